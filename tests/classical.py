"""49 nonlinear systems F(z) = 0 with their standard starts, in float64.

23 systems that the tests of NonlinearSolve.jl take from Burkardt's collection, 14 further square systems or dimensions of
Moré, Garbow and Hillstrom (1981) and of the MINPACK tests, and 12 cells like those of deep equilibrium models, for which
F(z) = z - cell(z).
Every function maps (batch, n) to (batch, n), row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class System:
    name: str
    function: Function  # F, (batch, n) -> (batch, n)
    start: tuple[float, ...]
    family: str  # "nonlinearsolve", "minpack" or "deq"

    def z0(self, batch: int = 1) -> Tensor:
        return torch.tensor(self.start, dtype=torch.float64).expand(batch, -1).clone()

    def cell(self, z: Tensor) -> Tensor:
        """The map z - F(z), whose fixed points are the roots of F."""
        return z - self.function(z)


def _stack(*columns: Tensor) -> Tensor:
    return torch.stack(columns, dim=1)


def _places(z: Tensor) -> Tensor:
    """Return 1, ..., n."""
    return torch.arange(1, z.shape[1] + 1, dtype=z.dtype)


def _shifted(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return z_{k-1} and z_{k+1}, with zeros beyond the ends."""
    return nnf.pad(z[:, :-1], (1, 0)), nnf.pad(z[:, 1:], (0, 1))


def generalized_rosenbrock(z: Tensor) -> Tensor:
    return torch.cat([1 - z[:, :1], 10 * (z[:, 1:] - z[:, :-1].square())], dim=1)


def powell_singular(z: Tensor) -> Tensor:
    a, b, c, d = z.unbind(1)
    return _stack(a + 10 * b, math.sqrt(5) * (c - d), (b - 2 * c).square(), math.sqrt(10) * (a - d).square())


def powell_badly_scaled(z: Tensor) -> Tensor:
    a, b = z.unbind(1)
    return _stack(1e4 * a * b - 1, torch.exp(-a) + torch.exp(-b) - 1.0001)


def wood(z: Tensor) -> Tensor:
    """The gradient of Wood's function."""
    a, b, c, d = z.unbind(1)
    u, v = b - a.square(), d - c.square()
    return _stack(
        -200 * a * u - (1 - a),
        200 * u + 20.2 * (b - 1) + 19.8 * (d - 1),
        -180 * c * v - (1 - c),
        180 * v + 20.2 * (d - 1) + 19.8 * (b - 1),
    )


def helical_valley(z: Tensor) -> Tensor:
    a, b, c = z.unbind(1)
    turn = torch.atan2(b, a) / (2 * math.pi)  # of MINPACK's branch: in (-1/4, 3/4]
    turn = torch.where((a < 0) & (b < 0), turn + 1, turn)
    return _stack(10 * (c - 10 * turn), 10 * (torch.sqrt(a.square() + b.square()) - 1), c)


def watson(z: Tensor) -> Tensor:
    """The gradient of half Watson's sum of squares."""
    n = z.shape[1]
    t = torch.arange(1, 30, dtype=z.dtype).unsqueeze(1) / 29
    power = torch.arange(n, dtype=z.dtype)
    value = t**power  # (29, n)
    slope = power * t ** (power - 1).clamp_min(0)
    sums = z @ value.T
    residual = z @ slope.T - sums.square() - 1  # (batch, 29)
    gradient = residual @ slope - 2 * (residual * sums) @ value
    last = z[:, 1] - z[:, 0].square() - 1
    first_two = _stack(z[:, 0] - 2 * z[:, 0] * last, last)
    return gradient + nnf.pad(first_two, (0, n - 2))


def chebyquad(z: Tensor) -> Tensor:
    """The mean of each shifted Chebyshev polynomial over z, less its integral over (0, 1)."""
    n, x = z.shape[1], 2 * z - 1
    before, now, out = torch.ones_like(z), x, []
    for degree in range(1, n + 1):
        integral = 0.0 if degree % 2 else -1.0 / (degree * degree - 1)
        out.append(now.mean(dim=1) - integral)
        before, now = now, 2 * x * now - before
    return _stack(*out)


def brown_almost_linear(z: Tensor) -> Tensor:
    n = z.shape[1]
    linear = z[:, :-1] + z.sum(dim=1, keepdim=True) - (n + 1)
    return torch.cat([linear, z.prod(dim=1, keepdim=True) - 1], dim=1)


def discrete_boundary_value(z: Tensor) -> Tensor:
    h = 1 / (z.shape[1] + 1)
    left, right = _shifted(z)
    return 2 * z - left - right + h * h / 2 * (z + h * _places(z) + 1) ** 3


def discrete_integral(z: Tensor) -> Tensor:
    h = 1 / (z.shape[1] + 1)
    t = h * _places(z)
    cube = (z + t + 1) ** 3
    below = (t * cube).cumsum(dim=1)
    above = ((1 - t) * cube).sum(dim=1, keepdim=True) - ((1 - t) * cube).cumsum(dim=1)
    return z + h / 2 * ((1 - t) * below + t * above)


def trigonometric(z: Tensor) -> Tensor:
    cosine = z.cos()
    return z.shape[1] - cosine.sum(dim=1, keepdim=True) + _places(z) * (1 - cosine) - z.sin()


def variably_dimensioned(z: Tensor) -> Tensor:
    total = (_places(z) * (z - 1)).sum(dim=1, keepdim=True)
    return z - 1 + _places(z) * total * (1 + 2 * total.square())


def broyden_tridiagonal(z: Tensor) -> Tensor:
    left, right = _shifted(z)
    return (3 - 2 * z) * z - left - 2 * right + 1


def broyden_banded(z: Tensor) -> Tensor:
    place = _places(z)
    distance = place.unsqueeze(1) - place  # row less column
    band = ((distance <= 5) & (distance >= -1) & (distance != 0)).to(z.dtype)
    return z * (2 + 5 * z.square()) + 1 - (z * (1 + z)) @ band.T


def matrix_square_root(size: int) -> Function:
    """Hammarling's X X - A, A nearly defective."""
    a = 1e-4 * torch.eye(size, dtype=torch.float64)
    a[0, 1] = 1.0

    def function(z: Tensor) -> Tensor:
        x = z.reshape(-1, size, size)
        return (x @ x - a.to(z.dtype)).reshape(z.shape)

    return function


def dennis_schnabel(z: Tensor) -> Tensor:
    a, b = z.unbind(1)
    return _stack(a + b - 3, a.square() + b.square() - 9)


def sample_18(z: Tensor) -> Tensor:
    a, b = z.unbind(1)

    def quotient(x: Tensor) -> Tensor:  # (1 - exp(-x²)) / x, continued by 0
        zero = x == 0
        return torch.where(zero, 0.0, -torch.expm1(-x.square()) / torch.where(zero, 1.0, x))

    return _stack(b.square() * quotient(a), a * quotient(b))


def sample_19(z: Tensor) -> Tensor:
    return z * z.square().sum(dim=1, keepdim=True)


def scalar(z: Tensor) -> Tensor:
    return z * (z - 5).square()


def freudenstein_roth(z: Tensor) -> Tensor:
    a, b = z.unbind(1)
    return _stack(a - b**3 + 5 * b.square() - 2 * b - 13, a + b**3 + b.square() - 14 * b - 29)


def boggs(z: Tensor) -> Tensor:
    a, b = z.unbind(1)
    return _stack(a.square() - b + 1, a - torch.cos(math.pi / 2 * b))


def chandrasekhar(z: Tensor) -> Tensor:
    n = z.shape[1]
    mu = (_places(z) - 0.5) / n
    weight = mu.unsqueeze(1) / (mu.unsqueeze(1) + mu)
    return z - 1 / (1 - 0.9 / (2 * n) * (z @ weight.T))


def extended_rosenbrock(z: Tensor) -> Tensor:
    a, b = z[:, ::2], z[:, 1::2]
    return torch.stack((10 * (b - a.square()), 1 - a), dim=2).reshape(z.shape)


def extended_powell_singular(z: Tensor) -> Tensor:
    return powell_singular(z.reshape(-1, 4)).reshape(z.shape)


def box_three_dimensional(z: Tensor) -> Tensor:
    t = 0.1 * _places(z)
    a, b, c = (column.unsqueeze(1) for column in z.unbind(1))
    return torch.exp(-t * a) - torch.exp(-t * b) - c * (torch.exp(-t) - torch.exp(-10 * t))


# cells like those of deep equilibrium models


def _gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _of_norm(matrix: Tensor, norm: float) -> Tensor:
    return matrix * (norm / torch.linalg.matrix_norm(matrix, 2))


def _layer(n: int, norm: float, seed: int, kind: str = "gaussian") -> tuple[Tensor, Tensor]:
    """Return weights of that spectral norm and an input."""
    w = _gaussian(n, n, seed=seed)
    if kind == "orthogonal":
        w = torch.linalg.qr(w).Q
    if kind == "symmetric":
        w = w + w.T
    if kind == "skew":
        w = w - w.T
    return _of_norm(w, norm), _gaussian(n, seed=seed + 1)


def tanh_cell(n: int, norm: float, seed: int, kind: str = "gaussian", gain: float = 1.0) -> Function:
    w, x = _layer(n, norm, seed, kind)
    return lambda z: z - torch.tanh(z @ w.T + gain * x)


def relu_cell(n: int, norm: float, seed: int) -> Function:
    w, x = _layer(n, norm, seed, "orthogonal")
    return lambda z: z - torch.relu(z @ w.T + x)


def monotone_cell(n: int, seed: int) -> Function:
    """relu(W z + x) with I - W strongly monotone, |W| far above 1 (Winston and Kolter 2020)."""
    a, b = _gaussian(n, n, seed=seed) / n**0.5, _gaussian(n, n, seed=seed + 1) / n**0.5
    w = 0.9 * torch.eye(n, dtype=torch.float64) - a.T @ a + b - b.T
    x = _gaussian(n, seed=seed + 2)
    return lambda z: z - torch.relu(z @ w.T + x)


def normed_cell(n: int, seed: int) -> Function:
    """LayerNorm(z + V relu(W z + x)), as in a transformer."""
    w, x = _layer(n, 1.5, seed)
    v, _ = _layer(n, 1.5, seed + 2)
    return lambda z: z - nnf.layer_norm(torch.relu(z @ w.T + x) @ v.T + x + 0.5 * z, (n,))


def attention_cell(tokens: int, width: int, seed: int) -> Function:
    """A mean over tokens by softmax of scores, and an input."""
    q, k, v = (_of_norm(_gaussian(width, width, seed=seed + i), 2.0) for i in range(3))
    x = _gaussian(tokens, width, seed=seed + 3)

    def function(z: Tensor) -> Tensor:
        s = z.reshape(-1, tokens, width)
        weights = torch.softmax((s @ q) @ (s @ k).transpose(1, 2) / width**0.5, dim=2)
        return z - torch.tanh(weights @ s @ v + x).reshape(z.shape)

    return function


def gated_cell(n: int, seed: int) -> Function:
    """A gate between the state and tanh of a steep layer."""
    w, x = _layer(n, 3.0, seed)
    u, _ = _layer(n, 3.0, seed + 2)

    def function(z: Tensor) -> Tensor:
        gate = torch.sigmoid(z @ u.T + x)
        return gate * (z - torch.tanh(z @ w.T + x))

    return function


def convolution_cell(channels: int, size: int, seed: int) -> Function:
    w = _gaussian(channels, channels, 3, 3, seed=seed) / (9 * channels) ** 0.5
    x = _gaussian(channels, size, size, seed=seed + 1)

    def function(z: Tensor) -> Tensor:
        image = z.reshape(-1, channels, size, size)
        return z - torch.tanh(1.5 * nnf.conv2d(image, w, padding=1) + x).reshape(z.shape)

    return function


def affine_cell(n: int, norm: float, seed: int) -> Function:
    w, x = _layer(n, norm, seed, "orthogonal")
    return lambda z: z - (z @ w.T + x)


def _constant(value: float, n: int) -> tuple[float, ...]:
    return (value,) * n


def _grid(n: int) -> tuple[float, ...]:
    """k (k - n - 1) / (n + 1)²: t (t - 1) on the inner points of a grid."""
    return tuple(k / (n + 1) * (k / (n + 1) - 1) for k in range(1, n + 1))


def _evenly(n: int) -> tuple[float, ...]:
    return tuple(k / (n + 1) for k in range(1, n + 1))


def _identity(n: int) -> tuple[float, ...]:
    return tuple(torch.eye(n).flatten().tolist())


_NONLINEARSOLVE: list[tuple[str, Function, tuple[float, ...]]] = [
    ("generalized Rosenbrock, 10", generalized_rosenbrock, (-1.2, *_constant(1.0, 9))),
    ("Powell singular", powell_singular, (3.0, -1.0, 0.0, 1.0)),
    ("Powell badly scaled", powell_badly_scaled, (0.0, 1.0)),
    ("Wood", wood, (-3.0, -1.0, -3.0, -1.0)),
    ("helical valley", helical_valley, (-1.0, 0.0, 0.0)),
    ("Watson, 2", watson, _constant(0.0, 2)),
    ("Chebyquad, 2", chebyquad, _evenly(2)),
    ("Brown almost linear, 10", brown_almost_linear, _constant(0.5, 10)),
    ("discrete boundary value, 10", discrete_boundary_value, _grid(10)),
    ("discrete integral equation, 10", discrete_integral, _grid(10)),
    ("trigonometric, 10", trigonometric, _constant(0.1, 10)),
    ("variably dimensioned, 10", variably_dimensioned, tuple(1 - k / 10 for k in range(1, 11))),
    ("Broyden tridiagonal, 10", broyden_tridiagonal, _constant(-1.0, 10)),
    ("Broyden banded, 10", broyden_banded, _constant(-1.0, 10)),
    ("matrix square root, 2 by 2", matrix_square_root(2), _identity(2)),
    ("matrix square root, 3 by 3", matrix_square_root(3), _identity(3)),
    ("Dennis and Schnabel", dennis_schnabel, (1.0, 5.0)),
    ("sample problem 18", sample_18, (2.0, 2.0)),
    ("sample problem 19", sample_19, (3.0, 3.0)),
    ("scalar x (x - 5)²", scalar, (1.0,)),
    ("Freudenstein and Roth", freudenstein_roth, (0.5, -2.0)),
    ("Boggs", boggs, (1.0, 0.0)),
    ("Chandrasekhar, 10", chandrasekhar, _constant(1.0, 10)),
]

_MINPACK: list[tuple[str, Function, tuple[float, ...]]] = [
    ("Rosenbrock", extended_rosenbrock, (-1.2, 1.0)),
    ("extended Rosenbrock, 20", extended_rosenbrock, (-1.2, 1.0) * 10),
    ("extended Powell singular, 20", extended_powell_singular, (3.0, -1.0, 0.0, 1.0) * 5),
    ("Box, 3", box_three_dimensional, (0.0, 10.0, 20.0)),
    ("Watson, 6", watson, _constant(0.0, 6)),
    ("Watson, 9", watson, _constant(0.0, 9)),
    ("Chebyquad, 5", chebyquad, _evenly(5)),
    ("Chebyquad, 6", chebyquad, _evenly(6)),
    ("Chebyquad, 7", chebyquad, _evenly(7)),
    ("Chebyquad, 9", chebyquad, _evenly(9)),
    ("Brown almost linear, 30", brown_almost_linear, _constant(0.5, 30)),
    ("Brown almost linear, 40", brown_almost_linear, _constant(0.5, 40)),
    ("discrete boundary value, 50", discrete_boundary_value, _grid(50)),
    ("Broyden tridiagonal, 100", broyden_tridiagonal, _constant(-1.0, 100)),
]

_DEQ: list[tuple[str, Function, tuple[float, ...]]] = [
    ("tanh cell, norm 0.9", tanh_cell(32, 0.9, seed=0, kind="orthogonal"), _constant(0.0, 32)),
    ("tanh cell, norm 3", tanh_cell(32, 3.0, seed=10), _constant(0.0, 32)),
    ("tanh cell, symmetric, norm 2", tanh_cell(32, 2.0, seed=20, kind="symmetric"), _constant(0.0, 32)),
    ("tanh cell, skew, norm 5", tanh_cell(32, 5.0, seed=30, kind="skew"), _constant(0.0, 32)),
    ("tanh cell, norm 8, saturated", tanh_cell(16, 8.0, seed=40, gain=3.0), _constant(0.0, 16)),
    ("relu cell, norm 0.95", relu_cell(32, 0.95, seed=50), _constant(0.0, 32)),
    ("monotone relu cell", monotone_cell(32, seed=60), _constant(0.0, 32)),
    ("normed residual cell", normed_cell(32, seed=70), _constant(0.0, 32)),
    ("attention cell", attention_cell(6, 8, seed=80), _constant(0.0, 48)),
    ("gated cell", gated_cell(16, seed=90), _constant(0.0, 16)),
    ("convolution cell", convolution_cell(3, 6, seed=100), _constant(0.0, 108)),
    ("affine cell, norm 1.5", affine_cell(32, 1.5, seed=110), _constant(0.0, 32)),
]

SYSTEMS = [
    System(name, function, start, family)
    for family, systems in (("nonlinearsolve", _NONLINEARSOLVE), ("minpack", _MINPACK), ("deq", _DEQ))
    for name, function, start in systems
]
