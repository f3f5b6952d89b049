"""A model that trains badly, what is wrong with it, and the same model made well.

python examples/sick_model.py
"""

import torch
from torch import Tensor, nn

import equilibria as eq


class Cell(nn.Linear):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.tanh(super().forward(z) + x)


def main() -> None:
    torch.manual_seed(0)
    encoder, cell, head = nn.Linear(8, 24), Cell(24, 24), nn.Linear(24, 2)
    with torch.no_grad():
        cell.weight.mul_(6)  # as after training with too high a rate
    sick = nn.Sequential(encoder, eq.DEQ(cell, solver=eq.Picard()), head)
    x = torch.randn(16, 8)
    print(eq.diagnose(sick, x))
    well = nn.Sequential(encoder, eq.DEQ(eq.spectral_norm(cell, bound=0.9)), head)
    print(eq.diagnose(well, x))


if __name__ == "__main__":
    main()
