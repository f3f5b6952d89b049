"""Continuous batching beside static batching on the same model and requests: `python benchmarks/serving.py`.

Two baselines, each with rows that drop out of the solve when they are done:

    static   waits for a batch, solves it by the library's own loop to the strictest tolerance among its requests
    grouped  the engine admitting only into an empty pool: a batch whose rows have tolerances and step limits of their own

"Full" is the engine with full=True, which evaluates all rows at every step.

Time is that of the processor, so that a machine that does other things as well changes it little. Saturation: all requests
wait from the beginning; the servers take turns, and ratios are medians over the rounds of ratios within a round. Load:
Poisson arrivals on a clock that runs with the processor time of the server and jumps over its idle time; latencies are from
arrival to answer. A batch is then whatever waits when the server becomes free, up to its rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import equilibria as eq
from equilibria.serving.load import poisson
from equilibria.serving.monitor import percentile
from equilibria.serving.static import StaticBatching

ROWS = 64
SPREAD = (256, 512, 1024)  # widths of the cells
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Request:
    inputs: Any
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    name: str
    about: str
    model: nn.Module
    requests: list[Request]


class GainCell(nn.Module):
    """tanh(gain W z + x) with a gain of the request's own: from easy to hardly contracting."""

    def __init__(self, n: int) -> None:
        super().__init__()
        q, _ = torch.linalg.qr(torch.randn(n, n))
        self.weight = nn.Parameter(q)

    def forward(self, z: Tensor, x: Tensor, gain: Tensor) -> Tensor:
        return torch.tanh(gain * (z @ self.weight.T) + 0.1 * x)


class MixedNet(nn.Module):
    """A model whose requests take from a few steps to a hundred and more."""

    def __init__(self, n: int = 384) -> None:
        super().__init__()
        self.encoder = nn.Linear(32, n)
        stop = eq.Stop(rtol=1e-4, max_steps=300, on_failure="ignore")
        self.layer = eq.DEQ(GainCell(n), solver=eq.Anderson(), stop=stop)
        self.head = nn.Linear(n, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.encoder(x[:, 1:]), x[:, :1]))
        return out


def digits_model() -> tuple[nn.Module, Tensor]:
    """A digits classifier after a short training, and the images."""
    data = load_digits()
    images, classes = torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)
    model = eq.models.create("skip-mlp-vanilla", inputs=64, width=64, solver=eq.models.SkipSolver(tolerance=1e-3))
    model.layer.solver = eq.Anderson()  # type: ignore[union-attr]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(150):
        index = torch.randint(len(images), (64,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(images[index]), classes[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), images


def cases(names: Sequence[str], count: int) -> list[Case]:
    torch.manual_seed(0)
    chance = random.Random(0)
    model, images = digits_model()
    digits = [Request(images[i % len(images)]) for i in range(count)]
    tolerances = [Request(r.inputs, {"rtol": 10 ** chance.uniform(-6, -1), "max_steps": 200}) for r in digits[: count // 2]]
    gains = [chance.uniform(0.95, 0.99) if chance.random() < 0.1 else chance.uniform(0.2, 0.7) for _ in range(count // 2)]
    mixed = [Request(torch.cat([torch.tensor([gain]), torch.randn(32)])[:33]) for gain in gains]
    # 1 / (1 - gain), to which the steps are about proportional, is log-uniform
    spread = [1 - 1 / math.exp(chance.uniform(math.log(1.25), math.log(100.0))) for _ in range(count // 2)]
    spread_inputs = [Request(torch.cat([torch.tensor([gain]), torch.randn(32)])) for gain in spread]
    monotone = eq.models.create("mon-mlp-mnist").eval()
    pictures = [Request(torch.rand(1, 28, 28)) for _ in range(count)]
    stop = eq.Stop(rtol=0.0, atol=0.0, max_steps=64, on_failure="ignore")
    reasoner = eq.models.create("reasoner-trm-nano", stop=stop, gradient=eq.Implicit()).eval()
    config: Any = reasoner.config
    steps = [round(2 ** chance.uniform(1, 6)) for _ in range(count // 8)]
    boards = [Request(torch.randint(config.tokens, (config.positions,)), {"max_steps": n}) for n in steps]
    residual = eq.models.create("jfb-resnet-mnist").eval()
    found = [
        Case("digits", "trained digits classifier, Anderson: steps hardly vary", model, digits),
        Case("monotone", "mon-mlp-mnist, Picard: four or five steps", monotone, pictures),
        Case("residual", "jfb-resnet-mnist, Picard: convolutions, a dear cell", residual, pictures[: count // 8]),
        Case("tolerances", "the digits classifier, requests with rtol 1e-1 to 1e-6", model, tolerances),
        Case(
            "difficulty",
            "384 units, one request in ten hardly contracts: a few steps, or a hundred",
            MixedNet().eval(),
            mixed,
        ),
        *[
            Case(f"spread-{n}", f"{n} units, 1 / (1 - gain) log-uniform from 1.25 to 100", MixedNet(n).eval(), spread_inputs)
            for n in SPREAD
            if not names or f"spread-{n}" in names
        ],
        Case("reasoner", "reasoner-trm-nano, boards with 2 to 64 recursions, drawn log-uniformly", reasoner, boards),
    ]
    return [case for case in found if not names or case.name in names]


def server(kind: str, model: nn.Module) -> Any:
    if kind == "static":
        return StaticBatching(model, ROWS, wait=0.0)
    mode: Any = "grouped" if kind == "grouped" else "auto"
    engine = eq.serving.Engine(model, ROWS, queue=10**7, admission=mode, full=kind == "full")
    engine.clock = time.process_time
    return engine


def saturate(serve: Any, requests: Sequence[Request]) -> tuple[float, list[Any]]:
    """Seconds per request, and the tickets."""
    begin = time.process_time()
    tickets = [serve.submit(request.inputs, **request.options) for request in requests]
    serve.run()
    return (time.process_time() - begin) / len(requests), tickets


def arrive(serve: Any, requests: Sequence[Request], arrivals: Sequence[float]) -> list[float]:
    """Latencies of requests that arrive at these times."""
    now, sent = 0.0, 0
    waiting: list[tuple[float, Any]] = []
    latencies: list[float] = []
    while sent < len(arrivals) or waiting:
        begin = time.process_time()
        if not waiting and arrivals[sent] > now:
            now = arrivals[sent]
        while sent < len(arrivals) and arrivals[sent] <= now:
            request = requests[sent % len(requests)]
            waiting.append((arrivals[sent], serve.submit(request.inputs, **request.options)))
            sent += 1
        serve.step()
        now += time.process_time() - begin
        latencies += [now - due for due, ticket in waiting if ticket.done()]
        waiting = [(due, ticket) for due, ticket in waiting if not ticket.done()]
    return latencies


def behind_hard(serve: Any, requests: Sequence[Request], tickets: Sequence[Any]) -> float:
    """Seconds until the answer to the easiest request that arrives when a pool of the hardest ones has begun."""
    order = sorted(range(len(requests)), key=lambda i: tickets[i].result(0).steps)
    for i in order[-ROWS + 1 :]:
        serve.submit(requests[i].inputs, **requests[i].options)
    begin = time.process_time()
    if not isinstance(serve, StaticBatching):
        serve.step()
        easy = serve.submit(requests[order[0]].inputs, **requests[order[0]].options)
    else:
        serve.run()  # it arrives when the batch has begun, and is in the next one
        easy = serve.submit(requests[order[0]].inputs, **requests[order[0]].options)
    while not easy.done():
        serve.step()
    taken = time.process_time() - begin
    serve.run()
    return taken


def measure(case: Case, rounds: int, curve: bool) -> dict[str, Any]:
    kinds = ("static", "grouped", "engine", "full")
    servers = {kind: server(kind, case.model) for kind in kinds}
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    tickets: list[Any] = []
    for kind in kinds:
        saturate(servers[kind], case.requests[: 2 * ROWS])
    for _ in range(rounds):
        for kind in kinds:
            seconds, found = saturate(servers[kind], case.requests)
            taken[kind].append(seconds)
            tickets = found
    each = {kind: statistics.median(values) for kind, values in taken.items()}
    steps = sorted(ticket.result(0).steps for ticket in tickets)
    report: dict[str, Any] = {
        "about": case.about,
        "requests": len(case.requests),
        "steps": {"least": steps[0], "median": steps[len(steps) // 2], "most": steps[-1]},
        "per_second": {kind: 1 / value for kind, value in each.items()},
        "spread": {kind: (max(values) - min(values)) / each[kind] for kind, values in taken.items()},
        "throughput_over_static": paired(taken, "static", "engine"),
        "throughput_over_grouped": paired(taken, "grouped", "engine"),
        "throughput_of_full_over_engine": paired(taken, "engine", "full"),
    }
    report["easy_behind_hard_ms"] = {kind: 1e3 * behind_hard(servers[kind], case.requests, tickets) for kind in kinds}
    loads = LOADS if curve else (0.8,)
    report["load"] = {str(load): at_load(servers, case, load / each["static"]) for load in loads}
    at80 = report["load"]["0.8"]
    report["p99_over_static"] = at80["engine"]["p99_ms"] / at80["static"]["p99_ms"]
    report["p99_over_grouped"] = at80["engine"]["p99_ms"] / at80["grouped"]["p99_ms"]
    return report


def paired(taken: dict[str, list[float]], one: str, other: str) -> float:
    """Median over the rounds of the ratio of two times that were measured one after the other."""
    return statistics.median(a / b for a, b in zip(taken[one], taken[other], strict=True))


def at_load(servers: dict[str, Any], case: Case, rate: float) -> dict[str, dict[str, float | None]]:
    """Percentiles of latencies at that many requests per second, by server."""
    arrivals = poisson(rate, len(case.requests), math.inf, seed=1)
    found: dict[str, dict[str, float | None]] = {}
    for kind, serve in servers.items():
        latencies = sorted(arrive(serve, case.requests, arrivals))
        found[kind] = {f"p{share}_ms": 1e3 * (percentile(latencies, share / 100) or 0.0) for share in (50, 90, 99)}
    return found


def draw(report: dict[str, Any], path: Path) -> None:
    shown = [(name, case) for name, case in report["cases"].items() if len(case["load"]) > 1]
    figure, axes = plt.subplots(1, len(shown) + 1, figsize=(4.2 * (len(shown) + 1), 3.4), squeeze=False)
    names = list(report["cases"])
    places = range(len(names))
    for kind, shift in (("static", 0.2), ("grouped", -0.2)):
        gains = [report["cases"][name][f"throughput_over_{kind}"] for name in names]
        axes[0, 0].barh([place + shift for place in places], gains, 0.4, label=f"over {kind}")
    axes[0, 0].axvline(1.0, color="grey", lw=0.8)
    axes[0, 0].set_yticks(list(places), names)
    axes[0, 0].set_xlabel("throughput at saturation, times")
    axes[0, 0].legend(fontsize=8)
    for axis, (name, case) in zip(axes[0, 1:], shown, strict=True):
        loads = [float(load) for load in case["load"]]
        for kind, colour in (("static", "tab:red"), ("grouped", "tab:orange"), ("engine", "tab:blue")):
            for share, style in ((50, "--"), (99, "-")):
                values = [case["load"][str(load)][kind][f"p{share}_ms"] for load in loads]
                axis.plot(loads, values, style, color=colour, marker=".", label=f"{kind}, p{share}")
        axis.set(yscale="log", title=name, xlabel="load, of static's saturation", ylabel="latency, ms")
        axis.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", help="digits monotone residual tolerances difficulty reasoner; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4096, help="of the cheapest case; dearer ones have fewer")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/serving.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/images/serving-latency.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = cases(options.cases, options.requests)
    gc.freeze()  # as `equilibria serve` does: collections then look at what requests leave, not at the libraries
    report: dict[str, Any] = {
        "command": f"python benchmarks/serving.py --rounds {options.rounds} --requests {options.requests}",
        "torch": torch.__version__,
        "load_of_the_machine": os.getloadavg()[1],
        "rows": ROWS,
        "rounds": options.rounds,
        "cases": {},
    }
    for case in found:
        report["cases"][case.name] = one = measure(case, options.rounds, case.name == "difficulty")
        shown = {key: one[key] for key in ("steps", "per_second", "throughput_over_static", "throughput_over_grouped")}
        print(case.name, json.dumps({**shown, "p99": (one["p99_over_static"], one["p99_over_grouped"])}), flush=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    draw(report, options.picture)


if __name__ == "__main__":
    main()
