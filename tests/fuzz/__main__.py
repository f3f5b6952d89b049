"""Run the fuzzer over a range of its cases: `python -m tests.fuzz --samples 100000 --seed 0 --json fuzz.json`."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.oracle import judge
from tests.fuzz.strategies import CHOICES, Case, numbered, uncoupled
from tests.fuzz.verdict import Verdict

EXAMPLES = 8  # cases kept of every category
SAVE_EVERY = 200  # cases between two writings of the file
ENDLESS = 120  # seconds of processor time after which a case counts as one that does not end; most take hundredths of one
STUCK = 1800  # seconds after which it does so without processor time: a deadlock, on a machine however busy
SHRINKING = 200  # cases run at most to make one smaller


def category(kind: str, detail: str) -> str:
    """Return a key that is equal for findings of probably one cause: message and place of a crash, else its kind."""
    return f"{kind}: {detail}" if kind == "unclear crash" else kind


def minimal(case: Case, wanted: str) -> Case:
    """Return a simpler case of the same category: every field in turn gets the simplest choice that still shows it."""
    budget = SHRINKING
    for _ in range(2):
        for name in [field.name for field in dataclasses.fields(Case) if field.name != "seed"]:
            choices = list(dict.fromkeys(CHOICES[name]))
            for choice in choices[: choices.index(getattr(case, name))]:
                budget -= 1
                simpler = dataclasses.replace(case, **{name: choice})
                if budget > 0 and wanted in {category(f.kind, f.detail) for f in judge(simpler).findings}:
                    case = simpler
                    break
    return case


def machine() -> dict[str, Any]:
    """Return the machine and versions of the figures."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next(
            (line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")), cpu
        )
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {"commit": git.stdout.strip(), "torch": torch.__version__, "python": platform.python_version(), "cpu": cpu}


class Tally:
    """Counts over all cases so far; stored as JSON, from which another start continues."""

    def __init__(self, seed: int, start: int, uncoupled: bool) -> None:
        self.counts: dict[str, Any] = {"seed": seed, "start": start, "uncoupled": uncoupled, "next": start, "seconds": 0.0}
        self.counts |= dict.fromkeys(("cases", "samples", "converged", "gradients", "refused", "lies", "unclear"), 0)
        self.categories: dict[str, dict[str, Any]] = {}
        self.refusals: collections.Counter[str] = collections.Counter()

    @classmethod
    def load(cls, saved: dict[str, Any]) -> Tally:
        tally = cls(saved["seed"], saved["start"], saved["uncoupled"])
        tally.counts = {name: saved[name] for name in tally.counts}
        tally.categories, tally.refusals = saved["categories"], collections.Counter(saved["refusals"])
        return tally

    def case(self, number: int) -> Case:
        case = numbered(self.counts["seed"], number)
        return uncoupled(case) if self.counts["uncoupled"] else case

    def enter(self, number: int, case: Case, verdict: Verdict) -> None:
        counts = self.counts
        counts["next"], counts["cases"] = number + 1, counts["cases"] + 1
        for name in ("samples", "converged", "gradients"):
            counts[name] += getattr(verdict, name)
        if verdict.refused is not None:
            counts["refused"] += 1
            self.refusals[re.sub(r"\d+", "N", verdict.refused.splitlines()[0])[:60]] += 1
        for finding in verdict.findings:
            crash = finding.kind == "unclear crash"
            counts["unclear" if crash else "lies"] += 1
            entry = self.categories.setdefault(category(finding.kind, finding.detail), {"count": 0, "examples": []})
            entry["count"] += 1
            if len(entry["examples"]) < EXAMPLES and number not in [e["number"] for e in entry["examples"]]:
                entry["examples"].append({"number": number, "detail": finding.detail, "case": case.changed()})

    def merge(self, other: dict[str, Any]) -> None:
        """Add the counts of another range of the same stream of cases."""
        for name in ("cases", "samples", "converged", "gradients", "refused", "lies", "unclear"):
            self.counts[name] += other[name]
        self.counts["seconds"] = round(self.counts["seconds"] + other["seconds"], 1)
        self.counts["ranges"] = [*self.counts.get("ranges", []), [other["start"], other["next"]]]
        self.categories |= other["categories"]
        self.refusals.update(other["refusals"])

    def dump(self) -> dict[str, Any]:
        refusals = dict(self.refusals.most_common())
        return {**self.counts, **machine(), "categories": self.categories, "refusals": refusals}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--samples", type=int, default=20_000, help="rows of batches to judge")
    parser.add_argument("--seed", type=int, default=0, help="which stream of cases")
    parser.add_argument("--start", type=int, default=0, help="number of the first case: several ranges may run side by side")
    parser.add_argument("--json", type=Path, help="file of the figures; if it exists, the run goes on from there")
    parser.add_argument("--case", type=int, help="run this case alone and print what is found")
    parser.add_argument("--uncoupled", action="store_true", help="no cells that mix rows, but for batch statistics")
    parser.add_argument(
        "--merge", type=Path, nargs="+", help="add the figures of these files of one seed up, and run nothing"
    )
    parser.add_argument("--keep", action="store_true", help="do not make the findings' cases smaller at the end")
    args = parser.parse_args()
    tally = Tally(args.seed, args.start, args.uncoupled)
    if args.case is not None:
        return _one(tally.case(args.case))
    if args.merge:
        return _merged(tally, [json.loads(file.read_text()) for file in args.merge], args.json)
    if args.json is not None and args.json.exists():
        tally = Tally.load(json.loads(args.json.read_text()))
    _run(tally, args.samples, args.json)
    if not args.keep:
        for name, entry in tally.categories.items():
            entry["minimal"] = _reproductions(name, entry, tally)
    _save(tally, args.json)
    _print(tally)
    return int(tally.counts["lies"] + tally.counts["unclear"] > 0)


def _merged(tally: Tally, parts: list[dict[str, Any]], file: Path | None) -> int:
    same = {(part["seed"], part["uncoupled"], part["commit"], part["torch"]) for part in parts}
    if len(same) != 1:
        raise SystemExit(f"These files are of different seeds, settings, commits or versions: {sorted(same)}")
    tally.counts["seed"], tally.counts["uncoupled"] = parts[0]["seed"], parts[0]["uncoupled"]
    for part in parts:
        tally.merge(part)
    del tally.counts["start"], tally.counts["next"]
    _save(tally, file)
    _print(tally)
    return int(tally.counts["lies"] + tally.counts["unclear"] > 0)


def _reproductions(name: str, entry: dict[str, Any], tally: Tally) -> list[dict[str, str]]:
    """Return minimal cases for the kept examples of a category, one for each set of changed fields."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for example in entry["examples"]:
        smaller = minimal(tally.case(example["number"]), name)
        details = [f.detail for f in judge(smaller).findings if category(f.kind, f.detail) == name]
        shown = {"case": str(smaller), "detail": details[0] if details else "not shown again"}
        found.setdefault(tuple(smaller.changed()), shown)
    return list(found.values())


def _one(case: Case) -> int:
    verdict = judge(case)
    print(case)
    for finding in verdict.findings:
        print(f"row {finding.row}: {finding.kind}: {finding.detail}")
    print(f"{verdict.samples} samples, {verdict.converged} converged, {verdict.gradients} gradients compared")
    print(f"refused: {verdict.refused}")
    return int(bool(verdict.findings))


def _interrupt(number: int, frame: Any) -> None:
    raise TimeoutError(f"no end after {ENDLESS} seconds of processor time, or {STUCK} seconds")


def _run(tally: Tally, samples: int, file: Path | None) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _interrupt)
    signal.signal(signal.SIGPROF, _interrupt)
    began, before = time.monotonic(), tally.counts["seconds"]
    while tally.counts["samples"] < samples:
        number = tally.counts["next"]
        case = tally.case(number)
        signal.alarm(STUCK)
        signal.setitimer(signal.ITIMER_PROF, ENDLESS)
        tally.enter(number, case, judge(case))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        tally.counts["seconds"] = round(before + time.monotonic() - began, 1)
        if tally.counts["cases"] % SAVE_EVERY == 0:
            _save(tally, file)
            shown = {name: tally.counts[name] for name in ("cases", "samples", "lies", "unclear", "seconds")}
            print(", ".join(f"{value} {name}" for name, value in shown.items()), file=sys.stderr)


def _save(tally: Tally, file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(tally.dump(), indent=1) + "\n")


def _print(tally: Tally) -> None:
    counts = tally.counts
    print(
        f"{counts['samples']} samples in {counts['cases']} cases ({counts['seconds']:.0f} s): "
        f"{counts['converged']} converged, {counts['gradients']} gradients compared, "
        f"{counts['refused']} cases refused with a clear error, "
        f"{counts['lies']} lies, {counts['unclear']} unclear crashes"
    )
    for name, entry in sorted(tally.categories.items(), key=lambda item: -item[1]["count"]):
        print(f"\n{entry['count']:6d}  {name}")
        for shown in entry.get("minimal", ()):
            print(f"        {shown['case']}\n            {shown['detail']}")


if __name__ == "__main__":
    sys.exit(main())
