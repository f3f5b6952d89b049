"""Adapters for operators ("physics") and denoisers of the library deepinv, which is not imported here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.models.images.inverse.operators import Operator


class DeepinvOperator(Operator):
    """The operator of a linear physics of deepinv.

    physics       an object such as deepinv.physics.Inpainting(...), with the methods `A(x)`, `A_adjoint(y)` and, for HQS and
                  ADMM, `prox_l2(z, y, gamma)`
    squared_norm  an upper bound of |A|²; physics.compute_sqnorm(x) measures it
    """

    def __init__(self, physics: Any, squared_norm: float) -> None:
        super().__init__()
        for name in ("A", "A_adjoint"):
            require(
                callable(getattr(physics, name, None)),
                f"A linear physics needs the method {name}, but {type(physics).__name__} has none.",
            )
        require(squared_norm > 0, f"squared_norm must be positive, got {squared_norm}.")
        self.physics = physics  # if the physics is a module, this registers it, and `to` moves its buffers
        self._squared_norm = float(squared_norm)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.physics.A(x))

    def adjoint(self, y: Tensor) -> Tensor:
        return torch.as_tensor(self.physics.A_adjoint(y))

    def squared_norm(self) -> float:
        return self._squared_norm

    def regularized_inverse(self, v: Tensor, weight: Tensor | float) -> Tensor:
        """Return the regularized inverse, computed by prox_l2 with measurements of zero."""
        if not callable(getattr(self.physics, "prox_l2", None)):
            return super().regularized_inverse(v, weight)
        return torch.as_tensor(self.physics.prox_l2(v, torch.zeros_like(self.physics.A(v)), weight))


class DeepinvDenoiser(nn.Module):
    """A denoiser of deepinv at one noise level; it is called as denoiser(x, sigma).

    trained  False: the weights are held constant, as in plug-and-play methods
    """

    def __init__(self, denoiser: Any, sigma: float, *, trained: bool = False) -> None:
        super().__init__()
        require(callable(denoiser), f"denoiser must be callable as denoiser(x, sigma), got {denoiser!r}.")
        self.denoiser, self.sigma = denoiser, float(sigma)
        if isinstance(denoiser, nn.Module) and not trained:
            denoiser.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.denoiser(x, self.sigma))
