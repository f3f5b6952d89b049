"""Run jobs on a cluster with submitit: by Slurm, or as processes of this machine."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equilibria._core.files import optional
from equilibria.lab.choices import Cluster
from equilibria.lab.experiments.runner import Failure, Job, Resources, command

POLL = 2.0  # seconds between two polls of the jobs


@dataclass(frozen=True)
class RunCommand:
    """The function of a submitit job: it runs a command line.

    submitit looks for `checkpoint` at the function that it was given, not at its arguments. Without it, a job that reached
    its time limit would end. With it, the job is submitted again, and its run resumes from its checkpoint.
    """

    def __call__(self, words: Sequence[str]) -> int:
        subprocess.run(words, check=True)  # killed if submitit's signal handler ends this process
        return 0

    def checkpoint(self, words: Sequence[str]) -> Any:
        """Return the job to submit after a preemption or a timeout; submitit calls this."""
        return optional("submitit.helpers", "cluster").DelayedSubmission(self, words)


def run_on_cluster(
    jobs: Sequence[Job],
    cluster: Cluster,
    options: Mapping[str, Any],
    logs: Path,
    place: Resources,
    watch: Callable[[Job, str], None] = lambda job, event: None,
) -> list[Failure]:
    """Submit jobs, as one array if the cluster has arrays, wait for them, and return the failures.

    options  parameters of `submitit.AutoExecutor.update_parameters`, such as {"timeout_min": 60, "slurm_partition": "gpu"}
    logs     folder of submitit's files; all nodes must have access to it and to the folders of the runs
    """
    logs.mkdir(parents=True, exist_ok=True)
    # submitit reads results as pickles: a new folder that only this user can write has no file of anybody else
    executor = _executor(cluster, options, Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=logs)))
    # absolute paths: a node may start in another folder
    absolute = [Job(job.row, job.experiment, job.folder.resolve(), job.assignments) for job in jobs]
    submitted = executor.map_array(RunCommand(), [command(job, place) for job in absolute])
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
                # the last line of a traceback names the error
                last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                failures.append(Failure(job, f"{last}; its log is {handle.paths.stderr}"))
        if waiting:
            time.sleep(POLL)
    return failures


def _executor(cluster: Cluster, options: Mapping[str, Any], logs: Path) -> Any:
    """Return submitit's executor; raises ValueError for options that it does not accept."""
    executor = optional("submitit", "cluster").AutoExecutor(folder=logs.resolve(), cluster=cluster)
    try:
        executor.update_parameters(**options)
    except (NameError, TypeError) as error:
        raise ValueError(f"submitit does not accept these parameters of --cluster-set: {error}") from error
    return executor
