"""Linear measurement operators y = A x with their adjoints: blur, inpainting and random rows of the Fourier transform."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from equilibria._core.checks import require


class Operator(nn.Module, ABC):
    """Base class of linear operators A on images (batch, channels, height, width) that treat all channels equally.

    A subclass defines `forward`, `adjoint`, `squared_norm` and, for `HQS` and `ADMM`, `regularized_inverse`.
    """

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the measurements A x."""

    @abstractmethod
    def adjoint(self, y: Tensor) -> Tensor:
        """Return the image A' y, for which <A x, y> = <x, A' y>."""

    @abstractmethod
    def squared_norm(self) -> float:
        """Return an upper bound of |A|²; gradient steps shorter than 2 / |A|² do not expand."""

    def regularized_inverse(self, v: Tensor, weight: Tensor | float) -> Tensor:
        """Return (I + weight A'A)^-1 v."""
        raise NotImplementedError(
            f"HQS and ADMM need regularized_inverse, which {type(self).__name__} does not define. Use ProximalGradient."
        )

    def proximal(self, v: Tensor, y: Tensor, weight: Tensor | float) -> Tensor:
        """Return the x that minimises weight / 2 |A x - y|² + 1/2 |x - v|²."""
        return self.regularized_inverse(v + weight * self.adjoint(y), weight)


class Blur(Operator):
    """A circular convolution with a kernel (k, k), k odd, on images of `size` (height, width).

    kernel  the point spread function, centred in the middle of the kernel
    """

    spread: Tensor

    def __init__(self, kernel: Tensor, size: tuple[int, int]) -> None:
        super().__init__()
        square = kernel.dim() == 2 and kernel.shape[0] == kernel.shape[1] and kernel.shape[0] % 2 == 1
        require(square, f"kernel must be square with an odd side, got shape {tuple(kernel.shape)}.")
        require(kernel.shape[0] <= min(size), f"A kernel of {kernel.shape[0]} pixels does not fit images of {size}.")
        self.size = size
        reach = kernel.shape[0] // 2
        padded = kernel.new_zeros(size)
        padded[: kernel.shape[0], : kernel.shape[1]] = kernel
        # the real kernel is stored, because `double()` does not convert complex buffers
        self.register_buffer("spread", padded.roll((-reach, -reach), (0, 1)))

    @property
    def spectrum(self) -> Tensor:
        """The Fourier coefficients of the kernel, as `rfft2` returns them."""
        return torch.fft.rfft2(self.spread)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft2(torch.fft.rfft2(x) * self.spectrum, s=self.size)

    def adjoint(self, y: Tensor) -> Tensor:
        return torch.fft.irfft2(torch.fft.rfft2(y) * self.spectrum.conj(), s=self.size)

    def squared_norm(self) -> float:
        return float(self.spectrum.abs().max()) ** 2

    def regularized_inverse(self, v: Tensor, weight: Tensor | float) -> Tensor:
        spectrum = self.spectrum
        power = spectrum.real.square() + spectrum.imag.square()
        return torch.fft.irfft2(torch.fft.rfft2(v) / (1 + weight * power), s=self.size)


class Inpainting(Operator):
    """mask * x with a mask (height, width) that is 1 for measured pixels and 0 for missing ones."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask.to(torch.get_default_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        return self.mask * x

    def adjoint(self, y: Tensor) -> Tensor:
        return self.mask * y

    def squared_norm(self) -> float:
        return float(self.mask.abs().max()) ** 2

    def regularized_inverse(self, v: Tensor, weight: Tensor | float) -> Tensor:
        return v / (1 + weight * self.mask.square())


class FourierRows(Operator):
    """The coefficients of the orthonormal Fourier transform at the ones of a mask (height, width).

    Measurements are (batch, channels, height, width, 2), with real and imaginary parts; they are 0 where the mask is 0.
    """

    mask: Tensor
    weights: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        mask = mask.to(torch.get_default_dtype())
        self.register_buffer("mask", mask)
        # for real images A'A multiplies the coefficient at w by the mean of the squared mask at w and at -w
        mirrored = mask.flip(0, 1).roll((1, 1), (0, 1))
        self.register_buffer("weights", (mask.square() + mirrored.square()) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.fft.fft2(x, norm="ortho") * self.mask)

    def adjoint(self, y: Tensor) -> Tensor:
        return torch.fft.ifft2(torch.view_as_complex(y) * self.mask, norm="ortho").real

    def squared_norm(self) -> float:
        return float(self.weights.max())

    def regularized_inverse(self, v: Tensor, weight: Tensor | float) -> Tensor:
        return torch.fft.ifft2(torch.fft.fft2(v) / (1 + weight * self.weights)).real


def gaussian_kernel(size: int, deviation: float) -> Tensor:
    """Return a Gaussian kernel (size, size) whose entries sum to 1; size is odd."""
    place = torch.arange(size, dtype=torch.get_default_dtype()) - size // 2
    line = torch.exp(-place.square() / (2 * deviation**2))
    kernel = torch.outer(line, line)
    return kernel / kernel.sum()


def random_mask(size: tuple[int, int], share: float, generator: torch.Generator | None = None, centre: int = 0) -> Tensor:
    """Return a mask of zeros and ones, with ones at about a `share` of the entries, drawn at random.

    centre  frequencies up to this one are always ones; they are in the first and last rows and columns, as in `torch.fft`
    """
    require(0 < share <= 1, f"share must be in (0, 1], got {share}.")
    mask = torch.rand(size, generator=generator) < share
    if centre:
        rows, columns = (torch.fft.fftfreq(n, 1 / n).abs() <= centre for n in size)
        mask = mask | torch.outer(rows, columns)
    return mask.to(torch.get_default_dtype())


def adjoint_error(operator: Operator, x: Tensor, generator: torch.Generator | None = None) -> float:
    """Return |<A x, y> - <x, A' y>| / (|A x| |y|) for a random y; only rounding if `adjoint` is the adjoint of `forward`."""
    with torch.no_grad():
        ax = operator(x)
        y = torch.randn(ax.shape, dtype=ax.dtype, device=ax.device, generator=generator)
        difference = torch.sum(ax * y) - torch.sum(x * operator.adjoint(y))
        return float(difference.abs() / (ax.norm() * y.norm()).clamp_min(math.ulp(0.0)))
