"""The conditions under which inexact gradients point uphill, checked on the gradients that the layers return.

Geng and others 2021: Theorem 1 with the lower bound of its proof, Remark 1 and Theorem 2. Fung and others 2022: the
condition of Jacobian-free backpropagation. With N = df/dtheta (parameters, n) and J = df/dz, the exact gradient of <v, z> is
N (I - J)^{-T} v, and a phantom one is A v.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from tests.problems import TIGHT, TanhCell, inputs

N, PARAMETERS = 5, 9


class Controlled(nn.Module):
    """f = J z + N' theta + x: both derivatives are chosen."""

    def __init__(self, jacobian: Tensor, derivative: Tensor) -> None:
        super().__init__()
        self.register_buffer("jacobian", jacobian)
        self.register_buffer("derivative", derivative)
        self.theta = nn.Parameter(torch.zeros(len(derivative), dtype=torch.float64))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        jacobian, derivative = self.get_buffer("jacobian"), self.get_buffer("derivative")
        return z @ jacobian.T + self.theta @ derivative + x


def orthogonal(rows: int, columns: int, seed: int) -> Tensor:
    drawn = torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(drawn)[0]


def with_singular_values(values: Tensor, rows: int, seed: int) -> Tensor:
    """(rows, len(values))."""
    return orthogonal(rows, len(values), seed) * values @ orthogonal(len(values), len(values), seed + 1000).T


def cell(gamma: float, kappa: float, seed: int) -> Controlled:
    """A contraction of factor `gamma` that turns, and a derivative whose N'N has the condition number `kappa`."""
    values = torch.linspace(1.0, kappa**0.5, N, dtype=torch.float64)
    return Controlled(gamma * orthogonal(N, N, seed), with_singular_values(values, PARAMETERS, seed + 1))


def matrix_of(gradient: eq.Gradient, f: Controlled) -> Tensor:
    """(parameters, n): the gradient of every entry of the layer's output."""
    z = eq.DEQ(f, gradient=gradient, stop=TIGHT)(torch.zeros(1, N, dtype=torch.float64))
    rows = [torch.autograd.grad(entry, f.theta, retain_graph=True)[0] for entry in z[0]]
    return torch.stack(rows, dim=1)


def least_product(a: Tensor, f: Controlled) -> float:
    """The least <A v, exact gradient> over all v = (I - J)' u with |u| = 1."""
    n, apart = f.get_buffer("derivative"), torch.eye(N, dtype=torch.float64) - f.get_buffer("jacobian")
    form = (a @ apart.T).T @ n
    return float(torch.linalg.eigvalsh((form + form.T) / 2)[0])


def defect(a: Tensor, f: Controlled) -> float:
    """|A (I - J)' - N|."""
    apart = torch.eye(N, dtype=torch.float64) - f.get_buffer("jacobian")
    return float(torch.linalg.matrix_norm(a @ apart.T - f.get_buffer("derivative"), 2))


def extremes(f: Controlled) -> tuple[float, float]:
    """Least and largest singular value of N."""
    values = torch.linalg.svdvals(f.get_buffer("derivative"))
    return float(values[-1]), float(values[0])


PHANTOMS = [
    kind(steps=steps, damping=damping)
    for kind in (eq.UnrolledPhantom, eq.NeumannPhantom)
    for steps in (1, 3, 9, 27)
    for damping in (0.5, 1.0)
]


def test_the_condition_of_theorem_1_implies_ascent_and_separates() -> None:
    met, ascending = [], []
    for seed in range(4):
        for gamma, kappa in ((0.3, 1.5), (0.8, 4.0), (0.95, 30.0)):
            f = cell(gamma, kappa, seed)
            least, largest = extremes(f)
            for gradient in PHANTOMS:
                a = matrix_of(gradient, f)
                product, wrong = least_product(a, f), defect(a, f)
                # the lower bound of the proof, for every cotangent
                assert product >= least**2 - wrong * largest - 1e-9
                met.append(wrong < least**2 / largest)
                ascending.append(product > 0)
    assert all(rises for condition, rises in zip(met, ascending, strict=True) if condition)
    assert 0 < sum(met) < sum(ascending) < len(met)  # sufficient, not necessary; and some gradients do not ascend


def test_remark_1_is_the_condition_on_the_inverse_alone() -> None:
    """A = N D: |D (I - J)' - I| < 1 / kappa^2 with the condition number kappa of N implies that of Theorem 1."""
    met = 0
    for seed in range(4):
        f = cell(0.6, 2.0, seed)
        least, largest = extremes(f)
        n, eye = f.get_buffer("derivative"), torch.eye(N, dtype=torch.float64)
        for gradient in PHANTOMS:
            a = matrix_of(gradient, f)
            d = torch.linalg.pinv(n) @ a
            torch.testing.assert_close(n @ d, a, rtol=1e-8, atol=1e-9)
            remaining = torch.linalg.matrix_norm(d @ (eye - f.get_buffer("jacobian")).T - eye, 2)
            if remaining < (least / largest) ** 2:
                met += 1
                assert defect(a, f) < least**2 / largest + 1e-9 and least_product(a, f) > 0
    assert 0 < met < 4 * len(PHANTOMS)


@pytest.mark.parametrize("damping", [0.4, 1.0])
def test_theorem_2_phantom_gradients_approach_the_exact_one_as_fast_as_the_damped_map_contracts(damping: float) -> None:
    f = cell(0.8, 4.0, seed=0)
    apart = torch.eye(N, dtype=torch.float64) - f.get_buffer("jacobian")
    exact = f.get_buffer("derivative") @ torch.linalg.inv(apart).T
    torch.testing.assert_close(matrix_of(eq.Implicit(stop=TIGHT), f), exact, rtol=1e-9, atol=1e-9)
    for steps in (1, 4, 16, 64):
        for gradient in (eq.UnrolledPhantom(steps=steps, damping=damping), eq.NeumannPhantom(steps=steps, damping=damping)):
            error = torch.linalg.matrix_norm(matrix_of(gradient, f) - exact, 2)
            bound = torch.linalg.matrix_norm(exact, 2) * (1 - damping * (1 - 0.8)) ** steps
            assert error <= bound + 1e-9


def test_theorem_2_derivatives_of_the_iterates_converge_from_any_start() -> None:
    f, x = TanhCell(4, norm=0.8), inputs(2, 4)
    exact = torch.autograd.grad(eq.DEQ(f, stop=TIGHT)(x).square().sum(), list(f.parameters()))
    errors = []
    for depth in (2, 8, 32, 128):
        z = eq.DEQ(f, gradient=eq.Unrolled(depth=depth), stop=eq.Stop(on_failure="ignore"))(x)
        found = torch.autograd.grad(z.square().sum(), list(f.parameters()))
        errors.append(max(float((a - b).abs().max()) for a, b in zip(found, exact, strict=True)))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-9


def test_the_condition_of_jfb_implies_descent_and_separates() -> None:
    met, descending = [], []
    for seed in range(6):
        for gamma in (0.2, 0.5, 0.9):
            for kappa in (1.05, 1.8, 4.5, 200.0):
                f = cell(gamma, kappa, seed)
                least, _ = extremes(f)
                product = least_product(matrix_of(eq.JFB(), f), f)
                assert product >= least**2 * (1 - gamma * kappa) - 1e-9
                met.append(kappa <= 1 / gamma)
                descending.append(product > 0)
    assert all(falls for condition, falls in zip(met, descending, strict=True) if condition)
    assert 0 < sum(met) < sum(descending) < len(met)


def test_the_inverse_of_a_contraction_is_positive_as_jfb_needs_it() -> None:
    """<u, (I - J)^{-1} u> >= (1 - gamma) / (1 + gamma)^2 |u|^2."""
    for seed in range(5):
        for gamma in (0.1, 0.5, 0.9):
            inverse = torch.linalg.inv(torch.eye(N, dtype=torch.float64) - gamma * orthogonal(N, N, seed))
            least = torch.linalg.eigvalsh((inverse + inverse.T) / 2)[0]
            assert least >= (1 - gamma) / (1 + gamma) ** 2 - 1e-12
