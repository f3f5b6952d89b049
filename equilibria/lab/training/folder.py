"""The folder of a run: what is written while it goes on, and `Run`, which reads it."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import math
import platform
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import nn

from equilibria.lab.training.checkpoints import Checkpoints, CorruptCheckpointError, Found, read
from equilibria.lab.training.durable import append_to, replace_file
from equilibria.lab.training.settings import Training, from_plain, one_of, to_plain
from equilibria.lab.training.task import Task

CONFIG, METRICS, SUMMARY, LOCK = "config.json", "metrics.jsonl", "summary.json", ".lock"
FREE = {"training.checkpoint_minutes"}  # may differ when a run is resumed: the results do not depend on it


@dataclass(frozen=True)
class Summary:
    """How a finished run ended.

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
        """Inside the block no other process holds the folder; a process that is killed lets go of it."""
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

        Where nothing was kept yet there is nothing to go on with: such a run begins anew.
        """
        file = self.path / CONFIG
        kept = any(self.checkpoints.folder.glob("step-*")) or (self.path / SUMMARY).exists()
        if not file.exists() or not kept:
            replace_file(file, _json(config))
            return []
        versions = check_settings(self.path, config)
        self.checkpoints.sweep()
        self.best.sweep()
        return versions

    def cut_metrics(self, epochs: int) -> list[dict[str, Any]]:
        """Keep the lines of these first epochs: those of a run that was killed may be ahead of its checkpoint."""
        kept = read_metrics(self.path)[:epochs]
        if len(kept) < epochs:
            raise ValueError(f"{self.path / METRICS} has {len(kept)} epochs, the checkpoint was written after {epochs}.")
        replace_file(self.path / METRICS, b"".join(map(_line, kept)))
        return kept

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        try:
            append_to(self.path / METRICS, _line(record))
        except OSError as error:
            raise OSError(error.errno, f"cannot write {self.path / METRICS}: {error.strerror or error}") from error

    def finish(self, summary: Summary) -> None:
        replace_file(self.path / SUMMARY, _json(asdict(summary)))

    def summary(self) -> Summary | None:
        found = _read_json(self.path / SUMMARY) if (self.path / SUMMARY).exists() else None
        return None if found is None else Summary(**found)


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
        """Read a run; a folder that is none is refused."""
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            what = "has no config.json" if folder.is_dir() else "does not exist"
            raise FileNotFoundError(f"{folder} is not the folder of a run: it {what}.")
        summary = _read_json(folder / SUMMARY) if (folder / SUMMARY).exists() else None
        return Run(folder, _read_json(folder / CONFIG), read_metrics(folder), summary)

    @property
    def training(self) -> Training:
        return from_plain(Training, self.config["training"], "training.")

    def model(self, task: Task[Any], which: str = "last") -> nn.Module:
        """The task's model with the weights of this run, in eval mode.

        which  "last": those that evaluation uses, averaged if the run averages; "raw": never averaged; "best": those of
               the epoch that was best by `Task.better`
        """
        one_of("choice of weights", which, ("last", "raw", "best"))
        found = _newest(Checkpoints(self.folder / ("best" if which == "best" else "checkpoints")))
        with torch.random.fork_rng():
            model = task.model()
        averaged = found.parts["average"]["means"] if which == "last" and "average" in found.parts else {}
        model.load_state_dict(found.parts["model"] | averaged)
        return model.eval()


def check_settings(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Refuse a config that is not that of the run in `folder`; returns versions that have changed since."""
    changed = _differences(_read_json(folder / CONFIG), json.loads(_json(config)))
    refused = [line for key, line in changed.items() if not key.startswith("versions.") and key not in FREE]
    if refused:
        raise ValueError(
            f"The run in {folder} was started with other settings: {'; '.join(refused)}. Go on with the settings it has, or "
            "take another folder."
        )
    return [line for key, line in changed.items() if key.startswith("versions.")]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last one that was cut short is left out."""
    file = folder / METRICS
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def whole_config(config: Mapping[str, Any] | None, training: Training) -> dict[str, Any]:
    """What config.json has: that of the experiment, the settings of training, and versions."""
    return {**(config or {}), "training": to_plain(training), "versions": versions()}


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    names = ("equilibria", "torch", "lightning-fabric")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def _newest(checkpoints: Checkpoints) -> Found:
    """Without setting anything aside."""
    problems = []
    for path in reversed(checkpoints.paths()):
        try:
            found = read(path, parts=("model", "average"))
        except CorruptCheckpointError as error:
            problems.append(str(error))
            continue
        if problems:
            warnings.warn(f"{' '.join(problems)} The weights are those of {path}, before it.", stacklevel=3)
        return found
    raise FileNotFoundError(" ".join([f"There is no sound checkpoint in {checkpoints.folder}.", *problems]))


def _differences(before: Any, now: Any, key: str = "") -> dict[str, str]:
    """Every key whose values differ, with both."""
    if isinstance(before, dict) and isinstance(now, dict):
        found: dict[str, str] = {}
        for name in sorted(before.keys() | now.keys()):
            found |= _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
        return found
    return {} if before == now else {key: f"{key} was {before!r}, now {now!r}"}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error


def _json(value: Any) -> bytes:
    return (json.dumps(_strict(value), indent=1, allow_nan=False) + "\n").encode()


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(_strict(record), allow_nan=False) + "\n").encode()


def _strict(value: Any) -> Any:
    """JSON has no nan and no inf: they become null."""
    if isinstance(value, Mapping):
        return {key: _strict(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
