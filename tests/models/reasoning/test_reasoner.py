"""Reasoners against the published computation, with all solvers and gradients; sizes and files."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import equilibria as eq
from equilibria import models
from equilibria.models import Reasoner, ReasonerConfig

ROUNDING = 1e-10  # float64, some hundred operations deep
TINY = ReasonerConfig(tokens=5, positions=6, width=8, heads=2, layers=2, multiple=4, h_cycles=3, l_cycles=2)
TIGHT = eq.Stop(rtol=1e-12, atol=0.0, max_steps=300, on_failure="raise")


def tokens(batch: int = 3, positions: int = 6) -> Tensor:
    return torch.randint(5, (batch, positions), generator=torch.Generator().manual_seed(1))


def tiny(**changes: Any) -> Reasoner:
    """Return a small reasoner in double precision; `changes` are options of the configuration and of the model."""
    torch.manual_seed(0)
    names = {field.name for field in dataclasses.fields(ReasonerConfig)}
    config = dataclasses.replace(TINY, **{name: value for name, value in changes.items() if name in names})
    return Reasoner(config, **{name: value for name, value in changes.items() if name not in names}).double()


def cell_weights(model: Reasoner) -> list[Tensor]:
    return [weight for name, weight in model.named_parameters() if name.startswith("layer.cell")]


def tamed(model: Reasoner) -> Reasoner:
    """Return the model with small weights in the cell, which then contracts."""
    with torch.no_grad():
        for weight in cell_weights(model):
            weight.mul_(0.2)
    return model


# The published computation without the library: SwiGLU, mixing over positions by an MLP or by attention with rotary
# positions, an RMS norm after each sum, recursions without a gradient and one with a gradient.


def reference_swiglu(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    wide = x @ w[f"{name}.gate_up.weight"].T
    half = wide.shape[-1] // 2
    return (wide[..., :half] * torch.sigmoid(wide[..., :half]) * wide[..., half:]) @ w[f"{name}.down.weight"].T


def reference_norm(h: Tensor) -> Tensor:
    return h / (h.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()


def reference_attention(h: Tensor, w: Mapping[str, Tensor], name: str, heads: int) -> Tensor:
    batch, positions, width = h.shape
    size = width // heads
    parts = [part.view(batch, positions, heads, size) for part in (h @ w[f"{name}.qkv.weight"].T).chunk(3, dim=-1)]
    turned = []
    for part in parts[:2]:
        out = torch.empty_like(part)
        for p in range(positions):
            for i in range(size // 2):
                angle = torch.tensor(p * 10_000.0 ** (-2 * i / size), dtype=torch.float64)
                a, b = part[:, p, :, i], part[:, p, :, i + size // 2]
                out[:, p, :, i] = a * angle.cos() - b * angle.sin()
                out[:, p, :, i + size // 2] = b * angle.cos() + a * angle.sin()
        turned.append(out)
    scores = torch.einsum("bphd,bqhd->bhpq", *turned) / size**0.5
    mixed = torch.einsum("bhpq,bqhd->bphd", scores.softmax(dim=-1), parts[2])
    return mixed.reshape(batch, positions, width) @ w[f"{name}.out.weight"].T


def reference_block(h: Tensor, w: Mapping[str, Tensor], config: ReasonerConfig) -> Tensor:
    for i in range(config.layers):
        name = f"layer.cell.layers.{i}"
        if config.mixer == "mlp":
            mixed = reference_swiglu(h.transpose(1, 2), w, f"{name}.mixer.mlp").transpose(1, 2)
        else:
            mixed = reference_attention(h, w, f"{name}.mixer", config.heads)
        h = reference_norm(h + mixed)
        h = reference_norm(h + reference_swiglu(h, w, f"{name}.mlp"))
    return h


def reference_logits(model: Reasoner, x: Tensor, start: tuple[Tensor, Tensor]) -> Tensor:
    c, w = model.config, dict(model.named_parameters())
    embedded = c.width**0.5 * w["embedding.weight"][x]
    z_h, z_l = start

    def recursion(z_h: Tensor, z_l: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(c.l_cycles):
            z_l = (1 - c.relaxation) * z_l + c.relaxation * reference_block(z_l + z_h + embedded, w, c)
        return (1 - c.relaxation) * z_h + c.relaxation * reference_block(z_h + z_l, w, c), z_l

    with torch.no_grad():
        for _ in range(c.h_cycles - 1):
            z_h, z_l = recursion(z_h, z_l)
    z_h, _ = recursion(z_h, z_l)
    return z_h @ w["head.weight"].T


@pytest.mark.parametrize("mixer", ["mlp", "attention"])
@pytest.mark.parametrize("relaxation", [1.0, 0.95])
def test_one_step_gradient_is_the_published_computation(mixer: str, relaxation: float) -> None:
    model, x = tiny(mixer=mixer, relaxation=relaxation), tokens()
    start = model.start(x)
    ours = model.think(x, start).logits
    reference = reference_logits(model, x, start)
    torch.testing.assert_close(ours, reference, rtol=ROUNDING, atol=ROUNDING)
    weights = [weight for name, weight in model.named_parameters() if not name.startswith("halt")]
    cotangent = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    grads = [torch.autograd.grad(out, weights, cotangent) for out in (ours, reference)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=ROUNDING, atol=ROUNDING)
    assert max(float(grad.abs().max()) for grad in grads[0]) > 1e-3  # not zero against zero


def test_one_step_gradient_is_jfb_at_any_state() -> None:
    """From a given state, a solve of zero steps with JFB is one recursion with its graph."""
    model, x = tiny(h_cycles=1), tokens()
    state = tuple(torch.randn(3, 6, 8, dtype=torch.float64) for _ in range(2))
    s = eq.DEQ(model.layer.cell, stop=eq.Stop(max_steps=0, on_failure="ignore"), gradient=eq.JFB()).solve(
        model.embed(x), init=state
    )
    ours, direct = s.z[0], model.layer.cell(state, model.embed(x))[0]
    weights = cell_weights(model)
    for one, other in zip(
        torch.autograd.grad(ours.square().sum(), weights), torch.autograd.grad(direct.square().sum(), weights), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("start", ["random", "learned"])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_direct_step_is_a_solve_of_no_steps_with_jfb(start: Any, noise: float) -> None:
    """Compared are values, residuals and gradients for the same draws, from a new start and from a given state."""
    x, found = tokens(), []
    for direct in (False, True):
        model = tiny(start=start, noise=noise, relaxation=0.9, direct=direct)
        torch.manual_seed(5)
        first = model.think(x)
        second = model.think(x, first.state)
        loss = first.logits.square().sum() + second.logits.square().sum() + second.halt.sum()
        weights = [weight for name, weight in model.named_parameters() if not name.startswith("layer.init")]
        grads = torch.autograd.grad(loss, weights)
        found.append([first.logits, second.logits, second.halt, first.residual, second.residual, *second.state, *grads])
        with eq.record(model) as solutions:
            model.train()(x)
            model.eval()(x)
        assert len(solutions) == 2 - direct
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=ROUNDING, atol=ROUNDING)
    with pytest.raises(ValueError, match="direct=True needs stop=None"):
        tiny(direct=True, gradient=eq.UnrolledPhantom(steps=2, damping=1.0))


@pytest.mark.parametrize("solver", [eq.Anderson(), eq.Broyden(), eq.Newton()], ids=["anderson", "broyden", "newton"])
def test_every_solver_finds_the_equilibrium_of_plain_iteration(solver: Any) -> None:
    """Solves start near the equilibrium, because the cell has others, which Newton's method finds from far away."""
    x = tokens()
    model = tamed(tiny(stop=TIGHT, solver=eq.Picard(), noise=0.01, start="random"))
    torch.manual_seed(3)  # of the noise
    with torch.no_grad():
        plain = model.layer.solve(model.embed(x), init=model.start(x)).z
        near = tuple(z + 0.05 * torch.randn_like(z) for z in plain)
        model.layer.solver = solver
        torch.manual_seed(3)
        model.start(x)
        found = model.layer.solve(model.embed(x), init=near).z
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("gradient", "steps"),
    [
        (eq.Implicit(stop=TIGHT), 400),
        (eq.UnrolledPhantom(steps=3, damping=1.0), 3),
        (eq.NeumannPhantom(steps=3, damping=1.0), 3),
    ],
    ids=["exact", "upg", "npg"],
)
def test_other_gradients_follow_their_formula(gradient: eq.Gradient, steps: int) -> None:
    """At the equilibrium the exact gradient is that of many unrolled steps, and those of UPG and NPG are that of three."""
    x = tokens()
    model = tamed(tiny(stop=TIGHT, solver=eq.Anderson(), gradient=gradient))
    weights = cell_weights(model)
    logits = model.think(x).logits
    ours = torch.autograd.grad(logits.square().sum(), weights)
    with torch.no_grad():
        z = model.layer(model.embed(x))
    for _ in range(steps):
        z = model.layer.cell(z, model.embed(x).detach())
    direct = torch.autograd.grad(model.read(z)[0].square().sum(), weights)
    for one, other in zip(ours, direct, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "count", "published"),
    [("reasoner-trm-sudoku", 5_036_545, 5e6), ("reasoner-eqr-sudoku", 5_036_545, 5e6), ("reasoner-eqr-maze", 263_809, None)],
)
def test_sizes_are_the_published_ones(name: str, count: int, published: float | None) -> None:
    assert models.info(name).parameters == count
    assert published is None or abs(count - published) < 0.02 * published


def test_a_step_continues_from_a_given_state() -> None:
    """Two supervised steps of two recursions are one of four."""
    x = tokens()
    model = tiny(h_cycles=2)
    start = model.start(x)
    twice = model.think(x, model.think(x, start).state)
    model.plain = 3
    torch.testing.assert_close(twice.logits, model.think(x, start).logits, rtol=ROUNDING, atol=ROUNDING)


def test_noise_is_one_draw_per_solve_or_per_call() -> None:
    x = tokens()
    for per, same in (("solve", True), ("call", False)):
        model = tiny(noise=0.1, noise_per=per)
        s = model.layer.solve(model.embed(x))
        assert torch.equal(s.f(s.z)[0], s.f(s.z)[0]) is same
        assert not torch.equal(model.think(x).logits, model.think(x).logits)  # another solve, another draw
    quiet = tiny(noise=0.1, eval_noise=False)
    assert not torch.equal(quiet.think(x).logits, quiet.think(x).logits)
    assert torch.equal(quiet.eval().think(x).logits, quiet.think(x).logits)
    model = tiny(start="random")
    assert not torch.equal(model.start(x)[0], model.start(x)[0])
    assert float(model.start(x)[0].detach().abs().max()) <= 2.0


@pytest.mark.parametrize(("mixer", "shape"), [("line", (6,)), ("square", (3, 3))])
def test_a_convolution_sums_over_nearest_neighbours(mixer: Any, shape: tuple[int, ...]) -> None:
    """The convolution is compared with an explicit sum, with zeros beyond the edge."""
    count = math.prod(shape)
    model = tiny(mixer=mixer, positions=count, layers=1)
    cell: Any = model.layer.cell
    mix = cell.layers[0].mixer
    h = torch.randn(2, count, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    weight, board = mix.convolution.weight.detach(), h.view(2, *shape, 8)
    expected = torch.zeros_like(board)
    places: Any = itertools.product(*(range(n) for n in shape))
    for place in places:
        for offset in itertools.product((-1, 0, 1), repeat=len(shape)):
            near = tuple(a + b for a, b in zip(place, offset, strict=True))
            if all(0 <= a < n for a, n in zip(near, shape, strict=True)):
                kernel = weight[(..., *(b + 1 for b in offset))]
                expected[(slice(None), *place)] += board[(slice(None), *near)] @ kernel.T
    torch.testing.assert_close(mix(h), expected.view(2, count, 8), rtol=ROUNDING, atol=ROUNDING)


def test_a_recursion_on_a_line_reaches_one_position_per_block() -> None:
    model = tiny(mixer="line", layers=1, l_cycles=2)
    x, changed = tokens(1, 9), tokens(1, 9)
    changed[0, 0] = (x[0, 0] + 1) % 5
    start = torch.zeros(1, 9, 8, dtype=torch.float64), torch.zeros(1, 9, 8, dtype=torch.float64)
    with torch.no_grad():
        ends = [model.layer.cell(start, model.embed(each))[0] for each in (x, changed)]
    moved = (ends[0] - ends[1]).abs().amax(dim=(0, 2)) > 0
    assert moved.tolist() == [True] * 4 + [False] * 5  # two updates of the scratch pad, one of the answer: three positions


def test_learned_starts_get_gradients_that_follow_the_start() -> None:
    model = tiny(start="learned", h_cycles=1, stop=eq.Stop(max_steps=2, on_failure="ignore"), gradient=eq.Unrolled(depth=2))
    model.think(tokens()).logits.square().sum().backward()
    start: Any = model.layer.init
    assert start.vectors.grad is not None and bool((start.vectors.grad != 0).any())


def test_registers_and_the_shape_of_tokens() -> None:
    model = tiny(registers=2)
    assert model.think(tokens()).logits.shape == (3, 6, 5)
    with pytest.raises(ValueError, match=r"must have the shape \(batch, 6\), got \(3, 5\)"):
        model(tokens(positions=5))
    assert tiny(mixer="attention").think(tokens(positions=9)).logits.shape == (3, 9, 5)
    assert tiny(mixer="line").think(tokens(positions=9)).logits.shape == (3, 9, 5)
    with pytest.raises(ValueError, match="needs a square number of positions, got 6"):
        tiny(mixer="square").think(tokens(positions=6))
    with pytest.raises(ValueError, match="needs registers=0, got 2"):
        tiny(mixer="line", registers=2)
    with pytest.raises(ValueError, match="relaxation must lie in"):
        dataclasses.replace(TINY, relaxation=0.0)
    with pytest.raises(ValueError, match="even width per head"):
        tiny(mixer="attention", heads=3)


def test_a_reasoner_fits_one_batch_and_round_trips(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = models.create("reasoner-nano")
    assert isinstance(model, Reasoner)
    x = torch.randint(5, (16, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    state = None
    for step in range(120):
        thought = model.think(x, state)
        state = None if step % 4 == 3 else thought.state
        loss = F.cross_entropy(thought.logits.flatten(0, 1), x.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.3
    same = models.load(models.save(model, tmp_path / "reasoner.safetensors"))
    assert isinstance(same, Reasoner)
    answers = []
    for each in (model, same):
        torch.manual_seed(1)  # of starts and noise
        answers.append(each.think(x).logits)
    torch.testing.assert_close(*answers, rtol=0, atol=0)
