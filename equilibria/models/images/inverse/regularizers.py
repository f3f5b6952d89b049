"""Regularizers that replace a proximal map: a learned denoiser with a bounded Lipschitz constant, and soft thresholds."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from equilibria._core.checks import require
from equilibria.cells.circular import convolve, response, transposed


class CircularNorm(nn.Module):
    """A parametrization that scales a kernel so that its circular convolution has a norm of at most `bound`.

    The norm is exact: the largest singular value over all frequencies of images of `size`. Gradients flow through it. A
    kernel with a smaller norm is not changed.
    """

    def __init__(self, size: tuple[int, int], bound: float) -> None:
        super().__init__()
        self.size, self.bound = size, bound

    def forward(self, kernel: Tensor) -> Tensor:
        return kernel / (self.norm(kernel) / self.bound).clamp_min(1)

    def norm(self, kernel: Tensor) -> Tensor:
        matrices = response(kernel, self.size).flatten(0, 1)
        with torch.no_grad():
            worst = torch.linalg.matrix_norm(matrices, ord=2).argmax()
        return torch.linalg.matrix_norm(matrices[worst], ord=2)


class ContractiveDenoiser(nn.Module):
    """R(x) = c (x - W' s(W x)) + (1 - c) m: a gradient step on a learned convex function, with a bounded Lipschitz constant.

    W is a circular convolution with |W|² <= 2 on images of `size`, and s(t) = a tanh(t / a) with one a per filter and slopes
    in [0, 1]. So W' s(W x) has a symmetric Jacobian with eigenvalues in [0, 2], and |R(x) - R(y)| <= c |x - y| for all
    weights. W' s(W x) is the gradient of a convex ridge regularizer (Goujon and others 2023). Initially R is close to the
    identity. m is a learned grey value, to which c < 1 contracts images.

    size         (height, width) of the images
    filters      number of filters in W
    reach        side of a filter in pixels, odd
    contraction  c, at most 1
    amplitude    initial value of a
    """

    def __init__(
        self,
        size: tuple[int, int],
        *,
        channels: int = 1,
        filters: int = 32,
        reach: int = 5,
        contraction: float = 0.99,
        amplitude: float = 0.02,
    ) -> None:
        super().__init__()
        require(reach % 2 == 1, f"reach must be odd, got {reach}.")
        require(0 < contraction <= 1, f"contraction must be in (0, 1], got {contraction}.")
        self.contraction = contraction
        kernels = torch.randn(filters, channels, reach, reach) / (reach * math.sqrt(filters))
        self.filters = nn.Parameter(kernels - kernels.mean(dim=(-2, -1), keepdim=True))
        parametrize.register_parametrization(self, "filters", CircularNorm(size, math.sqrt(2)))
        self.log_amplitude = nn.Parameter(torch.full((filters, 1, 1), math.log(amplitude)))
        self.grey = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        amplitude, c = self.log_amplitude.exp(), self.contraction
        features = amplitude * torch.tanh(convolve(x, self.filters) / amplitude)
        return c * (x - convolve(features, transposed(self.filters))) + (1 - c) * self.grey


class SoftThreshold(nn.Module):
    """Shrinks the coefficients of the orthonormal cosine transform of n x n images towards zero by a learned threshold.

    This is the proximal map of the threshold times the sum of absolute coefficients. `ProximalGradient` with it is ISTA.
    """

    transform: Tensor

    def __init__(self, size: int, threshold: float = 0.01) -> None:
        super().__init__()
        require(threshold > 0, f"threshold must be positive, got {threshold}.")
        self.log_threshold = nn.Parameter(torch.tensor(math.log(threshold)))
        self.register_buffer("transform", cosine_transform(size))

    def forward(self, x: Tensor) -> Tensor:
        coefficients = self.transform @ x @ self.transform.T
        shrunk = coefficients.sign() * torch.relu(coefficients.abs() - self.log_threshold.exp())
        return self.transform.T @ shrunk @ self.transform


def cosine_transform(size: int) -> Tensor:
    """Return the matrix (size, size) of the orthonormal discrete cosine transform."""
    k = torch.arange(size, dtype=torch.get_default_dtype())
    matrix = math.sqrt(2 / size) * torch.cos(math.pi * torch.outer(k, k + 0.5) / size)
    matrix[0] /= math.sqrt(2)
    return matrix
