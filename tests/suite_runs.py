"""Run pytest in a process of its own and count what it found."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch


def run_pytest(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Run pytest and return counts, names of failed tests, exit code, seconds and commit."""
    begin = time.monotonic()
    found: dict[str, Any] = {"commit": commit()}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        code = subprocess.run(command, env=os.environ | dict(environment), check=False).returncode
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if _has(case, "failure", "error")]
    skipped = sum(_has(case, "skipped") for case in cases)
    return found | {
        "passed": len(cases) - len(failed) - skipped,
        "skipped": skipped,
        "failed": failed,
        "exit_code": code,
        "seconds": round(time.monotonic() - begin),
    }


def commit() -> str:
    """Return the commit of the tests, marked if files differ from it; "unknown" outside of a clone."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--match="]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def machine() -> dict[str, str]:
    """Return the machine and versions on which a result depends."""
    kernels = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "python": platform.python_version(), "cpu": _processor(), "kernels": kernels}


def describe(found: Mapping[str, Any]) -> str:
    """Return the counts on one line, then a line for each failed test."""
    counts = f"{found['passed']} passed, {len(found['failed'])} failed, {found['skipped']} skipped in {found['seconds']} s"
    return "\n".join([f"{counts}, exit code {found['exit_code']}", *(f"    {name}" for name in found["failed"])])


def write(path: Path, summary: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n")


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.+)$", listed.read_text(), re.MULTILINE) if listed.exists() else None
    return named[1] if named else platform.processor() or platform.machine()


def _has(case: ElementTree.Element, *tags: str) -> bool:
    return any(case.find(tag) is not None for tag in tags)
