"""Continuous batching beside static batching on the same model and requests: `python benchmarks/serving.py`.

Two baselines, each with rows that drop out of the solve when they are done:

    static   waits for a batch, solves it by the library's own loop to the strictest tolerance and the largest step limit
             among its requests
    grouped  the engine admitting only into an empty pool: a batch whose rows have tolerances and step limits of their own

"Full" is the engine with full=True, which evaluates all rows at every step.

Time is that of the processor, so that a machine that does other things as well changes it little. Saturation: all requests
wait from the beginning; the servers take turns, and ratios are medians over the rounds of ratios within a round. Load:
Poisson arrivals on a clock that runs with the processor time of the server and jumps over its idle time; latencies are from
arrival to answer. The servers take turns within a trace too, so that all of them meet the slow phases of the machine. A
batch is whatever waits when the server becomes free, up to its rows. Percentiles are medians over several traces, ratios of
percentiles are medians of ratios on the same trace. `docs/serving_tables.py` makes the tables and the picture of
docs/serving.md from the JSON file.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
ARRIVALS = 4096  # the largest number of arrivals in a trace
SECONDS = 2.0  # of static at saturation, the longest trace otherwise
TURN = 0.05  # seconds of processor time after which the next server goes on with the same trace
END = object()
REPEATS = 5  # of the time to an easy answer behind hard requests
KINDS = ("static", "grouped", "engine", "full")


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
        Case("residual", "jfb-resnet-mnist, Anderson: convolutions, an expensive cell", residual, pictures[: count // 8]),
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
    return eq.serving.Engine(model, ROWS, queue=10**7, admission=mode, full=kind == "full")


def saturate(serve: Any, requests: Sequence[Request]) -> tuple[float, list[Any]]:
    """Seconds per request, and the tickets."""
    begin = time.process_time()
    tickets = [serve.submit(request.inputs, **request.options) for request in requests]
    serve.run()
    return (time.process_time() - begin) / len(requests), tickets


def clock_cost() -> float:
    """Seconds that reading the clock takes, which is not the server's time."""
    readings = [time.process_time() for _ in range(1001)]
    return (readings[-1] - readings[0]) / (len(readings) - 1)


def arrive(serve: Any, requests: Sequence[Request], arrivals: Sequence[float], latencies: list[float]) -> Iterator[None]:
    """Append the latencies of requests that arrive at these times; yields after every TURN of processor time."""
    now, used, sent, reading = 0.0, 0.0, 0, clock_cost()
    due: dict[int, float] = {}  # arrivals of the requests that are not answered, by ticket
    done: list[Any] = []
    while sent < len(arrivals) or due:
        begin = time.process_time()
        if not due and arrivals[sent] > now:
            now = arrivals[sent]
        while sent < len(arrivals) and arrivals[sent] <= now:
            request = requests[sent % len(requests)]
            ticket = serve.submit(request.inputs, **request.options)
            ticket.add_done_callback(done.append)
            due[id(ticket)] = arrivals[sent]
            sent += 1
        serve.step()
        taken = max(time.process_time() - begin - reading, 0.0)
        now, used = now + taken, used + taken
        latencies += [now - due.pop(id(ticket)) for ticket in done]
        done.clear()
        if used >= TURN:
            used = 0.0
            yield


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


def measure(case: Case, rounds: int, traces: int, curve: bool) -> dict[str, Any]:
    servers = {kind: server(kind, case.model) for kind in KINDS}
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    tickets: list[Any] = []
    for kind in KINDS:
        saturate(servers[kind], case.requests[: 2 * ROWS])
    for _ in range(rounds):
        for kind in KINDS:
            seconds, found = saturate(servers[kind], case.requests)
            taken[kind].append(seconds)
            tickets = found
    each = {kind: statistics.median(values) for kind, values in taken.items()}
    steps = sorted(ticket.result(0).steps for ticket in tickets)
    pairs = {"engine_over_static": ("static", "engine"), "engine_over_grouped": ("grouped", "engine")}
    pairs |= {"full_over_engine": ("engine", "full")}
    count = max(min(int(SECONDS / each["static"]), ARRIVALS), len(case.requests))
    loads = [poisson(1.0, count, math.inf, seed=seed) for seed in range(1, traces + 1)]  # at one request a second
    behind = {kind: [behind_hard(servers[kind], case.requests, tickets) for _ in range(REPEATS)] for kind in KINDS}
    return {
        "about": case.about,
        "requests": len(case.requests),
        "steps": {"least": steps[0], "median": steps[len(steps) // 2], "most": steps[-1]},
        "per_second": {kind: 1 / value for kind, value in each.items()},
        "throughput": {name: quartiles(ratios(taken, *pair)) for name, pair in pairs.items()},
        "easy_behind_hard_ms": {kind: 1e3 * statistics.median(values) for kind, values in behind.items()},
        "load_of_static": {
            str(load): at_load(servers, case, load / each["static"], loads) for load in (LOADS if curve else (0.8,))
        },
        "load_of_grouped": {"0.8": at_load(servers, case, 0.8 / each["grouped"], loads, ("grouped", "engine"))},
    }


def ratios(taken: dict[str, list[float]], one: str, other: str) -> list[float]:
    """Ratios of two times that were measured one after the other, one per round."""
    return [a / b for a, b in zip(taken[one], taken[other], strict=True)]


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """The median and both quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [values[0]]
    return {"median": middle, "low": low, "high": high}


def at_load(
    servers: dict[str, Any], case: Case, rate: float, traces: Sequence[Sequence[float]], kinds: Sequence[str] = KINDS[:3]
) -> dict[str, Any]:
    """Percentiles of latencies at that many requests per second by server, and those of the engine over the others'."""
    traces = [[moment / rate for moment in trace] for trace in traces]
    latencies: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for trace in traces:
        own: dict[str, list[float]] = {kind: [] for kind in kinds}
        turns = {kind: arrive(servers[kind], case.requests, trace, own[kind]) for kind in kinds}
        while turns:
            turns = {kind: run for kind, run in turns.items() if next(run, END) is not END}
        for kind in kinds:
            latencies[kind].append(sorted(own[kind]))
    found: dict[str, Any] = {"per_second": rate, "arrivals": len(traces[0]), "traces": len(traces)}
    shares = {f"p{share}": share / 100 for share in (50, 90, 99)}
    points = {
        kind: {name: [1e3 * (percentile(each, share) or 0.0) for each in values] for name, share in shares.items()}
        for kind, values in latencies.items()
    }
    for kind in kinds:
        found[kind] = {f"{name}_ms": statistics.median(values) for name, values in points[kind].items()}
    for kind in [kind for kind in kinds if kind in ("static", "grouped")]:
        for name in ("p50", "p99"):
            pairs = zip(points["engine"][name], points[kind][name], strict=True)
            found[f"engine_over_{kind}_{name}"] = quartiles([a / b for a, b in pairs])
    return found


def commit() -> str:
    """The last commit that changed the package, with "+" if files of it have changed since."""
    last = ["git", "log", "-1", "--format=%h", "--", "equilibria"]
    head = subprocess.run(last, capture_output=True, text=True, check=True).stdout
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "equilibria"], check=False)
    return head.strip() + ("+" if changed.returncode else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "cases", nargs="*", help="digits monotone residual tolerances difficulty spread-N reasoner; default: all"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--traces", type=int, default=5, help="of arrivals, for every load")
    parser.add_argument("--requests", type=int, default=4096, help="of the cheapest case; the others have fewer")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/serving.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = cases(options.cases, options.requests)
    gc.freeze()  # as `equilibria serve` does: collections then look at what requests leave, not at the libraries
    names = " ".join([*options.cases, ""])
    report: dict[str, Any] = {
        "command": f"python benchmarks/serving.py {names}--rounds {options.rounds} --traces {options.traces} "
        f"--requests {options.requests}",
        "commit": commit(),
        "torch": torch.__version__,
        "load_of_the_machine": os.getloadavg()[1],
        "rows": ROWS,
        "rounds": options.rounds,
        "cases": {},
    }
    for case in found:
        report["cases"][case.name] = one = measure(case, options.rounds, options.traces, case.name == "difficulty")
        at80 = one["load_of_static"]["0.8"]
        shown = {"steps": one["steps"], "throughput": one["throughput"], "p99": at80["engine_over_static_p99"]}
        print(case.name, json.dumps(shown), flush=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
