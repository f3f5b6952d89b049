"""Optical flow: correlations and windows against loops, the update against its formula, gradients, videos and files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria import models
from equilibria.models import DEQFlow, FlowConfig
from equilibria.models.flow.cell import FlowCell, FlowState, Upsample
from equilibria.models.flow.correlation import correlation_pyramid, look_up

ROUNDING = 1e-10  # float64, some hundred operations deep
GRADIENT = 1e-6  # of solves to 1e-11, whose adjoint is as exact
TINY = FlowConfig(features=6, context=5, hidden=4, motion=5, levels=2, radius=1)
TIGHT = eq.Stop(rtol=1e-12, atol=1e-13, max_steps=400, on_failure="raise")


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tiny(**options: Any) -> DEQFlow:
    """Return a small model in double precision, with small weights in the cell."""
    torch.manual_seed(0)
    model = DEQFlow(dataclasses.replace(TINY, detached=options.pop("detached", False)), **options).double()
    with torch.no_grad():
        for weight in cell_of(model).parameters():
            weight.mul_(0.5)
    return model


def cell_of(model: DEQFlow) -> FlowCell:
    assert isinstance(model.layer.cell, FlowCell)
    return model.layer.cell


def tamed(model: DEQFlow) -> DEQFlow:
    """Return the model with flow' = 0.5 flow + head(h'): plain iteration then finds the equilibrium."""
    cell = cell_of(model)
    update = cell.forward

    def forward(z: FlowState, *inputs: Tensor) -> FlowState:
        h, flow = update(z, *inputs)
        return h, flow - 0.5 * z[1]

    cell.forward = forward  # type: ignore[assignment, method-assign]
    return model


def test_the_pyramid_has_products_of_all_pairs() -> None:
    first, second = normal(2, 3, 4, 6), normal(2, 3, 4, 6, seed=2)
    fine, coarse = correlation_pyramid(first, second, 2)
    for i, j, k, m in ((0, 0, 0, 0), (3, 5, 1, 2), (2, 4, 3, 5)):
        expected = (first[1, :, i, j] * second[1, :, k, m]).sum() / 3**0.5
        torch.testing.assert_close(fine[1, 6 * i + j, k, m], expected, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(coarse[0, 7, 1, 2], fine[0, 7, 2:4, 4:6].mean(), rtol=ROUNDING, atol=ROUNDING)
    with pytest.raises(ValueError, match="at least 8x8 pixels, got 4x6"):
        correlation_pyramid(first, second, 4)


@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])
def test_the_lookup_interpolates_as_grid_sample_does(scale: float) -> None:
    """End points far outside of the frame are included; both functions are zero there."""
    batch, h, w, radius = 2, 5, 7, 2
    pyramid = correlation_pyramid(normal(batch, 3, h, w), normal(batch, 3, h, w, seed=2), 3)
    flow = scale * normal(batch, 2, h, w, seed=3)
    found = look_up(pyramid, flow, radius)
    assert found.shape == (batch, 3 * 25, h, w)
    steps = torch.arange(-radius, radius + 1).double()
    expected = []
    for level, images in enumerate(pyramid):
        ends = torch.stack([flow[:, 0] + torch.arange(w), flow[:, 1] + torch.arange(h)[:, None]], dim=-1).flatten(0, 2)
        offsets = torch.stack([steps.expand(5, 5), steps[:, None].expand(5, 5)], dim=-1)  # rows first, as the lookup has it
        at = (ends[:, None, None] + 0.5) / 2**level - 0.5 + offsets
        size = torch.tensor([images.shape[3], images.shape[2]])
        sampled = F.grid_sample(images.flatten(0, 1).unsqueeze(1), (2 * at + 1) / size - 1, align_corners=False)
        expected.append(sampled.view(batch, h, w, 25).movedim(-1, 1))
    torch.testing.assert_close(found, torch.cat(expected, dim=1), rtol=ROUNDING, atol=ROUNDING)


def test_the_lookup_has_derivatives_of_second_order() -> None:
    pyramid = correlation_pyramid(normal(1, 2, 2, 3), normal(1, 2, 2, 3, seed=2), 1)
    flow = (0.3 * normal(1, 2, 2, 3, seed=3)).requires_grad_()  # between pixels, where it is smooth
    volume = pyramid[0].requires_grad_()
    assert torch.autograd.gradgradcheck(lambda f, v: look_up((v,), f, 1), (flow, volume))


def test_matching_features_are_found_at_the_true_displacement() -> None:
    """In the window at zero flow the correlation is largest at the pixel to which the feature moved."""
    second = normal(1, 64, 8, 8)
    first = second.roll((-1, -2), dims=(2, 3))  # the pixel (y, x) of the first is at (y + 1, x + 2) in the second
    found = look_up(correlation_pyramid(first, second, 1), torch.zeros(1, 2, 8, 8).double(), 2)
    best = found[0, :, 1:-2, 1:-3].argmax(dim=0)
    assert bool((best == (1 + 2) * 5 + (2 + 2)).all())


def test_the_update_is_that_of_a_convolutional_gru() -> None:
    """The cell is compared with its formula, written out with its weights and without `prepare`."""
    cell = cell_of(tiny())
    w = dict(cell.named_parameters())
    first, second, context = normal(2, 6, 3, 4), normal(2, 6, 3, 4, seed=2), normal(2, 5, 3, 4, seed=3)
    h, flow = normal(2, 4, 3, 4, seed=4), normal(2, 2, 3, 4, seed=5)
    found = cell((h, flow), *cell.prepare(first, second, context))

    def conv(x: Tensor, name: str) -> Tensor:
        weight = w[f"{name}.weight"]
        return F.conv2d(x, weight, w.get(f"{name}.bias"), padding=weight.shape[-1] // 2)

    seen = conv(look_up(correlation_pyramid(first, second, 2), flow, 1), "correlated").relu()
    m = torch.cat([conv(torch.cat([seen, flow], 1), "encode").relu(), flow], 1)
    update, reset, new = conv(context, "context").split(4, dim=1)
    gates = conv(torch.cat([h, m], 1), "gates")
    update, reset = torch.sigmoid(gates[:, :4] + update), torch.sigmoid(gates[:, 4:] + reset)
    new = torch.tanh(conv(torch.cat([reset * h, m], 1), "candidate") + new)
    after = (1 - update) * h + update * new
    torch.testing.assert_close(found[0], after, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(found[1], flow + conv(conv(after, "head.0").relu(), "head.2"), rtol=ROUNDING, atol=ROUNDING)


def test_upsampling_is_convex_and_scales_the_flow() -> None:
    torch.manual_seed(0)
    fine = Upsample(dataclasses.replace(TINY, factor=4)).double()
    h, flow = normal(2, 4, 3, 5), torch.ones(2, 2, 3, 5).double() * torch.tensor([1.5, -2.0]).view(2, 1, 1)
    torch.testing.assert_close(fine((h, flow)), 4 * flow[:, :, :1, :1].expand(2, 2, 12, 20), rtol=ROUNDING, atol=ROUNDING)
    flow = normal(2, 2, 3, 5)
    out = fine((h, flow))
    with torch.no_grad():
        last = fine.weights[-1]
        assert isinstance(last, nn.Conv2d) and last.bias is not None
        last.weight.zero_()
        last.bias.zero_()
        last.bias[4 * 16 : 5 * 16] = 60.0
    nearest = F.interpolate(4 * flow, scale_factor=4, mode="nearest")  # all weight on the middle
    torch.testing.assert_close(fine((h, flow)), nearest, rtol=ROUNDING, atol=ROUNDING)
    assert out.amax() <= 4 * flow.amax() and out.amin() >= 4 * flow.amin()


def test_the_solution_is_an_equilibrium_with_the_gradient_of_the_unrolled_update() -> None:
    frames = normal(2, 2, 3, 8, 16)
    deep = tamed(tiny(depth=150))
    deq = tamed(tiny(solver=eq.Anderson(), stop=TIGHT, gradient=eq.Implicit(stop=TIGHT)))
    deq.load_state_dict(deep.state_dict())
    with eq.record(deq) as solutions:
        flow = deq(frames)
    h, motion = solutions[0].z
    assert isinstance(flow, Tensor) and h.shape == (2, 4, 2, 4) and motion.shape == (2, 2, 2, 4)
    assert float(flow.detach().abs().mean()) > 1e-3
    other = deep(frames)
    torch.testing.assert_close(flow, other, rtol=1e-8, atol=1e-8)
    weights = normal(*flow.shape, seed=7)
    for a, b in zip(deq.parameters(), deep.parameters(), strict=True):
        (ours,) = torch.autograd.grad((flow * weights).sum(), a, retain_graph=True)
        (theirs,) = torch.autograd.grad((other * weights).sum(), b, retain_graph=True)
        torch.testing.assert_close(ours, theirs, rtol=GRADIENT, atol=GRADIENT)


def test_intermediate_states_of_the_unrolled_network_are_its_updates() -> None:
    model, frames = tiny(depth=3), normal(2, 2, 3, 8, 8)
    flows = model(frames, on_the_way=True)
    assert len(flows) == 3
    torch.testing.assert_close(flows[-1], model(frames), rtol=0, atol=0)
    for depth in (1, 2):
        model.layer.depth = depth
        torch.testing.assert_close(flows[depth - 1], model(frames), rtol=0, atol=0)


def test_corrections_are_one_step_from_iterates() -> None:
    model = tiny(stop=eq.Stop(rtol=0, atol=0, max_steps=7, keep_every=2, on_failure="ignore"), corrections=2)
    frames = normal(2, 2, 3, 8, 8)
    with eq.record(model) as solutions:
        flows = model(frames, on_the_way=True)
    (s,) = solutions
    assert len(s.iterates) == 3 and len(flows) == 3  # after 2, 4, 6 steps; two of them, and the equilibrium
    torch.testing.assert_close(flows[0], model.upsample(s.f(s.iterates[1])), rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(flows[-1], model.upsample(s.z), rtol=0, atol=0)
    for flow in flows:
        found = torch.autograd.grad(flow.square().sum(), list(model.parameters()), retain_graph=True)
        assert all(bool(grad.abs().sum() > 0) for grad in found)


def test_a_detached_flow_stops_only_the_gradient_through_lookups() -> None:
    """With RAFT's cell values are equal; the first of two updates affects the loss only through the hidden state."""
    frames = normal(1, 2, 3, 8, 8)
    whole, cut = tiny(depth=2), tiny(depth=2, detached=True)
    torch.testing.assert_close(whole(frames), cut(frames), rtol=0, atol=0)
    last = "layer.cell.head.2.weight"  # makes increments: of the first one only the path through the flow is left
    one, two = (torch.autograd.grad(m(frames).sum(), dict(m.named_parameters())[last])[0] for m in (whole, cut))
    assert float((one - two).abs().max()) > 1e-6


def test_warm_starts_along_a_video_give_the_same_flows() -> None:
    model = tamed(tiny(stop=eq.Stop(rtol=1e-9, atol=0, max_steps=200, on_failure="raise"))).eval()
    still = normal(2, 1, 3, 8, 16).expand(-1, 4, -1, -1, -1)
    with torch.no_grad(), eq.record(model) as warm:
        flows = model.video(still)
    with torch.no_grad(), eq.record(model) as cold:
        single = torch.stack([torch.as_tensor(model(still[:, i : i + 2])) for i in range(3)], dim=1)
    torch.testing.assert_close(flows, single, rtol=1e-6, atol=1e-6)
    steps = [int(s.stats.steps.max()) for s in warm]
    assert steps[0] == int(cold[0].stats.steps.max()) > 3 and steps[1] <= 1 and steps[2] <= 1
    memory = model.layer.init
    assert isinstance(memory, eq.Remember) and len(memory) == 0  # a video without a key leaves nothing behind


def test_keys_continue_a_video_in_a_later_call() -> None:
    model = tamed(tiny(stop=eq.Stop(rtol=1e-9, atol=0, max_steps=200, on_failure="raise"))).eval()
    still = normal(2, 1, 3, 8, 8).expand(-1, 3, -1, -1, -1)
    with torch.no_grad(), eq.record(model) as solutions:
        model.video(still[:, :2], keys=["a", "b"])
        model.video(still[:, 1:], keys=["a", "b"])
    assert int(solutions[1].stats.steps.max()) <= 1
    memory = model.layer.init
    assert isinstance(memory, eq.Remember) and len(memory) == 2
    memory.forget(["a"])
    assert len(memory) == 1


def test_the_unrolled_network_has_the_weights_of_the_equilibrium() -> None:
    deq, raft = models.create("deq-flow-nano"), models.create("raft-nano")
    raft.load_state_dict(deq.state_dict())
    assert models.info("deq-flow-nano").parameters == models.info("raft-nano").parameters == 117_684


def test_a_model_fits_one_pair_of_frames() -> None:
    torch.manual_seed(0)
    model = models.create("deq-flow-nano")
    base = F.interpolate(torch.randn(1, 3, 10, 10), size=(40, 40), mode="bilinear")
    frames = torch.stack([base[..., 4:-4, 4:-4], base[..., 4:-4, 2:-6]], dim=1)  # to the right by two pixels
    flow = torch.tensor([2.0, 0.0]).view(1, 2, 1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    errors = []
    for _ in range(40):
        flows = model(frames, on_the_way=True)
        loss = eq.correction_penalty(flows, lambda found: (found - flow).abs().mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(float((flows[-1].detach() - flow).norm(dim=1).mean()))
    assert sum(errors[-5:]) < 0.5 * sum(errors[:5])


def test_a_flow_model_round_trips_through_a_file(tmp_path: Path) -> None:
    model = models.create("deq-flow-nano").eval()
    models.save(model, tmp_path / "flow.safetensors")
    frames = torch.randn(1, 2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(models.load(tmp_path / "flow.safetensors").eval()(frames), model(frames))


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 3, 3, 8, 8), (1, 2, 3, 10, 8)])
def test_frames_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="divisible by 4, got"):
        tiny()(torch.zeros(shape).double())


@pytest.mark.parametrize("settings", [{"factor": 3}, {"factor": 1}, {"hidden": 0}, {"levels": 0}])
def test_invalid_settings_of_a_flow_model_raise(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        FlowConfig(**settings)  # type: ignore[arg-type]
