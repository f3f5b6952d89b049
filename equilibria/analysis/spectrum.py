"""The Jacobian at an equilibrium, for looking at: its spectral radius, largest singular value, dense matrix and spectrum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria._core.linear import Linearisation
from equilibria._core.maps import FlatMap
from equilibria.gradients.base import quarantine
from equilibria.solution import Solution, Status
from equilibria.solvers.base import divide, dot, require

NAN = float("nan")


@dataclass(frozen=True)
class SpectralRadius:
    """What `spectral_radius` found, sample by sample; nan for a sample whose solve or whose Jacobian is not finite."""

    radius: Tensor  # (batch,) largest modulus of an eigenvalue
    converged: Tensor  # (batch,) bool; where False, the radius is the mean growth over the later half of the steps
    residual: Tensor  # (batch,) how far the last vectors are from spanning an invariant space, relative to |J'v|
    rayleigh: Tensor  # (batch,) <J'v, v> of the last vector v, sign included; of a complex pair it says nothing
    steps: int  # products with J'

    def __str__(self) -> str:
        return _line("spectral radius", self.radius, self.converged, self.steps)


@dataclass(frozen=True)
class LargestSingularValue:
    """What `largest_singular_value` found, sample by sample; nan for a sample whose solve or Jacobian is not finite."""

    value: Tensor  # (batch,) |J| in the Euclidean norm
    converged: Tensor  # (batch,) bool; where False, the value is the mean growth over the later half of the steps
    residual: Tensor  # (batch,) how far the last vectors are from spanning an invariant space of J'J, relative to |J'Jv|
    rayleigh: Tensor  # (batch,) <J'Jv, v> of the last vector v: its root is a lower bound
    steps: int  # products with J'J

    def __str__(self) -> str:
        return _line("largest singular value", self.value, self.converged, self.steps)


def spectral_radius(
    s: Solution, steps: int = 100, tolerance: float = 1e-3, generator: torch.Generator | None = None
) -> SpectralRadius:
    """The spectral radius of J = df/dz at the equilibrium; below 1, plain iteration converges from nearby.

    Power iteration with vector-Jacobian products (J' has the spectrum of J) on one run of the cell. Dominant eigenvalues
    that are a complex or a ± pair turn the vector for ever, but any three vectors in a row then satisfy w'' = a w' + b w,
    and the roots of t² = a t + b are the pair. Where more than two eigenvalues share the largest modulus, as for an
    orthogonal J, this does not converge either; the growth of the vectors still tends to the radius, and is returned.

    Samples that batch statistics couple have one Jacobian together: its radius is repeated for every sample.

    steps      products at most
    tolerance  of the residual, and of the radius from one step to the next, for a sample to count as converged. The
               radius is then exact for a Jacobian so close to J; how close it is for J depends on J's eigenvectors
    generator  of the vectors to start from; None: torch's own
    """
    jacobian = _Jacobian(s)
    found = jacobian.iterate(jacobian.transposed, steps, tolerance, generator)
    return SpectralRadius(found.radius, found.converged, found.residual, found.rayleigh, found.steps)


def largest_singular_value(
    s: Solution, steps: int = 100, tolerance: float = 1e-3, generator: torch.Generator | None = None
) -> LargestSingularValue:
    """The largest singular value of J = df/dz at the equilibrium; below 1, the cell contracts there.

    Power iteration on J'J, a run of the cell in forward mode and a vector-Jacobian product a step. Coupled samples and
    arguments as in `spectral_radius`.
    """
    jacobian = _Jacobian(s)
    found = jacobian.iterate(lambda v: jacobian.transposed(jacobian.product(v)), steps, tolerance, generator)
    return LargestSingularValue(found.radius.sqrt(), found.converged, found.residual, found.rayleigh, found.steps)


def dense_jacobian(s: Solution, limit: int = 1024) -> Tensor:
    """(batch, n, n), J[b, i, j] = df_i/dz_j of sample b on its packed state, by n vector-Jacobian products.

    nan for samples whose solve ended NONFINITE. States of more than `limit` numbers are refused.
    """
    jacobian = _Jacobian(s)
    batch, n = jacobian.shape
    require(
        n <= limit,
        f"A dense Jacobian takes n products and n² numbers a sample: got n = {n}, the limit is {limit}. Use "
        "spectral_radius or largest_singular_value, which take neither, or raise the limit.",
    )
    require(
        not jacobian.whole,
        f"The {batch} samples are coupled by batch statistics and have no Jacobians of their own. Put the cell into eval "
        "mode and solve again.",
    )
    rows = [
        jacobian.transposed(unit.expand(batch, n)) for unit in torch.eye(n, dtype=s.layout.dtype, device=s.layout.device)
    ]
    dense = torch.stack(rows, dim=1) if rows else s.layout.pack(s.z).new_zeros(batch, 0, 0)
    return dense.masked_fill(~jacobian.good.view(-1, 1, 1), NAN)


def jacobian_spectrum(s: Solution, limit: int = 1024) -> Tensor:
    """(batch, n) eigenvalues of `dense_jacobian`, complex128, by falling modulus; nan where it is not finite."""
    dense = dense_jacobian(s, limit).double()
    bad = ~torch.isfinite(dense).flatten(1).all(dim=1).unsqueeze(1)
    eigenvalues = torch.linalg.eigvals(dense.masked_fill(bad.unsqueeze(2), 0.0))  # it raises for one nan in the batch
    order = eigenvalues.abs().argsort(dim=1, descending=True)
    return eigenvalues.gather(1, order).masked_fill(bad, complex(NAN, NAN))


class _Jacobian:
    """df/dz at a solution: of every sample, or of the batch as one problem where its samples are coupled."""

    def __init__(self, s: Solution) -> None:
        z = s.layout.pack(s.z).detach()
        self.good = s.stats.status != Status.NONFINITE
        z, args, _ = quarantine(s.equation, z, s.equation.args, z, self.good)
        self.at = Linearisation(s.equation, z, args)
        self.whole = s.equation.coupled and len(z) > 1
        self.shape = z.shape

    def transposed(self, v: Tensor) -> Tensor:
        return self.at.transposed(v.reshape(self.shape)).reshape(v.shape)

    def product(self, v: Tensor) -> Tensor:
        return self.at.product(v.reshape(self.shape)).reshape(v.shape).detach()

    def iterate(self, product: FlatMap, steps: int, tolerance: float, generator: torch.Generator | None) -> _Estimate:
        """A power iteration with `product`, told for every sample."""
        require(steps >= 1, f"A power iteration takes at least 1 step, got steps={steps}.")
        require(tolerance >= 0, f"A tolerance must not be negative, got {tolerance}.")
        z, good = self.at.z, self.good
        device = z.device if generator is None else generator.device
        start = torch.randn(self.shape, dtype=z.dtype, device=device, generator=generator).to(z.device)
        found = _power_iteration(product, start.reshape(1, -1) if self.whole else start, steps, tolerance)
        radius, residual, rayleigh = (
            value.expand(len(z)).masked_fill(~good, NAN) for value in (found.radius, found.residual, found.rayleigh)
        )
        return _Estimate(radius, found.converged & good, residual, rayleigh, found.steps)


@dataclass(frozen=True)
class _Estimate:
    """What a power iteration found; the fields are those of SpectralRadius."""

    radius: Tensor
    converged: Tensor
    residual: Tensor
    rayleigh: Tensor
    steps: int


def _power_iteration(product: FlatMap, start: Tensor, steps: int, tolerance: float) -> _Estimate:
    """v <- A v / |A v|, until every row knows its dominant eigenvalues; start: (rows, n)."""
    v = divide(start, _length(start))
    before, growth = torch.zeros_like(v), torch.ones_like(v[:, :1])  # no third vector yet
    radius = residual = rayleigh = last = torch.full_like(v[:, 0], float("inf"))
    converged = torch.zeros_like(last, dtype=torch.bool)
    growths: list[Tensor] = []
    for _ in range(steps):
        y = product(v)
        now = _fit(before, growth, v, y)
        # a row that has converged keeps its estimate: it may not wait for others, as a fit of nearly parallel vectors
        # becomes worse again with every step
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
    # not the fit: as long as it is poor, its roots lie anywhere inside the field of values
    radius = torch.where(converged, radius, later.log().mean(dim=0).exp())
    return _Estimate(radius, converged, residual, rayleigh, len(growths))


def _fit(before: Tensor, growth: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest modulus of an eigenvalue, the residual and the Rayleigh quotient, (rows,) each.

    A before = growth v and y = A v with `before` and v of length 1; before = 0 is no vector. Two fits by least squares,
    y = r v for one real eigenvalue, y = a v + (b / growth) before for a pair; what counts is the one that comes closer to
    an invariant space. Near a real eigenvalue `before` and v become parallel, and what the second one sees is rounding;
    its residual, measured on the direction that v adds, tells.
    """
    size = _length(y)
    y = divide(y, size)  # squares of very large or small numbers would leave the dtype
    rayleigh = dot(y, v)
    residual = _length(y - rayleigh * v)
    cosine = dot(before, v)
    added = v - cosine * before
    width = _length(added)
    a = divide(dot(y, added), width.square())
    c = dot(y, before) - a * cosine
    residual_of_pair = _length(y - a * v - c * before) / width
    pair = residual_of_pair < residual  # not where width is 0 and it is inf or nan
    radius = size * torch.where(pair, _largest_root(a, c * divide(growth, size)), rayleigh.abs())
    residual = torch.where(pair, residual_of_pair, residual)
    return radius.squeeze(1), residual.squeeze(1), (size * rayleigh).squeeze(1)


def _largest_root(a: Tensor, b: Tensor) -> Tensor:
    """The largest modulus of a root of t² = a t + b; that of a complex pair is the root of their product -b."""
    discriminant = a.square() / 4 + b
    real = a.abs() / 2 + discriminant.clamp_min(0).sqrt()
    return torch.where(discriminant >= 0, real, (-b).clamp_min(0).sqrt())


def _length(x: Tensor) -> Tensor:
    """(rows, 1), the length of each row, of numbers whose squares leave the dtype too."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], 1)
    largest = x.abs().amax(dim=1, keepdim=True)
    scale = largest.masked_fill(~((largest > 0) & (largest < float("inf"))), 1.0)  # nan is neither
    return scale * torch.linalg.vector_norm(x / scale, dim=1, keepdim=True)


def _line(what: str, values: Tensor, converged: Tensor, steps: int) -> str:
    known = values[~values.isnan()]
    if known.numel() == 0:
        return f"{what} unknown: no sample of {values.numel()} is finite"
    return (
        f"{what} {float(known.mean()):.4g} on average, {float(known.max()):.4g} at worst; "
        f"{int(converged.sum())} of {values.numel()} estimates settled in {steps} steps"
    )
