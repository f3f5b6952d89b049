"""Small models for the diagnosis and its tests: one without problems, the others with one problem each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from equilibria.deq import DEQ
from equilibria.nn import VariationalDropout
from equilibria.solvers.picard import Picard
from equilibria.stop import Stop

WIDTH, BATCH = 24, 32


class TanhCell(nn.Module):
    """tanh(after(W z) + x), with W of a given spectral norm."""

    def __init__(self, norm: float, after: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Identity() if after is None else after
        with torch.no_grad():
            self.linear.weight.mul_(norm / torch.linalg.matrix_norm(self.linear.weight, ord=2))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.after(self.linear(z)) + x)


def contractive() -> tuple[nn.Module, Tensor]:
    """Return a model without problems: a contractive cell, with dropout whose mask is fixed."""
    return _model(lambda: DEQ(TanhCell(0.7, VariationalDropout(0.1))))


def not_contractive() -> tuple[nn.Module, Tensor]:
    """Return a model with plain iteration on a cell whose Jacobian has eigenvalues outside of the unit circle."""
    return _model(lambda: DEQ(TanhCell(6.0), solver=Picard()), scale=0.1)


def tolerance_out_of_reach() -> tuple[nn.Module, Tensor]:
    """Return a model with a tolerance of ten digits in single precision."""
    return _model(lambda: DEQ(TanhCell(0.7), stop=Stop(rtol=1e-10, atol=0.0)))


def free_dropout() -> tuple[nn.Module, Tensor]:
    """Return a model with nn.Dropout inside the cell, which is then a different function at every call."""
    return _model(lambda: DEQ(TanhCell(0.7, nn.Dropout(0.2))))


def batch_statistics() -> tuple[nn.Module, Tensor]:
    """Return a model with batch norm inside the cell, in training mode."""
    norm = nn.BatchNorm1d(WIDTH)
    nn.init.constant_(norm.weight, 0.3)  # at its default of 1 the cell would not contract, which is another problem
    return _model(lambda: DEQ(TanhCell(0.7, norm)))


EXAMPLES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "contractive": contractive,
    "not-contractive": not_contractive,
    "tolerance-out-of-reach": tolerance_out_of_reach,
    "free-dropout": free_dropout,
    "batch-statistics": batch_statistics,
}


def _model(layer: Callable[[], DEQ], scale: float = 1.0) -> tuple[nn.Module, Tensor]:
    """Return Linear, layer, Linear and a batch (BATCH, 10) times `scale`; the numbers do not depend on torch's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, WIDTH), layer(), nn.Linear(WIDTH, 3)), scale * torch.randn(BATCH, 10)
