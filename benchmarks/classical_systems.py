"""Our solvers beside scipy's on 49 classical systems, from their standard starts: `python benchmarks/classical_systems.py`

Writes benchmarks/results/classical_systems.json and prints the table of docs/solvers.md. "Tight" asks every method for
max|F| <= 1e-8. "Default" takes every method as it comes and counts max|F| <= 1e-4. "Root" takes our solvers by `eq.root`,
whose default tolerance is one of |F|. What counts is F at the answer, computed anew. Evaluations are runs of F, those for
products among them; scipy takes differences in place of products.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch
from scipy import optimize

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import equilibria as eq  # noqa: E402
from equilibria.solvers.fallback import AnySolver  # noqa: E402
from tests.classical import SYSTEMS, System  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "classical_systems.json"
TIGHT, DEFAULT = 1e-8, 1e-4
SETTINGS = ("tight", "default", "root")
LIMITS = {"tight": TIGHT, "default": DEFAULT, "root": DEFAULT}
TIGHT_STOP = eq.Stop(rtol=0.0, atol=TIGHT, norm=eq.stop.max_norm, max_steps=500, on_failure="ignore")
OURS: dict[str, AnySolver] = {
    "Picard()": eq.Picard(),
    "Anderson()": eq.Anderson(),
    "Broyden(line_search=True)": eq.Broyden(line_search=True),
    "SteadyState()": eq.SteadyState(),
    "DFSane()": eq.solvers.DFSane(),
    "PseudoTransient()": eq.solvers.PseudoTransient(),
    "TrustRegion()": eq.solvers.TrustRegion(),
    "Newton()": eq.Newton(),
    "Newton(line_search=False)": eq.Newton(line_search=False),
    "Robust()": eq.Robust(),
}
SCIPY: dict[str, dict[str, Any]] = {  # options of the tight runs
    "hybr": {"xtol": 1e-14},
    "lm": {"xtol": 1e-14, "ftol": 1e-14, "gtol": 0.0},
    "broyden1": {"fatol": TIGHT, "maxiter": 500},
    "df-sane": {"fatol": TIGHT, "ftol": 0.0, "maxfev": 5000},
    "krylov": {"fatol": TIGHT, "maxiter": 500},
}


def largest(system: System, z: torch.Tensor) -> float:
    return float(system.function(z).abs().max())


def run_ours(system: System, solver: AnySolver, setting: str) -> dict[str, Any]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)  # what did not converge is in the table
        if setting == "root":
            solution = eq.root(system.function, system.z0(), solver=solver)
        else:
            stop = TIGHT_STOP if setting == "tight" else eq.Stop()
            solution = eq.fixed_point(system.cell, system.z0(), solver=solver, stop=stop)
        error = largest(system, solution.z)
    stats = solution.stats
    return {"error": error, "evaluations": stats.evaluations, "products": stats.products}


def run_scipy(system: System, method: str, setting: str) -> dict[str, Any]:
    calls = 0

    def function(x: Any) -> Any:
        nonlocal calls
        calls += 1
        with torch.no_grad():
            return system.function(torch.from_numpy(numpy.array(x, dtype=float)).unsqueeze(0)).squeeze(0).numpy()

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = SCIPY[method] if setting == "tight" else None
            answer = optimize.root(function, numpy.array(system.start), method=method, options=options).x
        error = float(abs(function(answer)).max())
        calls -= 1
    except (ValueError, FloatingPointError, OverflowError, numpy.linalg.LinAlgError):
        error = float("inf")  # it has raised on a state that overflowed
    return {"error": error, "evaluations": calls, "products": 0}


def measure() -> dict[str, Any]:
    about, methods = protocol(), dict[str, dict[str, dict[str, Any]]]()  # the commit may change while it runs
    for name in [*OURS, *(f"scipy {method}" for method in SCIPY)]:
        ours, methods[name] = name in OURS, {}
        for setting in SETTINGS if ours else SETTINGS[:2]:
            rows = {}
            for system in SYSTEMS:
                run = run_ours(system, OURS[name], setting) if ours else run_scipy(system, name[6:], setting)
                rows[system.name] = run | {"error": run["error"] if numpy.isfinite(run["error"]) else None}
            methods[name][setting] = rows
        print(name, {setting: solved(rows, LIMITS[setting]) for setting, rows in methods[name].items()}, flush=True)
    return {"protocol": about, "systems": [system.name for system in SYSTEMS], "methods": methods}


def protocol() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    model = next((line.split(":")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return {
        "commit": commit.strip(),
        "torch": torch.__version__,
        "scipy": scipy.__version__,
        "cpu": model.strip() or platform.processor(),
        "threads": torch.get_num_threads(),
        "dtype": "float64",
        "tight": f"max|F| <= {TIGHT}, at most {TIGHT_STOP.max_steps} steps (of each link of a chain)",
        "default": f"defaults of every method, max|F| <= {DEFAULT}",
        "root": f"eq.root with its default tolerance, max|F| <= {DEFAULT}",
    }


def solved(rows: dict[str, dict[str, Any]], tolerance: float) -> int:
    return sum(row["error"] is not None and row["error"] <= tolerance for row in rows.values())


def table(results: dict[str, Any]) -> str:
    """In Markdown: systems solved, and evaluations and products of those that a method has solved."""
    methods = results["methods"].values()
    settings = [setting for setting in SETTINGS[1:] if any(setting in runs for runs in methods)]
    titles = dict(zip(SETTINGS[1:], ("by default, to 1e-4", "by `eq.root`, to 1e-4"), strict=True))
    columns = ["solved to 1e-8, of 49", "evaluations", "of these products", *(titles[setting] for setting in settings)]
    lines = [f"| method | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for name, runs in results["methods"].items():
        good = [row for row in runs["tight"].values() if row["error"] is not None and row["error"] <= TIGHT]
        evaluations, products = (sum(row[key] for row in good) for key in ("evaluations", "products"))
        label = name if name.startswith("scipy") else f"`{name}`"
        by_default = [str(solved(runs[setting], DEFAULT)) if setting in runs else "" for setting in settings]
        lines.append(f"| {label} | {len(good)} | {evaluations} | {products} | {' | '.join(by_default)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--show", action="store_true", help="print the table of the stored results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.show:
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n")
    print(table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
