"""Segmentation: mean IoU over a whole split, the rows of its table, and its pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("lightning_fabric")
from equilibria.lab.data.sets import IGNORE
from equilibria.lab.experiments.definitions import SCALES
from equilibria.lab.experiments.mdeq.label_pictures import PALETTE, bars, coloured
from equilibria.lab.experiments.mdeq.segmentation_table import experiment, tables
from equilibria.lab.experiments.mdeq.segmentation_task import (
    Segmentation,
    SegmentSettings,
    class_weights,
    counts,
    cross_entropy,
    overlaps,
    ratios,
    scores_of,
)
from equilibria.lab.experiments.mdeq.task import MDEQOptions
from equilibria.lab.training.statistics import Meter, observe
from equilibria.lab.training.task import Outcome
from equilibria.lab.training.trainer import Trainer

ROWS = [row.name for row in tables()[0].rows]
SIGNATURE = b"\x89PNG\r\n"


def settings(**changes: object) -> SegmentSettings:
    return dataclasses.replace(experiment("mdeq", "debug").settings, **changes)  # type: ignore[arg-type]


def labelled(images: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return scores and labels, a fifth of them without a class."""
    draws = torch.Generator().manual_seed(0)
    y = torch.randint(classes, (images, 6, 7), generator=draws)
    return torch.randn(images, classes, 6, 7, generator=draws), y.masked_fill(
        torch.rand(y.shape, generator=draws) < 0.2, IGNORE
    )


def by_hand(predicted: Tensor, y: Tensor, classes: int) -> tuple[float, float]:
    """Return accuracy and mean IoU, counted pixel by pixel."""
    table = [[0] * classes for _ in range(classes)]
    for label, guess in zip(y.flatten().tolist(), predicted.flatten().tolist(), strict=True):
        if label != IGNORE:
            table[label][guess] += 1
    ious = []
    for c in range(classes):
        union = sum(table[c]) + sum(row[c] for row in table) - table[c][c]
        if union:
            ious.append(table[c][c] / union)
    return sum(table[c][c] for c in range(classes)) / sum(map(sum, table)), sum(ious) / len(ious)


def test_mean_iou_over_batches_is_that_of_the_whole_split() -> None:
    scores, y = labelled(7, 5)
    y[y == 4], scores[:, 4] = 3, -9.0  # a class that is nowhere does not count
    meter = Meter()
    for part in (slice(0, 3), slice(3, 6), slice(6, 7)):  # batches of unlike size
        loss = cross_entropy(scores[part], y[part])
        meter.add_batch(observe(Outcome(loss, counts(scores[part], y[part]), len(y[part])), []))
    found = ratios(meter.means(), 5)
    assert set(found) == {"loss", "accuracy", "mean_iou"}
    accuracy, iou = by_hand(scores.argmax(dim=1), y, 5)
    assert found["accuracy"] == pytest.approx(accuracy, abs=1e-12)
    assert found["mean_iou"] == pytest.approx(iou, abs=1e-12)


def test_iou_of_every_class_matches_the_definition() -> None:
    y = torch.tensor([[[0, 0, 1, IGNORE]]])
    predicted = torch.tensor([[[0, 1, 1, 2]]])
    found = overlaps(predicted, y, 3)
    assert found[:2] == [0.5, 0.5] and found[2] != found[2]  # class 2 is only where there is no label


def test_an_epoch_without_a_label_has_no_ratios() -> None:
    scores, y = torch.zeros(2, 3, 4, 4, requires_grad=True), torch.full((2, 4, 4), IGNORE)
    loss = cross_entropy(scores, y)
    loss.backward()
    assert loss == 0 and scores.grad is not None and not scores.grad.any()
    means = {name: float(value) for name, value in counts(scores.detach(), y).items()}
    assert ratios(means | {"loss": 0.0}, 3) == {"loss": 0.0}
    assert ratios({}, 3) == {}


def test_rare_classes_have_larger_weights() -> None:
    y = torch.tensor([[0, 0, 0, 1, IGNORE, IGNORE]])
    expected = 1 / torch.log(torch.tensor([1.1 + 0.75, 1.1 + 0.25, 1.1]))
    torch.testing.assert_close(class_weights(y, 3, 1.1), expected)


def test_scores_have_the_size_of_the_image() -> None:
    net = MDEQOptions(size="nano-segmentation", depth=1).model(3, 11)
    assert scores_of(net, torch.randn(1, 3, 18, 24)).shape == (1, 11, 18, 24)
    assert sum(p.numel() for p in net.parameters()) == 31_007


def test_classes_are_weighted_only_in_training() -> None:
    task = Segmentation(settings(balance=1.02))
    loaders = task.batches(None, experiment("mdeq", "debug").training, 0, 1)
    torch.manual_seed(0)
    model, batch = task.model().eval(), next(iter(loaders.train))
    scores = scores_of(model, batch[0])
    weights = class_weights(task.settings.load(None).train.y, 4, 1.02)
    torch.testing.assert_close(task.loss(model, batch, 0).loss, cross_entropy(scores, batch[1], weights))
    torch.testing.assert_close(task.evaluate(model, batch).loss, cross_entropy(scores, batch[1]))


@pytest.mark.parametrize("row", ROWS)
def test_every_row_runs(row: str, tmp_path: Path) -> None:
    e = experiment(row, "debug")
    summary = Trainer(e.task(), e.training, tmp_path, config=e.config()).fit()
    assert summary.final["split"].keys() == {"train", "valid", "test"}
    for split in summary.final["split"].values():
        assert 0 < split["mean_iou"] < split["accuracy"] < 1
        assert not any(name.startswith(("both_", "either_")) for name in split)
    assert ("residual" in summary.final["split"]["test"]) == (row == "mdeq")


def test_all_rows_begin_with_the_same_weights() -> None:
    weights = []
    for row in ROWS:
        torch.manual_seed(0)
        weights.append(experiment(row, "reduced").task().model().state_dict())
    for other in weights[1:]:
        assert all(torch.equal(value, other[name]) for name, value in weights[0].items())


def test_the_full_recipe_is_that_of_cityscapes() -> None:
    e = experiment("mdeq", "full")
    rule = e.training.optimizer
    assert (rule.name, rule.lr, rule.momentum, rule.weight_decay) == ("sgd", 0.01, 0.9, 5e-4)
    assert sum(p.numel() for p in e.task().model().parameters()) == 8_964_619
    assert [experiment(row, "full").training.pretrain_steps > 0 for row in ROWS] == [True, False, False]


def test_the_gallery_shows_images_labels_and_predictions() -> None:
    task, training = Segmentation(settings()), experiment("mdeq", "debug").training
    model = task.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = task.gallery(model, None, training)
    assert set(found) == {"segmentation", "classes"}
    assert all(title and picture.startswith(SIGNATURE) for title, picture in found.values())
    assert model.training  # as before
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_every_label_has_its_colour() -> None:
    found = coloured(torch.tensor([[0, 3, IGNORE]]))
    assert found.tolist() == [[list(PALETTE[0]), list(PALETTE[3]), [0, 0, 0]]]
    assert len(set(PALETTE)) == len(PALETTE) >= 11
    with pytest.raises(ValueError, match="colours for labels below 12, got the label 40"):
        coloured(torch.tensor([[40]]))
    assert bars({"road": 0.5, "nowhere": float("nan")}).startswith(SIGNATURE)


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="balance must be above 1"):
        SegmentSettings(balance=1.0)
    with pytest.raises(ValueError, match="test must be at least 1 image"):
        SegmentSettings(test=0)


def test_the_table_names_its_rows() -> None:
    (table,) = tables()
    assert {claim.left for claim in table.claims} | {claim.right for claim in table.claims} <= set(ROWS)
    assert set(table.protocol) == set(SCALES)
    for row in table.rows:
        assert [row.experiment(scale).name for scale in SCALES] == [f"camvid-{row.name}"] * 3
