"""Monotone convolutional cells on one image or on a pyramid of images; W consists of circular convolutions.

On a torus, (1 + alpha) I - alpha W splits into one small matrix per frequency, which is cheap to invert. Images are not
tori. They get a frame of zeros, which s sets to zero again in every step, so that no value crosses an edge and the interior
sees ordinary zero padding. Setting entries to zero is a projection too, so the theory holds unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.cells.circular import (
    Torus,
    convolve,
    decimated,
    gram,
    identity_kernel,
    is_traced,
    real_blocks,
    response,
    spread,
    transposed,
    widen,
)
from equilibria.cells.monotone import (
    Certificate,
    MonotoneCell,
    State,
    Tensors,
    bounds,
    check_shape,
    check_sizes,
    full_precision,
    widened,
)

Image = int | tuple[int, int]


class Kernel(nn.Module):
    """The kernel scale * K / |K| with K of shape (channels, inputs, size, size); `scale` is a parameter that starts at 1."""

    def __init__(self, inputs: int, channels: int, size: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs * size**2)  # as torch.nn.Conv2d
        self.weight = nn.Parameter(torch.empty(channels, inputs, size, size).uniform_(-bound, bound))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self) -> Tensor:
        return self.scale * F.normalize(self.weight.flatten(), dim=0).view_as(self.weight)


class MonotoneConv2d(MonotoneCell):
    """z = relu(W z + U x + b) with W = (1 - m) I - A'A + B - B', all convolutions, A = g A0 / |A0|, B = h B0 / |B0|.

    in_channels  channels of x, (batch, in_channels, height, width)
    channels     channels of z, (batch, channels, height + 2 f, width + 2 f) with a frame of f = kernel_size // 2 zeros
    kernel_size  odd size of A, B and U
    image        (height, width) of x, or one number for both
    m            monotonicity: I - W >= m I
    frame        False: no frame, the image is a torus

    The code released with the paper has the term g A'A, which is not monotone for g < 0; here it is g^2 A'A, which always
    is.
    """

    def __init__(
        self, in_channels: int, channels: int, kernel_size: int, image: Image, m: float = 1.0, *, frame: bool = True
    ) -> None:
        super().__init__(m)
        check_sizes(in_channels=in_channels, channels=channels)
        self.image = _checked_image(image, kernel_size)
        self.frame = kernel_size // 2 if frame else 0
        self.U = _injection(in_channels, channels, kernel_size, self.frame)
        self.A = Kernel(channels, channels, kernel_size)
        self.B = Kernel(channels, channels, kernel_size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the state of one sample: channels, height and width including the frame."""
        height, width = self.image
        return self.U.out_channels, height + 2 * self.frame, width + 2 * self.frame

    def source(self, x: Tensor) -> Tensor:
        _check_images(x, self.U.in_channels, self.image)
        return self.U(x)

    def operator(self) -> Tensor:
        with full_precision(self.A.weight):
            return _monotone_kernel(self.A(), self.B(), self.m).unsqueeze(0)

    def multiply(self, z: Tensor, operator: Tensor) -> Tensor:
        return convolve(z, operator[0])

    def multiply_transposed(self, z: Tensor, operator: Tensor) -> Tensor:
        return convolve(z, transposed(operator[0]))

    def invert(self, operator: Tensor, alpha: float) -> tuple[Tensor, Torus]:
        """Return the inverse as real matrices per frequency, and the torus that transforms images."""
        torus = Torus(self.shape[1:], operator)
        matrices = torch.linalg.inv(_shifted(torus.response(operator[0]).squeeze(1), alpha))
        return real_blocks(matrices).unsqueeze(0), torus

    def solve(self, y: Tensor, inverse: tuple[Tensor, Torus]) -> Tensor:
        blocks, torus = inverse
        return torus.apply(y, blocks.squeeze(0))

    def solve_transposed(self, y: Tensor, inverse: tuple[Tensor, Torus]) -> Tensor:
        blocks, torus = inverse
        return torus.apply(y, blocks.squeeze(0).mT)

    def project(self, u: Tensor, source: Tensors) -> Tensor:
        return _rectified(u, self.frame)

    @torch.no_grad()
    def certificate(self) -> Certificate:
        """Return the certificate of W on the torus; with a frame it is a bound for W on the interior."""
        return bounds(response(widened(self.operator()[0]), self.shape[1:]))

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], *self.shape)

    def check_state(self, z: State) -> None:
        check_shape(z, self.shape)

    def extra_repr(self) -> str:
        return f"image={self.image}, frame={self.frame}, m={self.m}"


class MonotoneTiers2d(MonotoneCell):
    """A pyramid of images; tier i has channels[i] channels and half the height and width of tier i - 1; x enters at tier 0.

    W = (1 - m) I - A'A + B - B' for A with A_i on the diagonal and stride-2 convolutions L_i, from tier i to tier i + 1,
    below it. The skew part between tiers cancels the coupling from tier i + 1 to tier i, so W is lower bidiagonal:

        (W z)_i = ((1 - m) I - A_i'A_i + B_i - B_i' - L_i'L_i) z_i - 2 A_i'L_{i-1} z_{i-1}

    The state is a tuple of images, each with its frame. in_channels, kernel_size, m and frame are as in MonotoneConv2d;
    height and width must be divisible by 2^(tiers - 1).
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        kernel_size: int,
        image: Image,
        m: float = 1.0,
        *,
        frame: bool = True,
    ) -> None:
        super().__init__(m)
        check_sizes(tiers=len(channels), in_channels=in_channels, channels=min(channels, default=1))
        self.image = _checked_image(image, kernel_size)
        self.frame = kernel_size // 2 if frame else 0
        self.shapes = self._shapes(tuple(channels), kernel_size)
        self.U = _injection(in_channels, channels[0], kernel_size, self.frame)
        self.A = nn.ModuleList(Kernel(c, c, kernel_size) for c in channels)
        self.B = nn.ModuleList(Kernel(c, c, kernel_size) for c in channels)
        self.L = nn.ModuleList(Kernel(c, d, kernel_size) for c, d in pairwise(channels))

    def _shapes(self, channels: tuple[int, ...], kernel_size: int) -> tuple[tuple[int, int, int], ...]:
        """Return (channels, height, width) of every tier, frames included.

        Raises ValueError if height and width cannot be halved once per tier.
        """
        halvings = 2 ** (len(channels) - 1)
        if any(side % halvings or side // halvings + 2 * self.frame < kernel_size for side in self.image):
            raise ValueError(
                f"{len(channels)} tiers halve the image {len(channels) - 1} times: height and width must be divisible by "
                f"{halvings} and stay at least as large as the kernel, got {self.image}. Pad the image or use fewer tiers."
            )
        height, width = self.image
        border = 2 * self.frame
        return tuple((c, height // 2**i + border, width // 2**i + border) for i, c in enumerate(channels))

    def source(self, x: Tensor) -> tuple[Tensor, ...]:
        _check_images(x, self.U.in_channels, self.image)
        first: Tensor = self.U(x)
        return first, *(first.new_zeros(len(x), *shape) for shape in self.shapes[1:])

    def operator(self) -> Tensors:
        """Return (kernels within tiers, A_i, L_i), each a tuple over tiers."""
        with full_precision(self.U.weight):
            A, B, L = ([kernel() for kernel in kernels] for kernels in (self.A, self.B, self.L))
            within = [_monotone_kernel(a, b, self.m) for a, b in zip(A, B, strict=True)]
        return tuple(tuple(kernel.unsqueeze(0) for kernel in kernels) for kernels in (within, A, L))

    def multiply(self, z: tuple[Tensor, ...], operator: Tensors) -> tuple[Tensor, ...]:
        """Return W z: the convolutions within tiers and the contribution of every tier to the next coarser one."""
        within, A, L = operator
        down = [convolve(part, kernel[0], stride=2) for part, kernel in zip(z, L, strict=False)]
        out = [convolve(part, kernel[0]) for part, kernel in zip(z, within, strict=True)]
        for i, coarse in enumerate(down):
            out[i] = out[i] - _lift(coarse, L[i])
            out[i + 1] = out[i + 1] - 2 * convolve(self._extend(coarse), transposed(A[i + 1][0]))
        return tuple(out)

    def multiply_transposed(self, z: tuple[Tensor, ...], operator: Tensors) -> tuple[Tensor, ...]:
        """Return W'z: the convolutions within tiers and the contribution of every tier to the next finer one."""
        within, A, L = operator
        out = [convolve(part, transposed(kernel[0])) for part, kernel in zip(z, within, strict=True)]
        for i, kernel in enumerate(L):
            up = self._shrink(convolve(z[i + 1], A[i + 1][0]))
            out[i] = out[i] - _lift(convolve(z[i], kernel[0], stride=2) + 2 * up, kernel)
        return tuple(out)

    def invert(self, operator: Tensors, alpha: float) -> Tensors:
        """Return (D_i^{-1}, tori, 2 alpha A_i, L_i), each a tuple over tiers.

        D_i are the diagonal blocks of (1 + alpha) I - alpha W. They are inverted in the Fourier domain of the periodic
        image (`Torus`) of their tier.
        """
        within, A, L = operator
        # L_i'L_i keeps every second pixel and mixes frequencies; the last tier has no L
        folds = [2] * len(L) + [1]
        tori = tuple(Torus(shape[1:], within[0], fold) for shape, fold in zip(self.shapes, folds, strict=True))
        blocks = [_inverse_between(*parts, alpha) for parts in zip(within, L, tori, strict=False)]
        last = torch.linalg.inv(_shifted(tori[-1].response(within[-1][0]).squeeze(1), alpha))
        diagonal = tuple(real_blocks(matrices).unsqueeze(0) for matrices in (*blocks, last))
        return diagonal, tori, tuple(2 * alpha * kernel for kernel in A), L

    def solve(self, y: tuple[Tensor, ...], inverse: Tensors) -> tuple[Tensor, ...]:
        """Solve by forward substitution from the first tier; each tier gets the contribution of the one before."""
        diagonal, tori, A, L = inverse
        out = [tori[0].apply(y[0], diagonal[0].squeeze(0))]
        for i in range(1, len(y)):
            down = self._extend(convolve(out[-1], L[i - 1][0], stride=2))
            right = y[i] - convolve(down, transposed(A[i][0]))
            out.append(tori[i].apply(right, diagonal[i].squeeze(0)))
        return tuple(out)

    def solve_transposed(self, y: tuple[Tensor, ...], inverse: Tensors) -> tuple[Tensor, ...]:
        """Solve the transposed system by backward substitution from the last tier."""
        diagonal, tori, A, L = inverse
        out = [tori[-1].apply(y[-1], diagonal[-1].squeeze(0).mT)]
        for i in reversed(range(len(y) - 1)):
            up = self._shrink(convolve(out[-1], A[i + 1][0]))
            out.append(tori[i].apply(y[i] - _lift(up, L[i]), diagonal[i].squeeze(0).mT))
        return tuple(reversed(out))

    def _extend(self, coarse: Tensor) -> Tensor:
        """Pad a decimated framed image, whose frame is half as wide, to a full frame at the right and the bottom."""
        return F.pad(coarse, (0, self.frame, 0, self.frame))

    def _shrink(self, image: Tensor) -> Tensor:
        """Crop what `_extend` pads; its adjoint."""
        return image[..., : image.shape[-2] - self.frame, : image.shape[-1] - self.frame]

    def project(self, u: tuple[Tensor, ...], source: Tensors) -> tuple[Tensor, ...]:
        return tuple(_rectified(part, self.frame) for part in u)

    @torch.no_grad()
    def certificate(self) -> Certificate:
        """Return m and an upper bound of the norm; an exact norm would need frequencies that tiers of all sizes share.

        The symmetric part of I - W is m I + A'A by construction. |I - W| is at most the largest norm of a diagonal block
        plus the largest norm of a block below it.
        """
        sizes = [shape[1:] for shape in self.shapes]
        operator = pytree.tree_map(widened, self.operator())
        within, A, L = ([response(k[0], n, half=False) for k, n in zip(ks, sizes, strict=False)] for ks in operator)
        down = [_norm(decimated(kernel @ kernel.mH)) for kernel in L]  # |L L'|
        blocks = [bounds(kernel).norm + square for kernel, square in zip(within, [*down, 0.0], strict=True)]
        below = [2 * _norm(kernel) * math.sqrt(square) for kernel, square in zip(A[1:], down, strict=True)]
        return Certificate(self.m, max(blocks) + max(below, default=0.0))

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.new_zeros(x.shape[0], *shape) for shape in self.shapes)

    def check_state(self, z: State) -> None:
        """Raise ValueError unless `z` is a tuple with one image of the right shape per tier."""
        if not isinstance(z, tuple) or len(z) != len(self.shapes):
            seen = f"a tuple of {len(z)}" if isinstance(z, tuple) else type(z).__name__
            raise ValueError(f"The state is a tuple of {len(self.shapes)} tiers, got {seen}. Start with init=cell.start.")
        for part, shape in zip(z, self.shapes, strict=True):
            check_shape(part, shape)

    def extra_repr(self) -> str:
        return f"image={self.image}, frame={self.frame}, m={self.m}"


def _monotone_kernel(A: Tensor, B: Tensor, m: float) -> Tensor:
    """Return the kernel of (1 - m) I - A'A + B - B', of size 2 k - 1."""
    square = gram(A)
    skew = B - transposed(B)
    size = square.shape[-1]
    return widen((1 - m) * identity_kernel(len(A), A), size) - square + widen(skew, size)


def _shifted(W: Tensor, alpha: float) -> Tensor:
    """Return (1 + alpha) I - alpha W for blocks W, (..., n, n)."""
    return (1 + alpha) * torch.eye(W.shape[-1], dtype=W.dtype, device=W.device) - alpha * W


def _inverse_between(kernel: Tensor, down: Tensor, torus: Torus, alpha: float) -> Tensor:
    """Return D^{-1}, (groups, 4 in, 4 in), for D = F + alpha L'L with the convolution F = (1 + alpha) I - alpha K.

    L drops pixels, so L'L mixes the four frequencies of a group. The Woodbury identity inverts only small matrices:

        D^{-1} = F^{-1} - alpha F^{-1} L' H^{-1} L F^{-1} with H = I + alpha L F^{-1} L'
    """
    inverse = torch.linalg.inv(_shifted(torus.response(kernel[0]), alpha))  # (groups, 4, in, in)
    L = torus.response(down[0]) / torus.fold  # (groups, 4, out, in); one of 4 pixels is kept, which halves lengths
    left, right = (inverse @ L.mH).flatten(1, 2), (L @ inverse).transpose(1, 2).flatten(2, 3)
    H = torch.eye(L.shape[2], dtype=L.dtype, device=L.device) + alpha * (L @ inverse @ L.mH).sum(1)
    same = torch.eye(torus.fold**2, dtype=L.dtype, device=L.device)[:, None, :, None]
    apart = (inverse.unsqueeze(3) * same).flatten(3, 4).flatten(1, 2)
    return apart - alpha * left @ torch.linalg.solve(H, right)


def _lift(coarse: Tensor, kernel: Tensor) -> Tensor:
    """Return L'y, from the torus of half the size to the full one."""
    return convolve(spread(coarse), transposed(kernel[0]))


def _norm(matrices: Tensor) -> float:
    """Return the norm of a convolution: the largest spectral norm over its frequencies."""
    return torch.linalg.matrix_norm(matrices, 2).max().item()


class _Rectified(torch.autograd.Function):
    """relu inside and 0 in the frame, by one clamp: relu followed by a mask would read the image twice."""

    @staticmethod
    def forward(u: Tensor, frame: int) -> Tensor:
        height, width = u.shape[-2:]
        inside = torch.full((height - 2 * frame, width - 2 * frame), math.inf, dtype=u.dtype, device=u.device)
        most = F.pad(inside, (frame,) * 4)
        return torch.clamp(u, torch.zeros_like(most), most)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        # the output suffices for both: it is positive exactly where the derivative is 1
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _where_positive(gradients[0], *ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return _where_positive(tangents[0], *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], u: Tensor, frame: int) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        return _rectified(u.movedim(in_dims[0], 0), frame), 0


def _rectified(image: Tensor, frame: int) -> Tensor:
    """Return relu of `image` with its frame set to zero; traced graphs get the same from plain torch functions."""
    if frame == 0:
        return F.relu(image)
    if is_traced():
        return F.pad(F.relu(image)[..., frame:-frame, frame:-frame], (frame,) * 4)
    return _Rectified.apply(image, frame)  # type: ignore[no-untyped-call]


def _where_positive(t: Tensor, z: Tensor) -> Tensor:
    """Return t where z > 0 and 0 elsewhere, the derivative of relu; torch.where takes six times as long."""
    out: Tensor = torch.ops.aten.threshold_backward(t, z, 0)
    return out


def _injection(in_channels: int, channels: int, kernel_size: int, frame: int) -> nn.Conv2d:
    """Return the convolution U x + b, whose output has the size of the framed image; without a frame it is circular."""
    if frame:
        return nn.Conv2d(in_channels, channels, kernel_size, padding=2 * frame)
    return nn.Conv2d(in_channels, channels, kernel_size, padding=kernel_size // 2, padding_mode="circular")


def _checked_image(image: Image, kernel_size: int) -> tuple[int, int]:
    """Return (height, width); raises ValueError for an even kernel or an image smaller than the kernel."""
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be odd, so that the kernel has a centre, got {kernel_size}. Use 3.")
    height, width = (image, image) if isinstance(image, int) else image
    if min(height, width) < kernel_size:
        raise ValueError(f"The image must be at least as large as the kernel, {kernel_size}, got {(height, width)}.")
    return height, width


def _check_images(x: Tensor, channels: int, image: tuple[int, int]) -> None:
    """Raise ValueError unless x has shape (batch, channels, *image)."""
    if tuple(x.shape[1:]) != (channels, *image):
        raise ValueError(
            f"This cell takes x of shape (batch, {channels}, {image[0]}, {image[1]}), got {tuple(x.shape)}. Its inverse "
            "depends on the size: resize the images, or make the cell with another `image`."
        )
