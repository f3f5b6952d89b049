"""Run folders with given numbers, written without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from equilibria._core.plain import to_plain
from equilibria.lab.experiments.definitions import Scale, Table, run_folder


def write_run(
    base: Path, table: Table, row: str, seed: int, test: dict[str, float], scale: Scale = "full", **more: Any
) -> Path:
    """Write a finished run of two epochs whose last one has these test metrics; `more` is added to every record."""
    e = table.row(row).experiment(scale).seeded(seed)
    folder = run_folder(base, row, seed)
    folder.mkdir(parents=True)
    config = {**e.config(), "training": to_plain(e.training), "versions": {"torch": "2.0", "python": "3.12"}}
    (folder / "config.json").write_text(json.dumps(config))
    record = {"seconds_train": 2.0, "seconds_step": 0.01, "peak_bytes": 1e8, **more}
    lines = [
        {"epoch": epoch, "step": 10 * epoch, "split": {"train": {"loss": 1.0 / epoch}, "test": test}, **record}
        for epoch in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "machine.json").write_text(json.dumps({"processor": "abacus", "cores": "2 cores"}))
    summary = {
        "finished": True,
        "epochs": 2,
        "final": lines[-1],
        "best": lines[-1],
        "seconds_train": 60.0,
        "parameters": 134_538,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder
