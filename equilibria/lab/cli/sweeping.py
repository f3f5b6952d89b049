"""sweep: train an experiment over a grid of settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equilibria.lab.choices import Cluster
from equilibria.lab.cli.console import counted, explained, say, say_if_toy, show_json, show_table
from equilibria.lab.cli.options import AsJson, Assignments, DataRoot, Devices, ExperimentName, Out, ScaleOption, SettingsFile
from equilibria.lab.cli.runs import all_assignments

if TYPE_CHECKING:
    from equilibria.lab.experiments.runner import Job
    from equilibria.lab.experiments.sweep import PointResult


@explained()
def sweep(
    experiment: ExperimentName,
    grid: Annotated[
        list[str],
        typer.Option("--grid", metavar="KEY=A,B,...", help="Values of a setting; separate values that have commas by |."),
    ],
    assignments: Assignments = None,
    config: SettingsFile = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds per point.")] = 1,
    scale: ScaleOption = "full",
    metric: Annotated[
        str | None, typer.Option(metavar="SPLIT.NAME", help="Metric to compare; default: the one that picks the best epoch.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Number of runs at a time, each in a process; default: one, in this process.")
    ] = None,
    cluster: Annotated[
        Cluster | None,
        typer.Option(help="Submit the runs with submitit (extra `cluster`); local: processes here."),
    ] = None,
    cluster_options: Annotated[
        list[str] | None,
        typer.Option("--cluster-set", metavar="KEY=VALUE", help="Parameter of submitit, such as slurm_partition=gpu."),
    ] = None,
    devices: Devices = 1,
    out: Out = Path("runs"),
    data: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Train an experiment over a grid of settings and compare the runs in a table; finished runs are not run again."""
    say_if_toy(scale)
    from equilibria.lab.cli.running import RunWatch, exit_on_failures, run_jobs
    from equilibria.lab.experiments.catalogue import experiment as find_experiment
    from equilibria.lab.experiments.cluster import run_on_cluster
    from equilibria.lab.experiments.runner import Resources
    from equilibria.lab.experiments.sweep import parse_grid, points, results, write_results

    found = find_experiment(experiment, scale)
    folder = out / found.name / scale / "sweep"
    all_points = points(found, parse_grid(grid), folder, all_assignments(config, assignments), seeds)
    planned = [job for point in all_points for job in point.jobs]
    for job in planned:
        job.check_settings()  # of all runs before the first one starts
    todo = [job for job in planned if not job.finished]
    counts = f"{counted(len(all_points), 'point')}, {counted(len(planned), 'run')}"
    say(f"{found.name}: {counts}, {len(planned) - len(todo)} of them finished.")
    place = Resources(data, devices)
    if cluster is None:
        failures = run_jobs(todo, place, at_once=jobs or 0)
    else:
        options = _options(cluster_options or [])
        failures = run_on_cluster(todo, cluster, options, folder / "submitit", place, RunWatch(len(todo)))
    done = [job for job in planned if job.finished]
    if done:
        name, way = _metric(done, metric)
        measured = results(all_points, name)
        _show(measured, name, way, write_results(folder, name, measured), as_json)
    say_if_toy(scale)
    exit_on_failures(failures)  # last, so that the table of the finished runs is printed in any case


def _metric(done: Sequence[Job], metric: str | None) -> tuple[str, str]:
    """Return the metric of the table and whether "max" or "min" of it is best."""
    from equilibria.lab.experiments.sweep import default_metric

    name, way = default_metric(done[0])  # read from a finished run, since the splits depend on its data
    return (name, way) if metric is None else (metric, "max" if "accuracy" in metric or "iou" in metric else "min")


def _options(texts: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE texts for submitit; whole numbers become integers."""
    pairs = [text.partition("=") for text in texts]
    return {name.strip(): int(value) if value.strip().isdigit() else value.strip() for name, _, value in pairs}


def _show(found: Sequence[PointResult], metric: str, way: str, file: Path, as_json: bool) -> None:
    """Print the table of points, the best first, or all of them as JSON."""
    if as_json:
        return show_json({"metric": metric, "file": str(file), "points": [asdict(each) for each in found]})
    known = sorted((each for each in found if each.mean is not None), key=lambda r: r.mean or 0.0, reverse=way == "max")
    names = list(found[0].values)
    heads = [*names, f"{metric}, last epoch", "failed solves", "seconds", "runs"]
    rows = [[*each.values.values(), *_cells(each, metric.partition(".")[2])] for each in known]
    show_table(f"Sweep over {', '.join(names)}, best first", heads, rows)
    typer.echo(f"\nnumbers: {file}")


def _cells(each: PointResult, name: str) -> list[str]:
    """Return the texts of one row of the table: metric, failed solves, seconds and runs."""
    from equilibria.lab.cli.progress import metric_text

    spread = "" if each.deviation is None else f" ± {metric_text(name, each.deviation)}"
    return [
        f"{metric_text(name, each.mean)}{spread}",
        metric_text("failed", each.failed),
        "-" if each.seconds is None else f"{each.seconds:.1f}",
        str(each.runs),
    ]
