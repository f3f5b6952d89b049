"""Load a server for a while with faults among the requests: `python benchmarks/serving_soak.py --minutes 30`.

A model is served in a process of its own. Saturation is measured first, then requests come at 80 % of it, a tenth of them
bad: nan, huge numbers, wrong shapes, malformed bodies, clients that go away and clients that do not finish their body. Every
answer is compared with the model's own, and the memory of the server is read every few seconds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import equilibria as eq
from equilibria.serving.load import Reply, poisson, run_load

WIDTH, INPUTS, SAMPLES = 64, 64, 48
TOLERANCE = 1e-3  # of outputs of about 1: answers are solved to 5e-3 relative, and batches round differently
EXPECTED = {"nan": (200,), "huge": (200,), "shape": (422,), "malformed": (400,)}
FAULTS = [*EXPECTED, "gone", "slow"]
SENDERS = 4  # threads that send faults


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--load", type=float, default=0.8, help="share of the measured saturation")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/serving_soak.json"))
    options = parser.parse_args()
    torch.manual_seed(0)
    model = eq.models.create("skip-mlp-v2", inputs=INPUTS, width=WIDTH).eval()
    samples = [0.2 + 2 * i / SAMPLES * torch.rand(INPUTS) for i in range(SAMPLES)]
    with torch.no_grad():
        expected = [model(x.unsqueeze(0))[0].tolist() for x in samples]
    with tempfile.TemporaryDirectory() as folder:
        path = eq.models.save(model, Path(folder) / "model.safetensors")
        command = [sys.executable, "-m", "equilibria", "serve", str(path), "--port", "0", "--rows", "32"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                found = re.search(r"http://\S+", process.stdout.readline())
                assert found is not None
                report = soak(process.pid, found.group(), samples, expected, options.minutes, options.load)
                report["exit_code_before_the_end"] = process.poll()
            finally:
                process.terminate()
        report["exit_code"] = process.returncode
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def soak(pid: int, url: str, samples: list[Any], expected: list[Any], minutes: float, share: float) -> dict[str, Any]:
    origin = commit()  # files may change while this runs
    bodies = [json.dumps({"inputs": x.tolist()}).encode() for x in samples]
    run_load(url, bodies, [0.0] * 200, clients=32)  # warm up
    burst = run_load(url, bodies, [0.0] * 2000, clients=32)
    rate, seconds = share * burst.throughput, 60 * minutes
    found = Tally(samples, expected)
    memory: list[tuple[float, float]] = []
    done = threading.Event()
    watcher = threading.Thread(target=watch, args=(pid, memory, done))
    loads: list[float] = []
    faults = [threading.Thread(target=send_faults, args=(url, found, 0.1 * rate / SENDERS, done, i)) for i in range(SENDERS)]
    for thread in (watcher, *faults):
        thread.start()
    begin = time.monotonic()
    latencies: list[float] = []
    while time.monotonic() - begin < seconds:  # in pieces: outcomes are checked and dropped as they come
        piece = min(20.0, seconds - (time.monotonic() - begin))
        loads.append(os.getloadavg()[0])
        arrivals = poisson(rate, 10**6, max(piece, 0.1), seed=int(time.monotonic() - begin))
        report = run_load(url, bodies, arrivals, clients=32, on_outcome=found.check)
        latencies += [outcome.seconds for outcome in report.outcomes if outcome.code == 200][:500]
    done.set()
    for thread in (watcher, *faults):
        thread.join()
    third = max(len(memory) // 3, 1)
    first, last = (
        statistics.median(mb for _, mb in part) for part in (memory[third : 2 * third] or memory, memory[-third:])
    )
    latencies.sort()
    return {
        "command": f"python benchmarks/serving_soak.py --minutes {minutes:g}",
        "commit": origin,
        "machine_load": {"least": min(loads), "median": statistics.median(loads), "most": max(loads)},
        "minutes": (time.monotonic() - begin) / 60,
        "saturation_per_second": burst.throughput,
        "rate_per_second": rate,
        "good_requests": found.good,
        "wrong_answers": found.wrong,
        "codes_of_good_requests": {str(code): n for code, n in sorted(found.codes.items())},
        "faults": {kind: {str(code): n for code, n in sorted(found.faults[kind].items())} for kind in FAULTS},
        "unexpected_responses_to_faults": found.unexpected,
        "errors_without_a_message": found.unexplained,
        "p50_ms": 1e3 * latencies[len(latencies) // 2],
        "p99_ms": 1e3 * latencies[int(0.99 * len(latencies))],
        "memory_mb_second_third": first,
        "memory_mb_last_third": last,
        "memory_mb": [round(mb, 1) for _, mb in memory[:: max(len(memory) // 60, 1)]],
    }


class Tally:
    """Counts and comparisons; called by several threads."""

    def __init__(self, samples: list[Any], expected: list[Any]) -> None:
        self.samples, self.expected = samples, expected
        self.good = self.wrong = self.unexpected = self.unexplained = 0
        self.codes: Counter[int] = Counter()
        self.faults: dict[str, Counter[int]] = {kind: Counter() for kind in FAULTS}
        self._lock = threading.Lock()

    def check(self, i: int, outcome: Reply) -> None:
        right = True
        if outcome.code == 200:
            found = json.loads(outcome.body)
            pairs = zip(found["output"], self.expected[i % len(self.samples)], strict=True)
            right = all(a is not None and abs(a - b) <= TOLERANCE for a, b in pairs)
        with self._lock:
            self.good += 1
            self.codes[outcome.code] += 1
            self.wrong += not right

    def fault(self, kind: str, code: int, explained: bool) -> None:
        with self._lock:
            self.faults[kind][code] += 1
            self.unexplained += 400 <= code < 500 and not explained
            self.unexpected += kind in EXPECTED and code not in (*EXPECTED[kind], 429, 503)


def commit() -> str:
    """The commit of the code, with "+" if files of the package have changed since."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "equilibria"], check=False)
    return head.strip() + ("+" if changed.returncode else "")


def send_faults(url: str, found: Tally, rate: float, done: threading.Event, seed: int) -> None:
    chance = random.Random(seed)
    while not done.wait(chance.expovariate(rate)):
        kind = chance.choice(FAULTS)
        found.fault(kind, *send_fault(url, kind, chance))


def send_fault(url: str, kind: str, chance: random.Random) -> tuple[int, bool]:
    """Return the code of the response, 0 if none is awaited, -1 if there was none; and whether it names an error."""
    bodies = {
        "nan": '{"inputs": [' + ", ".join(["NaN"] * INPUTS) + "]}",
        "huge": json.dumps({"inputs": [chance.choice((1e30, -1e30, 3e38)) for _ in range(INPUTS)]}),
        "shape": json.dumps({"inputs": [[1.0] * chance.randrange(1, 9)] * 2}),
        "malformed": chance.choice(("{", '{"inputs": ', "[1, 2", '{"inputs": "x"}', '{"input": [1]}', "\x00\x01")),
    }
    body = bodies.get(kind, json.dumps({"inputs": [0.5] * INPUTS})).encode()
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        with socket.create_connection((host, int(port)), timeout=30) as client:
            if kind == "slow":  # half of the body, and then nothing for a while
                client.sendall(head.encode() + body[: len(body) // 2])
                time.sleep(0.2)
                return 0, True
            client.sendall(head.encode() + body)
            if kind == "gone":
                return 0, True
            answer = http.client.HTTPResponse(client)
            answer.begin()
            return answer.status, b'"error":' in answer.read()
    except (OSError, http.client.HTTPException):
        return -1, False


def watch(pid: int, memory: list[tuple[float, float]], done: threading.Event) -> None:
    """The resident memory of a process, in MB."""
    begin = time.monotonic()
    while not done.wait(5.0):
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        kilobytes = int(re.search(r"VmRSS:\s+(\d+)", text).group(1))  # type: ignore[union-attr]
        memory.append((time.monotonic() - begin, kilobytes / 1024))


if __name__ == "__main__":
    main()
