"""Optical flow: end-point errors, evaluation along videos, tables at debug scale."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning_fabric")
import equilibria as eq
from equilibria.lab.experiments import experiment
from equilibria.lab.experiments.flow import memory_table, table
from equilibria.lab.experiments.flow.task import FlowSettings, OpticalFlow, SceneData, end_point_error
from equilibria.lab.experiments.image_task import inside
from equilibria.lab.training import Trainer
from equilibria.models.flow.deq_flow import DEQFlow
from tests.lab.training.tasks import Noted

SMALL = FlowSettings(data=SceneData(height=16, width=24, train=8, test=2, frames=4, motion=2.0), rtol=0.05, eval_steps=60)


def test_the_end_point_error_is_the_mean_distance() -> None:
    truth = torch.zeros(2, 3, 2, 4, 5)
    flow = truth.clone()
    flow[0, :, 0], flow[0, :, 1] = 3.0, 4.0
    assert float(end_point_error(flow, truth)) == pytest.approx(2.5)


@pytest.mark.parametrize("row", table.TITLES)
def test_every_row_trains(row: str, tmp_path: Path) -> None:
    e = table.experiment(row, "debug")
    test = Trainer(e.task(), e.training, tmp_path, accelerator="cpu", listener=Noted()).fit().final["split"]["test"]
    assert 0 < test["epe"] < 100 and 0 < test["epe_zero"] < 2
    assert ("nfe_warm" in test) == (row not in ("unrolled", "raft")) and ("epe_48" in test) == (row in ("unrolled", "raft"))


def test_evaluation_is_along_videos() -> None:
    torch.manual_seed(0)
    task = OpticalFlow(SMALL)
    model, loaders = task.model().eval(), task.batches(None, table.experiment("deq", "debug").training, 0, 1)
    assert loaders.test is not None
    frames, y = next(iter(loaders.test))
    found = task.evaluate(model, (frames, y)).metrics
    with torch.no_grad(), eq.record(model) as solutions:
        flows = [model(frames[:, i : i + 2]) for i in range(3)]
    assert float(found["epe"]) == pytest.approx(float(end_point_error(torch.stack(flows, dim=1), y[:, :, :2])))
    assert found["nfe_cold_2"] == solutions[1].stats.sample_evaluations / 2
    assert found["nfe_cold"] == pytest.approx((float(found["nfe_cold_2"]) + float(found["nfe_cold_3"])) / 2)
    zeros = y[:, :, :2].norm(dim=2).mean()
    assert float(found["epe_zero"]) == pytest.approx(float(zeros))
    assert found["nfe_warm_1"] == found["nfe_cold_1"]


def test_corrections_have_phantom_gradients_of_their_steps() -> None:
    """Each correction is the cell applied that many times to an iterate, with a graph; the equilibrium is last."""
    torch.manual_seed(0)
    task = OpticalFlow(
        dataclasses.replace(SMALL, kind="upg", phantom_steps=2, corrections=1, correction_steps=3, keep_every=2)
    )
    net = inside(task.model(), DEQFlow)
    frames = torch.randn(2, 2, 3, 16, 24)
    with eq.record(net) as solutions:
        flows = net(frames, on_the_way=True)
    s = solutions[0]
    kept = s.stats.iterates
    z = s.layout.unpack(kept[len(kept) // 2])
    cell: Any = net.layer.cell
    inputs = cell.prepare(*net.inputs(frames))
    for _ in range(3):
        z = cell(z, *inputs)
    assert len(flows) == 2
    torch.testing.assert_close(flows[0], net.upsample(z), rtol=1e-4, atol=1e-4)
    weight = cell.head[-1].weight
    one, other = (
        torch.autograd.grad(flow.square().sum(), weight, retain_graph=True)[0] for flow in (flows[0], net.upsample(z))
    )
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def test_an_unrolled_network_is_evaluated_at_other_depths() -> None:
    torch.manual_seed(0)
    task = OpticalFlow(dataclasses.replace(SMALL, kind="unrolled", depth=2, depths=(1, 2)))
    model, loaders = task.model().eval(), task.batches(None, table.experiment("deq", "debug").training, 0, 1)
    assert loaders.test is not None
    frames, y = next(iter(loaders.test))
    found = task.evaluate(model, (frames, y)).metrics
    with torch.no_grad():
        assert float(found["epe_2"]) == pytest.approx(float(end_point_error(model(frames[:, :2]), y[:, 0, :2])))


@pytest.mark.parametrize("row", memory_table.ROWS)
def test_memory_is_constant_for_equilibria_and_grows_with_unrolled_steps(row: str, tmp_path: Path) -> None:
    """Every step of an unrolled network adds the memory of its activations."""
    e = memory_table.experiment(row, "debug")
    train = Trainer(e.task(), e.training, tmp_path, accelerator="cpu", listener=Noted()).fit().final["split"]["train"]
    ratio = train["bytes_12"] / train["bytes_6"]
    assert ratio < 1.1 if row in memory_table.EQUILIBRIA else ratio > 1.5


def test_all_rows_have_equal_parameters() -> None:
    counts = {sum(w.numel() for w in table.experiment(row).task().model().parameters()) for row in table.TITLES}
    assert len(counts) == 1 and experiment("flow-scenes-deq", "debug").scale == "debug"
