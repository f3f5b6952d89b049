"""The Jacobian at an equilibrium, for diagnosis: spectral radius, largest singular value, dense matrix and spectrum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria._core.checks import require
from equilibria._core.maps import FlatMap, Linearisation
from equilibria._core.quarantine import quarantine
from equilibria.solution import Solution
from equilibria.solvers.rowwise import divide, dot

NAN = float("nan")


@dataclass(frozen=True)
class SpectralRadius:
    """The result of `spectral_radius` per sample; nan for a sample whose solve or Jacobian is not finite."""

    radius: Tensor  # (batch,) largest modulus of an eigenvalue
    converged: Tensor  # (batch,) bool; where False, the radius is the mean growth over the second half of the steps
    residual: Tensor  # (batch,) distance of the last vectors from spanning an invariant space, relative to |J'v|
    rayleigh: Tensor  # (batch,) <J'v, v> of the last vector v, with its sign; not meaningful for a complex pair
    steps: int  # products with J'

    def __str__(self) -> str:
        return _line("spectral radius", self.radius, self.converged, self.steps)


@dataclass(frozen=True)
class LargestSingularValue:
    """The result of `largest_singular_value` per sample; nan for a sample whose solve or Jacobian is not finite."""

    value: Tensor  # (batch,) |J| in the Euclidean norm
    converged: Tensor  # (batch,) bool; where False, the value is the mean growth over the second half of the steps
    residual: Tensor  # (batch,) distance of the last vectors from spanning an invariant space of J'J, relative to |J'Jv|
    rayleigh: Tensor  # (batch,) <J'Jv, v> of the last vector v; its square root is a lower bound
    steps: int  # products with J'J

    def __str__(self) -> str:
        return _line("largest singular value", self.value, self.converged, self.steps)


def spectral_radius(
    s: Solution, steps: int = 100, tolerance: float = 1e-3, generator: torch.Generator | None = None
) -> SpectralRadius:
    """Return the spectral radius of J = df/dz at the equilibrium; below 1, plain iteration converges from nearby.

    The method is power iteration with vector-Jacobian products (J' has the spectrum of J) on one run of the cell. If the
    dominant eigenvalues are a complex or a ± pair, the vector never settles, but any three consecutive vectors satisfy w'' =
    a w' + b w, and the roots of t² = a t + b are the pair. If more than two eigenvalues share the largest modulus, as for an
    orthogonal J, this does not converge either; the growth of the vectors still tends to the radius and is returned.

    Samples coupled by batch statistics have one joint Jacobian; its radius is repeated for every sample.

    steps      largest number of products
    tolerance  of the residual, and of the change of the radius per step, for a sample to count as converged. The radius is
               then exact for a Jacobian that close to J; its error for J itself depends on J's eigenvectors
    generator  for the starting vectors; None: torch's own
    """
    jacobian = _Jacobian(s)
    found = jacobian.iterate(jacobian.transposed, steps, tolerance, generator)
    return SpectralRadius(found.radius, found.converged, found.residual, found.rayleigh, found.steps)


def largest_singular_value(
    s: Solution, steps: int = 100, tolerance: float = 1e-3, generator: torch.Generator | None = None
) -> LargestSingularValue:
    """Return the largest singular value of J = df/dz at the equilibrium; below 1, the cell contracts there.

    The method is power iteration on J'J, with one forward-mode run of the cell and one vector-Jacobian product per step.
    Coupled samples and arguments are as in `spectral_radius`.
    """
    jacobian = _Jacobian(s)
    found = jacobian.iterate(lambda v: jacobian.transposed(jacobian.product(v)), steps, tolerance, generator)
    return LargestSingularValue(found.radius.sqrt(), found.converged, found.residual, found.rayleigh, found.steps)


def dense_jacobian(s: Solution, limit: int = 1024) -> Tensor:
    """Return J, (batch, n, n), with J[b, i, j] = df_i/dz_j of sample b on its packed state, by n vector-Jacobian products.

    Samples whose solve ended NONFINITE are nan. Raises ValueError for states of more than `limit` numbers.
    """
    jacobian = _Jacobian(s)
    batch, n = jacobian.shape
    require(
        n <= limit,
        f"A dense Jacobian takes n products and n² numbers per sample: got n = {n}, the limit is {limit}. Use "
        "spectral_radius or largest_singular_value, which avoid both, or raise the limit.",
    )
    require(
        not jacobian.coupled,
        f"The {batch} samples are coupled by batch statistics and have no separate Jacobians. Put the cell into eval mode "
        "and solve again.",
    )
    rows = [
        jacobian.transposed(unit.expand(batch, n)) for unit in torch.eye(n, dtype=s.layout.dtype, device=s.layout.device)
    ]
    dense = torch.stack(rows, dim=1) if rows else s.layout.pack(s.z).new_zeros(batch, 0, 0)
    return dense.masked_fill(~jacobian.good.view(-1, 1, 1), NAN)


def jacobian_spectrum(s: Solution, limit: int = 1024) -> Tensor:
    """Return the eigenvalues of `dense_jacobian`, (batch, n) complex128, by descending modulus.

    Samples whose Jacobian is not finite have nan.
    """
    dense = dense_jacobian(s, limit).double()
    bad = ~torch.isfinite(dense).flatten(1).all(dim=1).unsqueeze(1)
    # eigvals raises if any sample of the batch is nan
    eigenvalues = torch.linalg.eigvals(dense.masked_fill(bad.unsqueeze(2), 0.0))
    order = eigenvalues.abs().argsort(dim=1, descending=True)
    return eigenvalues.gather(1, order).masked_fill(bad, complex(NAN, NAN))


class _Jacobian:
    """df/dz at a solution: per sample, or for the batch as one problem if its samples are coupled."""

    def __init__(self, s: Solution) -> None:
        z = s.layout.pack(s.z).detach()
        self.good = s.finite
        z, args, _ = quarantine(s.equation, z, s.equation.args, z, self.good)
        self.at = Linearisation(s.equation, z, args)
        self.coupled = s.equation.identity.coupled and len(z) > 1
        self.shape = z.shape

    def transposed(self, v: Tensor) -> Tensor:
        """Return J'v for v of shape (batch, n), or (1, batch * n) if samples are coupled."""
        return self.at.transposed(v.reshape(self.shape)).reshape(v.shape)

    def product(self, v: Tensor) -> Tensor:
        """Return Jv for v of the same shapes."""
        return self.at.product(v.reshape(self.shape)).reshape(v.shape).detach()

    def iterate(self, product: FlatMap, steps: int, tolerance: float, generator: torch.Generator | None) -> _PowerEstimate:
        """Run a power iteration with `product` and return the estimate per sample."""
        require(steps >= 1, f"A power iteration takes at least 1 step, got steps={steps}.")
        require(tolerance >= 0, f"A tolerance must not be negative, got {tolerance}.")
        z, good = self.at.z, self.good
        device = z.device if generator is None else generator.device
        start = torch.randn(self.shape, dtype=z.dtype, device=device, generator=generator).to(z.device)
        found = _power_iteration(product, start.reshape(1, -1) if self.coupled else start, steps, tolerance)
        radius, residual, rayleigh = (
            value.expand(len(z)).masked_fill(~good, NAN) for value in (found.radius, found.residual, found.rayleigh)
        )
        return _PowerEstimate(radius, found.converged & good, residual, rayleigh, found.steps)


@dataclass(frozen=True)
class _PowerEstimate:
    """The result of a power iteration; the fields are those of SpectralRadius."""

    radius: Tensor
    converged: Tensor
    residual: Tensor
    rayleigh: Tensor
    steps: int


def _power_iteration(product: FlatMap, start: Tensor, steps: int, tolerance: float) -> _PowerEstimate:
    """Iterate v <- A v / |A v| until every row has converged; start: (rows, n)."""
    v = divide(start, _length(start))
    before, growth = torch.zeros_like(v), torch.ones_like(v[:, :1])  # zeros: the first step has no vector before v
    radius = residual = rayleigh = last = torch.full_like(v[:, 0], float("inf"))
    converged = torch.zeros_like(last, dtype=torch.bool)
    growths: list[Tensor] = []
    for _ in range(steps):
        y = product(v)
        now = _fit(before, growth, v, y)
        # a converged row keeps its estimate while others continue: the fit of nearly parallel vectors gets worse with every
        # step
        radius, residual, rayleigh = (
            torch.where(converged, old, new) for old, new in zip((radius, residual, rayleigh), now, strict=True)
        )
        converged = converged | (residual <= tolerance) & ((radius - last).abs() <= tolerance * radius)
        before, growth, last = v, _length(y), radius
        v = divide(y, growth)
        growths.append(growth.squeeze(1))
        if bool((converged | ~torch.isfinite(radius)).all()):
            break
    later = torch.stack(growths[len(growths) // 2 :])
    # rows that did not converge do not use the fit: while it is poor, its roots lie anywhere inside the field of values
    radius = torch.where(converged, radius, later.log().mean(dim=0).exp())
    return _PowerEstimate(radius, converged, residual, rayleigh, len(growths))


def _fit(before: Tensor, growth: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest modulus of an eigenvalue, the residual and the Rayleigh quotient, (rows,) each.

    A before = growth v and y = A v, with `before` and v normalised; before = 0 means there is no such vector. Two fits are
    made by least squares: y = r v for one real eigenvalue, and y = a v + (b / growth) before for a pair. The one closer to
    an invariant space is used. Near a real eigenvalue `before` and v become parallel and the second fit sees only rounding,
    which shows in its residual, measured on the direction that v adds.
    """
    size = _length(y)
    y = divide(y, size)  # squares of very large or small numbers would over- or underflow
    rayleigh = dot(y, v)
    residual = _length(y - rayleigh * v)
    cosine = dot(before, v)
    added = v - cosine * before
    width = _length(added)
    a = divide(dot(y, added), width.square())
    c = dot(y, before) - a * cosine
    residual_of_pair = _length(y - a * v - c * before) / width
    pair = residual_of_pair < residual  # false where width is 0 and it is inf or nan
    # the largest modulus of a root of t² = a t + b; for a complex pair it is the square root of their product -b
    b = c * divide(growth, size)
    discriminant = a.square() / 4 + b
    real = a.abs() / 2 + discriminant.clamp_min(0).sqrt()
    largest_root = torch.where(discriminant >= 0, real, (-b).clamp_min(0).sqrt())
    radius = size * torch.where(pair, largest_root, rayleigh.abs())
    residual = torch.where(pair, residual_of_pair, residual)
    return radius.squeeze(1), residual.squeeze(1), (size * rayleigh).squeeze(1)


def _length(x: Tensor) -> Tensor:
    """Return the norm of each row, (rows, 1), without overflow or underflow of squares."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], 1)
    largest = x.abs().amax(dim=1, keepdim=True)
    scale = largest.masked_fill(~((largest > 0) & (largest < float("inf"))), 1.0)  # nan is neither
    return scale * torch.linalg.vector_norm(x / scale, dim=1, keepdim=True)


def _line(what: str, values: Tensor, converged: Tensor, steps: int) -> str:
    """Return one line on the estimates: mean, maximum and how many converged."""
    known = values[~values.isnan()]
    if known.numel() == 0:
        return f"{what} unknown: no sample of {values.numel()} is finite"
    return (
        f"{what} {float(known.mean()):.4g} on average, {float(known.max()):.4g} at worst; "
        f"{int(converged.sum())} of {values.numel()} estimates converged in {steps} steps"
    )
