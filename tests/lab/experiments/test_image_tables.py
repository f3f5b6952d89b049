"""The vision experiments: every row at debug scale; images, contraction, penalties and measurements."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning_fabric")
import equilibria as eq
from equilibria.analysis.memory import peak_memory
from equilibria.lab.experiments.catalogue import experiment, table
from equilibria.lab.experiments.image_task import ImageData, inside, judged
from equilibria.lab.experiments.jfb.task import ImplicitResNetSettings, ImplicitResNetTask
from equilibria.lab.experiments.mdeq.task import MDEQOptions, MDEQSettings, Multiscale
from equilibria.lab.experiments.monotone.task import Monotone, MonotoneSettings
from equilibria.lab.training.listeners import Silent
from equilibria.lab.training.settings import Training
from equilibria.lab.training.trainer import Trainer
from equilibria.models import MDEQ, ImplicitResNet, MonotoneNet

VISION = (
    "jfb-mnist",
    "jfb-svhn",
    "jfb-cifar10",
    "mon",
    "jr-cifar10",
    "phantom-cifar10",
    "skipdeq-mnist-mdeq",
    "mdeq-memory",
)
DIGITS = ImageData(name="digits", train=32, test=32)


@pytest.mark.parametrize("name", [f"{name}-{row.name}" for name in VISION for row in table(name).rows])
def test_every_row_trains(name: str, tmp_path: Path) -> None:
    e = experiment(name, "debug")
    summary = Trainer(e.task(), e.training, tmp_path, config=e.config(), listener=Silent()).fit()
    assert summary.epochs == 1 and summary.parameters > 0


def test_images_are_drawn_and_scaled_the_same_way_every_time() -> None:
    half, again = (ImageData(name="digits", train=10, size=4).load(None) for _ in range(2))
    assert torch.equal(half.train.x, again.train.x) and half.train.x.shape == (10, 1, 4, 4)
    whole = ImageData(name="digits").load(None)
    picked = ImageData(name="digits", train=10).load(None).train.x.flatten(1)
    rows = [int((whole.train.x.flatten(1) == x).all(1).nonzero()[0]) for x in picked]
    by_hand = whole.train.x[rows].unfold(2, 2, 2).unfold(3, 2, 2).mean(dim=(4, 5))
    torch.testing.assert_close(half.train.x, by_hand)
    assert ImageData(name="digits", size=12).load(None).test.x.shape[1:] == (1, 12, 12)
    with pytest.raises(ValueError, match="between 1 and the 360 images"):
        ImageData(name="digits", test=361).load(None)


def batch(task: Any) -> tuple[torch.Tensor, torch.Tensor]:
    loaders = task.batches(None, Training(batch_size=32, eval_batch_size=32), 0, 1)
    x, y = next(iter(loaders.train))
    return x, y


def test_a_residual_step_keeps_the_cell_contracting() -> None:
    torch.manual_seed(0)
    task = ImplicitResNetTask(ImplicitResNetSettings(data=dataclasses.replace(DIGITS, size=12)))
    model = task.model()
    cell: Any = inside(model, ImplicitResNet).layer.cell
    with torch.no_grad():
        for module in cell.convolutions():
            module.weight *= 20
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = [module.weight.norm() for module in cell.convolutions()]
    for step in range(3):
        task.loss(model, batch(task), step).loss.backward()
        task.improve(model, optimizer)
    assert all(module.weight.norm() < norm for module, norm in zip(cell.convolutions(), before, strict=True))


@pytest.mark.parametrize("method", ["peaceman-rachford", "forward-backward"])
def test_the_alpha_of_a_splitting_survives_a_checkpoint(method: Any) -> None:
    torch.manual_seed(0)
    settings = MonotoneSettings(data=DIGITS, channels=(8,), method=method)
    task, model = Monotone(settings), Monotone(settings).model()
    task.loss(model, batch(task), 0)
    chosen = inside(model, MonotoneNet).splitting.alpha
    other = Monotone(settings)
    other.resume(task.state())
    inside(model, MonotoneNet).splitting.alpha = 3.0
    other.loss(model, batch(task), 1)
    assert inside(model, MonotoneNet).splitting.alpha == chosen


def mdeq(**changes: Any) -> tuple[Multiscale, nn.Module]:
    torch.manual_seed(0)
    task = Multiscale(MDEQSettings(data=DIGITS, model=MDEQOptions(solver="anderson"), **changes))
    return task, task.model().train()


def test_penalties_enter_the_loss_with_their_weights() -> None:
    torch.manual_seed(0)
    settings = MDEQSettings(data=DIGITS, model=MDEQOptions(variant="v2"), skip_weight=3.0, jacobian_weight=2.0)
    task = Multiscale(settings)
    model, given = task.model(), batch(task)
    torch.manual_seed(1)
    outcome = task.loss(model, given, 0)
    torch.manual_seed(1)
    bare = judged(task.run(model, given[0])[0], given[1])[0]
    expected = bare + 3 * outcome.metrics["skip"] + 2 * outcome.metrics["jacobian"]
    torch.testing.assert_close(outcome.loss, expected)
    task.pretrain(model, on=True)
    assert set(task.loss(model, given, 0).metrics) == {"accuracy", "error"}


def test_regularized_steps_vary_in_length_and_the_others_do_not() -> None:
    task, model = mdeq(jacobian_weight=1.0, jacobian_frequency=0.5, jitter=2)
    layer, lengths = inside(model, MDEQ).layer, set()
    assert isinstance(layer, eq.DEQ)
    for step in range(40):
        task._vary_steps(model, step)
        lengths.add(layer.stop.max_steps)
        assert task.jacobian(step) or layer.stop.max_steps == 18
        assert layer.eval_stop is not None and layer.eval_stop.max_steps == 18
    assert lengths == {16, 17, 18, 19}


def test_accuracy_of_a_stopped_solver_is_not_recorded_as_a_solve() -> None:
    task, model = mdeq(at=(1, 18))
    given = batch(task)
    model.eval()
    with eq.record(model) as solutions:
        outcome = task.evaluate(model, given)
    assert len(solutions) == 1
    assert outcome.metrics["accuracy_at_18"] == outcome.metrics["accuracy"]
    assert "accuracy_at_1" in outcome.metrics


def test_the_memory_of_a_prediction_by_broydens_method_grows_with_the_steps_it_takes() -> None:
    peaks = []
    for steps in (4, 16):
        task = Multiscale(MDEQSettings(data=DIGITS, model=MDEQOptions(forward_steps=steps, tolerance=1e-12), at=(1,)))
        outcome = task.evaluate(task.model().eval(), batch(task))
        peaks.append(float(outcome.metrics["broyden_bytes"]))
    assert 1.5 * peaks[0] < peaks[1]


def test_comparing_gradients_leaves_training_as_it_was() -> None:
    results = []
    for cosines in ((), (1, 9)):
        task, model = mdeq(cosines=cosines, cosines_every=1)
        outcome = task.loss(model, batch(task), 0)
        outcome.loss.backward()
        results.append((outcome, [p.grad for p in model.parameters()], dict(model.named_buffers()), torch.rand(1)))
    (plain, grads, buffers, draw), (compared, same, others, later) = results
    assert torch.equal(plain.loss, compared.loss) and torch.equal(draw, later)
    assert all(a is None or torch.equal(a, b) for a, b in zip(grads, same, strict=True) if b is not None)
    assert all(torch.equal(buffers[name], others[name]) for name in buffers)
    assert compared.metrics["cosines_known"] in (0.0, 1.0)


def test_peak_memory_counts_what_is_held_at_once() -> None:
    def work() -> None:
        first = torch.zeros(1000, dtype=torch.float64)
        del first
        second, third = torch.zeros(500, dtype=torch.float64), torch.zeros(700, dtype=torch.float64)
        del second, third

    work()
    assert peak_memory(work) == 1200 * 8
