"""Write the tables of docs/machines.md from docs/machines/*.json: `python docs/machine_tables.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "machines.md"
FOLDER = Path(__file__).parent / "machines"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def torch_table() -> str:
    """A line per version of torch, oldest first."""
    runs = [json.loads(path.read_text()) for path in FOLDER.glob("torch-*.json")]
    runs.sort(key=lambda run: [int(part) for part in run["torch"].split("+")[0].split(".")])
    head = "| torch | Python | commit | passed | failed | skipped |\n|---|---|---|---:|---:|---:|\n"
    return head + "".join(f"| {run['torch']} | {run['python']} | {_counts(run)} |\n" for run in runs)


def rounding_table() -> str:
    """A line per setting of arithmetic."""
    found = json.loads((FOLDER / "rounding.json").read_text())
    head = "| setting | environment | commit | passed | failed | skipped |\n|---|---|---|---:|---:|---:|\n"
    return head + "".join(_setting(name, run) for name, run in found["settings"].items())


def machine_line() -> str:
    """The machine of the rounding runs."""
    found = json.loads((FOLDER / "rounding.json").read_text())
    return f"{found['cpu']} ({found['kernels']} kernels), torch {found['torch']}, Python {found['python']}.\n"


def left_out_table() -> str:
    """The tests that no arithmetic decides."""
    found = json.loads((FOLDER / "rounding.json").read_text())
    lines = "".join(f"| `{path}` | {reason} |\n" for path, reason in found["left_out"].items())
    return f"| left out | what it tests |\n|---|---|\n{lines}"


TABLES = {"torch": torch_table, "rounding": rounding_table, "machine": machine_line, "left": left_out_table}


def written(page: str) -> str:
    """The page with its tables made anew."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def _setting(name: str, run: dict[str, Any]) -> str:
    if "not_run" in run:
        return f"| {name} | {run['not_run']} | - | - | - | - |\n"
    variables = " ".join(f"`{key}={value}`" for key, value in run["environment"].items())
    return f"| {name} | {variables} | {_counts(run)} |\n"


def _counts(run: dict[str, Any]) -> str:
    return f"`{run.get('commit', '-')}` | {run['passed']} | {len(run['failed'])} | {run['skipped']}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
