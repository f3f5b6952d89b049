"""Batches: every sample once, the same order again, resumed and shared exactly."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import Tensor

from equilibria.lab import data

N = 23
SPLIT = data.Split(torch.arange(N * 2.0).view(N, 2), torch.arange(N))
IMAGES = data.Split(torch.arange(N * 3 * 64).view(N, 3, 8, 8).to(torch.uint8), torch.arange(N))
AUGMENT: list[data.Augmentation] = [data.Crop(2), data.Flip(), data.Erase()]


def labels(batches: data.Batches) -> list[list[int]]:
    return [y.tolist() for _, y in batches]


def same(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    return len(a) == len(b) and all(torch.equal(s, t) for p, q in zip(a, b, strict=True) for s, t in zip(p, q, strict=True))


def test_every_epoch_has_each_sample_once_in_its_own_order() -> None:
    batches = data.Batches(SPLIT, 5)
    first, second = labels(batches), labels(batches)
    assert [len(batch) for batch in first] == [5, 5, 5, 5, 3] and len(batches) == 5
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(N))
    assert first != second and batches.epoch == 2
    assert labels(data.Batches(SPLIT, 5)) == first != labels(data.Batches(SPLIT, 5, seed=1))
    assert all(torch.equal(x[:, 0], 2.0 * y) for x, y in data.Batches(SPLIT, 5))


def test_batches_may_be_unshuffled_and_leave_out_the_last() -> None:
    batches = data.Batches(SPLIT, 5, shuffle=False, drop_last=True)
    assert list(itertools.chain(*labels(batches))) == list(range(20)) and len(batches) == 4
    assert labels(batches) == labels(batches)


def test_global_random_numbers_neither_matter_nor_change() -> None:
    torch.manual_seed(1)
    first = list(data.Batches(IMAGES, 5, augment=AUGMENT))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert same(first, list(data.Batches(IMAGES, 5, augment=AUGMENT)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("handed_out", [0, 1, 4, 5, 7, 10])
def test_resuming_continues_exactly(handed_out: int) -> None:
    def endless(batches: data.Batches) -> list[tuple[Tensor, Tensor]]:
        return list(itertools.islice((batch for _ in range(4) for batch in batches), 12))

    whole = endless(data.Batches(IMAGES, 5, augment=AUGMENT))
    batches = data.Batches(IMAGES, 5, augment=AUGMENT)
    list(itertools.islice((batch for _ in range(4) for batch in batches), handed_out))
    state = json.loads(json.dumps(batches.state()))
    resumed = data.Batches(IMAGES, 5, augment=AUGMENT)
    resumed.resume(state)
    assert same(endless(resumed)[: 12 - handed_out], whole[handed_out:])


def test_a_loop_that_was_left_continues_unless_restarted() -> None:
    batches = data.Batches(SPLIT, 5)
    whole = labels(data.Batches(SPLIT, 5))
    next(iter(batches))
    assert labels(batches) == whole[1:]
    next(iter(batches))
    batches.restart()
    assert sorted(itertools.chain(*labels(batches))) == list(range(N))


def test_a_state_of_another_order_is_refused() -> None:
    state = data.Batches(SPLIT, 5).state()
    for other in (data.Batches(SPLIT, 6), data.Batches(SPLIT, 5, seed=3), data.Batches(SPLIT[:20], 5)):
        with pytest.raises(ValueError, match="another order"):
            other.resume(state)
    with pytest.raises(ValueError, match="length=None, but these have length=4"):
        data.TextBatches(torch.arange(30), 5, 4).resume({"tokens": 30, "batch_size": 5, "epoch": 0, "position": 0})


@pytest.mark.parametrize("world", [2, 3, 6])
def test_processes_share_the_same_batches(world: int) -> None:
    alone = list(data.Batches(IMAGES, 6, augment=AUGMENT))
    ranks = [
        list(data.Batches(IMAGES, 6, augment=AUGMENT, rank=r, world_size=world, drop_last=world > 5)) for r in range(world)
    ]
    together = [tuple(torch.cat(parts) for parts in zip(*batch, strict=True)) for batch in zip(*ranks, strict=True)]
    assert all(torch.equal(s, t) for p, q in zip(together, alone, strict=world <= 5) for s, t in zip(p, q, strict=True))
    assert len({len(batches) for batches in ranks}) == 1


def test_batches_resume_on_another_number_of_processes() -> None:
    batches = data.Batches(SPLIT, 6, drop_last=True)
    next(iter(batches))
    rest = labels(data_from(batches.state(), 0, 1))
    shared = [labels(data_from(batches.state(), rank, 3)) for rank in range(3)]
    assert [list(itertools.chain(*parts)) for parts in zip(*shared, strict=True)] == rest


def data_from(state: dict[str, int], rank: int, world: int) -> data.Batches:
    batches = data.Batches(SPLIT, 6, drop_last=True, rank=rank, world_size=world)
    batches.resume(state)
    return batches


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "rank=2"),
        ({"batch_size": 5, "world_size": 2}, "divisible by their number 2, got 5"),
        ({"batch_size": 24, "drop_last": True}, "23 samples are too few for a batch of 24"),
        ({"batch_size": 22, "world_size": 2}, "leaves some of 2 processes without any: use drop_last=True"),
    ],
)
def test_invalid_arguments_of_batches_raise(arguments: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        data.Batches(SPLIT, **arguments)  # type: ignore[arg-type]


def test_normalisation_comes_last() -> None:
    found = data.Dataset("some", IMAGES, IMAGES, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.125))
    x, y = next(iter(data.Batches(IMAGES, 4, transform=found.normalize)))
    expected = IMAGES.x[y].float() / 255
    for channel, (mean, std) in enumerate(zip(found.mean, found.std, strict=True)):
        torch.testing.assert_close(x[:, channel], (expected[:, channel] - mean) / std)
    assert IMAGES.x.dtype == torch.uint8


def test_normalize_does_not_change_its_argument() -> None:
    found = data.Dataset("some", IMAGES, IMAGES, mean=(0.5,), std=(2.0,))
    x = torch.ones(2, 1, 3, 3)
    assert float(found.normalize(x).max()) == 0.25 and float(x.min()) == 1
    plain = data.Dataset("some", IMAGES, IMAGES)
    assert plain.normalize(x) is x and float(plain.normalize(IMAGES.x).max()) <= 1


# graphs


def test_graph_batches_are_joined() -> None:
    graphs = [
        data.Graph(torch.full((n, 1), float(n)), torch.zeros(2, 1, dtype=torch.int64), torch.tensor([n]))
        for n in range(1, 8)
    ]
    joined = list(data.GraphBatches(graphs, 3))
    assert sorted(torch.cat([batch.y for batch in joined]).tolist()) == list(range(1, 8))
    assert all(torch.equal(batch.y.float()[batch.batch], batch.x[:, 0]) for batch in joined if batch.batch is not None)
    ranks = [next(iter(data.GraphBatches(graphs, 4, rank=rank, world_size=2))) for rank in range(2)]
    assert torch.equal(torch.cat([rank.y for rank in ranks]), next(iter(data.GraphBatches(graphs, 4))).y)


# text


@pytest.mark.parametrize(("tokens", "length"), [(101, 5), (100, 5), (103, 7), (9, 3)])
def test_rows_of_a_text_continue_from_segment_to_segment(tokens: int, length: int) -> None:
    batches = data.TextBatches(torch.arange(tokens, dtype=torch.int32), 4, length)
    segments = list(batches)
    x, y = (torch.cat(parts, dim=1) for parts in zip(*segments, strict=True))
    columns = (tokens - 1) // 4
    assert torch.equal(x.flatten(), torch.arange(4 * columns))  # rows follow each other, without gaps
    assert torch.equal(y, x + 1) and y.dtype == torch.int64
    assert all(part.shape == (4, length) for part, _ in segments[:-1]) and len(segments) == len(batches)
    full = list(data.TextBatches(torch.arange(tokens), 4, length, drop_last=True)) if columns >= length else []
    assert len(full) == columns // length


def test_text_resumes_and_is_shared_by_rows() -> None:
    tokens = torch.arange(200)
    whole = list(data.TextBatches(tokens, 4, 9))
    batches = data.TextBatches(tokens, 4, 9)
    list(itertools.islice(batches, 3))
    resumed = data.TextBatches(tokens, 4, 9)
    resumed.resume(batches.state())
    assert same(list(resumed), whole[3:]) and resumed.epoch == 1
    ranks = [list(data.TextBatches(tokens, 4, 9, rank=rank, world_size=2)) for rank in range(2)]
    assert all(torch.equal(torch.cat([a[0], b[0]]), c[0]) for a, b, c in zip(*ranks, whole, strict=True))


@pytest.mark.parametrize(("tokens", "length"), [(4, 1), (100, 0)])
def test_text_that_is_too_short_for_a_segment_raises(tokens: int, length: int) -> None:
    with pytest.raises(ValueError, match=f"{tokens} tokens are too few for a segment of {length}"):
        data.TextBatches(torch.arange(tokens), 4, length)


# splits


def test_a_split_needs_a_target_for_each_sample() -> None:
    with pytest.raises(ValueError, match="3 samples and 2 targets"):
        data.Split(torch.zeros(3, 1), torch.zeros(2))
    assert len(SPLIT[:4]) == 4 and repr(SPLIT) == "Split(x: float32 (23, 2), y: int64 (23,))"


def test_hold_out_moves_samples_from_training_to_validation() -> None:
    found = data.Dataset("some", SPLIT, SPLIT)
    held = data.hold_out(found, 5)
    assert held.valid is not None and len(held.valid) == 5 and found.valid is None
    assert sorted([*held.train.y.tolist(), *held.valid.y.tolist()]) == list(range(N))
    again = data.hold_out(found, 5)
    assert again.valid is not None and torch.equal(held.valid.y, again.valid.y)
    assert repr(held) == "Dataset('some', train=18, valid=5, test=23, classes=0)"
    with pytest.raises(ValueError, match="1 to 22 samples of some's training split, got 23"):
        data.hold_out(found, 23)
