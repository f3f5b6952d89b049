"""Which gradient? Cost and accuracy of each on one trained-like cell: `python benchmarks/gradients.py`

Training step (forward and backward) in units of the implicit one, interleaved, median of repeats, one thread; cosine and
relative error of the weight gradient against a tight implicit one; what autograd stores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import equilibria as eq

STOP = eq.Stop(rtol=1e-4, atol=0, max_steps=200, on_failure="ignore")
TIGHT = eq.Stop(rtol=1e-6, atol=0, max_steps=500, on_failure="ignore")
CHOICES: dict[str, tuple[eq.Gradient, Any]] = {
    "Implicit()": (eq.Implicit(), eq.Anderson()),
    "Implicit(solver=BiCGSTAB())": (eq.Implicit(solver=eq.BiCGSTAB()), eq.Anderson()),
    "Implicit(solver=Anderson())": (eq.Implicit(solver=eq.Anderson()), eq.Anderson()),
    "JFB()": (eq.JFB(), eq.Anderson()),
    "UnrolledPhantom(steps=5, damping=0.5)": (eq.UnrolledPhantom(), eq.Anderson()),
    "NeumannPhantom(steps=5, damping=0.5)": (eq.NeumannPhantom(), eq.Anderson()),
    "NeumannPhantom(steps=5, damping=1.0)": (eq.NeumannPhantom(damping=1.0), eq.Anderson()),
    "Escalate(when=0.1)": (eq.Escalate(), eq.Anderson()),
    "Shine() after Broyden()": (eq.Shine(), eq.Broyden()),
    "Shine(refine=5) after Broyden()": (eq.Shine(refine=5), eq.Broyden()),
    "Unrolled() through Anderson()": (eq.Unrolled(), eq.Anderson()),
    "Unrolled() through Picard()": (eq.Unrolled(), eq.Picard()),
    'Unrolled(checkpoint="sqrt"), Picard()': (eq.Unrolled(checkpoint="sqrt"), eq.Picard()),
    "Reversible(), Picard()": (eq.Reversible(), eq.Picard()),
}


class ConvCell(nn.Module):
    """A residual block with group norm: 16 channels on 12 x 12 images."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.inner, self.outer = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        with torch.no_grad():
            self.b.weight.mul_(0.5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.outer(torch.relu(z + x + self.b(self.inner(torch.relu(self.a(z))))))


class Measured:
    def __init__(self, cell: nn.Module, x: Tensor, v: Tensor, gradient: eq.Gradient, solver: Any) -> None:
        self.cell, self.x, self.v = cell, x, v
        self.deq = eq.DEQ(cell, solver=solver, stop=STOP, gradient=gradient)
        self.times: list[float] = []

    def step(self) -> Tensor:
        z = self.deq(self.x)
        # a random direction: the squared norm of a normalised output would hardly depend on the weights
        grads = torch.autograd.grad((z * self.v).sum(), list(self.cell.parameters()))
        return torch.cat([grad.flatten() for grad in grads])

    def time(self) -> None:
        start = time.perf_counter()
        self.step()
        self.times.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cell, x, v = ConvCell(), torch.randn(16, 16, 12, 12), torch.randn(16, 16, 12, 12)
    exact = Measured(cell, x, v, eq.Implicit(stop=TIGHT), eq.Anderson())
    exact.deq.stop = TIGHT
    reference = exact.step()
    measured = {name: Measured(cell, x, v, *parts) for name, parts in CHOICES.items()}
    grads = {name: one.step() for name, one in measured.items()}
    for _ in range(rounds):
        for one in measured.values():
            one.time()
    unit = statistics.median(measured["Implicit()"].times)
    print("| gradient | step time | cosine | relative error |\n|---|---:|---:|---:|")
    for name, one in measured.items():
        error = float((grads[name] - reference).norm() / reference.norm())
        cosine = float(torch.cosine_similarity(grads[name], reference, dim=0))
        print(f"| `{name}` | {statistics.median(one.times) / unit:.2f} | {cosine:.4f} | {error:.1e} |")


if __name__ == "__main__":
    main()
