"""Write the table and the picture of docs/serving.md from the stored figures: `python docs/serving_tables.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE / "serving.md"
PICTURE = HERE / "images" / "serving-latency.png"
RESULTS = HERE.parent / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def measured() -> dict[str, Any]:
    """The stored run of benchmarks/serving.py."""
    found: dict[str, Any] = json.loads((RESULTS / "serving.json").read_text())
    return found


def run_line() -> str:
    """The command, the commit and the machine of the run."""
    run = measured()
    return (
        f"`{run['command']}` at commit `{run['commit']}`, torch {run['torch']}, one thread, {run['rows']} rows, load of the "
        f"machine {run['load_of_the_machine']:.1f}.\n"
    )


def throughput_table() -> str:
    """Saturation: a line per case."""
    head = "| case | steps | static, per second | over static | over grouped | full over engine | easy behind hard, ms |\n"
    lines = ""
    for name, case in measured()["cases"].items():
        ratios = case["throughput"]
        columns = " | ".join(
            _ratio(ratios[key]) for key in ("engine_over_static", "engine_over_grouped", "full_over_engine")
        )
        behind = case["easy_behind_hard_ms"]
        easy = " / ".join(f"{behind[kind]:.3g}" for kind in ("static", "grouped", "engine"))
        steps = f"{case['steps']['least']} to {case['steps']['most']}"
        lines += f"| {name} | {steps} | {case['per_second']['static']:.0f} | {columns} | {easy} |\n"
    return head + "|---|---|---:|---:|---:|---:|---:|\n" + lines


def latency_table() -> str:
    """Load: a line per case."""
    head = "| case | static p50, p99, ms | engine p50, p99, ms | p50 over static | p99 over static | p99 over grouped |\n"
    lines = ""
    for name, case in measured()["cases"].items():
        at80, grouped = case["load_of_static"]["0.8"], case["load_of_grouped"]["0.8"]
        times = " | ".join(f"{at80[kind]['p50_ms']:.3g}, {at80[kind]['p99_ms']:.3g}" for kind in ("static", "engine"))
        over = " | ".join(_ratio(at80[f"engine_over_static_{share}"]) for share in ("p50", "p99"))
        lines += f"| {name} | {times} | {over} | {_ratio(grouped['engine_over_grouped_p99'])} |\n"
    return head + "|---|---:|---:|---:|---:|---:|\n" + lines


def soak_lines() -> str:
    """The stored run of benchmarks/serving_soak.py."""
    run = json.loads((RESULTS / "serving_soak.json").read_text())
    faults = ", ".join(
        f"{kind} {sum(codes.values())} ({'; '.join(f'{number} × {_code(code)}' for code, number in codes.items())})"
        for kind, codes in run["faults"].items()
    )
    good = ", ".join(f"{number} × {code}" for code, number in run["codes_of_good_requests"].items())
    return (
        f"`{run['command']}` at commit `{run['commit']}`, load of the machine {run['machine_load']['median']:.1f} in the "
        f"median, {run['machine_load']['most']:.1f} at most:\n\n"
        f"- {run['good_requests']:,} requests without a fault: {good}; wrong answers: {run['wrong_answers']}.\n"
        f"- Offered {run['rate_per_second']:.0f} a second of {run['saturation_per_second']:.0f} at saturation, client "
        f"and server on one machine; p50 {run['p50_ms']:.0f} ms, p99 {run['p99_ms']:.0f} ms.\n"
        f"- Faults: {faults}. Unexpected responses: {run['unexpected_responses_to_faults']}; 4xx without an explanation: "
        f"{run['errors_without_a_message']}.\n"
        f"- Memory {run['memory_mb_second_third']:.1f} MB in the second third, {run['memory_mb_last_third']:.1f} MB in the "
        f"last; exit code {run['exit_code']} after SIGTERM.\n"
    )


TABLES = {"run": run_line, "throughput": throughput_table, "latency": latency_table, "soak": soak_lines}


def written(page: str) -> str:
    """The page with its tables made anew."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def _ratio(value: dict[str, float]) -> str:
    return f"{value['median']:.2f} ({value['low']:.2f} to {value['high']:.2f})"


def _code(code: str) -> str:
    return {"0": "no response awaited", "-1": "connection closed"}.get(code, code)


def draw(path: Path = PICTURE) -> None:
    """Throughput of all cases, and latency over load where it was measured."""
    import matplotlib.pyplot as plt

    cases = measured()["cases"]
    shown = [(name, case) for name, case in cases.items() if len(case["load_of_static"]) > 1]
    figure, axes = plt.subplots(1, len(shown) + 1, figsize=(4.6 * (len(shown) + 1), 3.6), squeeze=False)
    first, places = axes[0, 0], range(len(cases))
    for kind, shift in (("static", 0.2), ("grouped", -0.2)):
        gains = [case["throughput"][f"engine_over_{kind}"] for case in cases.values()]
        middle = [gain["median"] for gain in gains]
        errors = [[gain["median"] - gain["low"] for gain in gains], [gain["high"] - gain["median"] for gain in gains]]
        first.barh([place + shift for place in places], middle, 0.4, xerr=errors, label=f"over {kind}")
    first.axvline(1.0, color="grey", lw=0.8)
    first.set_yticks(list(places), list(cases))
    first.set_xlabel("throughput at saturation, times")
    first.legend(fontsize=8)
    for axis, (name, case) in zip(axes[0, 1:], shown, strict=True):
        loads = [float(load) for load in case["load_of_static"]]
        for kind, colour in (("static", "tab:red"), ("grouped", "tab:orange"), ("engine", "tab:blue")):
            for share, style in ((50, "--"), (99, "-")):
                values = [case["load_of_static"][str(load)][kind][f"p{share}_ms"] for load in loads]
                axis.plot(loads, values, style, color=colour, marker=".", label=f"{kind}, p{share}")
        axis.set(yscale="log", title=name, xlabel="load, of static's saturation", ylabel="latency, ms")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw()
    PAGE.write_text(written(PAGE.read_text()))
