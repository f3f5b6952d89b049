"""Verdicts on claims: comparisons of means, decided only if the difference exceeds the noise over seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from equilibria.lab.experiments.claims import Claim
from equilibria.lab.experiments.definitions import Column, Figure, Table
from equilibria.lab.reports.measured import Measured, difference_error, quotient_error

LEAST_RUNS = 3  # runs per row that a verdict needs, since fewer give no estimate of the noise
ERRORS = 2.0  # distance from the bound in standard errors that a verdict needs
MOST_FAILED = 50.0  # % of failed solves above which a row counts as not trained
NEAR_GUESS = 0.1  # a row counts as not trained below this share of the way from the best constant answer to 100 %


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim: `held` is None if undecided, for `reason`; `seen` has the numbers."""

    claim: Claim
    held: bool | None
    seen: str
    reason: str | None = None

    @property
    def word(self) -> str:
        return {True: "held", False: "did not hold", None: "undecided"}[self.held]

    @property
    def text(self) -> str:
        """The numbers, and the reason if the claim is undecided."""
        return self.seen if self.reason is None else f"{self.seen}. Undecided: {self.reason}"


class Results(Protocol):
    """The measurements of a table."""

    @property
    def table(self) -> Table: ...

    def main(self, row: str) -> Measured | None: ...

    def machines(self) -> list[str]: ...

    def on(self, row: str, machine: str) -> Measured | None: ...

    def figure(self, row: str, column: Column, measured: Measured | None = None) -> Figure | None: ...


def judge(claim: Claim, results: Results) -> Verdict:
    """Compare the means of the runs as the claim says; the verdict is undecided if the runs do not suffice."""
    column = results.table.column(claim.column)
    other, compared = _opposite(claim, results.table)
    measured = _chosen(results, claim.left, compared)
    left = results.figure(claim.left, column, measured[claim.left])
    right = None if compared is None else results.figure(compared, other, measured[compared])
    missing = [name for name, figure in ((claim.left, left), (compared, right)) if name is not None and figure is None]
    if left is None or missing:
        return Verdict(claim, None, f"no finished run of {' and '.join(dict.fromkeys(missing))} with {column.title}")
    if right is not None and right.mean == 0 and claim.by == "ratio":
        return Verdict(claim, None, f"{other.title} of {compared} is 0: there is no ratio")
    number, shown = _comparison(claim, left, right, column.digits)
    error = _error(
        claim, (measured[claim.left], column, left), None if right is None else (measured[compared], other, right)
    )
    noise = "" if error is None else f" ± {ERRORS * error:.2g}"
    seen = f"{column.title}: {shown}{noise}; asked for {_bounds(claim)}"
    # the figures are shown even if the runs do not allow a verdict
    reason = next(_reasons(claim, results, measured, (left, right)), None)
    if reason is not None:
        return Verdict(claim, None, seen, reason)
    held = _decided(claim, number, ERRORS * (error or 0.0))
    inside = f"the bound is within {ERRORS:g} standard errors" if held is None else None
    return Verdict(claim, held, seen, inside)


def _chosen(results: Results, left: str, right: str | None) -> dict[str | None, Measured | None]:
    """Return the measurements to compare by row: those of one machine, unless only several machines have enough runs."""
    rows = [left] if right is None else [left, right]
    choices = [[results.on(row, machine) for row in rows] for machine in results.machines()]
    choices.append([results.main(row) for row in rows])

    def rank(place: int) -> tuple[bool, int, int]:
        runs = min((0 if found is None else len(found.runs)) for found in choices[place])
        # enough runs first, then more runs, then the earlier choice; the mixture of machines is the last one
        return runs >= LEAST_RUNS, runs, -place

    return dict(zip(rows, choices[max(range(len(choices)), key=rank)], strict=True))


def _reasons(
    claim: Claim, results: Results, measured: dict[str | None, Measured | None], figures: tuple[Figure, Figure | None]
) -> Iterator[str]:
    """Yield the reasons why the runs cannot decide a claim, the most important first."""
    column = results.table.column(claim.column)
    for row, found in measured.items():
        if row is not None and found is not None and claim.column != "failed":
            yield from _untrained(row, found, results)
    machines = {found.machine for found in measured.values() if found is not None}
    if column.is_time and len(machines) > 1:
        yield f"{' and '.join(str(row) for row in measured)} were timed on different machines"
    runs = {row: figure.runs for row, figure in zip(measured, figures, strict=False) if figure is not None}
    few = [f"{count or 'unknown'} of {row}" for row, count in runs.items() if (count or 0) < LEAST_RUNS]
    if few:
        yield f"runs: {', '.join(few)}; a verdict needs {LEAST_RUNS} of each row"
    if any(figure is not None and figure.standard_error is None for figure in figures):
        yield "the deviation over seeds is not known"


def _untrained(row: str, measured: Measured, results: Results) -> Iterator[str]:
    """Yield signs that a row has not trained: many failed solves, or an accuracy near that of a constant answer."""
    table = results.table
    failed = next((column for column in (*table.columns, *table.hidden) if column.name == "failed"), None)
    share = None if failed is None else results.figure(row, failed, measured)
    if share is not None and share.mean > MOST_FAILED and not table.row(row).limited:
        yield f"{share.mean:.0f} % of the solves of {row} fail: it has not trained"
    for name, guess in table.guess.items():
        accuracy = results.figure(row, table.column(name), measured)
        if accuracy is not None and accuracy.mean < guess + NEAR_GUESS * (100.0 - guess):
            yield f"{row} scores {accuracy.mean:.1f} %, a constant answer {guess:g} %: it has not trained"


def _decided(claim: Claim, number: float, noise: float) -> bool | None:
    """Return True or False if the number is farther from the bounds than the noise, else None."""
    low, high = claim.at_least, claim.at_most
    if (low is not None and number + noise < low) or (high is not None and number - noise > high):
        return False
    inside = (low is None or number - noise >= low) and (high is None or number + noise <= high)
    return True if inside else None


Term = tuple[Measured | None, Column, Figure]


def _error(claim: Claim, left: Term, right: Term | None) -> float | None:
    """Return the standard error of the number that a claim bounds, by pairs of equal seeds if values are known."""
    if right is None:
        return left[2].standard_error
    pairs = [_values(left), _values(right)]
    if all(pairs):
        return (quotient_error if claim.by == "ratio" else difference_error)(*pairs)
    errors = left[2].standard_error, right[2].standard_error
    if errors[0] is None or errors[1] is None:
        return None
    if claim.by == "difference":
        return float((errors[0] ** 2 + errors[1] ** 2) ** 0.5)
    # errors of independent means to first order: |d(a / b)|² = (da / b)² + (a db / b²)²
    quotient = left[2].mean / right[2].mean
    return float((errors[0] ** 2 + (quotient * errors[1]) ** 2) ** 0.5 / abs(right[2].mean))


def _values(term: Term) -> dict[str, float]:
    """Return values by run; empty for a column that is a ratio to another row, for which runs have no values."""
    measured, column, _ = term
    return {} if measured is None or column.over is not None else dict(measured.values.get(column.name, {}))


def as_published(claim: Claim, table: Table) -> str:
    """Return the comparison of a claim with the published figures as text; "–" if there are none."""
    other, compared = _opposite(claim, table)
    left = table.row(claim.left).published.get(claim.column)
    right = None if compared is None else table.row(compared).published.get(other.name)
    if left is None or (compared is not None and (right is None or right.mean == 0)):
        return "–"
    return _comparison(claim, left, right, table.column(claim.column).digits)[1]


def _opposite(claim: Claim, table: Table) -> tuple[Column, str | None]:
    """Return the column and the row that `left` is compared with; the row is None for a claim about one value."""
    column = table.column(claim.against or claim.column)
    return column, claim.right or (None if claim.against is None else claim.left)


def _comparison(claim: Claim, left: Figure, right: Figure | None, digits: int) -> tuple[float, str]:
    """Return the number that a claim bounds, and its computation as text.

    Values and differences are rounded three digits beyond those shown, since means of equal counts differ in the last bits.
    """
    if right is None:
        return round(left.mean, digits + 3), f"{left.mean:,.{digits}f}"
    first, second = f"{left.mean:,.{digits}f}", f"{right.mean:,.{digits}f}"
    if claim.by == "ratio":
        return left.mean / right.mean, f"{first} / {second} = {left.mean / right.mean:.4g}"
    number = round(left.mean - right.mean, digits + 3) + 0.0  # 0, not -0
    return number, f"{first} - {second} = {number:+.4g}"


def _bounds(claim: Claim) -> str:
    """Return the bounds of a claim as text."""
    low, high = claim.at_least, claim.at_most
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return f"at least {low:g}" if low is not None else f"at most {high:g}"
