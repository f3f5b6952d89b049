"""Run the benchmark from the command line: `python -m equilibria.lab.bench.command --quick`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from equilibria.analysis.plots import png
from equilibria.lab.bench.cases import CASES, make
from equilibria.lab.bench.driver import BenchResults, run
from equilibria.lab.bench.jax_methods import jax
from equilibria.lab.bench.methods import DEFAULT, ours, torchdeq
from equilibria.lab.bench.report import plot, text, with_ratios

QUICK_CASES = ("mlp-b32", "mlp-hard", "mlp-osc", "mixed", "transformer")  # the cases of --quick
QUICK_METHODS = (DEFAULT, "BiCGSTAB", "TorchDEQ Picard", "TorchDEQ Anderson", "TorchDEQ Broyden")
ROUNDS, BUDGET, QUICK_BUDGET = 9, 40.0, 8.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    found = [*ours(options.compile), *torchdeq(), *jax()]
    parts = options.only or (QUICK_METHODS if options.quick else ())
    methods = [method for method in found if not parts or any(part in method.name for part in parts)]
    if not methods:
        parser.error(f"--only {' '.join(options.only)} selects no method. Pass parts of the names in the tables.")
    if options.page is not None:
        try:
            with_ratios(options.page.read_text(encoding="utf-8"), BenchResults({}, ()))
        except (OSError, ValueError) as error:
            parser.error(f"the table cannot be written into {options.page}: {error}")
    for path in (options.json, options.plot):
        if path is not None and (problem := _unwritable(path)) is not None:
            parser.error(f"{path} cannot be written: {problem}. Choose another place.")
    if options.budget is not None and options.budget < 0:
        parser.error(f"--budget must not be negative, got {options.budget}.")
    torch.set_num_threads(1)  # with several threads the times of kernels this small vary more than the methods differ
    names = options.cases or (QUICK_CASES if options.quick else tuple(CASES))
    budget = options.budget if options.budget is not None else QUICK_BUDGET if options.quick else BUDGET
    results = run(map(make, names), methods, rounds=ROUNDS, budget=budget)
    print(text(results))
    if not torchdeq():
        print("\nTorchDEQ is not installed, so there is nothing to compare with: pip install torchdeq")
    _write(results, options.json, options.plot)
    if options.page is not None:
        options.page.write_text(with_ratios(options.page.read_text(encoding="utf-8"), results), encoding="utf-8")
    return 0


def _unwritable(path: Path) -> str | None:
    """Return the reason why a file cannot be written, by opening it; None if it can be written."""
    is_new = not path.exists()
    try:
        with open(path, "ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _write(results: BenchResults, numbers: Path | None, picture: Path | None) -> None:
    if numbers is not None:
        numbers.write_text(results.to_json())
    if picture is not None:
        picture.write_bytes(png(plot(results)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="equilibria bench", description="Training steps next to TorchDEQ's at equal achieved accuracy."
    )
    parser.add_argument(
        "--cases", nargs="+", choices=tuple(CASES), metavar="CASE", help=f"run these cases, out of {', '.join(CASES)}"
    )
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="PART", help="run only methods whose names contain any of these"
    )
    parser.add_argument(
        "--quick", action="store_true", help="run fewer cases and methods with a smaller budget; takes under two minutes"
    )
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="time of the timed rounds per case; at least three rounds are run"
    )
    parser.add_argument("--compile", action="store_true", help="also measure our default with compiled solves")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all measurements to this file")
    parser.add_argument(
        "--page", type=Path, metavar="PATH", help="write the table of ratios into this Markdown page, between its marks"
    )
    parser.add_argument("--plot", type=Path, metavar="PATH", help="write a plot of the ratios to this PNG file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
