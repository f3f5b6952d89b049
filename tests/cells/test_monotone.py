"""Monotone cells and their splittings, against dense algebra, enumeration and the generic implicit gradient."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import equilibria as eq
from equilibria.cells import circular
from equilibria.cells.circular import Torus, convolve, real_blocks, response
from equilibria.cells.monotone import MonotoneCell, MonotoneLinear, State
from equilibria.cells.monotone_conv import MonotoneConv2d, MonotoneTiers2d
from equilibria.cells.splitting import AdjointCell, ForwardBackward, PeacemanRachford, Readout, Splitting, tune_alpha
from tests.problems import generator

TIGHT = eq.Stop(rtol=1e-13, atol=1e-14, max_steps=4000, on_failure="raise")
EXACT = eq.Implicit(stop=eq.Stop(rtol=1e-13, atol=0.0, max_steps=2000, on_failure="raise"))
SAME: dict[str, Any] = {
    "rtol": 1e-10,
    "atol": 1e-10,
}  # two solves to 1e-13 differ by that over 1 - the rate of the slower one
ROUNDING: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}

CELLS: dict[str, Callable[[], MonotoneCell]] = {
    "linear": lambda: MonotoneLinear(4, 6, m=0.5),
    "conv": lambda: MonotoneConv2d(2, 3, 3, (4, 5), m=0.7),
    "torus": lambda: MonotoneConv2d(2, 3, 3, (6, 5), m=1.0, frame=False),
    "wide kernel": lambda: MonotoneConv2d(1, 2, 5, 5, m=0.7),
    "tiers": lambda: MonotoneTiers2d(2, (2, 3, 2), 3, (8, 4), m=0.7),
    "tiny conv": lambda: MonotoneConv2d(1, 2, 3, 3, m=0.7),
    "tiny tiers": lambda: MonotoneTiers2d(1, (1, 2), 3, 4, m=0.7),
    "tori": lambda: MonotoneTiers2d(2, (2, 3), 3, (6, 8), m=1.0, frame=False),
}
TINY = ["linear", "tiny conv", "tiny tiers"]
SMALL = ["linear", "conv", "tiers"]


def make(kind: str, seed: int = 0, size: float = 1.0) -> MonotoneCell:
    """Return a cell with random weights, `size` times as large as torch's, and scales of either sign."""
    torch.manual_seed(seed)
    cell = CELLS[kind]().double()
    with torch.no_grad():
        for name, parameter in cell.named_parameters():
            if name.endswith("scale"):
                parameter.copy_(size * (torch.rand(()) + 0.5) * (-1) ** torch.randint(2, ()))
            elif name in ("A", "B"):
                parameter.mul_(size)
    return cell


def inputs(cell: MonotoneCell, batch: int = 3, seed: int = 5) -> Tensor:
    shape = (4,) if isinstance(cell, MonotoneLinear) else (cell.U.in_channels, *cell.image)  # type: ignore[union-attr, misc]
    return torch.randn(batch, *shape, dtype=torch.float64, generator=generator(seed))


def parts(state: State) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def flat(state: State) -> Tensor:
    """(batch, n)"""
    return torch.cat([part.flatten(1) for part in parts(state)], dim=1)


def unflat(matrix: Tensor, like: State) -> State:
    pieces = matrix.split([part[0].numel() for part in parts(like)], dim=1)
    shaped = tuple(piece.reshape(-1, *part.shape[1:]) for piece, part in zip(pieces, parts(like), strict=True))
    return shaped if isinstance(like, tuple) else shaped[0]


def dense(cell: MonotoneCell, f: Callable[[State], State]) -> Tensor:
    """Return the matrix of a linear map of states, computed column by column."""
    like = cell.start(inputs(cell, 1))
    n = flat(like).shape[1]
    return flat(f(unflat(torch.eye(n, dtype=torch.float64), like))).T


@torch.no_grad()
def dense_w(cell: MonotoneCell) -> Tensor:
    operator = cell.operator()
    return dense(cell, lambda z: cell.multiply(z, operator))


def loss(z: State) -> Tensor:
    """Return a scalar whose gradient differs in every entry."""
    matrix = flat(z)
    weights = torch.linspace(-1, 2, matrix.numel(), dtype=matrix.dtype).view_as(matrix)
    return (weights * matrix + 0.1 * matrix**3).sum()


def layer(cell: nn.Module, solver: Any = eq.Picard(), gradient: eq.Gradient = EXACT) -> Readout:  # noqa: B008
    return Readout(eq.DEQ(cell, solver=solver, stop=TIGHT, gradient=gradient))


def splittings(cell: MonotoneCell) -> list[Splitting]:
    # for tiers the certified step is a bound, and a careful one; the exact one is several times as long
    eye = torch.eye(len(dense_w(cell)), dtype=torch.float64)
    norm = torch.linalg.matrix_norm(eye - dense_w(cell), 2).item()
    return [ForwardBackward(cell, cell.m / norm**2), PeacemanRachford(cell), PeacemanRachford(cell, alpha=0.3)]


# the operator


@pytest.mark.parametrize("size", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("kind", CELLS)
def test_the_guarantee_holds_for_any_parameters(kind: str, size: float) -> None:
    for seed in range(3):
        cell = make(kind, seed, size)
        rest = torch.eye(len(dense_w(cell)), dtype=torch.float64) - dense_w(cell)
        smallest = torch.linalg.eigvalsh((rest + rest.T) / 2).min().item()
        norm = torch.linalg.matrix_norm(rest, 2).item()
        certificate = cell.certificate()
        assert smallest >= cell.m - 1e-12
        assert certificate.alpha == 2 * certificate.monotonicity / certificate.norm**2
        if isinstance(cell, MonotoneTiers2d):  # bounds, on the safe side
            assert certificate.monotonicity == cell.m and norm <= certificate.norm <= 3 * norm
        else:
            assert certificate.monotonicity == pytest.approx(smallest, rel=1e-10)
            assert certificate.norm == pytest.approx(norm, rel=1e-10)


def test_a_convolution_is_the_sum_over_its_offsets() -> None:
    kernel = torch.randn(2, 3, 3, 3, dtype=torch.float64, generator=generator(0))
    z = torch.randn(1, 3, 4, 5, dtype=torch.float64, generator=generator(1))
    expected = torch.zeros(1, 2, 4, 5, dtype=torch.float64)
    for y in range(4):
        for x in range(5):
            for dy in (-1, 0, 1):
                for dx in (-1, 0, 1):
                    expected[0, :, y, x] += kernel[:, :, dy + 1, dx + 1] @ z[0, :, (y + dy) % 4, (x + dx) % 5]
    torch.testing.assert_close(convolve(z, kernel), expected, **ROUNDING)
    torch.testing.assert_close(
        convolve(z[..., :4], kernel, stride=2), convolve(z[..., :4], kernel)[..., ::2, ::2], **ROUNDING
    )
    spectrum = torch.einsum("yxoi,biyx->boyx", response(kernel, (4, 5), half=False), torch.fft.fft2(z))
    torch.testing.assert_close(torch.fft.ifft2(spectrum).real, expected, **ROUNDING)


@torch.no_grad()
def test_the_convolutional_operator_is_its_formula() -> None:
    cell = make("torus")
    assert isinstance(cell, MonotoneConv2d)
    A, B = (dense(cell, lambda z, k=k: convolve(z, k())) for k in (cell.A, cell.B))  # type: ignore[misc]
    assert torch.linalg.vector_norm(cell.A()) == pytest.approx(cell.A.scale.abs().item())
    expected = (1 - cell.m) * torch.eye(len(A), dtype=torch.float64) - A.T @ A + B - B.T
    torch.testing.assert_close(dense_w(cell), expected, **ROUNDING)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["tiers", "tori"])
def test_the_operator_of_tiers_is_its_formula(kind: str) -> None:
    """-A'A for A with A_i and L_i, and a skew part that cancels everything above the diagonal."""
    cell = make(kind)
    assert isinstance(cell, MonotoneTiers2d)

    def multiply_by_a(z: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        out = [convolve(part, kernel()) for part, kernel in zip(z, cell.A, strict=True)]
        for i, kernel in enumerate(cell.L):
            small = convolve(z[i], kernel())[..., ::2, ::2]
            out[i + 1][..., : small.shape[-2], : small.shape[-1]] += small
        return tuple(out)

    B = dense(cell, lambda z: tuple(convolve(part, kernel()) for part, kernel in zip(z, cell.B, strict=True)))
    A = dense(cell, multiply_by_a)
    square = A.T @ A
    sizes = [torch.Size(shape).numel() for shape in cell.shapes]
    tier = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    above = square * (tier[:, None] < tier[None, :])
    expected = (1 - cell.m) * torch.eye(len(B), dtype=torch.float64) - square + B - B.T + above - above.T
    torch.testing.assert_close(dense_w(cell), expected, **ROUNDING)


@torch.no_grad()
def test_a_framed_torus_equals_zero_padding() -> None:
    cell = make("conv")
    assert isinstance(cell, MonotoneConv2d)
    z = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=generator(2))
    A, B = cell.A(), cell.B()
    square = F.conv_transpose2d(F.conv2d(z, A, padding=2), A, padding=2)
    skew = F.conv2d(z, B, padding=1) - F.conv_transpose2d(z, B, padding=1)
    image = cell.multiply(F.pad(z, (1, 1, 1, 1)), cell.operator())[..., 1:-1, 1:-1]
    torch.testing.assert_close(image, (1 - cell.m) * z - square + skew, **ROUNDING)
    x = inputs(cell)
    plain = F.conv2d(x, cell.U.weight, cell.U.bias, padding=1)
    torch.testing.assert_close(cell.source(x)[..., 1:-1, 1:-1], plain, **ROUNDING)
    framed = layer(PeacemanRachford(cell))(x)
    assert framed[..., 1:-1, 1:-1].any() and not (framed - F.pad(framed[..., 1:-1, 1:-1], (1, 1, 1, 1))).any()


@torch.no_grad()
@pytest.mark.parametrize("kind", CELLS)
def test_inverse_and_transposes_are_those_of_the_matrix(kind: str) -> None:
    cell = make(kind, size=2.0)
    W, operator = dense_w(cell), cell.operator()
    torch.testing.assert_close(dense(cell, lambda z: cell.multiply_transposed(z, operator)), W.T, **ROUNDING)
    for alpha in (0.1, 1.0, 5.0):
        expected = torch.linalg.inv((1 + alpha) * torch.eye(len(W), dtype=torch.float64) - alpha * W)
        inverse = cell.inverse(alpha)
        torch.testing.assert_close(dense(cell, lambda y, v=inverse: cell.solve(y, v)), expected, **ROUNDING)  # type: ignore[misc]
        torch.testing.assert_close(
            dense(cell, lambda y, v=inverse: cell.solve_transposed(y, v)),  # type: ignore[misc]
            expected.T,
            **ROUNDING,
        )


@pytest.mark.parametrize(
    "cell, count",
    [
        (MonotoneLinear(784, 87), 84_313 - 880),
        (MonotoneConv2d(1, 54, 3, 28), 79_500 - 26_470),
        (MonotoneConv2d(3, 81, 3, 32), 172_218 - 51_850),
        (MonotoneTiers2d(1, (16, 32, 32), 3, 28), 81_394 - 25_930),
        (MonotoneTiers2d(3, (16, 32, 60), 3, 32), 170_194 - 60_010),
    ],
    ids=["linear", "MNIST", "CIFAR", "MNIST tiers", "CIFAR tiers"],
)
def test_parameter_counts_are_the_published_ones(cell: nn.Module, count: int) -> None:
    """The published counts are those of the models, without their linear classifiers."""
    assert sum(parameter.numel() for parameter in cell.parameters()) == count


# the transforms


def by_fft(z: Tensor, kernel: Tensor) -> Tensor:
    """Return a convolution by complex products per frequency, the reference for `Torus.apply`."""
    spectrum = torch.einsum("yxoi,biyx->boyx", response(kernel, tuple(z.shape[-2:])), torch.fft.rfft2(z))  # type: ignore[arg-type]
    return torch.fft.irfft2(spectrum, s=z.shape[-2:])


def by_torus(z: Tensor, kernel: Tensor) -> Tensor:
    torus = Torus(tuple(z.shape[-2:]), z)  # type: ignore[arg-type]
    return torus.apply(z, real_blocks(torus.response(kernel).squeeze(1)))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


@pytest.fixture(params=["by matrices", "by matrices, channel by channel", "by fast transforms"])
def all_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with matrix products, with matrix products one channel at a time, and with the FFT."""
    if request.param == "by fast transforms":
        monkeypatch.setattr(circular, "LONGEST", 0)
    if request.param == "by matrices, channel by channel":
        monkeypatch.setattr(circular, "SCRATCH", 1)


@pytest.mark.usefixtures("all_ways")
@pytest.mark.parametrize("size", [(6, 8), (5, 7), (4, 5), (7, 6), (1, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_torus_convolves_like_complex_products(size: tuple[int, int], batch: int) -> None:
    z, kernel = random(batch, 3, *size), random(2, 3, 3, 3, seed=1)
    torch.testing.assert_close(by_torus(z, kernel), by_fft(z, kernel), **ROUNDING)


def test_a_torus_takes_an_empty_batch() -> None:  # as the fast transform does not
    z = random(0, 3, 4, 5).requires_grad_()
    out = by_torus(z, random(2, 3, 3, 3))
    out.sum().backward()
    assert out.shape == (0, 2, 4, 5) and z.grad is not None


@pytest.mark.parametrize("size", [(30, 30), (64, 33), (65, 12)], ids=str)
def test_a_torus_of_the_size_of_images_loses_no_digits(size: tuple[int, int]) -> None:
    z, kernel = random(2, 4, *size), random(5, 4, 3, 3, seed=1)
    assert (Torus(size, z).bases is None) == (max(size) > circular.LONGEST)
    torch.testing.assert_close(by_torus(z, kernel), by_fft(z, kernel), **ROUNDING)
    single = by_torus(z.float(), kernel.float()).double()
    assert (single - by_fft(z, kernel)).norm() < 1e-6 * single.norm()


@pytest.mark.usefixtures("all_ways")
@pytest.mark.parametrize("size, fold", [((6, 8), 1), ((5, 7), 1), ((6, 8), 2), ((8, 6), 2), ((2, 4), 2)], ids=str)
def test_a_spectrum_has_the_length_of_its_image(size: tuple[int, int], fold: int) -> None:
    z = random(3, 2, *size)
    torus = Torus(size, z, fold)
    spectrum = torus.analyse(z)
    assert spectrum.shape == (torus.groups, 2 * fold**2 * 2, 3)
    torch.testing.assert_close(torus.synthesise(spectrum), z, **ROUNDING)
    torch.testing.assert_close(torch.linalg.vector_norm(spectrum), torch.linalg.vector_norm(z), **ROUNDING)
    other = random(*spectrum.shape, seed=1)  # synthesis is the transpose of analysis
    torch.testing.assert_close((spectrum * other).sum(), (z * torus.synthesise(other)).sum(), **ROUNDING)


@pytest.mark.parametrize("size, fold", [((6, 8), 1), ((5, 7), 1), ((6, 8), 2)], ids=str)
def test_both_transforms_give_the_same_spectrum(size: tuple[int, int], fold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    z = random(3, 2, *size)
    slow = Torus(size, z, fold)
    monkeypatch.setattr(circular, "LONGEST", 0)
    fast = Torus(size, z, fold)
    assert slow.bases is not None and fast.bases is None
    torch.testing.assert_close(slow.analyse(z), fast.analyse(z), **ROUNDING)
    assert slow == fast and hash(slow) == hash(fast) != hash(Torus(size, z.float(), fold))
    assert repr(slow) == f"Torus(size={size}, fold={fold})"


@pytest.mark.usefixtures("all_ways")
def test_a_torus_is_differentiable_and_can_be_mapped_over() -> None:
    z, kernel = random(2, 2, 4, 5).requires_grad_(), random(3, 2, 3, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(by_torus, (z, kernel), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(by_torus, (z, kernel), fast_mode=True)
    z, kernel = z.detach(), kernel.detach()
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        for argument in (0, 1):
            got, want = (transform(f, argument)(z, kernel) for f in (by_torus, by_fft))
            torch.testing.assert_close(got, want, **ROUNDING)
    many, kernels = random(3, 2, 2, 4, 5, seed=2), random(3, 3, 2, 3, 3, seed=3)
    for dims in ((0, None), (0, 0), (None, 0), (1, None)):
        got, want = (torch.func.vmap(f, dims)(*_args(dims, many, kernels)) for f in (by_torus, by_fft))
        torch.testing.assert_close(got, want, **ROUNDING)


def _args(dims: tuple[int | None, int | None], z: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    return z if dims[0] is not None else z[0], kernel if dims[1] is not None else kernel[0]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["conv", "torus", "wide kernel", "tiers", "tori"])
def test_inverses_by_fast_transforms_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = make(kind, size=2.0)
    y = unflat(random(2, flat(cell.start(inputs(cell, 1))).shape[1]), cell.start(inputs(cell, 1)))
    operator = cell.operator()
    slow = cell.invert(operator, 0.7)
    monkeypatch.setattr(circular, "LONGEST", 0)
    fast = cell.invert(operator, 0.7)
    for method in (cell.solve, cell.solve_transposed):
        torch.testing.assert_close(flat(method(y, slow)), flat(method(y, fast)), **ROUNDING)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["conv", "tiers"])
def test_a_step_and_its_transpose_can_be_traced(kind: str) -> None:
    """Compiled solves and exported models need this."""
    cell = make(kind)
    splitting = PeacemanRachford(cell)
    prepared = splitting.prepare(inputs(cell))
    like = cell.start(inputs(cell))

    def step(u: Tensor) -> Tensor:
        return flat(splitting(unflat(u, like), *prepared))

    def transpose(u: Tensor) -> Tensor:
        return torch.func.vjp(step, u)[1](u)[0]

    u = random(*flat(like).shape)
    for f in (step, transpose):
        graph = make_fx(torch.func.functionalize(f, remove="mutations"))(u)
        torch.testing.assert_close(graph(u), f(u), **ROUNDING)


def published_step(cell: MonotoneConv2d, u: Tensor, x: Tensor, alpha: float) -> Tensor:
    """Return 2 V(r + alpha c) - r for r = 2 s(u) - u in complex numbers, with the frame removed and added again."""
    matrices = response(cell.operator()[0], cell.shape[1:])
    V = torch.linalg.inv((1 + alpha) * torch.eye(cell.shape[0], dtype=matrices.dtype) - alpha * matrices)
    f = cell.frame
    r = 2 * F.pad(F.relu(u)[..., f:-f, f:-f], (f,) * 4) - u
    spectrum = torch.einsum("yxoi,biyx->boyx", V, torch.fft.rfft2(r + alpha * cell.source(x)))
    return 2 * torch.fft.irfft2(spectrum, s=u.shape[-2:]) - r


@pytest.mark.parametrize("kind", ["conv", "wide kernel"])
def test_a_step_of_peaceman_rachford_is_the_published_one(kind: str) -> None:
    cell = make(kind, size=2.0)
    assert isinstance(cell, MonotoneConv2d)
    x = inputs(cell).requires_grad_()
    u = random(3, *cell.shape).requires_grad_()
    splitting = PeacemanRachford(cell, alpha=0.3)
    got, want = splitting(u, *splitting.prepare(x)), published_step(cell, u, x, 0.3)
    torch.testing.assert_close(got, want, **SAME)
    leaves = [u, x, *cell.parameters()]
    for a, b in zip(*(torch.autograd.grad(loss(out), leaves) for out in (got, want)), strict=True):
        torch.testing.assert_close(a, b, **SAME)


def test_the_framed_relu_is_relu_and_a_frame() -> None:
    cell = make("conv")
    assert isinstance(cell, MonotoneConv2d)

    def plain(u: Tensor) -> Tensor:
        return F.pad(F.relu(u)[..., 1:-1, 1:-1], (1, 1, 1, 1))

    def framed(u: Tensor) -> Tensor:
        return cell.project(u, None)

    u = random(2, *cell.shape)
    u[0, 0, 2] = 0.0  # where relu has no derivative, and torch takes 0
    torch.testing.assert_close(framed(u), plain(u), rtol=0.0, atol=0.0)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(framed)(u[:1]), transform(plain)(u[:1]), rtol=0.0, atol=0.0)
    torch.testing.assert_close(torch.func.vmap(framed, 1, 1)(u), plain(u), rtol=0.0, atol=0.0)
    leaf = random(2, *cell.shape, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(framed, leaf, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(framed, leaf, fast_mode=True)
    u[1, 0, 2, 2] = torch.nan  # a nan must not be hidden from the solver
    assert framed(u)[1, 0, 2, 2].isnan() and framed(u).isnan().sum() == 1


# the equilibrium


def by_enumeration(W: Tensor, c: Tensor) -> Tensor:
    """Return the z with z = relu(W z + c), found by trying every set of positive entries."""
    n, found = len(c), []
    for code in range(2**n):
        on = torch.tensor([bool(code >> i & 1) for i in range(n)])
        z = torch.zeros_like(c)
        z[on] = torch.linalg.solve(torch.eye(int(on.sum()), dtype=c.dtype) - W[on][:, on], c[on])
        if (z >= 0).all() and ((W @ z + c)[~on] <= 0).all():
            found.append(z)
    assert len(found) == 1  # it exists, and it is unique
    return found[0]


@torch.no_grad()
def test_splittings_find_the_one_equilibrium() -> None:
    cell = make("linear", size=2.0)
    x, W = inputs(cell), dense_w(cell)
    assert torch.linalg.matrix_norm(W, 2) > 3
    exact = torch.stack([by_enumeration(W, c) for c in cell.source(x)])
    assert 0 < (exact > 0).double().mean() < 1
    for splitting in splittings(cell):
        torch.testing.assert_close(layer(splitting)(x), exact, **SAME)


@torch.no_grad()
@pytest.mark.parametrize("kind", CELLS)
def test_every_solver_on_every_splitting_has_the_same_answer(kind: str) -> None:
    cell = make(kind, size=1.3)
    x = inputs(cell)
    prepared = cell.prepare(x)
    expected = layer(PeacemanRachford(cell))(x)
    torch.testing.assert_close(flat(cell(expected, *prepared)), flat(expected), **SAME)
    for map_ in (cell, *splittings(cell)):
        for solver in (eq.Picard(), eq.Anderson(), eq.Broyden(), eq.Newton()):
            if map_ is not cell or not isinstance(solver, eq.Picard):
                z = layer(map_, solver)(x)
                torch.testing.assert_close(flat(z), flat(expected), **SAME)


@torch.no_grad()
@pytest.mark.parametrize("kind", SMALL)
def test_splittings_converge_where_plain_iteration_diverges(kind: str) -> None:
    cell = make(kind, size=1.5)
    x, certificate = inputs(cell), cell.certificate()
    stop = eq.Stop(rtol=1e-6, atol=0.0, max_steps=3000, on_failure="ignore")

    def steps(map_: nn.Module) -> Tensor:
        stats = eq.DEQ(map_, init=cell.start, solver=eq.Picard(), stop=stop).solve(x).stats
        return torch.where(stats.converged, stats.steps, 10**6).max()

    assert torch.linalg.matrix_norm(dense_w(cell), 2) > 1
    assert steps(cell) == 10**6
    forward_backward = steps(ForwardBackward(cell, 0.99 * certificate.alpha))
    counts = {alpha: int(steps(PeacemanRachford(cell, alpha))) for alpha in (0.05, 0.2, 1.0, 5.0)}
    assert max(counts.values()) < 10**6 > forward_backward
    # the best step of Peaceman-Rachford saves iterations: 4 to 40 fold on these cells
    assert 3 * min(counts.values()) < int(forward_backward), (kind, int(forward_backward), counts)


@torch.no_grad()
def test_peaceman_rachford_takes_the_published_number_of_steps() -> None:
    """The released models take 5 to 9 steps at a tolerance of 1e-2."""
    torch.manual_seed(0)
    cell = MonotoneLinear(784, 87)
    x = torch.rand(16, 784)
    deq = eq.DEQ(PeacemanRachford(cell), init=cell.start, solver=eq.Picard(), stop=eq.Stop(rtol=1e-2, on_failure="raise"))
    assert deq.solve(x).stats.steps.max() <= 9


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 6, 7])
def test_weights_are_not_mistaken_for_rows_of_the_batch(batch: int) -> None:
    """With six samples and a 6 x 6 matrix, dropping rows that converged must not drop rows of the matrix."""
    cell = make("linear", size=2.0)
    x = inputs(cell, batch) * torch.logspace(-6, 1, batch, dtype=torch.float64).unsqueeze(1)
    deq = eq.DEQ(
        PeacemanRachford(cell), init=cell.start, solver=eq.Picard(), stop=eq.Stop(rtol=0.0, atol=1e-6, max_steps=99)
    )
    stats = deq.solve(x).stats
    alone = torch.cat([deq(row.unsqueeze(0)) for row in x])
    torch.testing.assert_close(deq(x), alone, rtol=0.0, atol=1e-12)
    assert batch == 1 or stats.sample_evaluations < batch * stats.evaluations


# the gradient


def gradients(layer_: nn.Module, cell: MonotoneCell, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(loss(layer_(x)), [x, *cell.parameters()]))


def as_function(kind: str, index: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return a layer as a function of x and its parameters, and values for them away from the kinks of relu."""
    cell = make(kind)
    model = layer(splittings(cell)[index], eq.Anderson())  # finite differences solve hundreds of times
    names = [name for name, _ in model.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return flat(functional_call(model, dict(zip(names, parameters, strict=True)), (x,)))

    x = inputs(cell, 2)
    z = layer(PeacemanRachford(cell))(x)
    assert flat(cell.affine(z, *cell.prepare(x))).abs().min() > 2e-5
    return run, [tensor.detach().clone().requires_grad_() for tensor in (x, *model.parameters())]


BY_INDEX = pytest.mark.parametrize("index", range(3), ids=["forward-backward", "Peaceman-Rachford", "with another step"])


@BY_INDEX
@pytest.mark.parametrize("kind", TINY)
def test_splittings_pass_gradcheck(kind: str, index: int) -> None:
    assert torch.autograd.gradcheck(*as_function(kind, index), fast_mode=True)


@BY_INDEX
@pytest.mark.parametrize("kind", ["linear", "tiny conv", pytest.param("tiny tiers", marks=pytest.mark.slow)])
def test_splittings_pass_gradgradcheck(kind: str, index: int) -> None:
    assert torch.autograd.gradgradcheck(*as_function(kind, index), fast_mode=True)


@pytest.mark.parametrize("kind", CELLS)
def test_all_gradients_agree_with_a_dense_solve(kind: str) -> None:
    """The reference is a dense solve of u = J(g + W'u) and one step of the cell; all maps and adjoint solvers match it."""
    cell = make(kind)
    x = inputs(cell)
    z = unflat(flat(layer(PeacemanRachford(cell))(x)).detach(), cell.start(x))
    u = unflat(dense_adjoint(cell, z), z)
    leaf = x.clone().requires_grad_()
    pulled = cell.affine(z, *cell.prepare(leaf))
    expected = torch.autograd.grad(parts(pulled), [leaf, *cell.parameters()], parts(u))
    picard = eq.Implicit(solver=eq.Picard(), stop=TIGHT)
    for gradient in (EXACT, picard):
        for splitting in splittings(cell):
            for got, want in zip(gradients(layer(splitting, gradient=gradient), cell, x), expected, strict=True):
                torch.testing.assert_close(got, want, **SAME)
    for got, want in zip(gradients(layer(cell, eq.Anderson()), cell, x), expected, strict=True):
        torch.testing.assert_close(got, want, **SAME)


def cotangent(z: State) -> State:
    with torch.enable_grad():
        matrix = flat(z).detach().requires_grad_()
        return unflat(torch.autograd.grad(loss(matrix), matrix)[0], z)


def dense_adjoint(cell: MonotoneCell, z: State) -> Tensor:
    W, g, J = dense_w(cell), flat(cotangent(z)), (flat(z) > 0).double()
    eye = torch.eye(len(W), dtype=torch.float64)
    return torch.stack([torch.linalg.solve(eye - j[:, None] * W.T, j * v) for j, v in zip(J, g, strict=True)])


@torch.no_grad()
@pytest.mark.parametrize("kind", CELLS)
def test_the_adjoint_cell_solves_the_adjoint_equation(kind: str) -> None:
    cell = make(kind)
    z = layer(PeacemanRachford(cell))(inputs(cell))
    g = cotangent(z)
    expected = dense_adjoint(cell, z)
    adjoint = AdjointCell(cell)
    assert adjoint.certificate() == cell.certificate()
    for splitting in (adjoint, *splittings_like(cell, adjoint)):
        for solver in (eq.Picard(), eq.Anderson()):
            if splitting is not adjoint or not isinstance(solver, eq.Picard):
                torch.testing.assert_close(flat(layer(splitting, solver)(z, g)), expected, **SAME)


def splittings_like(cell: MonotoneCell, adjoint: AdjointCell) -> list[Splitting]:
    return [type(splitting)(adjoint, splitting.alpha) for splitting in splittings(cell)]


@torch.no_grad()
@pytest.mark.parametrize("kind", SMALL)
def test_the_published_reverse_iterations_find_the_adjoint(kind: str) -> None:
    """As in the paper, D = (1 - J) / J is infinite where J = 0, and the entries there are set to zero."""
    cell = make(kind)
    z = layer(PeacemanRachford(cell))(inputs(cell))
    W, g, J = dense_w(cell), flat(cotangent(z)), (flat(z) > 0).double()
    eye, v, D = torch.eye(len(W), dtype=torch.float64), J * g, (1 - J) / J

    def prox(y: Tensor, alpha: float) -> Tensor:
        return torch.where(J == 0, v, (y + alpha * (1 + D) * v) / (1 + alpha * D))

    alpha = cell.m / torch.linalg.matrix_norm(eye - W, 2).item() ** 2
    u = torch.zeros_like(v)
    for _ in range(2000):
        u = prox((1 - alpha) * u + alpha * u @ W, alpha)
    y, inverse = torch.zeros_like(v), torch.linalg.inv(2 * eye - W)
    for _ in range(300):
        half = 2 * prox(y, 1.0) - y
        y = 2 * half @ inverse - half
    expected = dense_adjoint(cell, z)
    torch.testing.assert_close(u, expected, **SAME)
    torch.testing.assert_close(prox(y, 1.0), expected, **SAME)


def test_alpha_may_be_tuned_between_forward_and_backward() -> None:
    cell = make("linear")
    x = inputs(cell)
    for splitting in splittings(cell):
        expected = gradients(layer(splitting), cell, x)
        leaf = x.clone().requires_grad_()
        value = loss(layer(splitting)(leaf))
        splitting.alpha *= 2
        got = torch.autograd.grad(value, [leaf, *cell.parameters()])
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, **SAME)


def test_a_monotone_layer_trains() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    y = (x[:, 0] * x[:, 1] > 0).long()  # not linearly separable
    deq = eq.DEQ(PeacemanRachford(MonotoneLinear(6, 16)), solver=eq.Picard())
    model = nn.Sequential(Readout(deq), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        value = F.cross_entropy(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < 0.3 * losses[0]


# the inverse that is kept


class Counted(MonotoneLinear):
    inversions = 0

    def invert(self, operator: Tensor, alpha: float) -> Tensor:
        self.inversions += 1
        return super().invert(operator, alpha)


@pytest.fixture
def counted() -> tuple[Counted, Readout, Tensor]:
    torch.manual_seed(0)
    cell = Counted(4, 6).double()
    return cell, layer(PeacemanRachford(cell)), inputs(cell)


def fresh(cell: MonotoneLinear, x: Tensor) -> Tensor:
    """Return the equilibrium of a cell without a cached inverse."""
    other = MonotoneLinear(4, 6).to(cell.A.dtype)
    other.load_state_dict(cell.state_dict())
    stop = TIGHT if x.dtype == torch.float64 else eq.Stop(rtol=1e-6, max_steps=200)
    return Readout(eq.DEQ(PeacemanRachford(other), solver=eq.Picard(), stop=stop))(x).detach()


def test_the_inverse_is_reused_while_the_weights_stay(counted: tuple[Counted, Readout, Tensor]) -> None:
    cell, model, x = counted
    with torch.no_grad():
        first = model(x)
        assert torch.equal(model(x), first) and torch.equal(model(x[:2]), first[:2])
        assert cell.inversions == 1
        layer(PeacemanRachford(AdjointCell(cell)))(first, torch.ones_like(first))
        assert cell.inversions == 1  # the adjoint shares it
        cell.inverse(2.0)
        assert cell.inversions == 2
    model.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    cell.inverse(1.0)
    model(leaf).sum().backward()
    assert cell.inversions == 3 and leaf.grad is not None  # gradients of x alone need no new inverse


def test_the_inverse_is_never_stale(counted: tuple[Counted, Readout, Tensor]) -> None:
    cell, model, x = counted

    def changes() -> list[Callable[[], Any]]:
        state = {name: 1.5 * value for name, value in cell.state_dict().items()}
        optimizers = [torch.optim.SGD(cell.parameters(), 0.1), torch.optim.Adam(cell.parameters(), 0.1, fused=True)]
        return [
            *(optimizer.step for optimizer in optimizers),
            lambda: cell.load_state_dict(state),
            lambda: cell.load_state_dict({k: v / 2 for k, v in state.items()}, assign=True),
            lambda: cell.A.data.mul_(1.1),  # behind the version counter
            lambda: setattr(cell.B, "data", cell.B.data + 0.1),  # behind the module
            lambda: setattr(cell, "m", 2.0),
            lambda: setattr(cell, "m", 1.0),
        ]

    for i in range(len(changes())):
        model(x).sum().backward()  # gradients for the optimizers
        with torch.no_grad():
            model(x)
            changes()[i]()
            before = cell.inversions
            after = model(x)
            assert cell.inversions == before + 1, i
        expected = fresh(cell, x) if cell.m == 1 else None
        assert expected is None or torch.allclose(after, expected, **SAME), i
    cell.float()
    with torch.no_grad():
        assert cell.inverse(1.0).dtype == torch.float32


def test_training_differentiates_the_inverse_and_caches_none(counted: tuple[Counted, Readout, Tensor]) -> None:
    cell, model, x = counted
    with torch.no_grad():
        model(x)
    for count in (2, 3):
        model(x).sum().backward()
        assert cell.inversions == count
    assert cell.A.grad is not None and cell.A.grad.any()
    assert cell._known is not None and not cell._known.value.requires_grad


def test_an_inverse_of_inference_mode_is_not_used_outside_it(counted: tuple[Counted, Readout, Tensor]) -> None:
    cell, model, x = counted
    model.requires_grad_(False)
    with torch.inference_mode():
        expected = model(x)
    leaf = x.clone().requires_grad_()
    z = model(leaf)
    z.sum().backward()
    assert cell.inversions == 2 and torch.equal(z, expected)


def test_cached_inverses_do_not_drop_derivatives_under_transforms(counted: tuple[Counted, Readout, Tensor]) -> None:
    cell, model, x = counted
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def value(parameters: dict[str, Tensor]) -> Tensor:
        return loss(functional_call(model, parameters, (x,)))

    model.requires_grad_(False)
    model(x)  # caches an inverse that would be wrong for the calls below
    reverse = torch.func.grad(value)(parameters)
    tangents = {name: torch.randn_like(tensor) for name, tensor in parameters.items()}
    forward = torch.func.jvp(value, (parameters,), (tangents,))[1]
    expected = sum((reverse[name] * tangents[name]).sum() for name in parameters)
    assert reverse["deq.cell.cell.A"].any()
    torch.testing.assert_close(forward, expected, **SAME)
    stacked = {name: torch.stack([tensor, 1.1 * tensor]) for name, tensor in parameters.items()}
    torch.testing.assert_close(torch.func.vmap(value)(stacked)[0], value(parameters), **SAME)
    cell._known = None
    torch.func.grad(lambda x: loss(model(x)))(x)
    model(x)  # must not use anything cached inside the transform


def test_copies_and_pickles_contain_no_cached_inverse(counted: tuple[Counted, Readout, Tensor]) -> None:
    cell, model, x = counted
    with torch.no_grad():
        expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        inner = twin.get_submodule("deq.cell.cell")
        assert isinstance(inner, Counted)
        assert inner._known is None and cell._known is not None
        with torch.no_grad():
            assert torch.equal(twin(x), expected)
            inner.A.mul_(2)
            assert not torch.equal(twin(x), expected) and torch.equal(model(x), expected)
    assert set(model.state_dict()) == {f"deq.cell.cell.{name}" for name in ("A", "B", "U.weight", "U.bias")}


@pytest.mark.parametrize("kind", SMALL)
def test_monotone_cells_run_under_autocast(kind: str) -> None:
    cell = make(kind).float()
    deq = eq.DEQ(PeacemanRachford(cell), solver=eq.Picard(), stop=eq.Stop(rtol=2e-2, on_failure="raise"))
    x = inputs(cell).float()
    with torch.autocast("cpu", torch.bfloat16):
        z = Readout(deq)(x)
    loss(z).backward()
    expected = layer(PeacemanRachford(copy.deepcopy(cell).double()))(x.double())
    torch.testing.assert_close(flat(z).double(), flat(expected), rtol=0.05, atol=0.05)
    assert all(torch.isfinite(parameter.grad).all() for parameter in cell.parameters() if parameter.grad is not None)


# steps and mistakes


@torch.no_grad()
def test_tune_alpha_halves_alpha_while_steps_do_not_grow() -> None:
    cell = make("linear", size=3.0)
    splitting = PeacemanRachford(cell, alpha=7.0)
    deq = eq.DEQ(splitting, init=cell.start, solver=eq.Picard(), stop=eq.Stop(rtol=1e-6, max_steps=500))
    x, tried = inputs(cell), []

    def steps() -> Tensor:
        tried.append(splitting.alpha)
        return deq.solve(x).stats.steps.max()

    best = tune_alpha(splitting, steps)
    counts = []
    for alpha in tried:
        splitting.alpha = alpha
        counts.append(int(deq.solve(x).stats.steps.max()))
    assert tried == [2.0**-i for i in range(len(tried))] and best == tried[-2]
    assert counts[:-1] == sorted(counts[:-1], reverse=True) and counts[-1] > counts[-2] < counts[0]


def test_alpha_stays_as_it_was_when_a_trial_fails() -> None:
    splitting = PeacemanRachford(make("linear"), alpha=7.0)

    def fail() -> float:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        tune_alpha(splitting, fail)
    assert splitting.alpha == 7.0
    assert tune_alpha(splitting, lambda: 1.0, largest=2.0, halvings=3) == 0.25 == splitting.alpha


@pytest.mark.parametrize(
    "mistake, message",
    [
        (lambda: MonotoneLinear(4, 6, m=0.0), r"m must be positive, got 0.0.*Leave it at 1.0"),
        (lambda: MonotoneConv2d(1, 2, 3, 8, m=-1.0), r"m must be positive, got -1.0"),
        (lambda: MonotoneLinear(4, 0), r"width must be at least 1, got 0"),
        (lambda: MonotoneConv2d(1, 2, 4, 8), r"kernel_size must be odd.*got 4. Use 3"),
        (lambda: MonotoneConv2d(1, 2, 5, (8, 4)), r"at least as large as the kernel, 5, got \(8, 4\)"),
        (lambda: MonotoneTiers2d(1, (2, 2, 2), 3, 10), r"divisible by 4.*got \(10, 10\). Pad the image"),
        (lambda: MonotoneTiers2d(1, (), 3, 10), r"tiers must be at least 1, got 0"),
        (lambda: ForwardBackward(MonotoneLinear(4, 6), 0.0), r"alpha must be positive, got 0.0.*tune_alpha"),
        (lambda: PeacemanRachford(MonotoneLinear(4, 6), -1.0), r"alpha must be positive, got -1.0"),
        (lambda: PeacemanRachford(MonotoneLinear(4, 6), float("nan")), r"alpha must be positive, got nan"),
        (lambda: PeacemanRachford(nn.Linear(3, 3)), r"takes a monotone cell, got Linear"),  # type: ignore[arg-type]
        (lambda: Readout(nn.Linear(3, 3)), r"eq.DEQ\(splitting\)"),
        (lambda: MonotoneLinear(4, 6).prepare(torch.zeros(2, 5)), r"\(batch, 4\), got \(2, 5\).*inputs=5"),
        (lambda: MonotoneLinear(4, 6).prepare(torch.zeros(4)), r"\(batch, 4\), got \(4,\)"),
        (lambda: MonotoneConv2d(1, 2, 3, 8).prepare(torch.zeros(2, 1, 8, 9)), r"\(batch, 1, 8, 8\), got \(2, 1, 8, 9\)"),
        (lambda: MonotoneTiers2d(1, (2, 2), 3, 8).prepare(torch.zeros(2, 8, 8)), r"\(batch, 1, 8, 8\), got \(2, 8, 8\)"),
        (lambda: eq.DEQ(MonotoneLinear(4, 6))(torch.zeros(2, 4)), r"\(batch, 6\), got \(2, 4\). Start with init=cell.start"),
        (
            lambda: eq.DEQ(PeacemanRachford(MonotoneConv2d(1, 2, 3, 8)))(torch.zeros(2, 1, 8, 8)),
            r"\(batch, 2, 10, 10\), got \(2, 1, 8, 8\)",
        ),
        (lambda: eq.DEQ(MonotoneTiers2d(1, (2, 2), 3, 8))(torch.zeros(2, 1, 8, 8)), r"a tuple of 2 tiers, got Tensor"),
        (lambda: AdjointCell(MonotoneLinear(4, 6)).source(torch.zeros(1, 6), torch.zeros(1, 5)), r"got \(1, 5\)"),
        (
            lambda: AdjointCell(AdjointCell(MonotoneLinear(4, 6))).source(*[torch.zeros(1, 6)] * 2),
            r"has no adjoint of its own",
        ),
    ],
)
def test_invalid_arguments_raise_with_a_remedy(mistake: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        mistake()


def test_setting_an_invalid_alpha_raises() -> None:
    splitting = PeacemanRachford(MonotoneLinear(4, 6))
    with pytest.raises(ValueError, match="alpha must be positive, got 0"):
        splitting.alpha = 0.0
    assert splitting.alpha == 1.0 and "alpha=1.0" in repr(splitting) and "m=1.0" in repr(splitting)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["linear", "convolution", "tiers"])
def test_monotone_cells_run_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    """torch has no inverse, eigenvalues or Fourier transform in half precision, so these are computed in float32."""
    torch.manual_seed(0)
    cells: dict[str, MonotoneCell] = {
        "linear": MonotoneLinear(5, 6),
        "convolution": MonotoneConv2d(2, 3, 3, 8),
        "tiers": MonotoneTiers2d(2, (3, 4), 3, 8),
    }
    cell = cells[kind].to(dtype)
    x = torch.randn(2, 5, dtype=dtype) if kind == "linear" else torch.randn(2, 2, 8, 8, dtype=dtype)
    wide = copy.deepcopy(cell).float()
    certificate, expected = cell.certificate(), wide.certificate()
    torch.testing.assert_close(certificate.norm, expected.norm, rtol=2e-2, atol=0.0)
    torch.testing.assert_close(certificate.monotonicity, expected.monotonicity, rtol=2e-2, atol=0.0)
    for make in (PeacemanRachford, lambda cell: ForwardBackward(cell, 0.2)):
        # an adjoint of this cell stalls near one spacing of the dtype, on either side of it: four can be reached
        gradient = eq.Implicit(stop=eq.Stop(rtol=4 * torch.finfo(dtype).eps, max_steps=200))
        z = Readout(eq.DEQ(make(cell), solver=eq.Picard(), stop=eq.Stop(max_steps=200), gradient=gradient))(x)
        reference = Readout(eq.DEQ(make(wide), solver=eq.Picard(), stop=eq.Stop(rtol=1e-5, max_steps=500)))(x.float())
        for part, exact in zip(*[(y,) if isinstance(y, Tensor) else y for y in (z, reference)], strict=True):
            assert part.dtype == dtype
            torch.testing.assert_close(part.float(), exact, rtol=0.1, atol=0.1 * float(exact.detach().abs().max()))
        cell.zero_grad()
        torch.stack([part.float().sum() for part in ((z,) if isinstance(z, Tensor) else z)]).sum().backward()
        assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in cell.parameters())
