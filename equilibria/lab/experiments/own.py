"""Experiments of the user: FILE.py:NAME, package.module:NAME, or entry points of installed packages."""

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

GROUP = "equilibria.experiments"  # group of entry points: NAME = "package.module:attribute"
KINDS = "an Experiment, a Task, or a function that returns one of these and takes no argument or the scale"


@dataclass(frozen=True)
class NoSettings:
    """The empty settings of a task that has none."""


def installed_experiments() -> dict[str, str]:
    """Return the experiments of installed packages as package.module:attribute by name."""
    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def load_experiment(target: str, scale: Scale, name: str | None = None) -> Experiment[Any]:
    """Return the experiment that `target` names; `name` is the name of its entry point, if it has one."""
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
        make=lambda settings: made() if isinstance(made, type) else made,  # a task alone has no settings
        scale=scale,
        origin=name or _absolute(place, attribute),
    )


def find(target: str) -> Any:
    """Return the object that `target` names: FILE.py:NAME or package.module:NAME."""
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise SettingError(f"Expected FILE.py:NAME or package.module:NAME, got {target!r}.")
    module = _module(place)
    if not hasattr(module, name):
        raise SettingError(f"{place} has no {name!r}.")
    return getattr(module, name)


def _called(found: Any, target: str, scale: Scale) -> Any:
    """Return the object, or the result if it is a function; only a function of the scale has scales other than "full"."""
    is_function = callable(found) and not isinstance(found, (type, Task))
    takes_scale = is_function and len(inspect.signature(found).parameters) > 0
    if scale != "full" and not takes_scale:
        raise SettingError(f"{target} has no scale {scale!r}: make it a function that takes the scale.")
    if not is_function:
        return found
    return found(scale) if takes_scale else found()


def _absolute(place: str, attribute: str) -> str:
    """Return the target with the absolute path of a file, so that a run finds its experiment from any folder."""
    return f"{Path(place).resolve() if place.endswith('.py') else place}:{attribute}"


@cache
def _module(place: str) -> Any:
    """Import a module by its file or dotted name; raises SettingError if that fails."""
    if not place.endswith(".py"):
        sys.path.insert(0, "")  # modules in the current folder are found, as with `python -m`
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise SettingError(f"Cannot import {place!r}: {error}.") from error
    path = Path(place)
    if not path.is_file():
        raise SettingError(f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look up their annotations there
    sys.path.insert(0, str(path.parent))  # modules next to the file are found, as with `python file.py`
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise SettingError(f"Cannot import {path}: {error}.") from error
    return module
