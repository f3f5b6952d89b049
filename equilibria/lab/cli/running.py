"""Run jobs from a command with progress output, and report failures at the end."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from equilibria.lab.cli.console import is_first_process, say
from equilibria.lab.cli.progress import listening, summary_line
from equilibria.lab.errors import TrainingError
from equilibria.lab.experiments.runner import THIS_PROCESS, Failure, Job, Resources, run_apart, run_here
from equilibria.lab.reports.run import write_run_report
from equilibria.lab.training.folder import Run


def run_jobs(jobs: Sequence[Job], place: Resources = THIS_PROCESS, at_once: int = 0) -> list[Failure]:
    """Run jobs one after the other in this process, or in separate processes, `at_once` at a time; return the failures."""
    if at_once:
        return run_apart(jobs, at_once=at_once, place=place, watch=RunWatch(len(jobs)))
    failures = []
    for job in jobs:
        try:
            with listening(job.label) as listener:
                run_here(job, place, listener)
            if is_first_process():  # all ranks have trained the same run
                write_run_report(job.folder)
        except TrainingError as error:
            failures.append(Failure(job, str(error)))  # the other jobs still run
    return failures


def exit_on_failures(failures: Sequence[Failure]) -> None:
    """Print the failures and exit with 1 if there are any."""
    for failure in failures:
        typer.echo(f"Error: {failure.job.label} failed: {failure.reason}", err=True)
    if failures:
        raise typer.Exit(1)


class RunWatch:
    """Prints a line when a process starts, finishes an epoch or ends."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def __call__(self, job: Job, event: str) -> None:
        self.done += event in ("finished", "failed")
        say(f"[{self.done}/{self.total}] {job.label}  {event}{self._epoch(job, event)}")

    def _epoch(self, job: Job, event: str) -> str:
        """Return the number of epochs and the metrics for an event "epoch N"; an empty text for other events."""
        word, _, number = event.partition(" ")
        if word != "epoch":
            return ""
        record = Run.open(job.folder).metrics[int(number) - 1]
        return f"/{job.experiment.training.epochs}  {summary_line(record)}"
