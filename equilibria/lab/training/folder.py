"""The folder of a run: `Folder` writes it during training, `Run` reads it."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import platform
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import nn

from equilibria._core.files import replace_file
from equilibria._core.plain import to_plain
from equilibria.lab.errors import CorruptCheckpointError
from equilibria.lab.training.checkpoints import Checkpoints, Found
from equilibria.lab.training.durable import append_to, as_json, as_line, read_object
from equilibria.lab.training.settings import Training, from_plain, one_of
from equilibria.lab.training.task import Task
from equilibria.models.states import take_dtypes

CONFIG, METRICS, SUMMARY, LOCK = "config.json", "metrics.jsonl", "summary.json", ".lock"
RESTORE = "Restore the file from a copy, or start the run anew in another folder."
FREE = {"training.checkpoint_minutes", "extended"}  # may differ when a run is resumed: the results do not depend on it


@dataclass(frozen=True)
class RunSummary:
    """The final and best record of a finished run.

    final  the last line of metrics.jsonl
    best   the line of the epoch that was best by `Task.better`
    """

    epochs: int
    final: dict[str, Any]
    best: dict[str, Any]
    seconds_train: float
    parameters: int
    finished: bool = True


class Folder:
    """A run's files, for the process that writes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints")
        self.best = Checkpoints(path / "best", keep=1)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder inside the block; the lock of a killed process is released."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            message = f"another process is training in {self.path}. Wait for it, stop it, or take another folder"
            raise BlockingIOError(errno.EAGAIN, message) from None
        try:
            yield
        finally:
            lock.release()

    def begin(self, config: Mapping[str, Any]) -> list[str]:
        """Write the config, or compare it with that of the run to go on with; returns versions that have changed since.

        A run that was cut off before its first checkpoint begins anew.
        """
        self.checkpoints.sweep()  # first: the only checkpoint may be one whose renaming was cut off
        self.best.sweep()
        file = self.path / CONFIG
        if self.checkpoints.empty and not (self.path / SUMMARY).exists():
            # refuse to begin anew where epochs were finished: only those of the first may be ahead of a checkpoint
            epochs = len(read_metrics(self.path))
            if epochs > 1:
                raise CorruptCheckpointError(
                    f"{self.path / METRICS} has {epochs} epochs, but there is no checkpoint in {self.checkpoints.folder}. "
                    "Restore the checkpoints, or start the run anew in another folder."
                )
            replace_file(file, as_json(config))
            return []
        if not file.exists():
            raise ValueError(f"{file} is missing beside the checkpoints of a run. Restore it, or take another folder.")
        return check_settings(self.path, config)

    def cut_metrics(self, epochs: int) -> list[dict[str, Any]]:
        """Keep the lines of these first epochs: those of a run that was killed may be ahead of its checkpoint."""
        kept = read_metrics(self.path)[:epochs]
        if len(kept) < epochs:
            raise ValueError(
                f"{self.path / METRICS} has {len(kept)} epochs, but the checkpoint was written after {epochs}. Restore the "
                "file, or start the run anew in another folder."
            )
        replace_file(self.path / METRICS, b"".join(map(as_line, kept)))
        return kept

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        try:
            append_to(self.path / METRICS, as_line(record))
        except OSError as error:
            raise OSError(error.errno, f"cannot write {self.path / METRICS}: {error.strerror or error}") from error

    def finish(self, summary: RunSummary) -> None:
        replace_file(self.path / SUMMARY, as_json(summary))

    def summary(self) -> RunSummary | None:
        found = read_summary(self.path)
        return None if found is None else RunSummary(**found)


@dataclass(frozen=True)
class Run:
    """A run's folder, finished or not; reading changes nothing in it.

    metrics  a dict per epoch, the lines of metrics.jsonl
    summary  None while the run is not finished
    """

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any] | None

    @staticmethod
    def open(folder: Path) -> Run:
        """Open a run folder; raises if it is not one."""
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            what = "has no config.json" if folder.is_dir() else "does not exist"
            raise FileNotFoundError(f"{folder} is not the folder of a run: it {what}.")
        config = read_object(folder / CONFIG, RESTORE)
        if not isinstance(config.get("training"), dict):
            raise ValueError(f"{folder / CONFIG} has no object 'training'. {RESTORE}")
        summary = read_summary(folder)  # before the metrics, which are complete when it is there
        metrics = read_metrics(folder)
        if summary is not None and len(metrics) != summary["epochs"]:
            raise ValueError(f"{folder / METRICS} has {len(metrics)} epochs, {SUMMARY} {summary['epochs']}. {RESTORE}")
        return Run(folder, config, metrics, summary)

    @property
    def training(self) -> Training:
        try:
            return from_plain(Training, self.config["training"], "training.")
        except (KeyError, TypeError, ValueError) as error:
            raise _not_as_written(self.folder / CONFIG, error) from error

    def model(self, task: Task[Any], which: str = "last") -> nn.Module:
        """The task's model with the weights of this run, in eval mode.

        which  "last": those that evaluation uses, averaged if the run averages; "raw": never averaged; "best": those of
               the epoch that was best by `Task.better`
        """
        one_of("choice of weights", which, ("last", "raw", "best"))
        found = self.checkpoint("best" if which == "best" else "checkpoints", ("model", "average"))
        with torch.random.fork_rng():
            model = task.model()
        try:
            averaged = found.parts["average"]["means"] if which == "last" and "average" in found.parts else {}
            state = found.parts["model"] | averaged
            take_dtypes(model, state)
            model.load_state_dict(state)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise does_not_fit(found.path, error) from error
        return model.eval()

    def checkpoint(self, kind: str, parts: Collection[str]) -> Found:
        """These parts of the newest sound checkpoint; a warning names newer ones that are corrupt.

        kind  "checkpoints" or "best", the name of their folder
        """
        checkpoints = Checkpoints(self.folder / kind)
        found, problems = checkpoints.read_newest(parts)
        if found is None:
            raise FileNotFoundError(f"There is no checkpoint in {checkpoints.folder} yet: train the run first.")
        if problems:
            told = " ".join(map(str, problems.values()))
            warnings.warn(f"{told} The weights are those of {found.path}, before it.", stacklevel=3)
        return found


def check_settings(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Refuse a config that is not that of the run in `folder`; returns versions that have changed since."""
    changed = _differences(read_object(folder / CONFIG, RESTORE), json.loads(as_json(config)))
    refused = [line for key, line in changed.items() if not key.startswith("versions.") and key not in FREE]
    if refused:
        raise ValueError(
            f"The run in {folder} was started with other settings, see its {CONFIG}: {'; '.join(refused)}. Go on with the "
            "settings it has, or take another folder."
        )
    return [line for key, line in changed.items() if key.startswith("versions.")]


def extend_run(folder: Path, epochs: int) -> None:
    """Make a finished run one that is to train up to `epochs` epochs; its config says after how many it was extended."""
    run = Run.open(folder)
    if run.summary is None:
        raise ValueError(f"The run in {folder} is not finished: `equilibria train` goes on with it.")
    if epochs <= run.summary["epochs"]:
        raise ValueError(f"The run in {folder} has {run.summary['epochs']} epochs already, got {epochs}.")
    run.checkpoint("checkpoints", ())  # raises where there is none to go on from
    before = [*run.config.get("extended", []), run.summary["epochs"]]
    config = run.config | {"training": run.config["training"] | {"epochs": epochs}, "extended": before}
    with Folder(folder).held():
        (folder / SUMMARY).unlink()  # first: a run without it is one that is finished anew, in no time
        replace_file(folder / CONFIG, as_json(config))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last one that was cut short is left out."""
    file = folder / METRICS
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [_metrics_line(file, number, line) for number, line in enumerate(lines, start=1)]


def _metrics_line(file: Path, number: int, line: bytes) -> dict[str, Any]:
    """One line, which is that of epoch `number`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: line {number} is not valid JSON ({error}). {RESTORE}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{file}: line {number} must be a JSON object, got {record!s:.80}. {RESTORE}")
    missing = [key for key in ("epoch", "step", "split", "seconds_train") if key not in record]
    if missing:
        raise ValueError(f"{file}: line {number} has no {', '.join(map(repr, missing))}. {RESTORE}")
    if record["epoch"] != number:
        raise ValueError(f"{file}: line {number} is of epoch {record['epoch']!r}, expected {number}. {RESTORE}")
    if not _is_record(record):
        raise ValueError(f"{file}: line {number} has values of other types, got {record!s:.120}. {RESTORE}")
    return record


def _is_record(record: Any) -> bool:
    """True if it has what every epoch has."""
    if not isinstance(record, dict) or not isinstance(record.get("split"), dict):
        return False
    numbers = (record.get("epoch"), record.get("step"), record.get("seconds_train"))
    return all(isinstance(values, dict) for values in record["split"].values()) and all(
        isinstance(number, (int, float)) for number in numbers
    )


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The content of summary.json of a finished run; None if there is none."""
    file = folder / SUMMARY
    if not file.exists():
        return None
    found = read_object(file, RESTORE)
    try:
        summary = asdict(from_plain(RunSummary, found))
    except (TypeError, ValueError) as error:
        raise _not_as_written(file, error) from error
    if not _is_record(summary["final"]):
        raise ValueError(f"{file}: 'final' must be the metrics of an epoch, got {summary['final']!s:.120}. {RESTORE}")
    if not isinstance(summary["best"].get("by", {}), dict):
        raise ValueError(f"{file}: 'best.by' must be an object, got {summary['best']['by']!r}. {RESTORE}")
    return summary


def does_not_fit(path: Path, error: Exception) -> CorruptCheckpointError:
    """The error for a checkpoint that is sound, but not one of this run."""
    return CorruptCheckpointError(
        f"The checkpoint {path} does not fit the run ({type(error).__name__}: {error}). It was changed, or written by "
        "another version or by other code. Restore it, go back to that code, or start the run anew in another folder."
    )


def whole_config(config: Mapping[str, Any] | None, training: Training) -> dict[str, Any]:
    """The content of config.json: the experiment, the settings of training, and versions."""
    return {**(config or {}), "training": to_plain(training), "versions": versions()}


def versions() -> dict[str, str]:
    """Versions of python, torch and this library, on which the numbers depend."""
    names = ("equilibria", "torch", "lightning-fabric")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def _differences(before: Any, now: Any, key: str = "") -> dict[str, str]:
    """Every key whose values differ, with both."""
    if isinstance(before, dict) and isinstance(now, dict):
        found: dict[str, str] = {}
        for name in sorted(before.keys() | now.keys()):
            found |= _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
        return found
    return {} if before == now else {key: f"{key} was {before!r}, now {now!r}"}


def _not_as_written(path: Path, error: Exception) -> ValueError:
    reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return ValueError(f"{path} was changed or written by another version: {reason} {RESTORE}")
