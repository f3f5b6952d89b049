"""Generated scenes: the flow is exactly the motion of visible points, and frames agree with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.lab import data
from equilibria.lab.data.moving_layers import Scenes, draw_scenes, pixels
from equilibria.lab.data.sets import generator

SIZE = (40, 56)
ROUNDING = 1e-11  # float64; phases of some tens of radians
# Bilinear interpolation of waves of five pixels and more: twice what is measured, 0.07 and 0.013. Without the flow: 0.2.
INTERPOLATION = 0.15
MEAN_INTERPOLATION = 0.025


def scenes(n: int = 6, **changes: Tensor) -> tuple[Scenes, Tensor]:
    found = draw_scenes(n, SIZE, 4, 4.0, generator("scenes", 1), torch.float64)
    return dataclasses.replace(found, **changes), pixels(SIZE, torch.float64).expand(n, *SIZE, 2)


def test_visible_points_keep_their_colour_along_the_flow() -> None:
    found, points = scenes()
    for time in (0.0, 3.0):
        flow, visible = found.flow(points, time, time + 1)
        before, layer = found.render(points, time)
        after, other = found.render(points + flow, time + 1)
        assert torch.equal(other == layer, visible)
        assert 0.5 < visible.double().mean() < 1.0
        torch.testing.assert_close(after[visible], before[visible], rtol=0, atol=ROUNDING)
        assert (after - before).abs()[~visible].mean() > 0.05  # another layer


def test_the_background_without_motion_stands_still() -> None:
    found, points = scenes(velocity=torch.zeros(6, 4, 2).double(), growth=torch.zeros(6, 4, 2, 2).double())
    flow, visible = found.flow(points, 0.0, 1.0)
    torch.testing.assert_close(flow, torch.zeros_like(flow), rtol=0, atol=ROUNDING)
    assert bool(visible.all())


def test_a_layer_moves_by_its_affine_map() -> None:
    """The flow of one pixel must equal the explicit map, and flows forth and back must cancel."""
    found, points = scenes()
    flow, visible = found.flow(points, 1.0, 2.0)
    _, layer = found.render(points, 1.0)
    for scene, row, column in ((0, 3, 5), (2, 20, 30), (5, 33, 50)):
        k = int(layer[scene, row, column])
        p = points[scene, row, column]
        centre, velocity, growth = found.centre[scene, k], found.velocity[scene, k], found.growth[scene, k]
        u = torch.linalg.solve(torch.eye(2).double() + growth, p - centre - velocity)
        expected = centre + 2 * velocity + (torch.eye(2).double() + 2 * growth) @ u - p
        torch.testing.assert_close(flow[scene, row, column], expected, rtol=0, atol=ROUNDING)
    back, still = found.flow(points + flow, 2.0, 1.0)
    torch.testing.assert_close((flow + back)[visible], torch.zeros_like(flow)[visible], rtol=0, atol=ROUNDING)
    assert bool(still[visible].all())


def warp(image: Tensor, flow: Tensor) -> Tensor:
    """Return image (n, c, h, w) sampled at the points to which flow (n, 2, h, w) leads."""
    height, width = image.shape[-2:]
    ends = pixels((height, width)) + flow.movedim(1, -1)
    grid = 2 * ends / torch.tensor([width - 1, height - 1]) - 1
    return F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=True)


def test_the_second_frame_warped_by_the_flow_is_the_first() -> None:
    """Compared are points that are visible with their neighbours in both frames; at edges interpolation mixes two layers."""
    found = data.load("moving-layers", size=SIZE, train=8, test=4, frames=4)
    for split in (found.train, found.test):
        for t in range(split.y.shape[1]):
            first, second = (split.x[:, i].float() / 255 for i in (t, t + 1))
            flow, visible = split.y[:, t, :2], split.y[:, t, 2:]
            smooth = (flow - F.avg_pool2d(flow, 5, 1, 2)).abs().amax(dim=1, keepdim=True) < 0.3  # no edge near
            inner = (-F.max_pool2d(-visible, 5, 1, 2) == 1) & smooth
            error = (warp(second, flow) - first).abs().amax(dim=1, keepdim=True)[inner]
            still = (second - first).abs().amax(dim=1, keepdim=True)[inner]
            assert inner.float().mean() > 0.3
            assert error.mean() < MEAN_INTERPOLATION < still.mean() / 3
            assert error.quantile(0.999) < INTERPOLATION


def test_frames_have_their_shapes_and_depend_only_on_the_seed() -> None:
    options: dict[str, Any] = {"size": (16, 24), "train": 40, "test": 3, "frames": 5}
    found = data.load("moving-layers", **options)
    assert found.train.x.shape == (40, 2, 3, 16, 24) and found.train.y.shape == (40, 1, 3, 16, 24)
    assert found.test.x.shape == (3, 5, 3, 16, 24) and found.test.y.shape == (3, 4, 3, 16, 24)
    assert found.train.x.dtype == torch.uint8 and set(found.test.y[:, :, 2].unique().tolist()) == {0.0, 1.0}
    again, other = data.load("moving-layers", **options), data.load("moving-layers", seed=1, **options)
    assert torch.equal(found.train.x, again.train.x) and torch.equal(found.test.y, again.test.y)
    assert not torch.equal(found.train.x, other.train.x) and not torch.equal(found.train.x[:3], found.test.x[:, :2])
    assert not torch.equal(found.train.x[0], found.train.x[32])  # another chunk


def test_validation_scenes_are_scenes_of_their_own() -> None:
    options: dict[str, Any] = {"size": (16, 24), "train": 8, "test": 3, "frames": 5}
    found, without = data.load("moving-layers", valid=3, **options), data.load("moving-layers", **options)
    assert without.valid is None and found.valid is not None
    assert found.valid.x.shape == found.test.x.shape and found.valid.y.shape == found.test.y.shape
    for other in (found.test.x[:, :2], found.train.x[:3]):
        assert not torch.equal(found.valid.x[:, :2], other)
    assert torch.equal(found.train.x, without.train.x) and torch.equal(found.test.x, without.test.x)


def test_motions_have_the_requested_size() -> None:
    slow, fast = (data.load("moving-layers", train=64, test=1, motion=motion).train.y[:, :, :2] for motion in (1.0, 6.0))
    lengths = [float(flow.norm(dim=2).mean()) for flow in (slow, fast)]
    assert 0.1 < lengths[0] < 1.0 and 4 < lengths[1] / lengths[0] < 8


@pytest.mark.parametrize("options", [{"size": (4, 64)}, {"layers": 0}, {"frames": 1}, {"motion": -1.0}])
def test_impossible_scenes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="moving-layers needs"):
        data.load("moving-layers", **options)
