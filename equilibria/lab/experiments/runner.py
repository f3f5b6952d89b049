"""Run experiments in this process, or several at a time in separate processes; finished runs are skipped."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equilibria._core.files import replace_file
from equilibria.lab.choices import Strategy
from equilibria.lab.experiments.catalogue import current_name
from equilibria.lab.experiments.catalogue import row as find_row
from equilibria.lab.experiments.definitions import MACHINE, Experiment, Scale, Table, run_folder
from equilibria.lab.experiments.source import source_commit
from equilibria.lab.training.folder import CONFIG, SUMMARY, Run, RunSummary, check_settings, whole_config
from equilibria.lab.training.gallery import write_gallery
from equilibria.lab.training.listeners import Listener
from equilibria.lab.training.trainer import Trainer

LOG = "log.txt"
POLL = 0.5  # seconds between two polls of the processes


@dataclass(frozen=True)
class Job:
    """An experiment with its seed, and the folder of its run. `row` is the name shown in messages."""

    row: str
    experiment: Experiment[Any]
    folder: Path
    assignments: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        return self.experiment.training.seed

    @property
    def label(self) -> str:
        return f"{self.row} seed {self.seed}"

    @property
    def finished(self) -> bool:
        return (self.folder / SUMMARY).is_file()

    def check_settings(self) -> None:
        """Raise if the folder holds a finished run with other settings."""
        if self.finished:
            check_settings(self.folder, whole_config(self.config(), self.experiment.training))

    def config(self) -> dict[str, Any]:
        """Return the config of the run; a folder that was started under the experiment's former name keeps that name."""
        config = self.experiment.config()
        before = Run.open(self.folder).config.get("experiment") if (self.folder / CONFIG).is_file() else None
        return config | {"experiment": before} if before and current_name(before) == config["experiment"] else config


@dataclass(frozen=True)
class Failure:
    """A run that ended with an error."""

    job: Job
    reason: str


def plan(
    table: Table,
    scale: Scale,
    out: Path,
    *,
    seeds: int | None = None,
    rows: Sequence[str] = (),
    assignments: Sequence[str] = (),
) -> list[Job]:
    """Return the runs of a table, ordered by seed: all rows run their first seed before any runs its second."""
    chosen = [find_row(table, name) for name in rows] or list(table.rows)
    count = table.seeds[scale] if seeds is None else seeds
    base = table.folder(out, scale)
    jobs = []
    for place in range(count):  # by seeds first: an interrupted table has all its rows early
        for row in chosen:
            experiment = row.experiment(scale).changed(assignments)
            seeded = experiment.seeded(seed_number(experiment, place))
            jobs.append(Job(row.name, seeded, run_folder(base, row.name, seeded.training.seed), tuple(assignments)))
    return jobs


def seed_number(experiment: Experiment[Any], place: int) -> int:
    """Return the seed at an index: first the experiment's own seeds, then the smallest numbers that are not among them."""
    if place < len(experiment.seeds):
        return experiment.seeds[place]
    others = (n for n in range(place + 1 + len(experiment.seeds)) if n not in experiment.seeds)
    return list(others)[place - len(experiment.seeds)]


@dataclass(frozen=True)
class Resources:
    """Folder of the datasets (default if None), number of devices, and strategy of distributed training."""

    root: Path | None = None
    devices: int = 1
    strategy: Strategy = "auto"


THIS_PROCESS = Resources()


def run_here(job: Job, place: Resources = THIS_PROCESS, listener: Listener | None = None) -> RunSummary:
    """Run or resume a job in this process."""
    job.folder.mkdir(parents=True, exist_ok=True)
    replace_file(job.folder / MACHINE, json.dumps(machine()).encode())
    e = job.experiment
    options: dict[str, Any] = {"root": place.root, "devices": place.devices, "strategy": place.strategy}
    trainer = Trainer(e.task(), e.training, job.folder, config=job.config(), listener=listener, **options)
    summary = trainer.fit()
    if trainer.fabric.is_global_zero:
        task = job.experiment.task()
        drawn = task.gallery(Run.open(job.folder).model(task, "last"), place.root, job.experiment.training)
        if drawn:
            write_gallery(job.folder, drawn)
    return summary


def run_apart(
    jobs: Sequence[Job],
    *,
    at_once: int,
    place: Resources = THIS_PROCESS,
    watch: Callable[[Job, str], None] = lambda job, event: None,
) -> list[Failure]:
    """Run jobs in separate processes, `at_once` at a time, and return the failures.

    watch  called with a job and an event: "started", "epoch N", "finished" or "failed"
    """
    waiting, failures = list(jobs), []
    running: dict[Job, subprocess.Popen[bytes]] = {}
    seen: dict[Job, int] = {}
    with _interruptible(running):
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[job] = _start(job, at_once, place)
                watch(job, "started")
            time.sleep(POLL)
            for job, process in list(running.items()):
                _report_epochs(job, seen, watch)
                if process.poll() is None:
                    continue
                del running[job]
                if process.returncode:
                    lines = (job.folder / LOG).read_text(errors="replace").strip().splitlines()[-6:]
                    failures.append(
                        Failure(job, "\n".join([f"exit code {process.returncode}; {job.folder / LOG} ends with:", *lines]))
                    )
                watch(job, "failed" if process.returncode else "finished")
    return failures


def command(job: Job, place: Resources) -> list[str]:
    """Return the command line that runs a job."""
    e = job.experiment
    words = [sys.executable, "-m", "equilibria", "train", e.reference, "--scale", e.scale, "--seed", str(job.seed)]
    words += ["--folder", str(job.folder), "--devices", str(place.devices), "--strategy", place.strategy]
    words += ["--data", str(place.root)] if place.root is not None else []
    return words + [word for text in job.assignments for word in ("--set", text)]


def machine() -> dict[str, Any]:
    """Return the hardware on which the times of a run depend, and the commit of the code."""
    found = {
        "processor": _processor(),
        "cores": f"{os.cpu_count()} cores",
        "threads": f"{torch.get_num_threads()} threads of torch",
    }
    if torch.cuda.is_available():
        found["devices"] = torch.cuda.get_device_name()
    if (commit := source_commit()) is not None:
        found["commit"] = commit
    return found


def _start(job: Job, at_once: int, place: Resources) -> subprocess.Popen[bytes]:
    """Start the process of a job; its output goes to the log in its folder, and processes share the cores."""
    job.folder.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // at_once)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ  # a setting of the user has precedence
    with open(job.folder / LOG, "ab") as log:  # appended: a resumed run keeps the log of its first part
        # a new session, so that Ctrl-C reaches only this process, which passes it on exactly once
        return subprocess.Popen(
            command(job, place), stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


@contextmanager
def _interruptible(running: dict[Job, subprocess.Popen[bytes]]) -> Iterator[None]:
    """Pass an interruption on to the processes and wait for the checkpoints they write; no process outlives this one."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        before = None
    try:
        yield
    finally:
        # empty unless an exception ends the block; all are signalled before the first wait, so that they stop together
        for process in running.values():
            process.send_signal(signal.SIGINT)
        for process in running.values():
            process.wait()
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _report_epochs(job: Job, seen: dict[Job, int], watch: Callable[[Job, str], None]) -> None:
    """Report epochs of a running job that were finished since the last call."""
    if not (job.folder / "config.json").is_file():
        return  # the process has not created its run yet
    records = Run.open(job.folder).metrics
    for record in records[seen.get(job, 0) :]:
        watch(job, f"epoch {record['epoch']}")
    seen[job] = len(records)


def _processor() -> str:
    """Return the name of the processor."""
    try:  # on Linux platform.processor() names the architecture at most
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
