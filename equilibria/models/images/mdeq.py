"""Multiscale DEQs for images (Bai, Koltun and Kolter 2020), also as Skip DEQs (Pal, Edelman and Rackauckas 2022)."""

from __future__ import annotations

from typing import Any, get_args

from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.deq import DEQ
from equilibria.explicit import WeightTied
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.unrolled import Unrolled
from equilibria.models.images.mdeq_cell import MDEQCell, Predictor, States, ZeroStates
from equilibria.models.images.mdeq_configs import MDEQConfig
from equilibria.models.images.mdeq_heads import ClassificationHead, SegmentationHead, stem
from equilibria.models.images.skip_mlp import Variant
from equilibria.models.solve_options import relative_stop
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.fallback import AnySolver
from equilibria.starts import FirstStep
from equilibria.stop import Stop


class MDEQ(nn.Module):
    """stem -> equilibrium of an `MDEQCell` -> head.

        model = MDEQ(MDEQ_CONFIGS["cifar-tiny"])
        scores = model(images)

    config     sizes and conventions, one of `MDEQ_CONFIGS` or your own
    classes    None: as in the configuration
    variant    start of the solver: "vanilla" at zero, "skip" at a prediction (Skip DEQ V1), "v2" at f(0, x)
    solver     of the equilibrium; None: Anderson. The papers take Broyden
    stop       None: tolerance and step limit of the configuration; no warnings, since most published solves use all steps
    gradient   None: implicit, with tolerance and step limit of the configuration
    eval_stop  `stop` in eval mode; None: the same
    depth      build the explicit twin instead: the cell applied that many times, with the same names in the state dict
    batched    False: the batch is one system with one norm
    """

    def __init__(
        self,
        config: MDEQConfig,
        classes: int | None = None,
        *,
        variant: Variant = "vanilla",
        solver: AnySolver | None = None,
        stop: Stop | None = None,
        gradient: Gradient | None = None,
        eval_stop: Stop | None = None,
        depth: int | None = None,
        batched: bool = True,
    ) -> None:
        super().__init__()
        classes = config.classes if classes is None else classes
        self.config = config
        self.gradient = gradient or Implicit(stop=relative_stop(config.tolerance, config.backward_steps))
        self.stem = stem(config)
        cell, init = MDEQCell(config), _start(config, variant)
        self.layer: DEQ | WeightTied
        if depth is None:
            stop = stop or relative_stop(config.tolerance, config.forward_steps)
            self.layer = DEQ(cell, init, solver or Anderson(), stop, self.gradient, eval_stop, batched=batched)
        else:
            self.layer = WeightTied(cell, depth, init)
        self.head = _head(config, classes)

    def forward(self, x: Tensor, *, with_state: bool = False) -> Tensor | tuple[Tensor, States]:
        """Return the scores of images (batch, channels, height, width): (batch, classes), or pixel by pixel.

        with_state  return (scores, state that the head got)
        """
        z = self._state(self.stem(x))
        scores: Tensor = self.head(z)
        return (scores, z) if with_state else scores

    def _state(self, injected: Tensor) -> States:
        """Return the state for the head: the equilibrium z, or f(z) if the conventions have a final step."""
        if isinstance(self.layer, WeightTied):
            return self.layer(injected)
        s = self.layer.solve(injected)
        explicit = isinstance(self.layer.gradient, Unrolled)  # a final step would make the unrolled network deeper
        return s.f(s.z) if self.config.conventions.final_step and not explicit else s.z


def pretraining(model: nn.Module, on: bool = True, depth: int | None = None) -> None:
    """Switch every MDEQ inside `model` to a shallow unrolled network, or back to the equilibrium.

    The published recipes train this way for the first steps. Parameters and optimizer state are unaffected. The switch is
    not part of the state dict. `gradient=Warmup(...)` does the same by the number of steps.

    depth  applications of the cell; None: as in the configuration
    """
    found = [module for module in model.modules() if isinstance(module, MDEQ)]
    require(len(found) > 0, f"pretraining applies to MDEQ models, but this {type(model).__name__} contains none.")
    for module in found:
        if isinstance(module.layer, WeightTied):
            raise TypeError(
                "pretraining needs an equilibrium, but this MDEQ is an explicit network: build it with depth=None."
            )
        unrolled = Unrolled(depth=module.config.pretraining_depth if depth is None else depth)
        module.layer.gradient = unrolled if on else module.gradient


def _head(config: MDEQConfig, classes: int) -> nn.Module:
    """Return the classifier, or the segmentation head if the configuration has no widths for a classifier."""
    return SegmentationHead(config, classes) if config.head is None else ClassificationHead(config, config.head, classes)


def _start(config: MDEQConfig, variant: Variant) -> Any:
    """Return the `init` of the variant."""
    variants = get_args(Variant)
    require(variant in variants, f"variant must be one of {', '.join(variants)}, got {variant!r}.")
    if variant == "skip":
        return Predictor(config)
    zeros = ZeroStates(config.channels)
    # f(0, x) as in the paper; for several resolutions its code runs the fusion before the blocks instead
    return FirstStep(zeros) if variant == "v2" else zeros
