"""load: requests at a given rate against a running server."""

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
    url: Annotated[str, typer.Argument(metavar="URL", help="Of a running `equilibria serve`, as http://127.0.0.1:8000.")],
    shape: Annotated[str, typer.Option(help="Of one sample, as 1,28,28: random numbers are sent.")] = "",
    tokens: Annotated[int, typer.Option(min=0, help="Send whole numbers below this instead, as of a vocabulary.")] = 0,
    body: Annotated[Path | None, typer.Option(help="File with bodies to send in turn, a JSON object per line.")] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="Requests per second on average; arrivals are Poisson.")] = 50.0,
    count: Annotated[int, typer.Option(min=1, max=1_000_000, help="Requests at most.")] = 500,
    seconds: Annotated[float, typer.Option(min=0.1, max=86_400, help="Time at most.")] = 60.0,
    clients: Annotated[int, typer.Option(min=1, max=1024, help="Connections.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and samples.")] = 0,
    api_key: Annotated[str | None, typer.Option(envvar="EQUILIBRIA_API_KEY", help="Of the server.")] = None,
    as_json: AsJson = False,
) -> None:
    """Send requests to a server at a given rate and report latencies."""
    bodies = read_bodies(body) if body is not None else random_bodies(shape, tokens, seed)
    arrivals = poisson(rate, count, seconds, seed)
    headers = {"X-API-Key": api_key} if api_key else {}
    report = run_load(url, bodies, arrivals, clients=clients, headers=headers)
    if as_json:
        return show_json(report.summary())
    show_table(f"{url}, {rate:g} requests a second", ("measured", "value"), _rows(report))


def _rows(report: LoadReport) -> list[tuple[str, str]]:
    rows = [("requests", str(len(report.outcomes))), ("answers per second", f"{report.throughput:.1f}")]
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        latency = report.latency(share)
        rows.append((f"latency, {name}", "–" if latency is None else f"{1e3 * latency:.1f} ms"))
    return rows + [(f"code {code}" if code else "no answer", str(number)) for code, number in report.codes.items()]


def read_bodies(path: Path) -> list[bytes]:
    lines = [line.encode() for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no line with a JSON object.")
    return lines


def random_bodies(shape: str, tokens: int, seed: int, count: int = 64) -> list[bytes]:
    """Samples of that shape, some easy and some hard: sizes differ."""
    try:
        extents = [int(part) for part in shape.split(",")]
    except ValueError as error:
        raise ValueError(f"--shape must be whole numbers with commas between them, as 1,28,28; got {shape!r}.") from error
    chance = random.Random(seed)

    def sample(extents: list[int], size: float) -> list[object] | float:
        if not extents:
            return chance.randrange(tokens) if tokens else size * chance.random()
        return [sample(extents[1:], size) for _ in range(extents[0])]

    return [json.dumps({"inputs": sample(extents, chance.uniform(0.2, 2.0))}).encode() for _ in range(count)]
