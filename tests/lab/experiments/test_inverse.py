"""Deblurring: the table at debug scale, and what is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning_fabric")
pytest.importorskip("sklearn")
from equilibria.lab.experiments.inverse import table
from equilibria.lab.experiments.inverse.task import photograph_tiles
from equilibria.lab.training import Trainer
from equilibria.models import parameters
from tests.lab.training.tasks import Noted


@pytest.mark.parametrize("row", table.ROWS)
def test_every_row_trains(row: str, tmp_path: Path) -> None:
    e = table.experiment(row, "debug")
    test = Trainer(e.task(), e.training, tmp_path, accelerator="cpu", listener=Noted()).fit().final["split"]["test"]
    assert test["psnr"] == pytest.approx(-10 * torch.tensor(test["mse"]).log10().item()) and test["psnr_100"] > 5
    grown = test["bytes_40"] / test["bytes_10"]
    if row.startswith("unrolled"):
        assert grown > 2
    elif row != "ista":  # its adjoint's basis ends early where thresholds leave few coefficients, not always as many
        assert grown < 1.3
    assert ("nfe" in test) == (not row.startswith("unrolled"))


def test_twins_have_equal_parameters() -> None:
    counts = {
        parameters(table.experiment(row).task().model())
        for row in ("proximal", "unrolled-5", "unrolled-10", "plug-and-play")
    }
    assert len(counts) == 1


def test_tiles_are_grey_and_come_in_one_order() -> None:
    tiles = photograph_tiles(24)
    assert tiles.shape[1:] == (1, 24, 24) and len(tiles) > 800
    assert 0 <= float(tiles.min()) < float(tiles.max()) <= 1
    torch.testing.assert_close(photograph_tiles.__wrapped__(24)[:5], tiles[:5])
