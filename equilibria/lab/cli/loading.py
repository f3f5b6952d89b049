"""load: send requests to a running server at a given rate and report latencies."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated

import typer

from equilibria.lab.cli.console import explained, show_json, show_table
from equilibria.lab.cli.options import AsJson
from equilibria.serving.load import LoadReport, poisson, run_load


@explained()
def load(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of `equilibria serve`, as http://127.0.0.1:8000.")],
    shape: Annotated[str, typer.Option(help="Shape of one sample, as 1,28,28; random numbers are sent.")] = "",
    tokens: Annotated[int, typer.Option(min=0, help="Send random integers below this instead, as tokens.")] = 0,
    body: Annotated[Path | None, typer.Option(help="File with request bodies to send in turn, one JSON per line.")] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="Requests per second on average; arrivals are Poisson.")] = 50.0,
    count: Annotated[int, typer.Option(min=1, max=1_000_000, help="Largest number of requests.")] = 500,
    seconds: Annotated[float, typer.Option(min=0.1, max=86_400, help="Longest time to send requests.")] = 60.0,
    clients: Annotated[int, typer.Option(min=1, max=1024, help="Number of connections.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals and samples.")] = 0,
    api_key: Annotated[str | None, typer.Option(envvar="EQUILIBRIA_API_KEY", help="API key of the server.")] = None,
    as_json: AsJson = False,
) -> None:
    """Send requests to a server at a given rate and report latencies."""
    bodies = read_bodies(body) if body is not None else random_bodies(shape, tokens, seed)
    arrivals = poisson(rate, count, seconds, seed)
    headers = {"X-API-Key": api_key} if api_key else {}
    report = run_load(url, bodies, arrivals, clients=clients, headers=headers)
    if as_json:
        return show_json(report.summary())
    show_table(f"{url}, {rate:g} requests per second", ("measured", "value"), _rows(report))


def _rows(report: LoadReport) -> list[tuple[str, str]]:
    """Return the rows of the table: throughput, latencies and counts of status codes."""
    rows = [("requests", str(len(report.outcomes))), ("answers per second", f"{report.throughput:.1f}")]
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        latency = report.latency(share)
        rows.append((f"latency, {name}", "–" if latency is None else f"{1e3 * latency:.1f} ms"))
    return rows + [(f"code {code}" if code else "no answer", str(number)) for code, number in report.codes.items()]


def read_bodies(path: Path) -> list[bytes]:
    """Return the request bodies in a file, one per line that is not empty."""
    lines = [line.encode() for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty; expected one JSON object per line.")
    return lines


def random_bodies(shape: str, tokens: int, seed: int, count: int = 64) -> list[bytes]:
    """Return `count` request bodies with random samples of a shape; magnitudes differ, so that some are hard to solve."""
    try:
        extents = [int(part) for part in shape.split(",")]
    except ValueError as error:
        raise ValueError(f"--shape must be integers separated by commas, as 1,28,28; got {shape!r}.") from error
    chance = random.Random(seed)

    def sample(extents: list[int], size: float) -> list[object] | float:
        if not extents:
            return chance.randrange(tokens) if tokens else size * chance.random()
        return [sample(extents[1:], size) for _ in range(extents[0])]

    return [json.dumps({"inputs": sample(extents, chance.uniform(0.2, 2.0))}).encode() for _ in range(count)]
