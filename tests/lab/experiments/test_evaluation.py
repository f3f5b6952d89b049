"""`evaluate` on the weights of a run gives the metrics that the run reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from equilibria.lab.experiments.catalogue import experiment
from equilibria.lab.experiments.evaluation import evaluate
from equilibria.lab.training import Run, Silent, Trainer

TIMES = {"predict_seconds", "spectral_radius"}  # the radius is measured on the first split alone


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("digits-deq", ["training.epochs=1"]),
        ("digits-deq", ["training.epochs=3"]),
        ("digits-deq", ["training.epochs=3", "training.ema=0.5", "training.eval_batch_size=100"]),
        ("digits-deq", ["training.epochs=2", "training.precision=64-true"]),
        ("digits-deq", ["training.epochs=2", "training.precision=bf16-mixed"]),
        ("digits-v2", ["training.epochs=2"]),
    ],
)
def test_evaluate_reports_the_counts_and_metrics_of_the_run(name: str, changes: list[str], tmp_path: Path) -> None:
    e = experiment(name, "debug").changed(["width=8", "training.batch_size=480", "solver.together=false", *changes])
    Trainer(e.task(), e.training, tmp_path, config=e.config(), accelerator="cpu", listener=Silent()).fit()
    run = Run.open(tmp_path)
    reported = run.metrics[-1]["split"]["test"]
    found = evaluate(run)
    assert found["evaluations"] == reported["evaluations"]
    assert {key: found[key] for key in found.keys() - TIMES} == {key: reported[key] for key in reported.keys() - TIMES}
