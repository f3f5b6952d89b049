"""Tables and a plot of benchmark results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equilibria.analysis.plots import COLOURS, INK, finish, new_axes
from equilibria.lab.bench.driver import BenchResults, CaseResults, MethodResult
from equilibria.lab.bench.methods import COMPILED, DEFAULT, OURS, PLAIN, TORCHDEQ

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = (
    "method",
    "step",
    "ratio",
    "spread",
    "evaluations",
    "products",
    "overhead",
    "residual",
    "gradient cosine",
    "gradient error",
)
EXPLANATION = f"""\
step: time of a training step, in bare calls of the cell; ratio: step divided by that of the fastest {TORCHDEQ}, lower is
better; spread: slowest round divided by the fastest; evaluations: calls of the cell, with and without graph; products:
products with its transposed Jacobian; overhead: step / (evaluations + products); residual: residual of the worst sample, in
float64; gradient cosine and error: agreement with a float64 implicit gradient, for weights or inputs, whichever is worse."""


MARKS = ("<!-- ratios -->", "<!-- end of ratios -->")  # the lines before and after the table in a page
FORMS = ("native", "plain", "compiled")  # forms of our default
RATIOS = ("case", "fastest TorchDEQ", "its calls", "our calls", *FORMS, *(f"solve, {form}" for form in FORMS))


def ratio(outcome: MethodResult | None, results: CaseResults) -> float | None:
    """Return the step time divided by that of the fastest TorchDEQ; None if either was not timed."""
    theirs = results.fastest(TORCHDEQ)
    if outcome is None or outcome.time is None or theirs is None or theirs.time is None:
        return None
    return outcome.time / theirs.time


def forward_ratio(outcome: MethodResult | None, results: CaseResults) -> float | None:
    """Return the time of a solve without gradients divided by that of the fastest TorchDEQ; None if either was not timed."""
    theirs = results.fastest(TORCHDEQ, forward=True)
    if outcome is None or outcome.forward_time is None or theirs is None or theirs.forward_time is None:
        return None
    return outcome.forward_time / theirs.forward_time


def ratios(results: BenchResults) -> str:
    """Return a Markdown table with a row per case: times of the forms of our default as shares of the fastest TorchDEQ's."""
    lines = _head(*RATIOS)
    for case in results.cases:
        theirs, own = case.fastest(TORCHDEQ), case.named(DEFAULT)
        forms = [case.named(name) for name in (DEFAULT, PLAIN, COMPILED)]
        shares = [ratio(form, case) for form in forms] + [forward_ratio(form, case) for form in forms]
        name = "–" if theirs is None else theirs.method.removeprefix(f"{TORCHDEQ} ")
        lines.append(_row(case.case, name, _calls(theirs), _calls(own), *(_number(share, ".2f") for share in shares)))
    return "\n".join(lines)


def summary(results: BenchResults) -> str:
    """Return a Markdown table with the fastest TorchDEQ, our default and our fastest configuration for each case."""
    lines = _head("case", *COLUMNS)
    for case in results.cases:
        for outcome in _chosen(case):
            lines.append(_row(case.case, *_cells(outcome, case)))
    return "\n".join(lines)


def with_ratios(page: str, results: BenchResults) -> str:
    """Return a Markdown page with the table of `ratios` between its two marks; the text between them is replaced."""
    before, begin, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (begin and end):
        raise ValueError(f"The page has no lines {MARKS[0]} and {MARKS[1]}. Add them where the table belongs.")
    return f"{before}{begin}\n\n{ratios(results)}\n\n{end}{after}"


def details(results: BenchResults) -> str:
    """Return a Markdown table per case with all methods, and the reason for every method that was not timed."""
    return "\n\n".join(_details(case) for case in results.cases)


def text(results: BenchResults) -> str:
    """Return the whole report as Markdown."""
    setting = ", ".join(f"{name} {value}" for name, value in results.setting.items() if value not in ("", None))
    parts = ["## Our default : fastest TorchDEQ", ratios(results), "## Training step", summary(results)]
    return "\n\n".join([*parts, EXPLANATION, details(results), setting])


def plot(results: BenchResults, axes: Axes | None = None) -> Axes:
    """Plot our step times as shares of the fastest TorchDEQ's, which is the line at 1."""
    axes = new_axes(min(max(5.2, 1.1 * len(results.cases) + 1.5), 10.0), 3.9) if axes is None else axes
    forms = {"default, native steps": DEFAULT, "steps in torch": PLAIN, "compiled": COMPILED}
    shares = {label: [ratio(case.named(name), case) for case in results.cases] for label, name in forms.items()}
    bars = {label: values for label, values in shares.items() if any(value is not None for value in values)}
    width = 0.76 / max(len(bars), 1)
    for i, (label, values) in enumerate(bars.items()):
        places = [
            (place + width * (i - (len(bars) - 1) / 2), value) for place, value in enumerate(values) if value is not None
        ]
        axes.bar([x for x, _ in places], [y for _, y in places], width=0.95 * width, label=label, color=COLOURS[i])
    axes.axhline(1.0, color=INK, lw=1)
    axes.set_xticks(range(len(results.cases)), [case.case for case in results.cases], rotation=40, ha="right")
    axes.legend(
        frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0)
    )  # above the axes, because inside it would hide bars
    return finish(axes, "", f"step time : fastest {TORCHDEQ}")


def _chosen(case: CaseResults) -> list[MethodResult]:
    """Return the methods that the summary shows, without duplicates."""
    wanted = (case.fastest(TORCHDEQ), case.named(DEFAULT), case.fastest(OURS))
    return list({outcome.method: outcome for outcome in wanted if outcome is not None}.values())


def _details(case: CaseResults) -> str:
    ordered = sorted(case.outcomes, key=lambda outcome: (outcome.time is None, outcome.time or 0.0))
    unit = "" if case.unit is None else f", a bare call takes {case.unit * 1e6:.0f} us"
    title = f"### {case.case}\n\n{case.note}; residual {case.rtol:.0e}{unit}."
    table = [*_head(*COLUMNS), *(_row(*_cells(outcome, case)) for outcome in ordered if outcome.failure is None)]
    failures = [f"- {outcome.method}: {outcome.failure}" for outcome in ordered if outcome.failure is not None]
    return "\n\n".join(["\n".join(part) for part in ([title], table, failures) if part])


def _cells(outcome: MethodResult, case: CaseResults) -> list[str]:
    work = outcome.work
    return [
        outcome.method,
        _number(outcome.time, ".0f"),
        _number(ratio(outcome, case), ".2f"),
        _number(outcome.spread, ".2f"),
        "–" if work is None else str(work.evaluations + work.graph_evaluations),
        "–" if work is None else str(work.products),
        _number(outcome.overhead, ".2f"),
        _number(outcome.residual, ".1e"),
        _number(outcome.cosine, ".4f"),
        _number(outcome.error, ".1e"),
    ]


def _calls(outcome: MethodResult | None) -> str:
    return "–" if outcome is None or outcome.work is None else str(outcome.work.calls)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _head(*names: str) -> list[str]:
    words = ("case", "method", "fastest TorchDEQ")
    return [_row(*names), _row(*("---" if name in words else "---:" for name in names))]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
