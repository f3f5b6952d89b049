"""Settings of training: dataclasses that check their values, and their conversion from JSON."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from equilibria._core.names import nearest

T = TypeVar("T")

OPTIMIZERS = ("adam", "adamw", "sgd", "rmsprop")  # names that `optimizer.name` takes
SCHEDULES = ("constant", "cosine", "step", "linear", "inverse-sqrt", "one-cycle")  # names that `schedule.name` takes
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")  # names of Lightning Fabric
FAILED_SOLVES = ("count", "skip", "stop")  # what the trainer does about solves that failed


def one_of(what: str, name: str, choices: Sequence[str]) -> None:
    """Raise ValueError with the nearest choice if `name` is none of the choices."""
    if name not in choices:
        raise ValueError(f"There is no {what} {name!r}. {nearest(name, choices)}")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimiser of `torch.optim`: adam, adamw, sgd or rmsprop.

    `betas` are those of adam and adamw, `momentum` that of sgd and rmsprop.
    """

    name: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    nesterov: bool = False  # for sgd with momentum

    def __post_init__(self) -> None:
        one_of("optimizer", self.name, OPTIMIZERS)
        if self.lr < 0 or self.weight_decay < 0 or self.momentum < 0:
            raise ValueError(f"lr, weight_decay and momentum must not be negative, got {self}.")
        if self.momentum and self.name.startswith("adam"):
            raise ValueError(f"{self.name} has no momentum, got {self.momentum}. Set the first of its betas instead.")
        if self.nesterov and (self.name != "sgd" or not self.momentum):
            raise ValueError(f"nesterov is for sgd with momentum, got {self}.")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The factor on `Optimizer.lr` as a function of the step.

    Over the first `warmup_steps` it grows linearly to 1. After that, with t the share of the remaining steps done, it is:

    constant      1
    cosine        final + (1 - final) (1 + cos πt) / 2
    linear        1 - (1 - final) t
    step          `factor` to the power of the number of `milestones` (shares of all steps) passed
    inverse-sqrt  (warmup_steps / (step + 1))^(1/2)
    one-cycle     from 1 / 25 to 1 over the first 30 %, then to 4e-6, both by half a cosine; momentum (beta_1 of Adam) goes
                  from 0.95 to 0.85 and back, as in `torch.optim.lr_scheduler.OneCycleLR`
    """

    name: str = "constant"
    warmup_steps: int = 0
    final: float = 0.0
    milestones: tuple[float, ...] = ()
    factor: float = 0.1

    def __post_init__(self) -> None:
        one_of("schedule", self.name, SCHEDULES)
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}.")
        if not all(0 <= milestone <= 1 for milestone in self.milestones):
            raise ValueError(f"milestones are shares of all steps, in [0, 1], got {self.milestones}.")
        if self.name == "step" and not self.milestones:
            raise ValueError('A schedule "step" needs milestones, such as (0.5, 0.75).')


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of the training of a task.

    batch_size          number of samples of all processes together
    clip_norm           largest norm of the gradient, which is scaled down to it; None: no clipping
    precision           a name of lightning-fabric: "32-true", "64-true", "bf16-mixed", "16-mixed" ...
    ema                 decay of an average of the weights, which evaluation uses; after n steps at most (1 + n) / (10 + n),
                        so that the initial weights do not dominate a short run
    pretrain_steps      steps on the unrolled model (`Task.pretrain`) before implicit training; evaluation is always implicit
    max_bad_steps       a step whose loss or gradient is not finite is skipped; this many in a row raise TrainingError
    failed_solves       what to do with a step in which a forward or adjoint solve failed: "count" it, "skip" it like one
                        that is not finite, or "stop" with an error
    checkpoint_minutes  time between checkpoints; there is also one at the end of every epoch
    seed                seed of weights, order and masks; the same seed gives the same bits on the same machine
    """

    epochs: int = 1
    batch_size: int = 32
    eval_batch_size: int = 256
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    clip_norm: float | None = None
    precision: str = "32-true"
    ema: float | None = None
    pretrain_steps: int = 0
    max_bad_steps: int = 10
    failed_solves: str = "count"
    checkpoint_minutes: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("precision", self.precision, PRECISIONS)
        one_of("failed_solves", self.failed_solves, FAILED_SOLVES)
        for name in ("epochs", "batch_size", "eval_batch_size", "max_bad_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"clip_norm must be positive, or None for no clipping, got {self.clip_norm}.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema must lie in (0, 1), or be None for no average, got {self.ema}.")
        if self.pretrain_steps < 0 or self.checkpoint_minutes < 0:
            raise ValueError(f"pretrain_steps and checkpoint_minutes must not be negative, got {self}.")


def from_plain(kind: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Return the dataclass `kind` from the result of `to_plain`; missing keys keep their defaults.

    Raises ValueError for an unknown key and TypeError for a value of another type, with the full name.
    """
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            raise ValueError(f"There is no setting {where}{key}. {nearest(key, names)}")
    return kind(**{key: _value(hints[key], value, f"{where}{key}") for key, value in values.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """Return `value` converted to the type of an annotation; raises TypeError if it does not fit."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise TypeError(f"{where} must be an object with the settings of {hint.__name__}, got {value!r}.")
        return from_plain(hint, value, f"{where}.")
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _either(hint, inner, value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = [inner[0]] * len(value) if inner[1:] == (...,) else list(inner)
        if len(kinds) == len(value):
            return tuple(
                _value(kind, each, f"{where}[{i}]") for i, (kind, each) in enumerate(zip(kinds, value, strict=True))
            )
    if origin is Literal and isinstance(value, str):
        one_of(where, value, [str(choice) for choice in inner])
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if _fits(hint, origin, inner, value):
        return value
    raise TypeError(f"{where} must be {_spelled(hint)}, got {value!r}.")


def _either(hint: Any, inner: tuple[Any, ...], value: Any, where: str) -> Any:
    """Return the value converted to the first type of a union that accepts it.

    In a union of one type and None, the error of that type is raised, which is more precise.
    """
    if value is None and type(None) in inner:
        return None
    kinds = [kind for kind in inner if kind is not type(None)]
    if len(kinds) == 1:
        return _value(kinds[0], value, where)
    for kind in kinds:
        try:
            return _value(kind, value, where)
        except (TypeError, ValueError):
            continue
    raise TypeError(f"{where} must be {_spelled(hint)}, got {value!r}.")


def _fits(hint: Any, origin: Any, inner: tuple[Any, ...], value: Any) -> bool:
    """Return True if `value` is an instance of the annotated type; a bool does not count as an int."""
    if hint is Any:
        return True
    if origin is Literal:
        return value in inner
    kind = origin or hint
    return isinstance(kind, type) and isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)


def _spelled(hint: Any) -> str:
    """Return an annotation as text."""
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
