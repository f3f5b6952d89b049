"""Constraints on weights that keep solves convergent.

SpectralNorm     a parametrization that scales W to a given spectral norm; gradients flow through the scaling
project_         after an optimizer step, replaces W by the nearest matrix with bounded row sums, for graph models
contract_        after an optimizer step, scales layers down if the map was measured not to be a contraction

For weight normalization use `torch.nn.utils.parametrizations.weight_norm`, which works in a solve without changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from equilibria._core.autodiff_modes import no_autocast
from equilibria._core.packing import State
from equilibria.solution import Solution

__all__ = ["SpectralNorm", "contract_", "lipschitz_ratio", "project_", "project_rows", "spectral_norm"]

M = TypeVar("M", bound=nn.Module)

WARM_UP = 15  # power iterations on a weight never seen before, as many as torch takes


class SpectralNorm(nn.Module):
    """W bound / sigma(W), a parametrization; sigma is the largest singular value of W as a matrix, (out, rest).

    torch.nn.utils.parametrizations.spectral_norm always scales to 1: there is no bound, no clipping, no exact mode.

    weight      the tensor to be parametrized, of two dimensions or more. The norm of a convolution as an operator lies
                above sigma, by up to the square root of the number of taps
    bound       the spectral norm W gets
    clip        scale by min(1, bound / sigma): a W within the bound is left as it is, not inflated
    exact       sigma by a singular value decomposition. Otherwise by power iteration, sigma = u'W v: nearly free, but from
                below, so that W lies above the bound until u and v have caught up with it
    learnable   the bound is trained: it is exp(log_bound), which is positive whatever the optimizer does. Weight decay
                draws it to 1. With `clip` it is a ceiling, and has a gradient only while W touches it
    iterations  of the power method whenever W is computed in training mode; in eval mode u and v do not move
    eps         shorter vectors count as zero. A zero W stays zero, and leaves u and v as they were
    dimension   of W that counts the outputs
    generator   draws where the power iteration starts
    """

    _u: Tensor
    _v: Tensor

    def __init__(
        self,
        weight: Tensor,
        bound: float = 1.0,
        *,
        clip: bool = False,
        exact: bool = False,
        learnable: bool = False,
        iterations: int = 1,
        eps: float = 1e-12,
        dimension: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _check_positive(bound=bound, iterations=iterations, eps=eps)
        if weight.dim() < 2 or weight.numel() == 0:
            raise ValueError(
                f"The spectral norm is that of a matrix: got a weight of shape {tuple(weight.shape)}, expected (out, in, "
                "...). Constrain the weights of linear and convolution layers, not scales and biases."
            )
        self.clip, self.exact, self.iterations, self.eps, self.dimension = clip, exact, iterations, eps, dimension
        self._bound = float(bound)
        # the logarithm, so that a learned bound stays positive
        logarithm = torch.tensor(math.log(bound), dtype=weight.dtype.to_real(), device=weight.device)
        self.log_bound = nn.Parameter(logarithm) if learnable else None
        if not exact:
            self._start(self._matrix(weight.detach()), generator)

    @property
    def bound(self) -> Tensor | float:
        """The current spectral norm of the scaled weight."""
        return self._bound if self.log_bound is None else self.log_bound.exp()

    def forward(self, weight: Tensor) -> Tensor:
        with no_autocast(weight.device):  # an error in sigma would be one in every entry
            factor = self.bound / self._sigma(weight).clamp(min=self.eps)
            factor = factor.clamp(max=1) if self.clip else factor
            return weight * factor.to(weight.dtype)

    def right_inverse(self, value: Tensor) -> Tensor:
        """Return the value itself, so that an assigned weight is scaled in forward; updates u and v for it."""
        if not self.exact:
            self._iterate(self._matrix(value), WARM_UP)
        return value

    def extra_repr(self) -> str:
        how = "exact" if self.exact else f"iterations={self.iterations}"
        bound = self._bound if self.log_bound is None else self.log_bound.exp().item()
        return f"bound={bound:.4g}, {how}, clip={self.clip}, learnable={self.log_bound is not None}"

    def _matrix(self, weight: Tensor) -> Tensor:
        return _at_least_float32(weight).movedim(self.dimension, 0).flatten(1)

    def _sigma(self, weight: Tensor) -> Tensor:
        matrix = self._matrix(weight)
        if self.exact:
            return torch.linalg.matrix_norm(matrix, ord=2)
        if self.training:
            self._iterate(matrix, self.iterations)
        # copies, because the next forward updates u and v, possibly before the backward of this one
        u, v = self._u.to(matrix.dtype, copy=True), self._v.to(matrix.dtype, copy=True)
        return torch.vdot(u, matrix @ v).real

    def _start(self, matrix: Tensor, generator: torch.Generator | None) -> None:
        for name, size in zip(("_u", "_v"), matrix.shape, strict=True):
            start = torch.randn(size, dtype=matrix.dtype, device=matrix.device, generator=generator)
            self.register_buffer(name, start / torch.linalg.vector_norm(start))
        self._iterate(matrix, WARM_UP)

    @torch.no_grad()
    def _iterate(self, matrix: Tensor, iterations: int) -> None:
        matrix = matrix.detach()  # no_grad leaves forward mode on, and u and v are constants there too
        u, v = self._u.to(matrix.dtype), self._v.to(matrix.dtype)
        for _ in range(iterations):
            u = _normalized(matrix @ v, u, self.eps)
            v = _normalized(matrix.mH @ u, v, self.eps)
        self._u.copy_(u)  # in place, not rebound: solves and replicas look for the change in the tensor itself
        self._v.copy_(v)


def spectral_norm(
    module: M,
    name: str = "weight",
    bound: float = 1.0,
    *,
    clip: bool = False,
    exact: bool = False,
    learnable: bool = False,
    iterations: int = 1,
    eps: float = 1e-12,
    generator: torch.Generator | None = None,
) -> M:
    """Give `module` a weight of that spectral norm, by `SpectralNorm`, and return the module.

    Call it before the optimizer is made where the bound is `learnable`: it adds a parameter.
    """
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor):
        found = [key for key, _ in module.named_parameters(recurse=False)]
        raise ValueError(
            f"{type(module).__name__} has no tensor {name!r} to constrain: its own parameters are {found}. Name one of them."
        )
    norm = SpectralNorm(
        weight,
        bound,
        clip=clip,
        exact=exact,
        learnable=learnable,
        iterations=iterations,
        eps=eps,
        dimension=int(isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))),
        generator=generator,
    )
    parametrize.register_parametrization(module, name, norm)
    return module


def project_rows(weight: Tensor, bound: float) -> Tensor:
    """Return the nearest matrix whose rows have sum_j |w_ij| <= bound, (m, n): its infinity norm is at most `bound`.

    A longer row w becomes sign(w) max(|w| - a, 0), with the a that makes it as long as the bound. Rows within it are
    returned bit for bit. Half precision is computed in float32 and rounded, hence feasible up to its rounding.
    """
    _check_positive(bound=bound)
    if weight.dim() != 2:
        raise ValueError(
            f"The rows of a matrix are projected: got shape {tuple(weight.shape)}. Reshape the weight to (rows, columns)."
        )
    wide = _at_least_float32(weight)
    length = wide.abs()
    # the threshold a solves sum_j max(length_j - a, 0) = bound. With the k longest entries alone that is a_k = (their sum -
    # bound) / k, which grows with k as long as the next entry is above a_k, and falls from there on: a is the largest a_k
    count = torch.arange(1, length.shape[1] + 1, device=length.device)
    sums = length.sort(dim=1, descending=True).values.cumsum(dim=1)
    threshold = ((sums - bound) / count).amax(dim=1, keepdim=True)
    projected = wide.sgn() * (length - threshold).clamp(min=0)
    inside = length.sum(dim=1, keepdim=True) <= bound
    return torch.where(inside, weight, projected.to(weight.dtype))


@torch.no_grad()
def project_(parameter: Tensor, bound: float, columns: bool = False) -> None:
    """Apply `project_rows` in place, after a step of the optimizer; `columns` also limits every sum_i |w_ij|.

    Projecting the columns shortens entries, none grows: the rows stay within the bound.
    """
    if not parameter.is_leaf:
        raise ValueError(
            f"The tensor of shape {tuple(parameter.shape)} is computed from others, and a projection of it would be lost: "
            "project the parameter itself. A weight with a parametrization has it in parametrizations.weight.original."
        )
    parameter.copy_(project_rows(parameter, bound))
    if columns:
        parameter.copy_(project_rows(parameter.mT, bound).mT)


@torch.no_grad()
def lipschitz_ratio(s: Solution, scale: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Return an estimate of the Lipschitz constant at the equilibrium: |f(z + step) - f(z)| / |step| for a random step.

    mean |f(w) - f(u)| / mean |w - u|, u = s.z, w = u + scale * Gaussian noise, as Fung et al. hold it below 1 (JFB:
    Jacobian-free backpropagation, 2022). They perturb the inputs as well; here they stay as they were bound.

    The norms are over the channels, dimension 1 of each tensor of the state; the means over all else. Of a nested state
    the means are added up over its tensors, above and below, before the ratio is taken. Samples that are not finite are
    left out: nan if none remains. An average over directions is below the Lipschitz constant.
    """
    _check_positive(scale=scale)
    u = pytree.tree_map(Tensor.detach, s.z)
    w = pytree.tree_map(
        lambda part: part + scale * torch.randn(part.shape, dtype=part.dtype, device=part.device, generator=generator), u
    )
    fu, fw = s.f(u), s.f(w)
    kept = s.finite
    for image in (fu, fw):
        kept = kept & torch.isfinite(s.layout.pack(image)).all(dim=1)
    return _mean_distance(fw, fu, kept) / _mean_distance(w, u, kept)


@torch.no_grad()
def contract_(
    layers: Iterable[nn.Module], s: Solution, bound: float, scale: float = 1.0, generator: torch.Generator | None = None
) -> float:
    """Scale the layers' weights and biases by (bound / r)^(1/L) where r = `lipschitz_ratio(s)` is above the bound.

    L is the number of `layers`, those the state passes through one after the other; where nothing else acts on it and
    there is no bias, the ratio is then the bound. A tensor that several of them share is scaled once. Call it after the
    optimizer's step, not between a solve and its `backward()`.

    Returns r, as it was. Where it is not finite nothing is scaled.
    """
    _check_positive(bound=bound)
    layers = list(layers)
    tensors = _own_tensors(layers)
    ratio = float(lipschitz_ratio(s, scale, generator))
    if bound < ratio < math.inf:
        factor = (bound / ratio) ** (1 / len(layers))
        for tensor in tensors:
            tensor.mul_(factor)
    return ratio


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normalized(x: Tensor, otherwise: Tensor, eps: float) -> Tensor:
    """Return x / |x|, or `otherwise` if |x| is below eps or not finite, so that the power iteration can recover."""
    length = torch.linalg.vector_norm(x)
    return torch.where((length > eps) & (length < math.inf), x / length, otherwise)


def _mean_distance(a: State, b: State, kept: Tensor) -> Tensor:
    """Return the mean distance of two states in the kept samples, summed over their tensors; 0 where none is kept."""
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    differences = [_at_least_float32(x) - _at_least_float32(y) for x, y in pairs]
    # norms over dimension 1; a tensor that has none is its own channel
    norms = [torch.linalg.vector_norm(x, dim=1) if x.dim() > 1 else torch.atleast_1d(x.abs()) for x in differences]
    means = [_mean(norm, kept) for norm in norms]
    return reduce(torch.add, means)  # they may be of different dtypes


def _mean(x: Tensor, kept: Tensor) -> Tensor:
    """Return the mean of x, (batch, ...), over the samples that are kept; `kept` is (1,) for a state without a batch."""
    selected = kept.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    return torch.where(selected, x, 0.0).sum() / selected.sum().clamp(min=1)


def _own_tensors(layers: list[nn.Module]) -> list[Tensor]:
    """Return the weights and biases of the layers, each once."""
    if not layers:
        raise ValueError("There are no layers to scale: give those that the state passes through.")
    found = {}
    for layer in layers:
        for name in ("weight", "bias"):
            tensor = _own_tensor(layer, name)
            if tensor is not None:
                found[id(tensor)] = tensor
    return list(found.values())


def _own_tensor(layer: nn.Module, name: str) -> Tensor | None:
    own = dict(layer.named_parameters(recurse=False))
    if name in own:
        return own[name]
    if parametrize.is_parametrized(layer, name):
        raise ValueError(
            f"The {name} of {type(layer).__name__} is computed by a parametrization, and scaling the result would be lost. "
            "Remove the parametrization, or hold this layer by spectral_norm and leave it out here."
        )
    if getattr(layer, name, None) is None and name == "bias":
        return None
    raise ValueError(
        f"The layers to scale need a parameter {name!r}, and {type(layer).__name__} has {sorted(own)}. Leave it out."
    )


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"{name} must be positive, got {number}.")
