"""Verdicts of an earlier state of the results beside those of now: how many changed, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

WORDS = {True: "held", False: "did not hold", None: "undecided"}
# what changed a verdict, by the earlier and the present word
DECIDED = "three or more runs of each row decide it"
FLIPPED = "other runs, or other rows to compare with"

Claim = Mapping[str, Any]
Earlier = Mapping[str, Mapping[str, bool | None]]


def section(tables: Mapping[str, Mapping[str, Any]], earlier: Earlier, kind: Callable[[Claim], str]) -> list[str]:
    """Return the section on changes as Markdown; empty without earlier verdicts.

    earlier  whether a claim held, by table and text of the claim
    kind     function from an undecided claim to the category of its reason
    """
    if not earlier:
        return []
    known = [
        (WORDS[earlier[name][claim["claim"]]], claim, name)
        for name, table in tables.items()
        for claim in table["claims"]
        if claim["claim"] in earlier.get(name, {})
    ]
    counts = Counter((before, WORDS[claim["held"]]) for before, claim, _ in known)
    others = sum(len(table["claims"]) for table in tables.values()) - len(known)
    words = list(WORDS.values())
    lines = [f"| earlier \\ now | {' | '.join(words)} | all |", "|---|---:|---:|---:|---:|"]
    for before in words:
        row = [counts[before, now] for now in words]
        lines.append(f"| {before} | {' | '.join(map(str, row))} | {sum(row)} |")
    columns = [sum(counts[before, now] for before in words) for now in words]
    lines.append(f"| all | {' | '.join(map(str, columns))} | {len(known)} |")
    flips = [(before, claim, name) for before, claim, name in known if {before, WORDS[claim["held"]]} == set(words[:2])]
    parts = [
        "## Changes of verdicts",
        "At first, claims were evaluated on the means alone, without regard to the number of runs and their variation. "
        f"{len(known)} claims were evaluated then and still are; {others} were added since. The rows below have their "
        "verdicts then, the columns those of now.",
        "\n".join(lines),
        "\n".join(_reasons(known, kind)),
    ]
    if flips:
        listed = (f"- {name}: {claim['claim']}: {before}, now {WORDS[claim['held']]}" for before, claim, name in flips)
        parts += [f"Verdicts that turned into their opposite, because of {FLIPPED}:", "\n".join(listed)]
    return parts


def _reasons(known: list[tuple[str, Claim, str]], kind: Callable[[Claim], str]) -> list[str]:
    """Return a line for every reason why a verdict changed, with its count."""
    changed: Counter[str] = Counter()
    for before, claim, _ in known:
        now = WORDS[claim["held"]]
        if before != now and now == "undecided":
            changed[f"decided then, undecided now: {kind(claim)}"] += 1
        elif before != now and before == "undecided":
            changed[f"undecided then, decided now: {DECIDED}"] += 1
    return [f"- {count} {reason}" for reason, count in changed.most_common()]
