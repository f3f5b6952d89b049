"""Run the tests under several settings of arithmetic: `python -m tests.rounding [--only NAME ...] [-- PYTEST ARGUMENTS]`.

Kernels of other instruction sets, other numbers of threads and other libraries add the same numbers in another order. What
holds on one machine only fails in one of these settings. The summary is written as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "as-it-is": ONE_THREAD,
    "aten-default": ONE_THREAD | {"ATEN_CPU_CAPABILITY": "default"},
    "aten-avx2": ONE_THREAD | {"ATEN_CPU_CAPABILITY": "avx2"},
    "aten-avx512": ONE_THREAD | {"ATEN_CPU_CAPABILITY": "avx512"},
    "two-threads": {"OMP_NUM_THREADS": "2"},
    "onednn-sse41": ONE_THREAD | {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "mkl-compatible": ONE_THREAD | {"MKL_CBWR": "COMPATIBLE"},
    "other-seeds": ONE_THREAD | {"EQUILIBRIA_TEST_SEED": "1000"},
}
CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")  # each machine has those up to its own


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rounding", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME", help=", ".join(SETTINGS)
    )
    parser.add_argument("--json", type=Path, default=Path("rounding.json"), help="where the summary goes")
    parser.add_argument("pytest", nargs="*", help="after --, for pytest; default: -q -n 2")
    options = parser.parse_args(arguments)
    summary: dict[str, Any] = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "settings": {}}
    for name in options.only:
        found = run(name, options.pytest or ["-q", "-n", "2"])
        summary["settings"][name] = found
        options.json.write_text(json.dumps(summary, indent=1) + "\n")
        print(f"{name}: {describe(found)}", flush=True)
    return int(any(found.get("failed") or found.get("exit_code") for found in summary["settings"].values()))


def run(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Counts and names of what failed; a setting that this machine does not have is skipped."""
    wanted = SETTINGS[name].get("ATEN_CPU_CAPABILITY", "default").upper()
    if wanted not in capabilities():
        return {"skipped": f"this machine has no {wanted}"}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        code = subprocess.run(command, env=os.environ | SETTINGS[name], check=False).returncode
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if _has(case, "failure", "error")]
    skipped = sum(_has(case, "skipped") for case in cases)
    passed = len(cases) - len(failed) - skipped
    counts = {"passed": passed, "skipped_tests": skipped, "failed": failed, "exit_code": code}
    return {"environment": dict(SETTINGS[name]), **counts, "seconds": round(time.monotonic() - begin)}


def capabilities() -> tuple[str, ...]:
    """Of torch's kernels on this machine; one that it does not name among ours has the plain ones alone."""
    own = torch.backends.cpu.get_cpu_capability()
    return CAPABILITIES[: CAPABILITIES.index(own) + 1] if own in CAPABILITIES else CAPABILITIES[:1]


def describe(found: Mapping[str, Any]) -> str:
    if "skipped" in found:
        return f"skipped, {found['skipped']}"
    lines = [
        f"{found['passed']} passed, {len(found['failed'])} failed in {found['seconds']} s, exit code {found['exit_code']}"
    ]
    return "\n".join([*lines, *(f"    {name}" for name in found["failed"])])


def _has(case: ElementTree.Element, *tags: str) -> bool:
    return any(case.find(tag) is not None for tag in tags)


if __name__ == "__main__":
    raise SystemExit(main())
