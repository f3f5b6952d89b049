"""Infer the coefficient of the Bratu problem from noisy data, with its uncertainty: an equilibrium without a neural network.

python examples/bratu.py --plot bratu.png

The problem is -Δu = c(x) exp(u) on the unit square with u = 0 on the boundary: the temperature of a slab that is heated by
a reaction. Newton's method finds the coefficient c(x) = θ0 + θ1 x, with gradient and Hessian through the equilibrium. Needs
the extra `train`.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import scipy.optimize
import torch
from torch import Tensor

import equilibria as eq

SIZE, NOISE = 15, 0.005
TRUTH = torch.tensor([3.0, 2.0], dtype=torch.float64)
TIGHT = eq.Stop(rtol=1e-10, atol=1e-12, max_steps=200, on_failure="raise")


def laplacian(size: int) -> Tensor:
    """Return -Δ on the inner points of a grid, (size², size²), by second-order differences."""
    unit, ones = torch.eye(size, dtype=torch.float64), torch.ones(size - 1, dtype=torch.float64)
    line = 2 * unit - torch.diag(ones, 1) - torch.diag(ones, -1)
    return (torch.kron(line, unit) + torch.kron(unit, line)) * (size + 1) ** 2


MATRIX = laplacian(SIZE)
INVERSE = torch.linalg.inv(MATRIX)
PLACE = (torch.arange(SIZE, dtype=torch.float64) + 1).div(SIZE + 1).repeat(SIZE)  # x of every point


def coefficient(theta: Tensor) -> Tensor:
    return theta[0] + theta[1] * PLACE


def cell(u: Tensor, theta: Tensor) -> Tensor:
    """Return (-Δ)^-1 c exp(u)."""
    return INVERSE @ (coefficient(theta) * u.exp())


def temperature(theta: Tensor) -> Tensor:
    """Return the solution for the parameters theta, (SIZE²,); differentiable in theta."""
    start = torch.zeros(SIZE**2, dtype=torch.float64)
    found = eq.fixed_point(cell, start, theta, stop=TIGHT, gradient=eq.Implicit(stop=TIGHT), batched=False)
    return torch.as_tensor(found.z)


def reference(theta: Tensor) -> Tensor:
    """Return the same solution, computed by scipy."""
    matrix, c = MATRIX.numpy(), coefficient(theta).numpy()
    residual, slope = lambda u: matrix @ u - c * np.exp(u), lambda u: matrix - np.diag(c * np.exp(u))
    return torch.from_numpy(scipy.optimize.root(residual, np.zeros(SIZE**2), jac=slope, tol=1e-12).x)


def misfit(theta: Tensor, data: Tensor) -> Tensor:
    """Return the negative log-likelihood, up to a constant."""
    return (temperature(theta) - data).square().sum() / (2 * NOISE**2)


def infer(data: Tensor, steps: int = 8) -> tuple[Tensor, Tensor]:
    """Return the most likely coefficients by Newton's method, and their covariance, the inverse Hessian."""
    theta = torch.tensor([2.0, 0.5], dtype=torch.float64)
    for step in range(steps):
        print(f"step {step}: θ = {theta.tolist()}, misfit {misfit(theta, data).item():.4f}")
        gradient, hessian = torch.func.grad(misfit)(theta, data), torch.func.hessian(misfit)(theta, data)
        theta = theta - torch.linalg.solve(hessian, gradient)
    return theta, torch.linalg.inv(torch.func.hessian(misfit)(theta, data))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", type=Path, default=Path("bratu.png"), help="where the picture goes")
    path, exact = parser.parse_args().plot, temperature(TRUTH)
    print(f"distance from scipy's solution: {(exact - reference(TRUTH)).abs().max().item():.1e}")
    data = exact + NOISE * torch.randn(exact.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theta, covariance = infer(data)
    deviation = covariance.diagonal().sqrt()
    for name, *values in zip(("θ0", "θ1"), theta, deviation, TRUTH, strict=True):
        print("{}: {:.3f} ± {:.3f}, true {:.3f}".format(name, *(value.item() for value in values)))
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for panel, title, field in zip(axes, ("noisy data", "equilibrium"), (data, temperature(theta)), strict=False):
        figure.colorbar(panel.imshow(field.view(SIZE, SIZE).tolist(), cmap="inferno", vmin=0), ax=panel)
        panel.set(title=title, xticks=[], yticks=[])
    draws = torch.distributions.MultivariateNormal(theta, covariance).sample((200,))
    axes[2].plot([0, 1], torch.stack([draws[:, 0], draws.sum(dim=1)]).tolist(), color="#3b5bdb", alpha=0.05)
    axes[2].plot([0, 1], [float(TRUTH[0]), float(TRUTH.sum())], "k--", label="true coefficient")
    axes[2].set(title="c(x), draws from its uncertainty", xlabel="x")
    axes[2].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
