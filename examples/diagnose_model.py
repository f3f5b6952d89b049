"""Diagnose a model whose solves fail, correct it, and diagnose it again.

python examples/diagnose_model.py
"""

import copy

import torch
from torch import Tensor, nn

import equilibria as eq


class Cell(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(z) + x)


def main() -> None:
    torch.manual_seed(0)
    encoder, cell, head = nn.Linear(8, 24), Cell(24), nn.Linear(24, 2)
    with torch.no_grad():
        cell.inner.weight.mul_(6)  # like a weight that grew in training with too high a learning rate
    model = nn.Sequential(encoder, eq.DEQ(cell, solver=eq.Picard()), head)
    x = torch.randn(16, 8)
    print(eq.diagnose(model, x))
    bounded = copy.deepcopy(cell)
    eq.constraints.spectral_norm(bounded.inner, bound=0.9)  # in place
    corrected = nn.Sequential(encoder, eq.DEQ(bounded), head)
    print(eq.diagnose(corrected, x))


if __name__ == "__main__":
    main()
