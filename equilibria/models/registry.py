"""Models by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from equilibria.models.mdeq import MDEQ
from equilibria.models.mdeq_configs import MDEQ_CONFIGS
from equilibria.models.skip_mlp import SkipMLP, SkipPolynomial


@dataclass(frozen=True)
class ModelInfo:
    """A model before it is made.

    build    its class, or a function that returns it
    options  what `build` is given unless the caller says otherwise
    """

    name: str
    summary: str
    build: Callable[..., nn.Module]
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def parameters(self) -> int:
        """How many it has with its defaults."""
        with torch.device("meta"):
            return parameters(self.build(**dict(self.options)))


def parameters(model: nn.Module) -> int:
    """How many numbers of a model are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def names() -> list[str]:
    """All models."""
    return list(_MODELS)


def info(name: str) -> ModelInfo:
    """What is known of a model without making it."""
    if name not in _MODELS:
        raise ValueError(f"There is no model {name!r}. {nearest(name, _MODELS)}")
    return _MODELS[name]


def create(name: str, **options: Any) -> nn.Module:
    """A model by name.

    model = eq.models.create("skip-mlp-v2", classes=10)
    """
    entry = info(name)
    taken = inspect.signature(entry.build).parameters
    if unknown := sorted(set(options) - set(taken)):
        raise TypeError(f"{name} has no option {', '.join(unknown)}. {nearest(unknown[0], taken)}")
    return entry.build(**(dict(entry.options) | options))


def nearest(name: str, choices: Iterable[str]) -> str:
    """The choices most like a name that is not among them, as a sentence."""
    choices = list(choices)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(choices)}."


_STARTS = {"vanilla": "starts at zero", "skip": "starts at a prediction", "v2": "starts at f(0, x)"}


def _mdeq_models() -> list[ModelInfo]:
    found = []
    for name, config in MDEQ_CONFIGS.items():
        summary, option = f"multiscale DEQ, {config.summary}", ("config", config)
        if not name.startswith("skip-"):
            found.append(ModelInfo(f"mdeq-{name}", summary, MDEQ, (option,)))
            continue
        for variant, start in _STARTS.items():
            full = f"skip-mdeq-{name.removeprefix('skip-')}-{variant}"
            found.append(ModelInfo(full, f"{summary}, {start}", MDEQ, (option, ("variant", variant))))
    return sorted(found, key=lambda entry: entry.name)


def _skip_models() -> list[ModelInfo]:
    found = []
    for variant, start in _STARTS.items():
        option = (("variant", variant),)
        found.append(ModelInfo(f"skip-mlp-{variant}", f"dense DEQ classifier, {start}", SkipMLP, option))
        found.append(
            ModelInfo(f"skip-polynomial-{variant}", f"DEQ regressor of one number, {start}", SkipPolynomial, option)
        )
    return sorted(found, key=lambda entry: entry.name)


_MODELS = {entry.name: entry for entry in (*_mdeq_models(), *_skip_models())}
