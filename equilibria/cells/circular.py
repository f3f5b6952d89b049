"""Convolutions on a torus: kernels, their adjoints and products, and their matrices per frequency.

A kernel (out, in, k, k) with odd k defines (K z)(q) = sum_d K[d] z(q + d), d = -k//2 .. k//2, with periodic indices. The
Fourier transform diagonalises it into one small matrix per frequency w, K(w) = sum_d K[d] exp(i w.d), (out, in). `Torus`
transforms images to frequencies and back.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

LONGEST = 64  # of a side that is transformed by products with matrices; beyond, the fast Fourier transform is faster
SCRATCH = 2**21  # numbers between its two products: memory the allocator keeps at hand, where more has to be cleared anew


def convolve(z: Tensor, kernel: Tensor, stride: int = 1) -> Tensor:
    """K z, (batch, in, height, width) -> (batch, out, ...); `stride` keeps every stride-th pixel, from the first on."""
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
    """The kernel of the identity, (channels, channels, 1, 1)."""
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


def real_blocks(matrices: Tensor) -> Tensor:
    """Complex matrices (..., out, in) as real ones, (..., 2 out, 2 in), on real parts followed by imaginary parts."""
    real, imaginary = torch.view_as_real(matrices).unbind(-1)
    upper, lower = torch.cat([real, -imaginary], dim=-1), torch.cat([imaginary, real], dim=-1)
    return torch.cat([upper, lower], dim=-2)


def decimated(matrices: Tensor) -> Tensor:
    """S K S' for S that keeps every second pixel: (height, width, ...) -> (height / 2, width / 2, ...).

    What lies half the sampling frequency apart falls on one frequency of the smaller torus, and is averaged.
    """
    height, width = matrices.shape[:2]
    aliases = matrices.unflatten(1, (2, width // 2)).unflatten(0, (2, height // 2))
    return aliases.mean(dim=(0, 2))


class Torus:
    """Images on a torus, and their frequencies, as real matrices of one column per sample.

    size  height and width
    fold  1, or 2 for operators that mix what lies half the sampling frequency apart, as keeping every second pixel does:
          these frequencies stand together. Height and width must be divisible by it
    like  a tensor of the kind of the images

    A spectrum is (groups, 2 * fold^2 * channels, batch): in a group, all real parts come before all imaginary parts, and
    in either the frequencies of the group, each with its channels. Of the two frequencies w and -w of a real image one is
    kept, with the weight sqrt(2), or both with the weight 1. So lengths are kept as well, and `synthesise`, the inverse of
    `analyse`, is also its transpose.

    Up to LONGEST pixels, the transform on a CPU is two products with real matrices that leave the result where the
    product per frequency wants it. The fast Fourier transform has less to compute, but the two transpositions around it,
    and complex products, take several times as long as all of that.
    """

    def __init__(self, size: tuple[int, int], like: Tensor, fold: int = 1) -> None:
        self.size, self.fold = size, fold
        self.coarse = size[0] // fold, size[1] // fold
        self.kept = self.coarse[1] // 2 + 1  # columns of groups: the others hold complex conjugates
        self.groups = self.kept * self.coarse[0]
        self.kind = like.dtype, like.device
        self.bases = _bases(self) if like.device.type == "cpu" and max(size) <= LONGEST else None

    def analyse(self, z: Tensor) -> Tensor:
        """(batch, channels, height, width) -> its spectrum."""
        if self.bases is None or is_traced():
            return _fast_analysis(z, self)
        return _Analysis.apply(z, self)  # type: ignore[no-untyped-call]

    def synthesise(self, spectrum: Tensor) -> Tensor:
        """The image, (batch, channels, height, width), of a spectrum."""
        if self.bases is None or is_traced():
            return _fast_synthesis(spectrum, self)
        return _Synthesis.apply(spectrum, self)  # type: ignore[no-untyped-call]

    def apply(self, z: Tensor, blocks: Tensor) -> Tensor:
        """The operator with these `real_blocks` per group, (groups, 2 * fold^2 * out, 2 * fold^2 * in)."""
        with torch.autocast(z.device.type, enabled=False):
            return self.synthesise(torch.bmm(blocks, self.analyse(z.to(blocks.dtype))))

    def response(self, kernel: Tensor) -> Tensor:
        """K(w) in the order of a spectrum, (groups, fold^2, out, in) complex."""
        matrices = response(kernel, self.size, half=self.fold == 1)
        apart = matrices.unflatten(1, (self.fold, -1)).unflatten(0, (self.fold, -1))[:, :, :, : self.kept]
        return apart.permute(3, 1, 0, 2, 4, 5).flatten(0, 1).flatten(1, 2)

    def weights(self, dtype: torch.dtype) -> Tensor:
        """(kept,), of the columns of groups: 1 where -w belongs to them too."""
        column = torch.arange(self.kept, device=self.kind[1])
        return (2 - (2 * column % self.coarse[1] == 0).to(dtype)).sqrt()

    def __eq__(self, other: object) -> bool:
        # what was compiled for one solve serves the next, with a torus of its own
        return isinstance(other, Torus) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.size, self.fold, self.kind

    def __repr__(self) -> str:
        return f"Torus(size={self.size}, fold={self.fold})"


def is_traced() -> bool:
    """True while a graph is traced, which takes plain functions of torch and no tensors from outside."""
    return torch.compiler.is_compiling() or get_proxy_mode() is not None


def _bases(torus: Torus) -> tuple[Tensor, Tensor]:
    """The transform along rows, then that along columns, the latter in parts.

    First (2 * fold * kept, width): column of groups, which of its horizontal frequencies, real or imaginary part. Then for
    each of these 2 * fold parts (2 * fold^2 * coarse height, height): row of groups, real or imaginary part, which vertical
    and which horizontal frequency.
    """
    fold, (height, width) = torus.fold, torus.size
    dtype, device = torus.kind
    down, along = (_waves(n, fold, device) for n in torus.size)  # (coarse, fold, n) each
    along = torus.weights(torch.float64)[:, None, None] * along[: torus.kept]
    first = torch.view_as_real(along).movedim(3, 2).reshape(2 * fold * torus.kept, width)
    same = torch.eye(fold, dtype=first.dtype, device=device)
    turn = real_blocks(down[..., None, None])  # (coarse, fold, pixel, part after, part before)
    second = torch.einsum("ipyab,qr->rbiapqy", turn, same).reshape(2 * fold, -1, height)
    return first.to(dtype), second.to(dtype)


def _waves(n: int, fold: int, device: torch.device) -> Tensor:
    """exp(-i w q) / sqrt(n) for frequencies w and pixels q, (n / fold, fold, n): those n / fold apart stand together."""
    place = torch.arange(n, device=device)
    angle = (torch.outer(place, place) % n).double() * (-2 * math.pi / n)
    return torch.polar(torch.full_like(angle, n**-0.5), angle).unflatten(0, (fold, -1)).transpose(0, 1)


def _channels_at_once(torus: Torus, batch: int) -> int:
    return max(1, SCRATCH // max(1, 2 * torus.fold * torus.kept * torus.size[0] * batch))


class _Analysis(torch.autograd.Function):
    """Its derivatives are itself and `_Synthesis`; nothing is saved for them."""

    @staticmethod
    def forward(z: Tensor, torus: Torus) -> Tensor:
        assert torus.bases is not None
        along, down = torus.bases
        (batch, channels), (height, width) = z.shape[:2], torus.size
        spectrum = z.new_empty(torus.kept, down.shape[1], channels, batch)
        step = _channels_at_once(torus, batch)
        for some, whole in zip(z.split(step, dim=1), spectrum.split(step, dim=2), strict=True):
            count = some.shape[1] * batch
            images = some.transpose(0, 1).reshape(count * height, width)
            lines = torch.mm(along, images.T).view(torus.kept, len(down), count, height)
            for out, parts in zip(whole.flatten(2), lines, strict=True):
                torch.mm(down[0], parts[0].T, out=out)
                for basis, part in zip(down[1:], parts[1:], strict=True):
                    out.addmm_(basis, part.T)
        return spectrum.view(torus.groups, 2 * torus.fold**2 * channels, batch)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Torus], output: Tensor) -> None:
        ctx.torus = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        with torch.autocast(gradients[0].device.type, enabled=False):  # which may be on where backward is called
            return ctx.torus.synthesise(gradients[0]), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return ctx.torus.analyse(tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], z: Tensor, torus: Torus) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        z = z.movedim(in_dims[0], 0)  # what is mapped over becomes more samples
        return torus.analyse(z.flatten(0, 1)).unflatten(2, z.shape[:2]), 2


class _Synthesis(torch.autograd.Function):
    """Its derivatives are itself and `_Analysis`; nothing is saved for them."""

    @staticmethod
    def forward(spectrum: Tensor, torus: Torus) -> Tensor:
        assert torus.bases is not None
        along, down = torus.bases
        (channels, batch), (height, width) = (spectrum.shape[1] // (2 * torus.fold**2), spectrum.shape[2]), torus.size
        whole = spectrum.reshape(torus.kept, down.shape[1], channels, batch)
        images = spectrum.new_empty(channels, batch, height, width)
        step = _channels_at_once(torus, batch)
        for some, out in zip(whole.split(step, dim=2), images.split(step), strict=True):
            count = len(out) * batch
            lines = spectrum.new_empty(torus.kept, len(down), count, height)
            for column, parts in zip(some.flatten(2), lines, strict=True):
                for basis, part in zip(down, parts, strict=True):
                    torch.mm(column.T, basis, out=part)
            torch.mm(lines.view(len(along), count * height).T, along, out=out.view(count * height, width))
        return images.transpose(0, 1)  # a view, and no copy: what comes next in a splitting reads it once, in any order

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Torus], output: Tensor) -> None:
        ctx.torus = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        with torch.autocast(gradients[0].device.type, enabled=False):
            return ctx.torus.analyse(gradients[0]), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return ctx.torus.synthesise(tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], spectrum: Tensor, torus: Torus) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        spectrum = spectrum.movedim(in_dims[0], 2)
        return torus.synthesise(spectrum.flatten(2, 3)).unflatten(0, spectrum.shape[2:]), 0


def _fast_analysis(z: Tensor, torus: Torus) -> Tensor:
    fold, weights = torus.fold, torus.weights(z.dtype)
    whole = torch.fft.rfft2(z, norm="ortho") if fold == 1 else torch.fft.fft2(z, norm="ortho")
    apart = whole.unflatten(3, (fold, -1)).unflatten(2, (fold, -1))[..., : torus.kept]
    parts = torch.view_as_real(apart * weights)  # (batch, channels, fold, coarse height, fold, kept, part)
    return parts.permute(5, 3, 6, 2, 4, 1, 0).reshape(torus.groups, 2 * fold**2 * z.shape[1], z.shape[0])


def _fast_synthesis(spectrum: Tensor, torus: Torus) -> Tensor:
    fold, weights = torus.fold, torus.weights(spectrum.dtype)
    channels = spectrum.shape[1] // (2 * fold**2)
    apart = spectrum.reshape(torus.kept, torus.coarse[0], 2, fold, fold, channels, spectrum.shape[2])
    parts = torch.view_as_complex(apart.permute(6, 5, 3, 1, 4, 0, 2).contiguous())
    if fold == 1:  # this transform counts a column twice where its weight is sqrt(2)
        return torch.fft.irfft2((parts / weights)[:, :, 0, :, 0], s=torus.size, norm="ortho")
    whole = F.pad(parts * weights, (0, torus.coarse[1] - torus.kept)).flatten(4, 5).flatten(2, 3)
    return torch.fft.ifft2(whole, norm="ortho").real


def _phases(n: int, kernel: Tensor) -> Tensor:
    """exp(i w d) for the n frequencies w and the k offsets d, (n, k)."""
    reach = kernel.shape[-1] // 2
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float64, device=kernel.device)
    frequencies = torch.arange(n, dtype=torch.float64, device=kernel.device) * (2 * math.pi / n)
    angle = torch.outer(frequencies, offsets).to(kernel.dtype)
    return torch.complex(angle.cos(), angle.sin())
