"""Does `tune` find the fastest setting? Three cells: `python benchmarks/tuning.py`

After tuning, the recommended setting and all others that were accepted are timed once more, by plain training steps that
know nothing of how they were chosen: interleaved, median of repeats, one thread, without the time that other processes
take from it. `--full` compares with every combination of the candidates that reaches what was asked for instead, also with
those that `tune` did not look at.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import torch
from gradients import ConvCell
from torch import Tensor, nn

import equilibria as eq
from equilibria.analysis.tuning import tune
from equilibria.analysis.tuning_settings import Candidates, Setting, Tuning

RESIDUAL, AGREEMENT = 1e-3, 0.99


class TanhCell(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(torch.addmm(x, z, self.weight.T))


def symmetric(n: int, norm: float) -> Tensor:
    """Eigenvalues from -norm to norm."""
    q = torch.linalg.qr(torch.randn(n, n)).Q
    return (q * torch.linspace(-norm, norm, n)) @ q.T


def problems() -> dict[str, tuple[nn.Module, Tensor]]:
    cheap = TanhCell(0.4 * torch.randn(128, 128) / 128**0.5)
    stiff = TanhCell(symmetric(128, 0.97))
    return {
        "cheap: tanh layer, 128 numbers, batch 64": (cheap, torch.randn(64, 128)),
        "stiff: the same, symmetric of norm 0.97": (stiff, 0.1 * torch.randn(64, 128)),
        "convolution: residual block, 16 x 12 x 12, batch 16": (ConvCell(), torch.randn(16, 16, 12, 12)),
    }


class Timed:
    def __init__(self, cell: nn.Module, x: Tensor, v: Tensor, setting: Setting) -> None:
        self.x, self.v, self.setting = x, v, setting
        self.deq = setting.apply(eq.DEQ(cell))
        self.deq.stop = dataclasses.replace(setting.stop, on_failure="ignore")
        self.seconds: list[float] = []

    def step(self) -> None:
        began = time.thread_time()
        z = self.deq(self.x)
        torch.autograd.grad((z * self.v).sum(), [*self.deq.parameters(), self.x])
        self.seconds.append(time.thread_time() - began)


def reaching(cell: nn.Module, x: Tensor, stop: eq.Stop, candidates: Candidates) -> list[Setting]:
    """Of all combinations those that reach residual and agreement, found without `tune`."""
    found = []
    quiet = dataclasses.replace(stop, on_failure="ignore")
    for solver in candidates.solvers:
        deq = eq.DEQ(cell, solver=solver, stop=quiet)
        if float(deq.solve(x).stats.residual.max()) <= RESIDUAL:
            agreements = eq.gradient_agreement(deq, x, candidates.gradients, generator=torch.Generator().manual_seed(0))
            found += [Setting(solver, stop, a.gradient) for a in agreements if a.cosine >= AGREEMENT]
    return found


def compare(tuning: Tuning, cell: nn.Module, x: Tensor, others: list[Setting], repeats: int) -> None:
    settings = [tuning.best, tuning.present, *(s for s in others if s not in (tuning.best, tuning.present))]
    timed = [Timed(cell, x, torch.randn_like(x), setting) for setting in settings]
    for _ in range(repeats):
        for one in timed:
            one.step()
    best, present, *_ = (statistics.median(one.seconds) for one in timed)
    rivals = timed if tuning.present in others else [timed[0], *timed[2:]]
    fastest = min(rivals, key=lambda one: statistics.median(one.seconds))
    shortest = statistics.median(fastest.seconds)
    print(f"  recommended  {1e3 * best:6.2f} ms  {tuning.best}")
    print(f"  fastest      {1e3 * shortest:6.2f} ms  {fastest.setting}")
    print(f"  defaults     {1e3 * present:6.2f} ms")
    print(f"  recommended / fastest of {len(rivals)}: {best / shortest:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--full", action="store_true", help="compare with every combination of the candidates")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, (cell, x) in problems().items():
        x.requires_grad_()
        began = time.perf_counter()
        (tuning,) = tune(eq.DEQ(cell), x, residual=RESIDUAL, agreement=AGREEMENT).values()
        print(f"{name}: tuned in {time.perf_counter() - began:.1f} s, {len(tuning.measurements)} settings measured")
        others = [m.setting for m in tuning.measurements if m.accepted]
        if options.full:
            others = reaching(cell, x, tuning.best.stop, Candidates())
        compare(tuning, cell, x, others, options.repeats)


if __name__ == "__main__":
    main()
