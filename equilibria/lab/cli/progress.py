"""Progress of a run: a bar on a terminal, a line per epoch in a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from equilibria.lab.cli.console import progress_console
from equilibria.lab.training.listeners import Listener, Silent

SHOWN = {
    "loss": "loss",
    "accuracy": "accuracy",
    "mean_iou": "mean IoU",
    "perplexity": "perplexity",
    "nfe": "NFE",
    "failed": "failed",
}


class Lines(Silent):
    """Prints a line per epoch and per message, each beginning with the label of the run."""

    def __init__(self, label: str, console: Console) -> None:
        self.label, self.console = label, console
        self.epochs = 0

    def epoch_started(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        self.epochs = epochs

    def epoch_done(self, record: Mapping[str, Any]) -> None:
        self.message(f"epoch {record['epoch']}/{self.epochs}  {summary_line(record)}")

    def message(self, text: str) -> None:
        # rich would read [brackets] as markup and break long lines of a log
        self.console.print(f"{self.label}  {text}", markup=False, highlight=False, soft_wrap=True)


class Bar(Lines):
    """`Lines` with a progress bar for the current epoch below them."""

    def __init__(self, label: str, progress: Progress) -> None:
        super().__init__(label, progress.console)
        self.progress = progress
        self.bar: TaskID = progress.add_task(label, total=None)

    def epoch_started(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        super().epoch_started(epoch, epochs, steps, done)
        self.progress.reset(self.bar, total=steps, completed=done, description=f"{self.label}  epoch {epoch}/{epochs}")

    def step_done(self, step: int, loss: float, seconds: float) -> None:
        self.progress.advance(self.bar)


@contextmanager
def listening(label: str) -> Iterator[Listener]:
    """Yield the listener for the current output: `Bar` on a terminal, else `Lines`."""
    console = progress_console()
    if not console.is_terminal:
        yield Lines(label, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:  # the lines of the epochs stay, the bar does not
        yield Bar(label, progress)


def summary_line(record: Mapping[str, Any]) -> str:
    """Return the record of an epoch as a line of text."""
    parts = []
    for split, values in record["split"].items():
        shown = [f"{word} {metric_text(name, values[name])}" for name, word in SHOWN.items() if values.get(name) is not None]
        parts.append(f"{split}: {', '.join(shown)}")
    return f"{'; '.join(parts)}; {record['seconds_train']:.1f} s"


def metric_text(name: str, value: float | None) -> str:
    """Return a metric as text: shares in percent, a dash for None."""
    if value is None:
        return "-"
    return f"{value:.2%}" if name in ("accuracy", "mean_iou", "failed") else f"{value:.4g}"
