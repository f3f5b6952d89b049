"""Multiscale DEQs for images (Bai, Koltun and Kolter 2020), also as Skip DEQs (Pal, Edelman and Rackauckas 2022)."""

from __future__ import annotations

from typing import Any, get_args

from torch import Tensor, nn

from equilibria._core.loop import Stop
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
from equilibria.solvers.base import require
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.fallback import AnySolver
from equilibria.starts import FirstStep


class MDEQ(nn.Module):
    """stem -> equilibrium of an `MDEQCell` -> head.

        model = MDEQ(MDEQ_CONFIGS["cifar-tiny"])
        scores = model(images)

    config     sizes and conventions, one of `MDEQ_CONFIGS` or your own
    classes    None: as many as the configuration has
    variant    where the solver starts: "vanilla" at zero, "skip" at a prediction (Skip DEQ V1), "v2" at f(0, x)
    solver     of the equilibrium; None: Broyden, as in the papers
    stop       None: tolerance and cap of the configuration, without a word on solves that meet the cap, as most do there
    gradient   None: implicit, with tolerance and cap of the configuration
    eval_stop  `stop` in eval mode; None: the same
    depth      an explicit twin instead: the cell applied so many times, with the same weights under the same names
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
        self.gradient = gradient or _default_gradient(config)
        self.stem = stem(config)
        cell, init = MDEQCell(config), _start(config, variant)
        self.layer: DEQ | WeightTied
        if depth is None:
            stop = stop or relative_stop(config.tolerance, config.forward_steps)
            self.layer = DEQ(cell, init, solver or Broyden(), stop, self.gradient, eval_stop, batched=batched)
        else:
            self.layer = WeightTied(cell, depth, init)
        self.head = _head(config, classes)

    def forward(self, x: Tensor, *, with_state: bool = False) -> Tensor | tuple[Tensor, States]:
        """Scores of images (batch, channels, height, width); `with_state` gives (scores, state that the head saw)."""
        z = self._state(self.stem(x))
        scores: Tensor = self.head(z)
        return (scores, z) if with_state else scores

    def _state(self, injected: Tensor) -> States:
        if isinstance(self.layer, WeightTied):
            return self.layer(injected)
        s = self.layer.solve(injected)
        explicit = isinstance(self.layer.gradient, Unrolled)  # its answer is the output of a network of that depth
        return s.f(s.z) if self.config.conventions.final_step and not explicit else s.z


def pretraining(model: nn.Module, on: bool = True, depth: int | None = None) -> None:
    """Switch every MDEQ inside `model` to a shallow unrolled network, and back to the equilibrium.

    The published recipes train so for the first steps. Parameters stay, and so does what an optimizer knows of them.
    The switch is no part of the state dict. `gradient=Warmup(...)` is the same by the count of steps.

    depth  None: as many applications of the cell as the configuration says
    """
    found = [module for module in model.modules() if isinstance(module, MDEQ)]
    require(len(found) > 0, f"pretraining switches MDEQ models, and there is none in this {type(model).__name__}.")
    for module in found:
        if isinstance(module.layer, WeightTied):
            raise TypeError("pretraining switches an equilibrium, and this MDEQ is an explicit network: depth must be None.")
        unrolled = Unrolled(depth=module.config.pretraining_depth if depth is None else depth)
        module.layer.gradient = unrolled if on else module.gradient


def _head(config: MDEQConfig, classes: int) -> nn.Module:
    return SegmentationHead(config, classes) if config.head is None else ClassificationHead(config, config.head, classes)


def _start(config: MDEQConfig, variant: Variant) -> Any:
    variants = get_args(Variant)
    require(variant in variants, f"variant must be one of {', '.join(variants)}, got {variant!r}.")
    if variant == "skip":
        return Predictor(config)
    zeros = ZeroStates(config.channels)
    # the paper's f(0, x); its code has another start for several resolutions, fusion first and the blocks after it
    return FirstStep(zeros) if variant == "v2" else zeros


def _default_gradient(config: MDEQConfig) -> Gradient:
    return Implicit(stop=relative_stop(config.tolerance, config.backward_steps))
