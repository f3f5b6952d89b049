"""Convolutions on a torus: kernels, their adjoints and products, and their matrices per frequency.

A kernel (out, in, k, k) with odd k stands for (K z)(q) = sum_d K[d] z(q + d), d = -k//2 .. k//2, indices wrapped round.
The Fourier transform turns it into one small matrix per frequency w, K(w) = sum_d K[d] exp(i w.d), (out, in).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(z: Tensor, kernel: Tensor, stride: int = 1) -> Tensor:
    """K z, (batch, in, height, width) -> (batch, out, ...); `stride` keeps every so many pixels, from the first on."""
    reach = kernel.shape[-1] // 2
    return F.conv2d(F.pad(z, (reach,) * 4, mode="circular"), kernel, stride=stride)


def transposed(kernel: Tensor) -> Tensor:
    """The kernel of K'."""
    return kernel.flip(-2, -1).transpose(0, 1)


def gram(kernel: Tensor) -> Tensor:
    """The kernel of K'K, of size 2 k - 1: sum_e K[e]' K[e + d]."""
    reach = kernel.shape[-1] - 1
    columns = kernel.transpose(0, 1)
    return F.conv2d(columns, columns, padding=reach).transpose(0, 1)


def identity_kernel(channels: int, like: Tensor) -> Tensor:
    """The kernel, (channels, channels, 1, 1), that changes nothing."""
    return torch.eye(channels, dtype=like.dtype, device=like.device)[:, :, None, None]


def widen(kernel: Tensor, size: int) -> Tensor:
    """The same convolution by a kernel of a larger odd size."""
    return F.pad(kernel, ((size - kernel.shape[-1]) // 2,) * 4)


def spread(z: Tensor) -> Tensor:
    """The adjoint of keeping every second pixel: zeros between the pixels, twice the height and the width."""
    height, width = z.shape[-2:]
    apart = F.pad(z[..., :, None, :, None], (0, 1, 0, 0, 0, 1))  # (..., height, 2, width, 2)
    return apart.reshape(*z.shape[:-2], 2 * height, 2 * width)


def response(kernel: Tensor, size: tuple[int, int], *, half: bool = True) -> Tensor:
    """K(w) at the frequencies of a torus, (height, width, out, in) complex.

    half  only the columns that the transform of a real image keeps, width // 2 + 1 of them
    """
    rows, columns = (_phases(n, kernel) for n in size)
    if half:
        columns = columns[: size[1] // 2 + 1]
    return torch.einsum("oiab,ya,xb->yxoi", kernel.to(rows.dtype), rows, columns)


def apply_response(z: Tensor, matrices: Tensor) -> Tensor:
    """The convolution with these matrices per frequency, (height, width // 2 + 1, out, in)."""
    spectrum = torch.einsum("yxoi,biyx->boyx", matrices, torch.fft.rfft2(z))
    size: list[int] = list(z.shape[-2:])
    return torch.fft.irfft2(spectrum, s=size)


def decimated(matrices: Tensor) -> Tensor:
    """S K S' for S that keeps every second pixel: (height, width, ...) -> (height / 2, width / 2, ...).

    What lies half the sampling frequency apart falls on one frequency of the smaller torus, and is averaged.
    """
    height, width = matrices.shape[:2]
    aliases = matrices.unflatten(1, (2, width // 2)).unflatten(0, (2, height // 2))
    return aliases.mean(dim=(0, 2))


def _phases(n: int, kernel: Tensor) -> Tensor:
    """exp(i w d) for the n frequencies w and the k offsets d, (n, k)."""
    reach = kernel.shape[-1] // 2
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float64, device=kernel.device)
    frequencies = torch.arange(n, dtype=torch.float64, device=kernel.device) * (2 * math.pi / n)
    angle = torch.outer(frequencies, offsets).to(kernel.dtype)
    return torch.complex(angle.cos(), angle.sin())
