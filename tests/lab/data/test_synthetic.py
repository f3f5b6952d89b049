"""Synthetic tasks have the properties that their papers state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equilibria.lab import data

TASKS = ["polynomial", "chains", "copy-memory", "shapes"]


def tensors(found: data.Dataset[data.Split]) -> list[torch.Tensor]:
    return [t for split in (found.train, found.test) for t in (split.x, split.y)]


@pytest.mark.parametrize("name", ["polynomial", "copy-memory", "shapes"])
def test_data_depend_only_on_the_seed(name: str) -> None:
    options: dict[str, Any] = {"train": 40, "test": 10}
    torch.manual_seed(1)
    first = data.load(name, **options)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert all(map(torch.equal, tensors(first), tensors(data.load(name, **options))))
    assert torch.equal(torch.get_rng_state(), before)
    assert not all(map(torch.equal, tensors(first), tensors(data.load(name, seed=7, **options))))


def test_polynomial_has_noisy_training_and_exact_test_targets() -> None:
    found = data.load("polynomial")

    def h(x: torch.Tensor) -> torch.Tensor:
        return 1.5 * x**3 + x**2 - 5 * x + 2 * torch.sin(x) - 3

    assert len(found.train) == 512 and len(found.test) == 128
    torch.testing.assert_close(found.test.y, h(found.test.x))
    error = found.train.y - h(found.train.x)
    assert float(error.std()) == pytest.approx(0.005, rel=0.15)  # 512 draws: 3 % at one sigma
    assert abs(float(error.mean())) < 0.001
    assert -1 <= float(found.train.x.min()) < -0.98 and 0.98 < float(found.train.x.max()) <= 1


@pytest.mark.parametrize("length", [10, 30])
def test_only_the_first_node_of_a_chain_shows_its_class(length: int) -> None:
    found = data.load("chains", length=length)
    graph = found.train[0]
    assert graph.x.shape == (40 * length, 100) and graph.edge_index.shape == (2, 40 * (length - 1))
    assert graph.y.bincount().tolist() == [20 * length] * 2
    starts, ends = graph.edge_index
    heads = torch.ones(len(graph.x), dtype=torch.bool).index_fill(0, ends, False)
    assert int(heads.sum()) == 40
    assert torch.equal(graph.x[heads].argmax(dim=1), graph.y[heads]) and torch.equal(graph.x.sum(dim=1), heads.float())
    assert torch.equal(graph.y[starts], graph.y[ends])
    assert bool((starts.bincount(minlength=len(heads)) <= 1).all() and (ends.bincount(minlength=len(heads)) <= 1).all())
    masks = torch.stack([split[0].mask for split in (found.train, found.valid, found.test) if split])
    assert masks.sum(dim=1).tolist() == [20, 100, 200] and int(masks.sum(dim=0).max()) == 1


def test_too_few_chains_are_refused() -> None:
    with pytest.raises(ValueError, match=r"make 200 nodes .*: too few .* 20 \+ 100 \+ 200"):
        data.load("chains", length=5)
    assert data.load("chains", length=5, test=50).test[0].mask.sum() == 50


def test_copy_memory_repeats_the_symbols_after_the_delay() -> None:
    found = data.load("copy-memory", delay=30, train=200, test=20)
    x, y = found.train.x, found.train.y
    assert x.shape == y.shape == (200, 50) and len(found.test) == 20
    assert x[:, :10].unique().tolist() == list(range(1, 9))
    assert torch.equal(y[:, 40:], x[:, :10]) and not y[:, :40].any()
    assert bool((x[:, 39] == 9).all()) and not x[:, 10:39].any() and not x[:, 40:].any()
    with pytest.raises(ValueError, match="delay of at least 1, got 0"):
        data.load("copy-memory", delay=0)


def test_shapes_have_images_and_a_label_per_pixel() -> None:
    found = data.load("shapes", train=200, valid=10, test=20, noise=0)
    x, y = found.train.x, found.train.y
    assert x.shape == (200, 3, 32, 32) and x.dtype == torch.uint8 and y.shape == (200, 32, 32)
    assert y.unique().tolist() == [0, 1, 2, 3] == list(range(len(found.classes)))
    assert bool((y > 0).flatten(1).any(dim=1).all())
    for image, labels in zip(
        x[:50], y[:50], strict=True
    ):  # without noise a shape has one colour: at most 3 and the background
        colours = torch.cat([image.flatten(1), labels.view(1, -1).to(torch.uint8)]).t().unique(dim=0)
        assert 2 <= len(colours) <= 4 and int((colours[:, 3] == 0).sum()) == 1


def test_shapes_have_the_areas_of_their_kind() -> None:
    found = data.load("shapes", size=128, train=300, valid=1, test=1, most=1, noise=0)
    for kind, fill in ((1, 3.1416 / 4), (2, 1.0), (3, 0.5)):  # of the box around it
        for labels in [labels for labels in found.train.y if int(labels.max()) == kind][:20]:
            rows, columns = (labels > 0).nonzero().unbind(1)
            box = (int(rows.max() - rows.min()) + 1) * (int(columns.max() - columns.min()) + 1)
            assert len(rows) / box == pytest.approx(fill, abs=0.04)


def test_colours_do_not_depend_on_shapes() -> None:
    found = data.load("shapes", train=2000, valid=1, test=1)
    pixels = [found.train.x.permute(0, 2, 3, 1)[found.train.y == kind].float().mean() for kind in (1, 2, 3)]
    assert float(torch.stack(pixels).std()) < 5  # of 255


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="size=4 and most=3"):
        data.load("shapes", size=4)


@pytest.mark.parametrize("name", TASKS)
def test_the_catalogue_describes_the_generated_data(name: str) -> None:
    found, info = data.load(name), data.info(name)
    splits = (found.train, found.valid, found.test)
    counts = tuple(0 if s is None else int(s[0].mask.sum()) if info.kind == "nodes" else len(s) for s in splits)
    assert counts == info.counts and len(found.classes) == info.classes and info.files == ()
