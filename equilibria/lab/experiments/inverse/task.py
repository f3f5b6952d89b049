"""Deblurring of photographs as a task, with equilibria, unrolled cells, plug-and-play and classical regularizers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria._core.files import optional
from equilibria.analysis.memory import peak_memory
from equilibria.explicit import WeightTied
from equilibria.gradients.implicit import Implicit
from equilibria.lab.data.batches import Batches
from equilibria.lab.data.sets import Split, generator
from equilibria.lab.experiments.image_task import Batch, inside
from equilibria.lab.training.settings import Training
from equilibria.lab.training.task import Loaders, Outcome, Task
from equilibria.models.images.inverse.cells import ADMM, HQS, ProximalGradient, TotalVariation
from equilibria.models.images.inverse.operators import Blur, gaussian_kernel
from equilibria.models.images.inverse.regularizers import ContractiveDenoiser, SoftThreshold
from equilibria.models.images.inverse.restoration import Restoration
from equilibria.solution import record
from equilibria.solvers.krylov import GMRES
from equilibria.stop import Stop

InverseMethod = Literal["proximal", "hqs", "admm", "tv", "ista"]
ADJOINT = Stop(rtol=3e-2, max_steps=30, on_failure="ignore")
EVALUATION = Stop(rtol=1e-5, max_steps=300, on_failure="ignore")
DEPTHS = (5, 10, 30, 100)  # numbers of steps at which the error is measured


@dataclass(frozen=True, kw_only=True)
class InverseSettings:
    """Settings of deblurring.

    method   the cell and its regularizer
    depth    None: the equilibrium; a number: the cell is unrolled that many times
    plugged  plug-and-play: the denoiser is trained on images with Gaussian noise only, and then held constant
    noise    standard deviation of the noise on measurements, for images in [0, 1]
    blur     standard deviation of the Gaussian kernel of 5 x 5 pixels, in pixels
    repeats  number of passes through the training tiles in an epoch
    valid    number of tiles for the choice of settings; `test` is the number of test tiles
    """

    method: InverseMethod = "proximal"
    depth: int | None = None
    plugged: bool = False
    size: int = 24
    noise: float = 0.02
    blur: float = 1.0
    contraction: float = 0.99
    repeats: int = 2
    valid: int = 64
    test: int = 64
    most: int | None = None


class Deblurring(Task[Batch]):
    """Trains on the mean squared error of reconstructions, and measures the PSNR, also of plain iteration."""

    better = ("psnr", "max")

    def __init__(self, settings: InverseSettings) -> None:
        self.settings = settings

    def model(self) -> nn.Module:
        return make_model(self.settings)

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Batch]:
        """Return the tiles with measurements; the noise is drawn in every training step, and fixed for other splits."""
        s, tiles = self.settings, photograph_tiles(self.settings.size)
        first = s.test + s.valid  # held-out tiles come first, so that they do not change with the number of training tiles
        train = tiles[first : None if s.most is None else first + s.most].repeat(s.repeats, 1, 1, 1)
        place: dict[str, Any] = {"rank": rank, "world_size": world_size}
        batches = Batches(Split(train, train), training.batch_size, seed=training.seed, drop_last=True, **place)
        held = {"test": tiles[: s.test], "valid": tiles[s.test : first]}
        valid, test = (
            Batches(self._measured(held[name], name), training.eval_batch_size, shuffle=False, **place)
            for name in ("valid", "test")
        )
        return Loaders(batches, valid, test)

    def _measured(self, tiles: Tensor, name: str) -> Split:
        s, draws = self.settings, generator("measurements", 0 if name == "test" else 1)
        return Split(operator(s)(tiles) + s.noise * torch.randn(tiles.shape, generator=draws), tiles)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Outcome:
        x, s = batch[0], self.settings
        if s.plugged:
            denoiser = inside(model, ContractiveDenoiser)
            return Outcome(nn.functional.mse_loss(denoiser(x + s.noise * torch.randn_like(x)), x), size=len(x))
        y = operator(s)(x) + s.noise * torch.randn_like(x)
        return Outcome(nn.functional.mse_loss(model(y), x), size=len(x))

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        """Return errors: `mse` of the reconstruction, and `mse_d` of d plain iterations from the usual start."""
        y, x = batch
        net = inside(model, Restoration)
        with torch.no_grad(), record(net) as solutions:
            error = nn.functional.mse_loss(net(y), x)
            found: dict[str, Tensor | float] = {"mse": error, "mse_measured": nn.functional.mse_loss(y, x)}
            states = WeightTied(net.cell, 1, net.cell.start).trajectory(y, depth=max(DEPTHS)).states
            found |= {f"mse_{depth}": nn.functional.mse_loss(net.cell.image(states[depth]), x) for depth in DEPTHS}
        for solution in solutions:
            found["failed"] = solution.stats.failed.float().mean()
            found["nfe"] = solution.stats.sample_evaluations / len(x)
        found |= {f"bytes_{steps}": self._memory(net, y[:8], x[:8], steps) for steps in (10, 40)}
        return Outcome(error, found, len(x))

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        # a PSNR is computed from the mean error over the split; a mean of PSNRs over batches would depend on the batches
        errors = {name: value for name, value in means.items() if name.startswith("mse")}
        return means | {f"psnr{name[3:]}": float(-10 * torch.tensor(value).log10()) for name, value in errors.items()}

    def _memory(self, net: Restoration, y: Tensor, x: Tensor, steps: int) -> float:
        """Return the peak bytes of a training step with exactly `steps` solver steps, or unrolled steps.

        The adjoint always takes its largest number of products, because its basis is part of the memory.
        """
        stop = Stop(rtol=0.0, atol=0.0, max_steps=steps, patience=10**6, compact=False, on_failure="ignore")
        unrolled = isinstance(net.layer, WeightTied)
        gradient = Implicit(solver=GMRES(), stop=dataclasses.replace(stop, max_steps=ADJOINT.max_steps))
        model = Restoration(net.cell, depth=steps if unrolled else None, stop=stop, gradient=gradient)
        weights = [p for p in model.parameters() if p.requires_grad]

        def train() -> None:
            with torch.enable_grad():
                torch.autograd.grad(nn.functional.mse_loss(model(y), x), weights, allow_unused=True)

        train()  # a first step allocates what is kept permanently
        return float(peak_memory(train))


def make_model(s: InverseSettings) -> Restoration:
    """Return the network of these settings."""
    measured, size = operator(s), (s.size, s.size)
    denoiser = partial(ContractiveDenoiser, size, contraction=s.contraction)
    cells: dict[str, Any] = {
        "proximal": lambda: ProximalGradient(measured, denoiser()),
        "hqs": lambda: HQS(measured, denoiser()),
        "admm": lambda: ADMM(measured, denoiser()),
        "tv": lambda: TotalVariation(measured),
        "ista": lambda: ProximalGradient(measured, SoftThreshold(s.size)),
    }
    stop = Stop(rtol=1e-4, max_steps=50, on_failure="ignore")
    gradient = Implicit(solver=GMRES(), stop=ADJOINT)
    return Restoration(cells[s.method](), depth=s.depth, stop=stop, gradient=gradient, eval_stop=EVALUATION)


def operator(s: InverseSettings) -> Blur:
    return Blur(gaussian_kernel(5, s.blur), (s.size, s.size))


@lru_cache(maxsize=2)
def photograph_tiles(size: int) -> Tensor:
    """Return grey tiles (n, 1, size, size) of scikit-learn's two photographs, in [0, 1] and in a fixed random order."""
    tiles = []
    for photograph in optional("sklearn.datasets", "train").load_sample_images().images:
        grey = torch.from_numpy(photograph.copy()).float().mean(dim=-1) / 255
        grey = grey[: len(grey) // size * size, : grey.shape[1] // size * size]
        tiles.append(grey.unfold(0, size, size).unfold(1, size, size).reshape(-1, 1, size, size))
    found = torch.cat(tiles)
    return found[torch.randperm(len(found), generator=generator("tiles", 0))]
