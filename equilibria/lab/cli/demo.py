"""demo: digits by an equilibrium and by its explicit twin, and what only the equilibrium gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equilibria.lab.choices import Scale
from equilibria.lab.cli.console import explained

if TYPE_CHECKING:
    from equilibria.lab.reports.table import TableResults
    from equilibria.lab.training.listeners import Listener

EVERY = 5  # epochs between two lines of progress
PAGE = "demo.html"
Rows = Sequence[Sequence[str]]


@explained()
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of all runs.")] = Path("runs"),
    scale: Annotated[Scale, typer.Option(help="debug: seconds; reduced: fewer epochs; full: the demo.")] = "full",
) -> None:
    """Train an equilibrium classifier of digits and its explicit twin, and report them: a minute, no download."""
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
    """A short line for every few epochs."""
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
    """What the demo says, section by section; every figure is measured here and now."""
    from equilibria.lab.experiments.digits.argument import Trained, memory
    from equilibria.lab.experiments.digits.memory_row import BATCH
    from equilibria.lab.reports.table import figure_text

    typer.echo("Measuring memory, difficulty and the tolerance at test time ...")
    trained, table = Trained(run, task), results.table
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
                for depth, row in memory(scale).items()
            ],
        ),
        Section(
            "Compute by difficulty: test digits ordered by their solver steps",
            ["digits", "steps, mean", "accuracy"],
            [[q.name, f"{q.steps:.1f}", f"{q.accuracy:.1%}"] for q in trained.quarters()],
        ),
        Section(
            "Accuracy for compute at test time: one trained model, any tolerance",
            ["tolerance", "evaluations per digit", "accuracy"],
            [[f"{s.tolerance:g}", f"{s.evaluations:.1f}", f"{s.accuracy:.1%}"] for s in trained.dial()],
        ),
        Section(f"Every sample has a status. Of the test digits: {statuses}", [], []),
    ]


class Section:
    """A title and a table under it."""

    def __init__(self, title: str, heads: Sequence[str], rows: Rows) -> None:
        self.title, self.heads, self.rows = title, heads, rows

    def text(self) -> str:
        """Columns with two spaces between them: no line is longer than 80 characters."""
        if not self.rows:
            return self.title
        lines = [self.heads, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.heads))]
        shown = [
            "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
            for line in lines
        ]
        return "\n".join([self.title, *(f"  {line}" for line in shown)])

    def html(self) -> str:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.heads)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows)
        return f"<h2>{escape(self.title)}</h2>" + (f"<table><tr>{head}</tr>{body}</table>" if self.rows else "")


def _show(sections: Sequence[Section], folder: Path, run: Path) -> None:
    """Print the sections, write them as a page, and say what to do next."""
    from equilibria._core.files import replace_file
    from equilibria.analysis.html_document import document

    title = "What an equilibrium gives"
    link = '<p>All figures, curves and the protocol: <a href="report.html">the report of the runs</a>.</p>'
    page = document(title, f"<h1>{title}</h1>" + "".join(section.html() for section in sections) + link)
    replace_file(folder / PAGE, page.encode())
    for section in sections:
        typer.echo(f"\n{section.text()}")
    typer.echo(f"\nreport: {folder / PAGE}\n\nNext:")
    typer.echo(f"  equilibria watch {run}\n  equilibria diagnose {run}\n  equilibria train digits-v2 --set width=128")
