"""Hessians, per-sample gradients and forward mode through an equilibrium, with torch.func.

python examples/second_derivatives.py
"""

import torch
from torch import Tensor

import equilibria as eq


def f(z: Tensor, W: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(z @ W.mT + x)


def energy(x: Tensor, W: Tensor) -> Tensor:
    """Return a scalar function of the equilibrium z = tanh(W z + x)."""
    z = eq.fixed_point(f, torch.zeros_like(x), W, x, stop=eq.Stop(rtol=1e-10)).z
    return z.square().sum()


def main() -> None:
    torch.manual_seed(0)
    W = torch.randn(3, 3, dtype=torch.float64) / 4
    x = torch.randn(5, 3, dtype=torch.float64)
    hessian = torch.func.hessian(lambda row: energy(row[None], W))(x[0])
    print(f"Hessian of one sample, symmetric to {(hessian - hessian.mT).abs().max().item():.1e}:\n{hessian}")
    per_sample = torch.func.vmap(torch.func.grad(lambda row, W: energy(row[None], W), argnums=1), in_dims=(0, None))(x, W)
    print(f"gradients of W, one per sample: {tuple(per_sample.shape)}")
    together = torch.func.grad(energy, argnums=1)(x, W)
    print(f"their sum is the gradient of the batch, to {(per_sample.sum(0) - together).abs().max().item():.1e}")
    forward = torch.func.jvp(lambda x: energy(x, W), (x,), (torch.ones_like(x),))[1]
    reverse = torch.func.grad(energy)(x, W).sum()
    print(f"forward mode {forward.item():.10f}, reverse mode {reverse.item():.10f}")


if __name__ == "__main__":
    main()
