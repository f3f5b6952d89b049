"""Run the tests of the core with the torch of this environment: `python -m tests.torch_version [--json FILE]`.

Warnings are shown and are no errors: a newer torch may deprecate what still works.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tests.suite_runs import describe, machine, run_pytest, write

TESTS = (
    "tests/core",
    "tests/solvers",
    "tests/gradients",
    "tests/cells",
    "tests/native/test_rows.py",
    "tests/native/test_same_as_torch.py",
    "tests/analysis/test_spectrum.py",
    "tests/test_deq.py",
    "tests/test_export.py",
    "tests/test_numerics.py",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_version", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the summary goes")
    options = parser.parse_args(arguments)
    found = run_pytest(["-q", "-n", "2", "-o", "filterwarnings=default", *TESTS], {"OMP_NUM_THREADS": "1"})
    about = machine()
    if options.json is not None:
        write(options.json, {**about, "tests": TESTS, **found})
    print(f"torch {about['torch']}, Python {about['python']}: {describe(found)}")
    return int(found["exit_code"])


if __name__ == "__main__":
    raise SystemExit(main())
