"""Experiments, and tables that compare experiments with published figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from equilibria._core.plain import to_plain
from equilibria.lab.choices import SCALES as SCALES
from equilibria.lab.choices import Scale as Scale
from equilibria.lab.errors import SettingError
from equilibria.lab.experiments.assignments import assign
from equilibria.lab.experiments.claims import Claim
from equilibria.lab.training.settings import Training, from_plain
from equilibria.lab.training.task import Task

S = TypeVar("S")

MACHINE = "machine.json"  # in a run folder: the hardware it ran on


@dataclass(frozen=True, kw_only=True)
class Experiment(Generic[S]):
    """A training run: task settings, training settings and seeds.

    settings  settings of model, data and loss, a frozen dataclass
    training  settings of optimiser, epochs and seed
    make      function from the settings to the task to train
    seeds     seeds of the repetitions: those of the paper, or ours
    origin    FILE.py:NAME of an experiment of the user, by which the command line finds it; None: it is found by its name
    """

    name: str
    summary: str
    settings: S
    training: Training
    make: Callable[[S], Task[Any]]
    scale: Scale = "full"
    seeds: tuple[int, ...] = (0, 1, 2)
    origin: str | None = None

    @property
    def reference(self) -> str:
        """The argument with which `equilibria train` runs it."""
        return self.origin or self.name

    def task(self) -> Task[Any]:
        """Return a new task with these settings."""
        return self.make(self.settings)

    def config(self) -> dict[str, Any]:
        """Return the experiment's part of config.json."""
        return {"experiment": self.reference, "scale": self.scale, "settings": to_plain(self.settings)}

    def changed(self, assignments: Iterable[str]) -> Experiment[S]:
        """Return a copy with settings changed by name, such as `variant=skip` or `training.epochs=1`."""
        groups = assign({"": self.settings, "training.": self.training}, assignments)
        return dataclasses.replace(self, settings=groups[""], training=groups["training."])

    def seeded(self, seed: int) -> Experiment[S]:
        """Return a copy with this seed."""
        return dataclasses.replace(self, training=dataclasses.replace(self.training, seed=seed))

    def restored(self, config: Mapping[str, Any]) -> Experiment[S]:
        """Return a copy with the settings in the config of a run; raises SettingError if they do not fit."""
        try:
            settings: S = from_plain(type(self.settings), config["settings"])
            training = from_plain(Training, config["training"])
        except KeyError as error:
            raise SettingError(f"The config of this run of {self.name} has no {error}.") from error
        except (AttributeError, TypeError, ValueError) as error:
            raise SettingError(f"The config of this run of {self.name} was written by another version: {error}") from error
        return dataclasses.replace(self, settings=settings, training=training)


@dataclass(frozen=True)
class Column:
    """A column of a table: one number of a run.

    key       name of the number in the run's files: "test.accuracy" is in the splits of an epoch, "summary.parameters" in
              the summary
    factor    factor from the stored unit to the unit of the title
    over      a reference row: the column shows the reference's value divided by the row's own, as a speed-up
    epochs    how the values of all epochs become one; "selected": the value of the epoch that was best on the validation
              split, or none without such a split
    """

    name: str
    title: str
    key: str
    digits: int = 2
    factor: float = 1.0
    over: str | None = None
    epochs: Literal["first", "last", "mean", "min", "max", "selected"] = "last"

    @property
    def is_time(self) -> bool:
        """True for seconds, and for ratios of seconds: figures that do not compare across machines."""
        return "seconds" in self.key  # the title may say ms, s or minutes


@dataclass(frozen=True)
class Figure:
    """A mean over runs.

    std    standard deviation over seeds, if known
    runs   number of runs; None for published figures
    error  standard error of the mean; None: std / sqrt(runs)
    """

    mean: float
    std: float | None = None
    runs: int | None = None
    error: float | None = None

    @property
    def standard_error(self) -> float | None:
        """The standard error of the mean; None if unknown."""
        if self.error is not None or self.std is None or not self.runs:
            return self.error
        return self.std / math.sqrt(self.runs)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A plot with a line for every row, through columns that differ in a number.

    points  (number, name of the column) from left to right
    """

    name: str
    title: str
    x_label: str
    y_label: str
    points: tuple[tuple[float, str], ...]
    log: bool = False


@dataclass(frozen=True)
class TableRow:
    """A row of a table: an experiment, and its published figures by column.

    title    title of the published row
    run_as   title of what is run instead, for scales that run something else
    limited  True if solves end at a step limit by design, so that failed solves do not mean that training failed
    """

    name: str
    title: str
    experiment: Callable[[Scale], Experiment[Any]]
    published: Mapping[str, Figure] = field(default_factory=dict)
    run_as: Mapping[Scale, str] = field(default_factory=dict)
    limited: bool = False

    def title_at(self, scale: Scale) -> str:
        """Return the title of what runs at a scale."""
        return self.run_as.get(scale, self.title)

    def label(self, scale: Scale) -> str:
        """Return the title of what runs at a scale, followed by the title of the published row if that differs."""
        own = self.title_at(scale)
        return own if own == self.title or not self.published else f"{own} (published: {self.title})"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Experiments that are reported together.

    protocol  notes for the reader, for each scale
    hidden    columns that only claims and profiles use
    guess     score of the best constant answer by column of accuracy, in the unit of the column
    former    former name of the table; runs in folders of that name are found
    """

    name: str
    title: str
    source: str
    rows: tuple[TableRow, ...]
    columns: tuple[Column, ...]
    claims: tuple[Claim, ...] = ()
    profiles: tuple[Profile, ...] = ()
    hidden: tuple[Column, ...] = ()
    guess: Mapping[str, float] = field(default_factory=dict)
    former: str | None = None
    protocol: Mapping[Scale, tuple[str, ...]] = field(default_factory=dict)
    seeds: Mapping[Scale, int] = field(default_factory=lambda: {"debug": 1, "reduced": 3, "full": 3})

    def row(self, name: str) -> TableRow:
        """Return a row by its name."""
        return next(row for row in self.rows if row.name == name)

    def column(self, name: str) -> Column:
        """Return a column, shown or hidden, by its name."""
        return next(column for column in (*self.columns, *self.hidden) if column.name == name)

    def folder(self, out: Path, scale: Scale) -> Path:
        """Return the folder for runs of a scale; one with the former name of the table is used if only that exists."""
        own = out / self.name / scale
        # runs that were started under the former name are found and continued in their folder
        if self.former is not None and not own.is_dir() and (out / self.former / scale).is_dir():
            return out / self.former / scale
        return own


def run_folder(base: Path, row: str, seed: int) -> Path:
    """Return the folder of a run below the folder of its table."""
    return base / row / f"seed-{seed}"
