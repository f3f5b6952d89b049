"""The equilibrium as the steady state of dz/dt = f(z, x) - z, integrated by a Runge-Kutta method.

python examples/continuous_deq.py
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


def main() -> None:
    torch.manual_seed(0)
    cell, x = Cell(16), torch.randn(8, 16)
    stop = eq.Stop(rtol=1e-5, max_steps=200)
    discrete = eq.DEQ(cell, solver=eq.Anderson(), stop=stop).solve(x)
    for method in ("tsit5", "bs3"):
        continuous = eq.DEQ(cell, solver=eq.SteadyState(method=method), stop=stop).solve(x)
        gap = (continuous.z - discrete.z).abs().max().item()
        print(
            f"{method}: {continuous.stats.evaluations} evaluations (Anderson's method: {discrete.stats.evaluations}), "
            f"{int(continuous.stats.rejected.sum())} steps rejected, {gap:.1e} from the discrete answer"
        )


if __name__ == "__main__":
    main()
