"""demo: train an equilibrium classifier of digits and its explicit twin, and show what only the equilibrium offers."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equilibria.lab.choices import Scale
from equilibria.lab.cli.console import explained

if TYPE_CHECKING:
    from equilibria.lab.cli.demo_page import Section
    from equilibria.lab.reports.table import TableResults
    from equilibria.lab.training.listeners import Listener

EVERY = 5  # epochs between two lines of progress
PAGE = "demo.html"


@explained()
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of all runs.")] = Path("runs"),
    scale: Annotated[Scale, typer.Option(help="debug: seconds; reduced: fewer epochs; full: the demo.")] = "full",
) -> None:
    """Train an equilibrium classifier of digits and its explicit twin, and report both; a minute, no download."""
    typer.echo("Training three classifiers of 8x8 digits: about a minute on two cores.")
    import torch  # here, so that the line above comes first

    from equilibria.lab.experiments.catalogue import table as find_table
    from equilibria.lab.experiments.digits.table import DIGITS
    from equilibria.lab.experiments.runner import THIS_PROCESS, plan, run_here
    from equilibria.lab.reports.run import write_run_report
    from equilibria.lab.reports.write import write_report

    found = find_table(DIGITS)
    jobs = plan(found, scale, out, seeds=1)
    torch.set_num_threads(1)  # the kernels are too small to gain from more threads
    for job in jobs:
        if not job.finished:
            run_here(job, THIS_PROCESS, _progress(job.experiment.summary))
            write_run_report(job.folder)
    folder = found.folder(out, scale)
    results = write_report(found, scale, folder)
    run = next(job for job in jobs if job.experiment.name.endswith("-deq"))
    _show(_sections(results, run.folder, run.experiment.task(), scale), folder, run.folder)


def _progress(label: str) -> Listener:
    """Return a listener that prints a short line every few epochs."""
    from equilibria.lab.training.listeners import Silent

    class Short(Silent):
        epochs = 0

        def epoch_started(self, epoch: int, epochs: int, steps: int, done: int) -> None:
            self.epochs = epochs

        def epoch_done(self, record: Mapping[str, Any]) -> None:
            epoch, accuracy = record["epoch"], record["split"]["test"]["accuracy"]
            if epoch == 1 or epoch % EVERY == 0 or epoch == self.epochs:
                typer.echo(f"  {label}: epoch {epoch} of {self.epochs}, test accuracy {accuracy:.1%}")

        def message(self, text: str) -> None:
            typer.echo(f"  {text}")

    return Short()


def _sections(results: TableResults, run: Path, task: object, scale: Scale) -> list[Section]:
    """Measure the trained model and return the sections of the demo; every figure is measured in this run."""
    from equilibria.lab.cli.demo_page import Section, draw_dial, draw_memory, draw_quarters
    from equilibria.lab.experiments.digits.argument import Trained, memory
    from equilibria.lab.experiments.digits.memory_row import BATCH
    from equilibria.lab.reports.table import figure_text

    typer.echo("Measuring memory, difficulty and the tolerance at test time ...")
    trained, table = Trained(run, task), results.table
    peaks, quarters, dial = memory(scale), trained.quarters(), trained.dial()
    columns = [column for column in table.columns if column.name in ("parameters", "accuracy", "nfe", "failed")]
    statuses = ", ".join(f"{count} {name}" for name, count in trained.statuses().items())
    return [
        Section(
            "Accuracy beside the explicit network with as many weights",
            ["", *(row.label(scale) for row in table.rows)],
            [[c.title, *(figure_text(results.figure(row.name, c), c) for row in table.rows)] for c in columns],
        ),
        Section(
            f"Memory of a training step, batch {BATCH}, over depth",
            ["layers or solver steps", "explicit, MB", "equilibrium, MB"],
            [
                [str(depth), f"{row['explicit'] / 1e6:.2f}", f"{row['equilibrium'] / 1e6:.2f}"]
                for depth, row in peaks.items()
            ],
            ("Memory of a training step over depth", lambda axes: draw_memory(axes, peaks)),
        ),
        Section(
            "Compute by difficulty: test digits ordered by their solver steps",
            ["digits", "steps, mean", "accuracy"],
            [[q.name, f"{q.steps:.1f}", f"{q.accuracy:.1%}"] for q in quarters],
            ("Solver steps by the difficulty of the sample", lambda axes: draw_quarters(axes, quarters)),
        ),
        Section(
            "Accuracy for compute at test time: one trained model, any tolerance",
            ["tolerance", "evaluations per digit", "accuracy"],
            [[f"{s.tolerance:g}", f"{s.evaluations:.1f}", f"{s.accuracy:.1%}"] for s in dial],
            ("Accuracy over compute at test time, one trained model", lambda axes: draw_dial(axes, dial)),
        ),
        Section(f"Status of the solve of every test digit: {statuses}"),
    ]


def _show(sections: Sequence[Section], folder: Path, run: Path) -> None:
    """Print the sections, write them as a page, and print commands to try next."""
    from equilibria._core.files import replace_file
    from equilibria.lab.cli.demo_page import page

    replace_file(folder / PAGE, page(sections).encode())
    for section in sections:
        typer.echo(f"\n{section.text()}")
    typer.echo(f"\nreport: {folder / PAGE}\n\nNext:")
    for line in (f"watch {run}", f"diagnose {run}", "train digits-v2 --set width=128"):
        typer.echo(f"  {_program()} {line}")


def _program() -> str:
    """Return the name of this command if the shell finds it, else its path."""
    called, found = Path(sys.argv[0]), shutil.which("equilibria")
    if called.name != "equilibria" or (found is not None and Path(found).resolve() == called.resolve()):
        return "equilibria"
    here = called.absolute()
    return str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)
