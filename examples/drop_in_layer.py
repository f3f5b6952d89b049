"""An equilibrium layer in an nn.Sequential, trained like any other layer.

python examples/drop_in_layer.py
"""

import torch
from torch import Tensor, nn

import equilibria as eq


class Cell(nn.Module):
    """f(z, x) = tanh(W z + b + x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # a bounded spectral norm keeps the equilibrium easy to find
        self.inner = eq.constraints.spectral_norm(nn.Linear(width, width), bound=0.95, exact=True)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(z) + x)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), eq.DEQ(Cell(32)), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    x = torch.rand(256, 2) * 2 - 1
    y = (x.prod(dim=1, keepdim=True) > 0).float()  # XOR: opposite corners of a square have the same class
    for step in range(201):
        with eq.record(model) as solutions:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}; forward: {solutions[0].stats}; backward: {solutions[0].adjoint}")
    right = ((model(x) > 0) == (y > 0)).float().mean()
    print(f"accuracy {right.item():.1%}")


if __name__ == "__main__":
    main()
