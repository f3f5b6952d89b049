"""Inverse problems: adjoints by dot products, proximal maps by dense algebra, contraction, and the deepinv interface."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria import models
from equilibria.models.images.inverse.cells import differences, differences_adjoint
from equilibria.models.images.inverse.regularizers import CircularNorm, cosine_transform

SIZE = 6
SOLVED = 1e-8  # float64, solves to a residual of 1e-11
TIGHT = eq.Stop(rtol=1e-11, atol=1e-13, max_steps=3000, on_failure="raise")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def operators() -> dict[str, models.Operator]:
    kernel = torch.rand(3, 3, generator=generator())
    return {
        "blur": models.Blur(kernel / kernel.sum(), (SIZE, SIZE)).double(),
        "inpainting": models.Inpainting(models.random_mask((SIZE, SIZE), 0.5, generator())).double(),
        "fourier": models.FourierRows(models.random_mask((SIZE, SIZE), 0.4, generator(), centre=1)).double(),
        "radon": models.Radon(SIZE, 4).double(),
    }


OPERATORS = operators()


def image(batch: int = 2, channels: int = 1) -> Tensor:
    return torch.rand(batch, channels, SIZE, SIZE, generator=generator(1), dtype=torch.float64)


def dense(operator: models.Operator) -> Tensor:
    """Return A as a matrix."""
    basis = torch.eye(SIZE * SIZE, dtype=torch.float64).view(-1, 1, SIZE, SIZE)
    return operator(basis).flatten(1).T


def denoiser(contraction: float = 0.9) -> models.ContractiveDenoiser:
    torch.manual_seed(0)
    found = models.ContractiveDenoiser((SIZE, SIZE), filters=4, reach=3, contraction=contraction).double()
    with torch.no_grad():
        for name, weight in found.named_parameters():
            if name.endswith("original"):
                weight.mul_(30)
    return found


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_adjoint_passes_the_dot_product_test(name: str, channels: int) -> None:
    assert models.adjoint_error(OPERATORS[name], image(channels=channels), generator(2)) < 1e-13


@pytest.mark.parametrize("name", OPERATORS)
def test_the_norm_is_a_close_upper_bound(name: str) -> None:
    exact = float(torch.linalg.matrix_norm(dense(OPERATORS[name]), ord=2)) ** 2
    assert exact <= OPERATORS[name].squared_norm() * (1 + 1e-12) < 4 * exact


@pytest.mark.parametrize("name", OPERATORS)
def test_the_proximal_map_solves_its_dense_system(name: str) -> None:
    operator, v = OPERATORS[name], image()
    matrix, y = dense(operator), operator(image().flip(0))
    system = torch.eye(SIZE**2, dtype=torch.float64) + 3.0 * matrix.T @ matrix
    right = v.flatten(1) + 3.0 * y.flatten(1) @ matrix
    expected = torch.linalg.solve(system, right.T).T.view_as(v)
    torch.testing.assert_close(operator.proximal(v, y, 3.0), expected, rtol=1e-9, atol=1e-10)


def test_a_blur_moves_a_bright_pixel_as_its_kernel() -> None:
    kernel = torch.zeros(3, 3, dtype=torch.float64)
    kernel[0, 1] = 1.0  # one row up
    torch.testing.assert_close(models.Blur(kernel, (SIZE, SIZE))(image()), image().roll(-1, -2))


def test_rays_along_the_axes_are_sums_of_columns_and_rows() -> None:
    radon, x = models.Radon(SIZE, 2).double(), image(1)
    seen = radon(x)[0, 0] * (2 * SIZE) ** 0.5
    total = x.sum()
    torch.testing.assert_close(seen.sum(dim=1), torch.stack([total, total]), rtol=1e-6, atol=1e-6)
    centre = (torch.arange(radon.bins) - (radon.bins - 1) / 2).double()
    place = torch.arange(SIZE).double() - (SIZE - 1) / 2
    moments = torch.stack([(x[0, 0].sum(0) * place).sum(), (x[0, 0].sum(1) * place).sum()])
    torch.testing.assert_close(seen @ centre, moments, rtol=1e-5, atol=1e-5)


def test_differences_have_their_adjoint_and_a_norm_below_8() -> None:
    x, p = image(), torch.randn(2, 1, SIZE, SIZE, 2, generator=generator(3), dtype=torch.float64)
    torch.testing.assert_close((differences(x) * p).sum(), (x * differences_adjoint(p)).sum())
    basis = torch.eye(SIZE**2, dtype=torch.float64).view(-1, 1, SIZE, SIZE)
    assert float(torch.linalg.matrix_norm(differences(basis).flatten(1), ord=2)) ** 2 <= 8 + 1e-12


def test_the_cosine_transform_is_orthonormal() -> None:
    matrix = cosine_transform(SIZE).double()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(SIZE, dtype=torch.float64), rtol=0, atol=1e-6)


def test_the_norm_of_a_circular_convolution_is_exact() -> None:
    kernel = torch.randn(4, 1, 3, 3, generator=generator(), dtype=torch.float64)
    from equilibria.cells.circular import convolve

    basis = torch.eye(SIZE**2, dtype=torch.float64).view(-1, 1, SIZE, SIZE)
    exact = torch.linalg.matrix_norm(convolve(basis, kernel).flatten(1), ord=2)
    torch.testing.assert_close(CircularNorm((SIZE, SIZE), 1.0).norm(kernel), exact)


def jacobian_norm(f: Any, x: Tensor) -> float:
    jacobian = torch.func.jacrev(f)(x).detach().view(x.numel(), x.numel())
    return float(torch.linalg.matrix_norm(jacobian, ord=2))


@pytest.mark.parametrize("contraction", [0.9, 1.0])
def test_a_denoiser_keeps_its_lipschitz_constant(contraction: float) -> None:
    found = denoiser(contraction)
    for scale in (0.001, 0.1, 10.0):
        assert jacobian_norm(found, scale * image(1)) <= contraction + 1e-9


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", [models.ProximalGradient, models.HQS])
def test_contraction_is_certified(name: str, kind: Any) -> None:
    cell = kind(OPERATORS[name], denoiser()).double()
    injected = cell.prepare(OPERATORS[name](image(1)))
    assert jacobian_norm(lambda x: cell(x, injected), image(1)) <= 0.9 + 1e-9


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", [models.ProximalGradient, models.ADMM])
def test_splittings_find_the_same_stationary_point(name: str, kind: Any) -> None:
    """With soft thresholds both solve 1/2 |A x - y|² + weight |D x|_1; optimality is checked on the subgradient.

    Plain iteration finds it from any start. Anderson need not: without contraction its steps may grow without bound.
    """
    operator, weight = OPERATORS[name], 0.05
    y, threshold = operator(image()), models.SoftThreshold(SIZE).double()
    cell = kind(operator, threshold).double()
    with torch.no_grad():
        share = cell.step if kind is models.ProximalGradient else cell.log_weight.exp()
        threshold.log_threshold.copy_(torch.log(weight * share))
    stop = eq.Stop(rtol=1e-8, max_steps=100_000, on_failure="raise")
    model = models.Restoration(cell, solver=eq.Picard(), stop=stop, gradient=eq.JFB(training_only=True)).eval()
    with torch.no_grad():
        x = model(y)
        coefficients = threshold.transform @ x @ threshold.transform.T
        slope = threshold.transform @ operator.adjoint(operator(x) - y) @ threshold.transform.T
    active = coefficients.abs() > 1e-6
    assert float(slope.abs().max()) <= weight + 1e-5
    torch.testing.assert_close(slope[active], -weight * coefficients[active].sign(), rtol=0, atol=1e-5)


def test_total_variation_denoising_of_a_step_matches_the_known_solution() -> None:
    """Without blur, two plateaus of an image approach each other by weight times perimeter over area."""
    x = torch.zeros(1, 1, SIZE, SIZE, dtype=torch.float64)
    x[..., SIZE // 2 :] = 1.0
    cell = models.TotalVariation(models.Inpainting(torch.ones(SIZE, SIZE)).double(), weight=0.1).double()
    model = models.Restoration(cell, solver=eq.Anderson(), stop=eq.Stop(rtol=1e-9, max_steps=5000)).eval()
    with torch.no_grad():
        found = model(x)
    shift = 0.1 * 2 * SIZE / (SIZE * SIZE / 2)  # both outlines of a half, since differences are periodic
    expected = shift + (1 - 2 * shift) * x
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [models.ProximalGradient, models.HQS, models.ADMM])
def test_gradients_are_those_of_a_deep_unrolled_network(kind: Any) -> None:
    operator = OPERATORS["blur"]
    cell, y = kind(operator, denoiser()).double(), operator(image())
    equilibrium = models.Restoration(cell, stop=TIGHT, gradient=eq.Implicit(stop=TIGHT))
    unrolled = models.Restoration(cell, depth=400)
    wanted = [p for p in cell.parameters() if p.requires_grad]
    ours, deep = (torch.autograd.grad(model(y).square().sum(), wanted) for model in (equilibrium, unrolled))
    for a, b in zip(ours, deep, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class StandIn:
    """The interface of a linear physics of deepinv: measurements, adjoint and the proximal map of the data term."""

    def __init__(self, operator: models.Operator) -> None:
        self.operator = operator

    def A(self, x: Tensor) -> Tensor:  # noqa: N802
        return torch.as_tensor(self.operator(x))

    def A_adjoint(self, y: Tensor) -> Tensor:  # noqa: N802
        return self.operator.adjoint(y)

    def prox_l2(self, z: Tensor, y: Tensor, gamma: Any) -> Tensor:
        return self.operator.proximal(z, y, gamma)


@pytest.mark.parametrize("kind", [models.ProximalGradient, models.HQS, models.ADMM])
def test_a_physics_of_deepinv_replaces_an_operator(kind: Any) -> None:
    own = OPERATORS["inpainting"]
    theirs = models.DeepinvOperator(StandIn(own), own.squared_norm())
    assert models.adjoint_error(theirs, image(), generator(4)) < 1e-13
    found = [
        models.Restoration(kind(operator, denoiser()).double(), stop=TIGHT).eval()(own(image()))
        for operator in (own, theirs)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=SOLVED, atol=SOLVED)


def test_a_denoiser_of_deepinv_is_called_with_its_level_of_noise() -> None:
    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.share = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor, sigma: float) -> Tensor:
            return x * self.share - sigma

    fixed = models.DeepinvDenoiser(Theirs(), 0.1)
    torch.testing.assert_close(fixed(torch.ones(1)), torch.tensor([0.4]))
    assert not any(p.requires_grad for p in fixed.parameters())
    assert all(p.requires_grad for p in models.DeepinvDenoiser(Theirs(), 0.1, trained=True).parameters())


def test_invalid_arguments_of_inverse_problems_raise() -> None:
    with pytest.raises(ValueError, match="odd side"):
        models.Blur(torch.ones(2, 2), (SIZE, SIZE))
    with pytest.raises(ValueError, match="A linear physics needs the method A_adjoint"):
        models.DeepinvOperator(type("Half", (), {"A": lambda self, x: x})(), 1.0)
    with pytest.raises(ValueError, match="share must be in"):
        models.random_mask((4, 4), 0.0)

    class Bare(models.Operator):
        def forward(self, x: Tensor) -> Tensor:
            return x

        def adjoint(self, y: Tensor) -> Tensor:
            return y

        def squared_norm(self) -> float:
            return 1.0

    with pytest.raises(NotImplementedError, match="Use ProximalGradient"):
        models.HQS(Bare(), denoiser())(image(), image())
