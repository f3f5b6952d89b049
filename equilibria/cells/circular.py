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

LONGEST = 64  # longest side in pixels that is transformed by matrix products; beyond it the FFT is faster
SCRATCH = 2**21  # largest intermediate result of the transform, in numbers: the allocator clears larger ones on every call


def convolve(z: Tensor, kernel: Tensor, stride: int = 1) -> Tensor:
    """Apply a circular convolution: (batch, in, height, width) -> (batch, out, height / stride, width / stride).

    `stride` keeps every stride-th pixel, starting with the first.
    """
    reach = kernel.shape[-1] // 2
    return F.conv2d(F.pad(z, (reach,) * 4, mode="circular"), kernel, stride=stride)


def transposed(kernel: Tensor) -> Tensor:
    """Return the kernel of the transposed convolution K'."""
    return kernel.flip(-2, -1).transpose(0, 1)


def gram(kernel: Tensor) -> Tensor:
    """Return the kernel of K'K, of size 2 k - 1: sum_e K[e]' K[e + d]."""
    reach = kernel.shape[-1] - 1
    columns = kernel.transpose(0, 1)
    # conv2d is a cross-correlation, sum_e K[e + d] K[e] over outputs, which is the formula transposed
    return F.conv2d(columns, columns, padding=reach).transpose(0, 1)


def identity_kernel(channels: int, like: Tensor) -> Tensor:
    """Return the kernel of the identity, (channels, channels, 1, 1), in the dtype and on the device of `like`."""
    return torch.eye(channels, dtype=like.dtype, device=like.device)[:, :, None, None]


def widen(kernel: Tensor, size: int) -> Tensor:
    """Pad a kernel with zeros to a larger odd `size`; the convolution stays the same."""
    return F.pad(kernel, ((size - kernel.shape[-1]) // 2,) * 4)


def spread(z: Tensor) -> Tensor:
    """Insert zeros between pixels, doubling height and width: the adjoint of keeping every second pixel."""
    height, width = z.shape[-2:]
    apart = F.pad(z[..., :, None, :, None], (0, 1, 0, 0, 0, 1))  # (..., height, 2, width, 2)
    return apart.reshape(*z.shape[:-2], 2 * height, 2 * width)


def response(kernel: Tensor, size: tuple[int, int], *, half: bool = True) -> Tensor:
    """Return K(w) at the frequencies of a torus, (height, width, out, in) complex.

    half  return only the width // 2 + 1 columns that the transform of a real image keeps
    """
    rows, columns = (_phases(n, kernel) for n in size)
    if half:
        columns = columns[: size[1] // 2 + 1]
    return torch.einsum("oiab,ya,xb->yxoi", kernel.to(rows.dtype), rows, columns)


def real_blocks(matrices: Tensor) -> Tensor:
    """Return complex matrices (..., out, in) as real ones, (..., 2 out, 2 in), acting on [real parts; imaginary parts]."""
    real, imaginary = torch.view_as_real(matrices).unbind(-1)
    upper, lower = torch.cat([real, -imaginary], dim=-1), torch.cat([imaginary, real], dim=-1)
    return torch.cat([upper, lower], dim=-2)


def decimated(matrices: Tensor) -> Tensor:
    """Return S K S' where S keeps every second pixel: (height, width, ...) -> (height / 2, width / 2, ...).

    Frequencies that lie half the sampling frequency apart alias to one frequency of the smaller torus; their matrices are
    averaged.
    """
    height, width = matrices.shape[:2]
    aliases = matrices.unflatten(1, (2, width // 2)).unflatten(0, (2, height // 2))
    return aliases.mean(dim=(0, 2))


class Torus:
    """Transforms between images on a torus and their frequencies, stored as real matrices with one column per sample.

    size  height and width
    fold  1, or 2 for operators that mix frequencies half the sampling frequency apart, such as keeping every second pixel:
          these frequencies form one group. Height and width must be divisible by it
    like  a tensor with the dtype and device of the images

    A spectrum has shape (groups, 2 * fold^2 * channels, batch). In a group, all real parts come before all imaginary parts;
    within each, the frequencies of the group follow one another, each with its channels. For a real image only one of the
    frequencies w and -w is kept, with the weight sqrt(2); where a group holds both, each has the weight 1. The transform is
    therefore orthogonal: `synthesise` is both the inverse and the transpose of `analyse`.

    On a CPU and up to LONGEST pixels the transform is two products with real matrices, which write the result in the layout
    that the product per frequency reads. The FFT needs fewer operations, but its two transpositions and the complex products
    take several times as long.
    """

    def __init__(self, size: tuple[int, int], like: Tensor, fold: int = 1) -> None:
        self.size, self.fold = size, fold
        self.coarse = size[0] // fold, size[1] // fold
        self.kept = self.coarse[1] // 2 + 1  # columns of groups that are stored; the others hold complex conjugates
        self.groups = self.kept * self.coarse[0]
        self.kind = like.dtype, like.device
        self.bases = _bases(self) if like.device.type == "cpu" and max(size) <= LONGEST else None

    def analyse(self, z: Tensor) -> Tensor:
        """Return the spectrum of images (batch, channels, height, width)."""
        if self.bases is None or is_traced():
            fold, weights = self.fold, self.weights(z.dtype)
            whole = torch.fft.rfft2(z, norm="ortho") if fold == 1 else torch.fft.fft2(z, norm="ortho")
            apart = whole.unflatten(3, (fold, -1)).unflatten(2, (fold, -1))[..., : self.kept]
            parts = torch.view_as_real(apart * weights)  # (batch, channels, fold, coarse height, fold, kept, part)
            return parts.permute(5, 3, 6, 2, 4, 1, 0).reshape(self.groups, 2 * fold**2 * z.shape[1], z.shape[0])
        return _Analysis.apply(z, self)  # type: ignore[no-untyped-call]

    def synthesise(self, spectrum: Tensor) -> Tensor:
        """Return the images (batch, channels, height, width) of a spectrum."""
        if self.bases is None or is_traced():
            return _fast_synthesis(spectrum, self)
        return _Synthesis.apply(spectrum, self)  # type: ignore[no-untyped-call]

    def apply(self, z: Tensor, blocks: Tensor) -> Tensor:
        """Apply an operator to images (batch, in, height, width), in the dtype of `blocks` and without autocast.

        blocks  `real_blocks` of the operator's matrices, (groups, 2 * fold^2 * out, 2 * fold^2 * in)
        """
        with torch.autocast(z.device.type, enabled=False):
            return self.synthesise(torch.bmm(blocks, self.analyse(z.to(blocks.dtype))))

    def response(self, kernel: Tensor) -> Tensor:
        """Return K(w) in the order of a spectrum, (groups, fold^2, out, in) complex."""
        matrices = response(kernel, self.size, half=self.fold == 1)
        apart = matrices.unflatten(1, (self.fold, -1)).unflatten(0, (self.fold, -1))[:, :, :, : self.kept]
        return apart.permute(3, 1, 0, 2, 4, 5).flatten(0, 1).flatten(1, 2)

    def weights(self, dtype: torch.dtype) -> Tensor:
        """Return the weights of the stored columns, (kept,): 1 where -w is stored too, else sqrt(2)."""
        column = torch.arange(self.kept, device=self.kind[1])
        return (2 - (2 * column % self.coarse[1] == 0).to(dtype)).sqrt()

    def __eq__(self, other: object) -> bool:
        # compared by value: a compiled solve is reused by the next one, which builds its own torus
        return isinstance(other, Torus) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.size, self.fold, self.kind  # the bases follow from these

    def __repr__(self) -> str:
        return f"Torus(size={self.size}, fold={self.fold})"


def is_traced() -> bool:
    """Return True while torch traces a graph: custom Functions and tensors from outside are not allowed there."""
    return torch.compiler.is_compiling() or get_proxy_mode() is not None


def _bases(torus: Torus) -> tuple[Tensor, Tensor]:
    """Return the matrices of the transform along rows and of the transform along columns.

    The first has shape (2 * fold * kept, width); its rows are ordered by column of groups, horizontal frequency in the
    group, and real or imaginary part. The second has one matrix (2 * fold^2 * coarse height, height) for each of these 2 *
    fold parts; its rows are ordered by row of groups, real or imaginary part, vertical frequency and horizontal frequency.
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
    """Return exp(-i w q) / sqrt(n) for frequencies w and pixels q, (n / fold, fold, n).

    The second dimension holds the frequencies of a group, which are n / fold apart.
    """
    place = torch.arange(n, device=device)
    # integers modulo n: the angle stays in [0, 2 pi), where cos and sin are exact to rounding
    angle = (torch.outer(place, place) % n).double() * (-2 * math.pi / n)
    return torch.polar(torch.full_like(angle, n**-0.5), angle).unflatten(0, (fold, -1)).transpose(0, 1)


def _channels_at_once(torus: Torus, batch: int) -> int:
    """Return how many channels to transform together so that the intermediate result stays below SCRATCH numbers."""
    return max(1, SCRATCH // max(1, 2 * torus.fold * torus.kept * torus.size[0] * batch))


class _Analysis(torch.autograd.Function):
    """The transform by matrix products. It is linear, with `_Synthesis` as its transpose; nothing is saved."""

    @staticmethod
    def forward(z: Tensor, torus: Torus) -> Tensor:
        """Return the spectrum of images z, (batch, channels, height, width), computed a few channels at a time."""
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
        with torch.autocast(gradients[0].device.type, enabled=False):  # backward may be called under autocast
            return ctx.torus.synthesise(gradients[0]), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return ctx.torus.analyse(tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], z: Tensor, torus: Torus) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        z = z.movedim(in_dims[0], 0)  # the mapped dimension becomes more samples
        return torus.analyse(z.flatten(0, 1)).unflatten(2, z.shape[:2]), 2


class _Synthesis(torch.autograd.Function):
    """The inverse transform by matrix products. It is linear, with `_Analysis` as its transpose; nothing is saved."""

    @staticmethod
    def forward(spectrum: Tensor, torus: Torus) -> Tensor:
        """Return the images of a spectrum, computed a few channels at a time."""
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
        return images.transpose(0, 1)  # a view, not a copy: a splitting reads it once, in any order

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


def _fast_synthesis(spectrum: Tensor, torus: Torus) -> Tensor:
    """Return the images of a spectrum by the inverse FFT."""
    fold, weights = torus.fold, torus.weights(spectrum.dtype)
    channels = spectrum.shape[1] // (2 * fold**2)
    apart = spectrum.reshape(torus.kept, torus.coarse[0], 2, fold, fold, channels, spectrum.shape[2])
    parts = torch.view_as_complex(apart.permute(6, 5, 3, 1, 4, 0, 2).contiguous())
    if fold == 1:  # irfft2 counts a column twice where its weight is sqrt(2)
        return torch.fft.irfft2((parts / weights)[:, :, 0, :, 0], s=torus.size, norm="ortho")
    whole = F.pad(parts * weights, (0, torus.coarse[1] - torus.kept)).flatten(4, 5).flatten(2, 3)
    return torch.fft.ifft2(whole, norm="ortho").real


def _phases(n: int, kernel: Tensor) -> Tensor:
    """Return exp(i w d) for the n frequencies w and the k offsets d, (n, k)."""
    reach = kernel.shape[-1] // 2
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float64, device=kernel.device)
    frequencies = torch.arange(n, dtype=torch.float64, device=kernel.device) * (2 * math.pi / n)
    angle = torch.outer(frequencies, offsets).to(kernel.dtype)  # computed in float64, rounded once
    return torch.complex(angle.cos(), angle.sin())
