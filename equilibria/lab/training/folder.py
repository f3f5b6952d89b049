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
RESTORE = "Restore the file from a copy, or start a new run in another folder."
FREE = {"training.checkpoint_minutes", "extended"}  # may differ when a run is resumed, since results do not depend on them


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
    """Writes the files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints")
        self.best = Checkpoints(path / "best", keep=1)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder inside the block; the lock of a killed process does not count."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            message = f"another process is training in {self.path}. Wait for it, stop it, or use another folder"
            raise BlockingIOError(errno.EAGAIN, message) from None
        try:
            yield
        finally:
            lock.release()

    def begin(self, config: Mapping[str, Any]) -> list[str]:
        """Write the config of a new run, or compare it with that of the run to resume; returns versions that have changed.

        A run that was killed before its first checkpoint begins again.
        """
        self.checkpoints.sweep()  # first, since the only checkpoint may be one that was killed during its renaming
        self.best.sweep()
        file = self.path / CONFIG
        if self.checkpoints.empty and not (self.path / SUMMARY).exists():
            # metrics may be ahead of the checkpoints by one epoch; more mean that checkpoints were lost
            epochs = len(read_metrics(self.path))
            if epochs > 1:
                raise CorruptCheckpointError(
                    f"{self.path / METRICS} has {epochs} epochs, but there is no checkpoint in {self.checkpoints.folder}. "
                    "Restore the checkpoints, or start a new run in another folder."
                )
            replace_file(file, as_json(config))
            return []
        if not file.exists():
            raise ValueError(f"{file} is missing, but there are checkpoints of a run. Restore it, or use another folder.")
        return check_settings(self.path, config)

    def cut_metrics(self, epochs: int) -> list[dict[str, Any]]:
        """Keep only the first `epochs` lines of the metrics, which may be ahead of the checkpoint, and return them."""
        kept = read_metrics(self.path)[:epochs]
        if len(kept) < epochs:
            raise ValueError(
                f"{self.path / METRICS} has {len(kept)} epochs, but the checkpoint was written after {epochs}. Restore the "
                "file, or start a new run in another folder."
            )
        replace_file(self.path / METRICS, b"".join(map(as_line, kept)))
        return kept

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Append the record of an epoch to metrics.jsonl."""
        try:
            append_to(self.path / METRICS, as_line(record))
        except OSError as error:
            raise OSError(error.errno, f"cannot write {self.path / METRICS}: {error.strerror or error}") from error

    def finish(self, summary: RunSummary) -> None:
        """Write summary.json, which marks the run as finished."""
        replace_file(self.path / SUMMARY, as_json(summary))

    def summary(self) -> RunSummary | None:
        """Return the summary of a finished run; None if it is not finished."""
        found = read_summary(self.path)
        return None if found is None else RunSummary(**found)


@dataclass(frozen=True)
class Run:
    """The content of a run's folder, finished or not; reading changes nothing in it.

    metrics  a dict per epoch, from the lines of metrics.jsonl
    summary  None if the run is not finished
    """

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any] | None

    @staticmethod
    def open(folder: Path) -> Run:
        """Read a run folder; raises FileNotFoundError if it is not one, and ValueError if its files are damaged."""
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            what = "has no config.json" if folder.is_dir() else "does not exist"
            raise FileNotFoundError(f"{folder} is not the folder of a run: it {what}. Pass a folder of `equilibria train`.")
        config = read_object(folder / CONFIG, RESTORE)
        if not isinstance(config.get("training"), dict):
            raise ValueError(f"{folder / CONFIG} has no object 'training'. {RESTORE}")
        summary = read_summary(folder)  # before the metrics: once it exists, they are complete
        metrics = read_metrics(folder)
        if summary is not None and len(metrics) != summary["epochs"]:
            raise ValueError(f"{folder / METRICS} has {len(metrics)} epochs, {SUMMARY} {summary['epochs']}. {RESTORE}")
        return Run(folder, config, metrics, summary)

    @property
    def training(self) -> Training:
        """The training settings of the run."""
        try:
            return from_plain(Training, self.config["training"], "training.")
        except (KeyError, TypeError, ValueError) as error:
            raise _not_as_written(self.folder / CONFIG, error) from error

    def model(self, task: Task[Any], which: str = "last") -> nn.Module:
        """Return the task's model with the weights of this run, in eval mode.

        which  "last": weights that evaluation uses, averaged if the run averages; "raw": the last weights, not averaged;
               "best": weights of the epoch that was best by `Task.better`
        """
        one_of("choice of weights", which, ("last", "raw", "best"))
        found = self.checkpoint("best" if which == "best" else "checkpoints", ("model", "average"))
        with torch.random.fork_rng():  # the initial weights are overwritten; the caller's random state must not change
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
        """Return these parts of the newest intact checkpoint; warns about newer ones that are corrupt.

        kind  name of the folder of checkpoints, "checkpoints" or "best"
        """
        checkpoints = Checkpoints(self.folder / kind)
        found, problems = checkpoints.read_newest(parts)
        if found is None:
            raise FileNotFoundError(f"There is no checkpoint in {checkpoints.folder} yet: train the run first.")
        if problems:
            corrupt = " ".join(map(str, problems.values()))
            warnings.warn(f"{corrupt} Weights of the earlier {found.path} are used.", stacklevel=3)
        return found


def check_settings(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Compare a config with that of the run in `folder`; returns versions that have changed.

    Raises ValueError if settings differ on which results depend.
    """
    changed = _differences(read_object(folder / CONFIG, RESTORE), json.loads(as_json(config)))
    refused = [line for key, line in changed.items() if not key.startswith("versions.") and key not in FREE]
    if refused:
        raise ValueError(
            f"The run in {folder} was started with other settings, see its {CONFIG}: {'; '.join(refused)}. Use the settings "
            "of the run, or another folder."
        )
    return [line for key, line in changed.items() if key.startswith("versions.")]


def extend_run(folder: Path, epochs: int) -> None:
    """Set the number of epochs of a finished run to `epochs`, so that it can be resumed.

    Its config lists the epochs after which the run was extended.
    """
    run = Run.open(folder)
    if run.summary is None:
        raise ValueError(f"The run in {folder} is not finished. Continue it with `equilibria train`.")
    if epochs <= run.summary["epochs"]:
        raise ValueError(f"epochs must exceed the {run.summary['epochs']} epochs of the run in {folder}, got {epochs}.")
    run.checkpoint("checkpoints", ())  # raises if there is no checkpoint to continue from
    before = [*run.config.get("extended", []), run.summary["epochs"]]
    config = run.config | {"training": run.config["training"] | {"epochs": epochs}, "extended": before}
    with Folder(folder).held():
        (folder / SUMMARY).unlink()  # first: if this is interrupted, resuming the run only writes the summary again
        replace_file(folder / CONFIG, as_json(config))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the records in metrics.jsonl; an incomplete last line is left out."""
    file = folder / METRICS
    # [:-1]: the text after the last newline is empty, or a line that was not completely written
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [_metrics_line(file, number, line) for number, line in enumerate(lines, start=1)]


def _metrics_line(file: Path, number: int, line: bytes) -> dict[str, Any]:
    """Parse the line of epoch `number`; raises ValueError if it is not valid."""
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
        raise ValueError(f"{file}: line {number} has values of wrong types, got {record!s:.120}. {RESTORE}")
    return record


def _is_record(record: Any) -> bool:
    """Return True if a record has splits of metrics and numbers for epoch, step and time."""
    if not isinstance(record, dict) or not isinstance(record.get("split"), dict):
        return False
    numbers = (record.get("epoch"), record.get("step"), record.get("seconds_train"))
    return all(isinstance(values, dict) for values in record["split"].values()) and all(
        isinstance(number, (int, float)) for number in numbers
    )


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the content of summary.json; None if the run is not finished."""
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
    """Return the error for a checkpoint that is intact but does not belong to this run."""
    return CorruptCheckpointError(
        f"The checkpoint {path} does not fit the run ({type(error).__name__}: {error}). It was changed, or written by "
        "another version or by other code. Restore it, go back to that code, or start a new run in another folder."
    )


def whole_config(config: Mapping[str, Any] | None, training: Training) -> dict[str, Any]:
    """Return the content of config.json: the experiment, the training settings, and versions."""
    return {**(config or {}), "training": to_plain(training), "versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions of python, torch and this library, on which the numbers depend."""
    names = ("equilibria", "torch", "lightning-fabric")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def _differences(before: Any, now: Any, key: str = "") -> dict[str, str]:
    """Return a text for every key whose values differ, with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        found: dict[str, str] = {}
        for name in sorted(before.keys() | now.keys()):
            found |= _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
        return found
    return {} if before == now else {key: f"{key} was {before!r}, now {now!r}"}


def _not_as_written(path: Path, error: Exception) -> ValueError:
    """Return the error for a file of valid JSON with unexpected content."""
    reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return ValueError(f"{path} was changed or written by another version: {reason} {RESTORE}")
