"""Experiments of the user's: found by FILE.py:NAME or package.module:NAME, or by the entry points of installed packages."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from equilibria.lab.errors import SettingError
from equilibria.lab.experiments.definitions import Experiment, Scale
from equilibria.lab.training.settings import Training
from equilibria.lab.training.task import Task

GROUP = "equilibria.experiments"  # of entry points: NAME = "package.module:attribute"
KINDS = "an Experiment, a Task, or a function of nothing or of the scale that returns one of these"


@dataclass(frozen=True)
class NoSettings:
    """The settings of a task that has none."""


def installed_experiments() -> dict[str, str]:
    """Experiments of installed packages: name -> package.module:attribute."""
    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def load_experiment(target: str, scale: Scale, name: str | None = None) -> Experiment[Any]:
    """The experiment that `target` names; `name` is that of its entry point."""
    place, _, attribute = target.rpartition(":")
    made = _called(find(target), target, scale)
    if isinstance(made, Experiment):
        return dataclasses.replace(made, scale=scale, origin=name or _absolute(place, attribute))
    kind = made if isinstance(made, type) else type(made)
    if not issubclass(kind, Task):
        raise SettingError(f"{target} is a {kind.__name__}; expected {KINDS}.")
    return Experiment(
        name=name or attribute,
        summary=(inspect.getdoc(kind) or attribute).splitlines()[0],
        settings=NoSettings(),
        training=Training(),
        make=lambda settings: made() if isinstance(made, type) else made,
        scale=scale,
        origin=name or _absolute(place, attribute),
    )


def find(target: str) -> Any:
    """The object that `target` names: FILE.py:NAME or package.module:NAME."""
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise SettingError(f"expected FILE.py:NAME or package.module:NAME, got {target!r}.")
    module = _module(place)
    if not hasattr(module, name):
        raise SettingError(f"{place} has no {name!r}.")
    return getattr(module, name)


def _called(found: Any, target: str, scale: Scale) -> Any:
    """The object itself, or what the function returns; only a function of the scale has scales other than "full"."""
    is_function = callable(found) and not isinstance(found, (type, Task))
    takes_scale = is_function and len(inspect.signature(found).parameters) > 0
    if scale != "full" and not takes_scale:
        raise SettingError(f"{target} has no scales; to have them, make it a function of the scale.")
    if not is_function:
        return found
    return found(scale) if takes_scale else found()


def _absolute(place: str, attribute: str) -> str:
    """The target with the whole path of a file, so that a run finds its experiment from any folder."""
    return f"{Path(place).resolve() if place.endswith('.py') else place}:{attribute}"


@cache
def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, "")  # what lies in the current folder, as `python -m` finds it
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise SettingError(f"cannot import {place!r}: {error}.") from error
    path = Path(place)
    if not path.is_file():
        raise SettingError(f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # where dataclasses look up their annotations
    sys.path.insert(0, str(path.parent))  # its neighbours, as `python file.py` finds them
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise SettingError(f"cannot import {path}: {error}.") from error
    return module
