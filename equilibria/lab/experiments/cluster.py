"""Runs as jobs of a cluster, by submitit: Slurm, or processes of this machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equilibria._core.files import optional
from equilibria.lab.choices import Cluster
from equilibria.lab.experiments.runner import Failure, Job, Resources, command

POLL = 2.0  # seconds between two looks at the jobs


@dataclass(frozen=True)
class Command:
    """A command line as a submitit job. A job that is preempted is submitted again: runs go on from their checkpoints."""

    words: tuple[str, ...]

    def __call__(self) -> int:
        subprocess.run(self.words, check=True)
        return 0

    def checkpoint(self) -> Any:
        return optional("submitit.helpers", "cluster").DelayedSubmission(self)


def run_on_cluster(
    jobs: Sequence[Job],
    cluster: Cluster,
    options: Mapping[str, Any],
    logs: Path,
    place: Resources,
    watch: Callable[[Job, str], None] = lambda job, event: None,
) -> list[Failure]:
    """Submit jobs, as one array where the cluster has arrays, and wait for them.

    options  of `submitit.AutoExecutor.update_parameters`, such as {"timeout_min": 60, "slurm_partition": "gpu"}
    logs     folder of submitit's files, which all nodes must see, as they must the folders of the runs
    """
    executor = _executor(cluster, options, logs)
    absolute = [Job(job.row, job.experiment, job.folder.resolve(), job.assignments) for job in jobs]
    submitted = executor.map_array(_run, [Command(tuple(command(job, place))) for job in absolute])
    waiting = dict(zip(jobs, submitted, strict=True))
    for job, handle in waiting.items():
        watch(job, f"submitted as {handle.job_id}")
    failures = []
    while waiting:
        for job, handle in list(waiting.items()):
            if not handle.done():
                continue
            del waiting[job]
            error = handle.exception()
            watch(job, "finished" if error is None else "failed")
            if error is not None:
                # the last line of an error is the one that names it
                last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                failures.append(Failure(job, f"{last}; its log is {handle.paths.stderr}"))
        if waiting:
            time.sleep(POLL)
    return failures


def _run(words: Command) -> int:
    return words()


def _executor(cluster: Cluster, options: Mapping[str, Any], logs: Path) -> Any:
    executor = optional("submitit", "cluster").AutoExecutor(folder=logs.resolve(), cluster=cluster)
    try:
        executor.update_parameters(**options)
    except (NameError, TypeError) as error:
        raise ValueError(f"submitit refuses these options of --cluster: {error}") from error
    return executor
