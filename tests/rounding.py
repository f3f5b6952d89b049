"""Run the tests under several settings of arithmetic: `python -m tests.rounding [--only NAME ...] [-- PYTEST ARGUMENTS]`.

Kernels of other instruction sets, other numbers of threads and other libraries add the same numbers in another order. What
holds on one machine only fails in one of these settings. The summary is written as JSON; the other settings of an earlier
summary of the same machine stay in it, each with its commit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.suite_runs import describe, machine, run_pytest, write

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "as-it-is": ONE_THREAD,
    "aten-default": ONE_THREAD | {"ATEN_CPU_CAPABILITY": "default"},
    "aten-avx2": ONE_THREAD | {"ATEN_CPU_CAPABILITY": "avx2"},
    "aten-avx512": ONE_THREAD | {"ATEN_CPU_CAPABILITY": "avx512"},
    "two-threads": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},  # waiting threads leave the cores to others
    "onednn-sse41": ONE_THREAD | {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "mkl-compatible": ONE_THREAD | {"MKL_CBWR": "COMPATIBLE"},
    "other-seeds": ONE_THREAD | {"EQUILIBRIA_TEST_SEED": "1000"},
}
CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")  # each machine has those up to its own
# Left out, because no arithmetic decides them: `make test` has run them once.
LEFT_OUT = {
    "tests/lab/cli": "texts and exit codes of the command line",
    "tests/lab/data": "files, checksums and seeded drawings",
    "tests/lab/reports": "pages and tables made of given numbers",
    "tests/test_imports.py": "which module imports which",
    "tests/test_release.py": "what is in the wheel",
    "tests/test_site.py": "links of the documentation",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rounding", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME", help=", ".join(SETTINGS)
    )
    parser.add_argument("--json", type=Path, default=Path("rounding.json"), help="where the summary goes")
    parser.add_argument("pytest", nargs="*", help="after --, for pytest; default: -q -n 2 and all tests but those left out")
    options = parser.parse_args(arguments)
    summary: dict[str, Any] = {**machine(), "left_out": LEFT_OUT, "settings": earlier(options.json)}
    for name in options.only:
        summary["settings"][name] = run(
            name, options.pytest or ["-q", "-n", "2", *(f"--ignore={path}" for path in LEFT_OUT)]
        )
        write(options.json, summary)
    ran = {name: summary["settings"][name] for name in options.only}
    for name, found in ran.items():
        print(f"{name}: {found.get('not_run') or describe(found)}")
    return int(any(found.get("exit_code") for found in ran.values()))


def earlier(path: Path) -> dict[str, Any]:
    """Return the settings in a summary of this machine; empty if the file is missing or of another machine."""
    found = json.loads(path.read_text()) if path.exists() else {}
    same = all(found.get(key) == value for key, value in machine().items())
    return {name: found["settings"][name] for name in SETTINGS if same and name in found.get("settings", {})}


def run(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run the tests under a setting and return the result; a setting that this machine does not support is not run."""
    wanted = SETTINGS[name].get("ATEN_CPU_CAPABILITY", "default").upper()
    if wanted not in capabilities():
        return {"not_run": f"this machine has no {wanted}"}
    print(f"{name}: {' '.join(f'{key}={value}' for key, value in SETTINGS[name].items())}", flush=True)
    return {"environment": dict(SETTINGS[name]), **run_pytest(arguments, SETTINGS[name])}


def capabilities() -> tuple[str, ...]:
    """Return the instruction sets of torch's kernels on this machine; an unknown one has only the plain kernels."""
    own = torch.backends.cpu.get_cpu_capability()
    return CAPABILITIES[: CAPABILITIES.index(own) + 1] if own in CAPABILITIES else CAPABILITIES[:1]


if __name__ == "__main__":
    raise SystemExit(main())
