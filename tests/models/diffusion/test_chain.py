"""A diffusion model, and its sampling chain as a fixed point, compared with the sequential chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria import models
from equilibria.models import ChainCell, Denoiser, DenoiserConfig, ParallelSampler, diffusion_loss
from equilibria.models.diffusion.denoiser import LARGEST_ANGLE

SOLVED = 1e-9  # float64, solves to a residual of 1e-12
STEPS = 6
TIGHT = eq.Stop(rtol=1e-12, atol=1e-14, max_steps=60, on_failure="raise")
FORMS = ["velocity", "noise", "step"]


def denoiser() -> Denoiser:
    """Return an untrained denoiser whose output depends on its input."""
    torch.manual_seed(0)
    net = Denoiser(DenoiserConfig(image=(1, 2, 2), width=16, blocks=1, embedding=8)).double()
    with torch.no_grad():
        net.output.weight.normal_(std=0.3)
    return net


def sampler(form: Any = "velocity", **options: Any) -> ParallelSampler:
    parts = {"stop": TIGHT, "gradient": eq.Implicit(stop=TIGHT), **options}
    return ParallelSampler(denoiser(), STEPS, form, **parts)


def noise(batch: int = 3) -> Tensor:
    return torch.randn(batch, 1, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=repr)
def test_the_fixed_point_is_the_sequential_chain(form: str, solver: Any) -> None:
    model = sampler(form, solver=solver)
    found = model.solve(noise())
    torch.testing.assert_close(found.z, model.sequential(noise()), rtol=SOLVED, atol=SOLVED)
    torch.testing.assert_close(model(noise()), model.sequential(noise())[:, -1], rtol=SOLVED, atol=SOLVED)


def test_a_step_takes_the_predicted_image_to_the_next_angle() -> None:
    """DDIM: x_{k+1} = cos φ_{k+1} image + sin φ_{k+1} noise, both predicted at x_k."""
    model, x = sampler(), noise()
    net, angles = denoiser(), LARGEST_ANGLE * (1 - torch.arange(STEPS + 1, dtype=torch.float64) / STEPS)
    for k in range(STEPS):
        v = net(x, angles[k].expand(3))
        image, predicted = angles[k].cos() * x - angles[k].sin() * v, angles[k].sin() * x + angles[k].cos() * v
        x = angles[k + 1].cos() * image + angles[k + 1].sin() * predicted
        torch.testing.assert_close(model.sequential(noise())[:, k], x)


@pytest.mark.parametrize("form", FORMS)
def test_every_state_depends_on_earlier_ones_only(form: Any) -> None:
    cell = ChainCell(denoiser(), STEPS, form)
    prepared = cell.prepare(noise(1))
    z = torch.randn(1, STEPS, 1, 2, 2, dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda z: cell(z, *prepared))(z).detach().view(STEPS, 4, STEPS, 4)
    blocks = jacobian.abs().amax(dim=(1, 3))
    assert float(blocks.triu().max()) == 0.0 and bool((blocks.diagonal(-1) > 0).all())
    if form == "step":
        assert float(blocks.tril(-2).max()) == 0.0
    flat = jacobian.reshape(4 * STEPS, 4 * STEPS)
    torch.testing.assert_close(torch.linalg.matrix_power(flat, STEPS), torch.zeros_like(flat), rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_plain_iteration_ends_after_as_many_rounds_as_states(form: str) -> None:
    """A round makes one more state exact; the last evaluation confirms it."""
    stop = eq.Stop(rtol=1e-11, atol=0.0, max_steps=100, on_failure="raise")
    found = sampler(form, stop=stop).solve(noise())
    assert int(found.stats.steps.max()) <= STEPS


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_sequential_chain(form: str) -> None:
    model, x, target = sampler(form), noise().requires_grad_(), noise().flip(0)
    wanted = [x, *model.parameters()]
    found = torch.autograd.grad((model(x) - target).square().sum(), wanted)
    direct = torch.autograd.grad((model.sequential(x)[:, -1] - target).square().sum(), wanted)
    for ours, reference in zip(found, direct, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-8, atol=1e-8)


def test_a_sample_does_not_depend_on_the_others() -> None:
    model = sampler(stop=eq.Stop(rtol=1e-5, on_failure="raise"))
    together = model.solve(noise())
    for i in range(3):
        alone = model.solve(noise()[i : i + 1])
        torch.testing.assert_close(together.z[i], alone.z[0], rtol=SOLVED, atol=SOLVED)
        assert int(together.stats.steps[i]) == int(alone.stats.steps[0])


def test_a_solve_can_start_from_the_chain_of_nearby_noise() -> None:
    model = sampler(stop=eq.Stop(rtol=1e-6, on_failure="raise"))
    cold, near = model.solve(noise()), noise() + 1e-9  # far below the tolerance: there is nothing left to do
    assert int(model.solve(near, init=cold).stats.steps.max()) <= 1 < int(model.solve(near).stats.steps.min())
    torch.testing.assert_close(model.solve(near, init=cold).z, model.sequential(near), rtol=1e-4, atol=1e-5)


def test_the_weights_of_a_denoiser_serve_chains_of_any_length() -> None:
    net = denoiser()
    short, long = ParallelSampler(net, 2), ParallelSampler(net, 9)
    long.load_state_dict(short.state_dict())
    assert long.sequential(noise()).shape == (3, 9, 1, 2, 2) and ParallelSampler(net, 1).solve(noise()).z.shape[1] == 1


def test_the_loss_is_that_of_the_velocity() -> None:
    net, images = denoiser(), noise(64).clamp(-1, 1)
    draws = torch.Generator().manual_seed(3)
    loss = diffusion_loss(net, images, draws)
    draws.manual_seed(3)
    angle = LARGEST_ANGLE * torch.rand(64, generator=draws, dtype=torch.float64)
    drawn = torch.randn(images.shape, generator=draws, dtype=torch.float64)
    c, s = angle.cos().view(-1, 1, 1, 1), angle.sin().view(-1, 1, 1, 1)
    errors = net(c * images + s * drawn, angle) - (c * drawn - s * images)
    torch.testing.assert_close(loss, errors.square().mean())


def test_a_denoiser_learns() -> None:
    torch.manual_seed(0)
    net = models.create("denoiser-digits", config=DenoiserConfig(image=(1, 4, 4), width=32, blocks=1))
    images = torch.ones(32, 1, 4, 4)
    images[16:] = -1  # two pictures
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    losses = []
    for _ in range(150):
        loss = diffusion_loss(net, images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-20:]) < 0.75 * sum(losses[:20])  # it does not reach 0: pure noise tells nothing of the picture


def test_invalid_settings_of_a_chain_raise() -> None:
    with pytest.raises(ValueError, match="steps must be at least 1"):
        ChainCell(denoiser(), 0)
    with pytest.raises(ValueError, match="form must be one of"):
        ChainCell(denoiser(), 3, "sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="embedding must be even"):
        DenoiserConfig(embedding=3)
