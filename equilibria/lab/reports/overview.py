"""The overview of all reports: what was run, and every claim with its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equilibria._core.files import replace_file
from equilibria.lab.experiments.definitions import Table
from equilibria.lab.reports.changes import WORDS, Earlier, section
from equilibria.lab.reports.headlines import lines as headlines
from equilibria.lab.reports.markdown import MARKS
from equilibria.lab.reports.measured import AGAIN
from equilibria.lab.reports.write import NUMBERS, TEXT, stored_folders
from equilibria.lab.training.durable import read_object

PAGE = "README.md"
NOTES = "NOTES.md"  # hand-written notes, shown at the end
EARLIER = "earlier.json"  # verdicts of an earlier state, {"claims": {table: {text: held}}}
NUMBERED = {
    "C1": "Skip DEQ and V2 need fewer evaluations at equal accuracy",
    "C2": "a continuous Skip DEQ converges where the plain one meets its limit of evaluations",
    "C3": "Jacobian regularization saves evaluations at about equal accuracy; without it, stopping early costs accuracy",
    "C4": "a training step with Jacobian regularization takes longer than one of Skip DEQ",
    "C5": "the Jacobian-free gradient is as accurate as the exact one, in less time",
    "C6": "an implicit ResNet is as good as its explicit twin",
    "C7": "a training step with an unrolled phantom gradient is faster than an implicit one, at about equal accuracy",
    "C8": "phantom gradients point uphill: their cosine with the exact gradient is positive, and rises with their steps",
    "C9": "Neumann phantom gradients of many steps degrade where the cell expands, unrolled ones do not",
    "C10": "memory does not grow with the solver's steps; it grows with a stack's layers, with checkpoints as their root",
    "C11": "a step of an equilibrium takes longer than one of an explicit network, which is no better for its parameters",
    "C12": "stacks of one layer approach a fixed point with depth",
    "C13": "implicit graph networks are as accurate with phantom gradients as with exact ones",
    "C14": "implicit training loses accuracy without unrolled pre-training, training with phantom gradients does not",
}
REASONS = {  # part of a verdict's reason: category under which the overview counts it
    "no finished run": "with a row that was not run",
    "a verdict needs": "with fewer than three runs of a row",
    "it has not trained": "with a row that has not trained",
    "standard errors": "within two standard errors",
    "is not known": "with a deviation that is not known",
    "different machines": "of times on different machines",
}


def write_overview(folder: Path, tables: Mapping[str, Table]) -> Path:
    """Read the stored reports of all tables, in this order, and write folder/README.md; returns its path."""
    found = {place.name: _read_table(place / NUMBERS) for name in tables for place in stored_folders(folder, name)}
    others = [table for name, table in tables.items() if not stored_folders(folder, name)]
    notes = (folder / NOTES).read_text() if (folder / NOTES).is_file() else ""
    earlier = read_object(folder / EARLIER, AGAIN)["claims"] if (folder / EARLIER).is_file() else {}
    replace_file(folder / PAGE, page(found, others, notes, earlier).encode())
    return folder / PAGE


def page(
    tables: Mapping[str, Mapping[str, Any]], others: Sequence[Table], notes: str = "", earlier: Earlier | None = None
) -> str:
    """Return the overview as Markdown.

    tables   results of `reports.table.plain` by the name of their folder
    others   tables that have not been run
    earlier  whether claims held in an earlier state, by table and text
    """
    lines = ["| table | source | scale | runs | claims |", "|---|---|---|---:|---|"]
    for name, table in tables.items():
        runs = sum(len(row["runs"]) for row in table["rows"].values())
        verdicts = [WORDS[claim["held"]] for claim in table["claims"]]
        counted = ", ".join(f"{verdicts.count(word)} {word}" for word in WORDS.values() if word in verdicts)
        lines.append(f"| [{name}]({name}/{TEXT}) | {table['source']} | {table['scale']} | {runs} | {counted or '–'} |")
    for unrun in others:
        command, claims = f"`equilibria reproduce {unrun.name}`", len(unrun.claims)
        lines.append(f"| {command} | {unrun.source} | | not run | {claims} to judge |")
    parts = [
        "# Results",
        "Every folder has the report of one table: our figures beside the published ones, claims, protocol and curves. A "
        "row that was not run shows a dash. This page is generated from the reports, except for the notes at its end. "
        "`equilibria reproduce TABLE` runs a table; `equilibria reproduce --all --scale reduced --report results` runs all "
        "of them and keeps reports of the full scale. Finished runs are not run again.",
        "\n".join(lines),
        *_speed_ups(tables),
        "## Claims",
        _counts(tables),
        "The table below has every claim with the published figures, ours and the verdict. The last column is the command "
        "after `equilibria`, with a link to the report. Claims that several papers make are numbered:",
        "\n".join(f"- {number}: {text}." for number, text in NUMBERED.items()),
        "\n".join(_claims(tables)),
        *section(tables, earlier or {}, _kind),
    ]
    return "\n\n".join([*parts, notes.strip()] if notes.strip() else parts) + "\n"


def _speed_ups(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the section on the averages of Skip DEQs; empty if there are no runs of them."""
    lines = headlines(tables)
    text = (
        "How many times faster the best of Skip DEQ and V2 trains and predicts than the plain DEQ, and how many times fewer "
        "steps its solver takes, in each table. Averages are over what was run."
    )
    return ["## Speed-ups of Skip DEQs", text, "\n".join(lines)] if lines else []


def _counts(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a sentence with the number of claims by verdict, and the reasons why claims are undecided."""
    claims = [claim for table in tables.values() for claim in table["claims"]]
    words = [WORDS[claim["held"]] for claim in claims]
    reasons = [_kind(claim) for claim in claims if claim["held"] is None]
    listed = "; ".join(f"{reasons.count(kind)} {kind}" for kind in dict.fromkeys(REASONS.values()) if kind in reasons)
    counted = ", ".join(f"{words.count(word)} {word}" for word in WORDS.values())
    return f"{len(claims)} claims: {counted}." + (f" Undecided are {listed}." if listed else "")


def _kind(claim: Mapping[str, Any]) -> str:
    """Return the category of the reason why a claim is undecided."""
    reason = claim.get("reason") or "no finished run"
    return next((kind for part, kind in REASONS.items() if part in reason), REASONS["no finished run"])


def _read_table(file: Path) -> dict[str, Any]:
    """Return the content of a table.json; raises ValueError if it is incomplete."""
    found = read_object(file, AGAIN)
    if missing := [key for key in ("table", "source", "scale", "rows", "claims") if key not in found]:
        raise ValueError(f"{file} has no {', '.join(map(repr, missing))}. {AGAIN}")
    return found


def _claims(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table of all claims, numbered claims first."""
    lines = ["| | claim | published | ours | verdict | command |", "|---|---|---|---|---|---|"]
    rows = [(claim.get("id", ""), claim, name) for name, table in tables.items() for claim in table["claims"]]
    for identity, claim, name in sorted(rows, key=lambda row: _place(row[0])):
        verdict = MARKS[WORDS[claim["held"]]]
        published, scale = claim.get("published", "–"), tables[name]["scale"]
        command = f"[`reproduce {tables[name]['table']} --scale {scale}`]({name}/{TEXT})"
        because = f": {claim['reason']}" if claim.get("reason") else ""
        lines.append(f"| {identity} | {claim['claim']} | {published} | {claim['seen']} | {verdict}{because} | {command} |")
    return lines


def _place(identity: str) -> int:
    """Return the sort key of a claim: C1, C2, ..., then claims without a number."""
    number = identity.removeprefix("C")
    return int(number) if number.isdigit() else 1000  # as numbers, since C10 follows C9
