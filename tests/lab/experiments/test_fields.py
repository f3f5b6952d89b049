"""Fitting fields to signals: the signals, the table at debug scale, resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning_fabric")
pytest.importorskip("sklearn")
from equilibria.lab.experiments.fields import table
from equilibria.lab.experiments.fields.signals import SIGNALS, signal, signed_distance
from equilibria.lab.experiments.fields.task import Fitting, decibels
from equilibria.lab.training import Trainer
from equilibria.models import coordinate_grid, parameters
from tests.lab.training.tasks import Noted

ROWS = [f"{kind}-{network}" for kind in table.KINDS for network in table.NETWORKS]


@pytest.mark.parametrize("row", ROWS)
def test_every_row_trains(row: str, tmp_path: Path) -> None:
    e = table.experiment(row, "debug")
    test = Trainer(e.task(), e.training, tmp_path, accelerator="cpu", listener=Noted()).fit().final["split"]["test"]
    assert all(0 < test[f"psnr_{name}"] < 60 for name in SIGNALS) and test["bytes"] > 0
    assert ("nfe" in test) == row.endswith(("implicit", "jfb"))


@pytest.mark.parametrize("name", SIGNALS)
def test_signals_lie_within_their_peak(name: str) -> None:
    x, y = signal(name, 16)
    assert len(x) == len(y) and y.shape[1] == 1
    assert float(x.abs().max()) < 1 and float(y.abs().max()) <= 1.1 and float(y.std()) > 0.1


def test_distances_grow_by_one_per_unit() -> None:
    """The gradient of a signed distance has norm 1 wherever it exists."""
    x = coordinate_grid(9, 9).double().requires_grad_()
    (slope,) = torch.autograd.grad(signed_distance(x).sum(), x)
    torch.testing.assert_close(slope.norm(dim=1), torch.ones(81, dtype=torch.float64))


def test_decibels_of_a_known_error() -> None:
    assert float(decibels(torch.tensor(0.04))) == pytest.approx(20.0)


def test_networks_of_a_kind_have_about_as_many_weights() -> None:
    for kind in table.KINDS:
        networks = [network for network in table.NETWORKS if network != "wide"]  # which has equal memory instead
        counts = [parameters(table.experiment(f"{kind}-{network}").task().model()) for network in networks]
        assert max(counts) < 1.1 * min(counts)


def test_the_equilibria_of_the_last_step_are_kept_in_checkpoints() -> None:
    task = table.experiment("siren-jfb", "debug").task()
    assert isinstance(task, Fitting)
    torch.manual_seed(0)
    model = task.model()
    task.loss(model, (torch.zeros(1, 1), torch.zeros(1)), 0)
    kept = task.state()
    other = Fitting(task.settings)
    other.resume(kept)
    again, there = (t.loss(model, (torch.zeros(1, 1), torch.zeros(1)), 1).loss.item() for t in (task, other))
    assert set(kept) == set(SIGNALS) and again == pytest.approx(there)
