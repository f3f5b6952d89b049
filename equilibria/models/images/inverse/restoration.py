"""Reconstruction of images as an equilibrium, or by the same cell unrolled."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from equilibria.deq import DEQ
from equilibria.explicit import WeightTied
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.models.images.inverse.cells import ReconstructionCell
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.fallback import AnySolver
from equilibria.stop import Stop


class Restoration(nn.Module):
    """Reconstructs images from measurements as the equilibrium of a cell (Gilton, Ongie and Willett 2021).

        operator = eq.models.Blur(eq.models.gaussian_kernel(5, 1.2), (32, 32))
        cell = eq.models.ProximalGradient(operator, eq.models.ContractiveDenoiser((32, 32)))
        model = eq.models.Restoration(cell)
        x = model(y)  # (batch, channels, height, width)

    depth  None: the equilibrium; a number: the cell is unrolled that many times
    solver, stop, gradient, eval_stop  as for `DEQ`
    """

    def __init__(
        self,
        cell: ReconstructionCell,
        *,
        depth: int | None = None,
        solver: AnySolver = Anderson(),
        stop: Stop = Stop(max_steps=60, on_failure="ignore"),
        gradient: Gradient = Implicit(stop=Stop(rtol=1e-2, max_steps=60, on_failure="ignore")),
        eval_stop: Stop | None = None,
    ) -> None:
        super().__init__()
        module: Any = cell
        self.layer: DEQ | WeightTied
        if depth is None:
            self.layer = DEQ(module, cell.start, solver, stop, gradient, eval_stop)
        else:
            self.layer = WeightTied(module, depth, cell.start)

    @property
    def cell(self) -> Any:
        """The cell, with its operator."""
        return self.layer.cell

    def forward(self, y: Tensor) -> Tensor:
        """Return images (batch, channels, height, width) reconstructed from measurements."""
        found: Tensor = self.cell.image(self.layer(y))
        return found
