"""The commands `train`, `extend` and `evaluate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equilibria.lab.choices import Scale, Strategy, Which
from equilibria.lab.cli.console import counted, explained, is_first_process, say, say_if_toy, show_json, show_table
from equilibria.lab.cli.options import (
    AsJson,
    Assignments,
    DataRoot,
    Devices,
    ExperimentName,
    Out,
    OwnExperiment,
    ScaleOption,
    SettingsFile,
)

if TYPE_CHECKING:
    from equilibria.lab.experiments.runner import Job


@explained()
def train(
    experiment: ExperimentName,
    assignments: Assignments = None,
    config: SettingsFile = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of the experiment's seeds to run, one after the other.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Run this seed instead.")] = None,
    scale: ScaleOption = "full",
    devices: Devices = 1,
    strategy: Annotated[
        Strategy, typer.Option(help="With several devices: ddp copies the model to each, fsdp shards it; auto: ddp.")
    ] = "auto",
    out: Out = Path("runs"),
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the run, for one seed; default: OUT/EXPERIMENT/SCALE/seed-S.")
    ] = None,
    data: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Train an experiment, or resume it where it was interrupted."""
    say_if_toy(scale)
    from equilibria.lab.cli.running import exit_on_failures, run_jobs
    from equilibria.lab.experiments.runner import Resources

    jobs = _jobs(experiment, scale, all_assignments(config, assignments), seeds, seed, out, folder)
    failures = run_jobs(jobs, Resources(data, devices, strategy), at_once=1 if devices > 1 and len(jobs) > 1 else 0)
    exit_on_failures(failures)
    if is_first_process():
        _show_runs(jobs, as_json)
        say_if_toy(scale)


@explained()
def extend(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    epochs: Annotated[int, typer.Option(min=1, help="Total number of epochs, including those already done.")],
    data: DataRoot = None,
    devices: Devices = 1,
    experiment: OwnExperiment = None,
    as_json: AsJson = False,
) -> None:
    """Train a finished run for more epochs, from its last checkpoint."""
    from equilibria.lab.cli.running import exit_on_failures, run_jobs
    from equilibria.lab.experiments.evaluation import experiment_of
    from equilibria.lab.experiments.runner import Job, Resources
    from equilibria.lab.training.folder import Run, extend_run

    found = experiment_of(Run.open(run), experiment)
    before = found.training
    longer = dataclasses.replace(found, training=dataclasses.replace(before, epochs=epochs))
    extend_run(run, epochs)
    if before.schedule.name != "constant":  # the other schedules depend on the number of all steps
        say(
            f"The schedule {before.schedule.name!r} now extends over {epochs} epochs, so the learning rate changes at this "
            f"point. The result differs from a run that was planned for {epochs} epochs."
        )
    failures = run_jobs([Job(found.name, longer, run)], Resources(data, devices))
    exit_on_failures(failures)
    if is_first_process():  # under torchrun every rank runs this command
        _show_runs([Job(found.name, longer, run)], as_json)


def _show_runs(jobs: Sequence[Job], as_json: bool) -> None:
    """Print the last metrics and the report of every run, or their summaries as JSON."""
    from equilibria.lab.cli.progress import summary_line
    from equilibria.lab.reports.run import PAGE
    from equilibria.lab.training.folder import Run

    summaries = {str(job.folder): Run.open(job.folder).summary or {} for job in jobs}
    if as_json:
        return show_json(summaries)
    for path, summary in summaries.items():
        typer.echo(f"{path}: {summary_line(summary['final'])} (last of {counted(summary['epochs'], 'epoch')})")
        typer.echo(f"report: {Path(path) / PAGE}")


@explained()
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    which: Annotated[Which, typer.Option(help="Weights: last, best, or raw (last, not averaged).")] = "last",
    data: DataRoot = None,
    experiment: OwnExperiment = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate the model of a run on the test data."""
    from equilibria.lab.experiments.evaluation import evaluate as evaluate_run
    from equilibria.lab.training.folder import Run

    metrics = evaluate_run(Run.open(run), which=which, root=data, named=experiment)
    if as_json:
        return show_json({"run": str(run), "which": which, "metrics": metrics})
    show_table(f"{run}, {which} weights", ("metric", "value"), [(name, f"{value:.6g}") for name, value in metrics.items()])


def all_assignments(config: Path | None, assignments: Sequence[str] | None) -> list[str]:
    """Return the settings of a file, followed by those of --set, which override them."""
    from equilibria.lab.experiments.settings_files import read_settings

    return [*(read_settings(config) if config is not None else ()), *(assignments or ())]


def _jobs(
    name: str, scale: Scale, assignments: list[str], seeds: int, seed: int | None, out: Path, folder: Path | None
) -> list[Job]:
    from equilibria.lab.experiments.catalogue import experiment
    from equilibria.lab.experiments.runner import Job, seed_number

    found = experiment(name, scale).changed(assignments)
    if folder is not None and seed is None and seeds > 1:
        raise typer.BadParameter("--folder holds one run; leave it out for several --seeds.")
    # a seed given by --set must not be replaced by the first of the experiment's own seeds
    own = any(text.partition("=")[0].strip() == "training.seed" for text in assignments)
    numbers = [seed] if seed is not None else [found.training.seed] if own else [seed_number(found, i) for i in range(seeds)]
    if own and seeds > 1:
        raise typer.BadParameter("--set training.seed=... sets one seed; leave it out to run several --seeds.")
    base = out / found.name / scale
    return [
        Job(found.name, found.seeded(number), folder or base / f"seed-{number}", tuple(assignments)) for number in numbers
    ]
