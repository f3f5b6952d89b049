"""Skip DEQs: the start is trained to be close to the equilibrium, with and without a network that predicts it.

python examples/skip_deq.py
"""

import torch
from torch import Tensor, nn

import equilibria as eq


class Cell(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = eq.constraints.spectral_norm(nn.Linear(width, width), bound=0.95)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(z) + x)


def train(name: str, init: eq.FirstStep | nn.Module | None) -> None:
    torch.manual_seed(0)
    encoder, layer, head = nn.Linear(4, 16), eq.DEQ(Cell(16), init, eq.Broyden()), nn.Linear(16, 1)
    parameters = [*encoder.parameters(), *layer.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    x = torch.randn(256, 4)
    y = torch.sin(2 * x).sum(dim=1, keepdim=True)
    for _ in range(100):
        s = layer.solve(encoder(x))
        loss = (head(s.z) - y).square().mean()
        penalty = eq.skip_penalty(s) if init is not None else 0.0
        optimizer.zero_grad()
        (loss + penalty).backward()
        optimizer.step()
    print(f"{name}: loss {loss.item():.4f}, {s.stats.steps.float().mean().item():.1f} steps of the solver on average")


def main() -> None:
    train("DEQ, from zero", None)
    train("Skip DEQ, from a prediction", nn.Linear(16, 16))
    train("Skip DEQ V2, from f(0, x)", eq.FirstStep())


if __name__ == "__main__":
    main()
