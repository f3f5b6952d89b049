"""Copy memory: its loss, its sizes, and a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning_fabric")
from equilibria.lab.experiments.definitions import SCALES
from equilibria.lab.experiments.deq_language.copy_memory import Copy, CopySettings, copying, tables
from equilibria.lab.experiments.deq_language.models import LanguageModel
from equilibria.lab.training.settings import Training
from equilibria.lab.training.trainer import Trainer

ROWS = [row.name for row in tables()[0].rows]
DELAY = 6


class Fixed(nn.Module):
    """A model that predicts the zeros with certainty and the symbols uniformly."""

    def forward(self, x: Tensor, memory: Any = None, targets: Tensor | None = None) -> tuple[Tensor, Any]:
        scores = torch.full((*x.shape, 10), -40.0)
        scores[:, :-10, 0] = 40.0
        scores[:, -10:, 1:9] = 0.0
        return scores, ()


def loaders(task: Copy) -> Any:
    return task.batches(None, Training(batch_size=8, eval_batch_size=4), 0, 1)


def test_without_memory_the_loss_is_that_of_ten_symbols_out_of_eight() -> None:
    task = Copy(CopySettings(delay=DELAY, train=16, test=8))
    batch = next(iter(loaders(task).test))
    outcome = task.evaluate(Fixed(), batch)
    assert float(outcome.loss) == pytest.approx(10 * math.log(8) / (DELAY + 20), rel=1e-5)
    assert 0 <= float(outcome.metrics["recalled"]) < 0.5


@pytest.mark.parametrize("model", [LanguageModel(size="copy", forward_steps=6), LanguageModel(kind="gru", size="5")])
def test_training_and_evaluation_agree_on_the_loss(model: LanguageModel) -> None:
    torch.manual_seed(0)
    task = Copy(CopySettings(model=model, delay=DELAY, train=16, test=8))
    net = task.model().eval()
    x, y = next(iter(loaders(task).train))
    torch.testing.assert_close(task.loss(net, (x, y), 0).loss, task.evaluate(net, (x, y)).loss, rtol=1e-5, atol=1e-5)


def test_the_models_are_of_one_size() -> None:
    counts = {name: sum(w.numel() for w in copying(name).task().model().parameters()) for name in ROWS}
    assert counts == {"deq": 13_702, "gru": 13_670}


@pytest.mark.parametrize("name", ROWS)
def test_the_experiment_has_all_scales(name: str) -> None:
    for scale in SCALES:
        e = copying(name, scale)
        assert (e.name, e.scale) == (f"copy-memory-{name}", scale)
    assert copying(name, "reduced").settings.delay >= 100


@pytest.mark.parametrize("name", ROWS)
def test_a_debug_run_reports_its_figures(name: str, tmp_path: Path) -> None:
    e = copying(name, "debug")
    split = Trainer(e.task(), e.training, tmp_path).fit().final["split"]["test"]
    assert set(split) >= {"loss", "recalled"} and math.isfinite(split["loss"])


def test_a_few_sequences_are_learnt() -> None:
    """The loss falls far below the best loss without memory."""
    torch.manual_seed(0)
    task = Copy(CopySettings(model=LanguageModel(kind="gru", size="60"), delay=1, train=8, test=4))
    net, batch = task.model(), next(iter(loaders(task).train))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-2)
    for step in range(60):
        task.loss(net, batch, step).loss.backward()
        task.improve(net, optimizer)
        optimizer.zero_grad()
    assert float(task.evaluate(net, batch).loss) < 0.5 * 10 * math.log(8) / 21


def test_only_the_equilibrium_is_pretrained() -> None:
    assert copying("deq").training.pretrain_steps and not copying("gru").training.pretrain_steps
    task = copying("deq", "debug").task()
    net: Any = task.model()
    task.pretrain(net, True)
    assert net.layer.gradient is not net.gradient
    task.pretrain(net, False)
    assert net.layer.gradient is net.gradient
