"""Inexact gradients compared with the exact one: their cost and their error.

python examples/phantom_gradient.py
"""

import torch
from torch import Tensor, nn

import equilibria as eq


class Cell(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = eq.constraints.spectral_norm(nn.Linear(width, width), bound=0.9)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(z) + x)


def main() -> None:
    torch.manual_seed(0)
    layer, x = eq.DEQ(Cell(32)), torch.randn(64, 32)
    gradients = {
        "Jacobian-free": eq.JFB(),
        "unrolled phantom, 5 steps": eq.UnrolledPhantom(steps=5, damping=0.5),
        "Neumann phantom, 5 steps": eq.NeumannPhantom(steps=5, damping=0.5),
        "unrolled phantom, 20 steps": eq.UnrolledPhantom(steps=20, damping=0.5),
        "implicit": eq.Implicit(),
    }
    generator = torch.Generator().manual_seed(0)
    for agreement in eq.gradient_agreement(layer, x, gradients, generator=generator):
        print(agreement)


if __name__ == "__main__":
    main()
