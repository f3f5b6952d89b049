"""Models by name."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from equilibria._core.names import nearest
from equilibria.models.entries import ModelInfo, entries
from equilibria.models.origins import remember_origin


def names() -> list[str]:
    """Return the names of all models."""
    return list(_MODELS)


def info(name: str) -> ModelInfo:
    """Return the description of a model without creating it."""
    if name not in _MODELS:
        raise ValueError(f"There is no model {name!r}. {nearest(name, _MODELS)}")
    return _MODELS[name]


def create(name: str, *, pretrained: bool = False, **options: Any) -> nn.Module:
    """Create a model by its name.

        model = eq.models.create("mdeq-tiny", num_classes=10)

    `num_classes` is another name of the option `classes`. `pretrained` loads the weights that come with the package and sets
    evaluation mode; it works for the models in `eq.models.pretrained.names()`.
    """
    model = _created(name, options)
    if pretrained:
        from equilibria.models.files import load  # here, since that module imports this one
        from equilibria.models.pretrained import weights

        return load(weights(name), model).eval()
    return model


def _created(name: str, options: dict[str, Any]) -> nn.Module:
    """Create a model from its entry; raises TypeError for an unknown option, with the nearest name."""
    entry = info(name)
    signature = inspect.signature(entry.build)
    if "num_classes" in options and "classes" in signature.parameters:
        if "classes" in options:
            raise TypeError("classes and num_classes are two names of one option: pass one of them.")
        options["classes"] = options.pop("num_classes")
    if unknown := sorted(set(options) - set(signature.parameters)):
        raise TypeError(f"{name} has no option {', '.join(unknown)}. {nearest(unknown[0], signature.parameters)}")
    given = signature.bind(**(dict(entry.options) | options))
    given.apply_defaults()  # stored with the model, since defaults may change in later versions
    return remember_origin(entry.build(*given.args, **given.kwargs), name, given.arguments)


_MODELS = {entry.name: entry for entry in entries()}
