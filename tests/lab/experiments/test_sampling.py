"""Sampling from a diffusion model: tables at debug scale, what is measured, and gradients of inversion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning_fabric")
pytest.importorskip("sklearn")
from equilibria.lab.experiments.sampling import inversion_table, table
from equilibria.lab.experiments.sampling.inversion_task import Inversion, InversionSettings
from equilibria.lab.experiments.sampling.task import relative_error
from equilibria.lab.training import Trainer
from equilibria.models import Denoiser
from tests.lab.training.tasks import Noted


@pytest.mark.parametrize("row", table.ROWS)
def test_samples_of_every_row_match_the_sequential_chain(row: str, tmp_path: Path) -> None:
    e = table.experiment(row, "debug")
    test = Trainer(e.task(), e.training, tmp_path, accelerator="cpu", listener=Noted()).fit().final["split"]["test"]
    assert test["steps"] == 8 and test["rounds_2"] >= 2
    assert test["error_4"] < 0.01 and test["failed_4"] == 0


@pytest.mark.parametrize("row", inversion_table.ROWS)
def test_every_row_inverts_images(row: str, tmp_path: Path) -> None:
    e = inversion_table.experiment(row, "debug")
    test = Trainer(e.task(), e.training, tmp_path, accelerator="cpu", listener=Noted()).fit().final["split"]["test"]
    assert test["mse"] < test["mse_first"] and test["bytes"] > 0
    if row == "sequential":
        assert test["rounds"] == test["adjoint"] == 6


def test_the_error_is_relative_and_per_sample() -> None:
    truth = torch.ones(2, 1, 2, 2)
    found = truth * torch.tensor([1.0, 1.5]).view(2, 1, 1, 1)
    assert relative_error(found, truth).tolist() == pytest.approx([0.0, 0.5])


def test_the_gradient_of_the_parallel_chain_is_that_of_the_sequential_one() -> None:
    torch.manual_seed(0)
    net = Denoiser(table.SMALL).double()
    with torch.no_grad():
        net.output.weight.normal_(std=0.3)
    noise, images = torch.randn(3, 1, 8, 8, dtype=torch.float64).requires_grad_(), torch.zeros(3, 1, 8, 8).double()
    gradients = {}
    for way in ("sequential", "implicit", "jfb"):
        task = Inversion(InversionSettings(way=way, steps=10, rtol=1e-10))
        task._step(task._sampler(net), noise, images, None)
        assert noise.grad is not None
        gradients[way] = noise.grad.clone()
    torch.testing.assert_close(gradients["implicit"], gradients["sequential"], rtol=1e-6, atol=1e-9)
    assert not torch.allclose(gradients["jfb"], gradients["sequential"], rtol=0.01)
