"""Image classification with multiscale DEQs as a task, with all starts, systems, gradients and penalties of the papers."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.analysis.agreement import gradient_agreement
from equilibria.analysis.measuring import untouched
from equilibria.analysis.memory import peak_memory
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.phantom import NeumannPhantom, UnrolledPhantom
from equilibria.lab.experiments.image_task import Batch, ImageSettings, ImageTask, inside, judged
from equilibria.lab.training.task import Outcome
from equilibria.models.images.mdeq import MDEQ, pretraining
from equilibria.models.images.mdeq_configs import MDEQ_CONFIGS, MDEQConfig
from equilibria.models.images.skip_mlp import Variant
from equilibria.models.solve_options import SolveOptions, relative_stop
from equilibria.penalties import PenaltySchedule, jacobian_penalty, random_max_steps, skip_penalty
from equilibria.solution import ConvergenceWarning, Solution, record
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.broyden import Broyden

PROBED = 16  # number of images of a batch on which gradients are compared and memory is measured

MDEQSolverName = Literal["broyden", "anderson", "picard", "tsit5"]
MDEQGradientName = Literal["implicit", "upg", "npg", "jfb", "bptt"]


@dataclass(frozen=True, kw_only=True)
class MDEQOptions:
    """Options of a multiscale DEQ, its solver and its gradient; None keeps the value of the configuration.

    size            a name in MDEQ_CONFIGS
    solver          solver of the equilibrium; "tsit5" integrates the continuous system
    relaxation      damping of Picard's method
    together        treat the batch as one system with one norm
    gradient        "implicit" uses Broyden's method if the forward solver is Broyden's too, else GMRES
    phantom_steps   number of steps of "upg" and "npg", whose damping is `damping`
    depth           build the explicit twin instead: the cell applied that many times
    """

    size: str = "nano"
    variant: Variant = "vanilla"
    solver: MDEQSolverName = "broyden"
    relaxation: float = 1.0
    together: bool = False
    gradient: MDEQGradientName = "implicit"
    phantom_steps: int = 5
    damping: float = 0.5
    dropout: float | None = None
    tolerance: float | None = None
    forward_steps: int | None = None
    backward_steps: int | None = None
    pretraining_depth: int | None = None
    depth: int | None = None

    def __post_init__(self) -> None:
        require(self.size in MDEQ_CONFIGS, f"size must be one of {', '.join(MDEQ_CONFIGS)}, got {self.size!r}.")

    def config(self, inputs: int) -> MDEQConfig:
        """Return the configuration with the given options replaced."""
        names = ("dropout", "tolerance", "forward_steps", "backward_steps", "pretraining_depth")
        changes: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        return dataclasses.replace(MDEQ_CONFIGS[self.size], inputs=inputs, **changes)

    def model(self, inputs: int, classes: int | None = None) -> MDEQ:
        """Return a new model for images with `inputs` channels."""
        config = self.config(inputs)
        solving = self.solving(config)
        return MDEQ(
            config,
            classes,
            variant=self.variant,
            solver=solving.make_solver(),
            gradient=solving.make_gradient(),
            depth=self.depth,
            batched=not self.together,
        )

    def solving(self, config: MDEQConfig) -> SolveOptions:
        """Return the options by which the layer is solved and differentiated."""
        # the code of Skip DEQs, which has the final step, solves the adjoint by GMRES in any case
        by_broyden = self.solver == "broyden" and not config.conventions.final_step
        return SolveOptions(
            stop=relative_stop(config.tolerance, config.forward_steps),
            adjoint_stop=relative_stop(config.tolerance, config.backward_steps),
            solver=self.solver,
            gradient=self.gradient,
            adjoint="broyden" if by_broyden else "gmres",
            history=max(config.forward_steps, 1),
            relaxation=self.relaxation,
            directions=config.backward_steps,
            phantom_steps=self.phantom_steps,
            damping=self.damping,
        )


@dataclass(frozen=True, kw_only=True)
class MDEQSettings(ImageSettings):
    """Settings of image classification with a multiscale DEQ.

    skip_weight         weight of the mean |f(z) - start|, for variants whose start is trained
    jacobian_weight     weight of the Jacobian penalty, applied in a share `jacobian_frequency` of the steps until step
                        `jacobian_until`; in these steps `jitter` varies the step limit of the solver
    at                  numbers of steps: accuracy is also measured with the solver stopped after each of them, and the peak
                        memory of a prediction of 16 images by Broyden's method, which stores every step
    cosines             numbers of steps: UPG and NPG with each of them are compared with the exact gradient every
                        `cosines_every` steps on 16 images of a batch, with the damping of `model`
    """

    model: MDEQOptions = dataclasses.field(default_factory=MDEQOptions)
    skip_weight: float = 0.01
    jacobian_weight: float = 0.0
    jacobian_frequency: float = 1.0
    jacobian_until: int | None = None
    jitter: int = 0
    at: tuple[int, ...] = ()
    cosines: tuple[int, ...] = ()
    cosines_every: int = 100


class Multiscale(ImageTask):
    """Trains a multiscale DEQ to classify."""

    def __init__(self, settings: MDEQSettings) -> None:
        super().__init__(settings.data)
        self.settings = settings
        self.jacobian = PenaltySchedule(
            weight=settings.jacobian_weight, frequency=settings.jacobian_frequency, until=settings.jacobian_until
        )
        self.unrolled = False  # True during pre-training, which has no penalties

    def model(self) -> nn.Module:
        return self.settings.model.model(self.data.shape[0])

    def pretrain(self, model: nn.Module, on: bool) -> None:
        pretraining(model, on)
        self.unrolled = on

    def run(self, model: nn.Module, x: Tensor) -> tuple[Tensor, list[Solution]]:
        with record(model) as solutions:
            scores, z = model(x, with_state=True)
        # penalties are computed on the state that the head got, which may be one step after the solver's answer
        return scores, [dataclasses.replace(s, z=z) for s in solutions]

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Outcome:
        self._vary_steps(model, step)
        outcome = super().loss(model, batch, step)
        if self.settings.cosines and step % self.settings.cosines_every == 0:
            found = self._cosines(inside(model, MDEQ), *(part[:PROBED] for part in batch))
            return dataclasses.replace(outcome, metrics={**outcome.metrics, **found})
        return outcome

    def penalties(self, solutions: Sequence[Solution], step: int) -> dict[str, tuple[float, Tensor]]:
        found: dict[str, tuple[float, Tensor]] = {}
        s = self.settings
        if not solutions or self.unrolled:
            return found
        if s.model.variant != "vanilla" and s.skip_weight:
            found["skip"] = s.skip_weight, skip_penalty(solutions[0])
        if s.jacobian_weight and (weight := self.jacobian(step)):
            found["jacobian"] = weight, jacobian_penalty(solutions[0])
        return found

    def seen(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | float]:
        mdeq, (x, y) = inside(model, MDEQ), batch
        if not self.settings.at or not isinstance(mdeq.layer, DEQ):
            return {}
        with torch.no_grad():
            injected = mdeq.stem(x)
            stopped = {f"accuracy_at_{k}": self._stopped(mdeq.layer, injected, k) for k in self.settings.at}
            found = {name: judged(mdeq.head(z), y)[1]["accuracy"] for name, z in stopped.items()}
            # with a pair for every step up to the limit of evaluation, as in the released code
            layer, stop = mdeq.layer, mdeq.layer.eval_stop or mdeq.layer.stop
            by_broyden = DEQ(layer.cell, layer.init, Broyden(history=stop.max_steps), stop, batched=layer.batched).eval()
            work = partial(by_broyden, mdeq.stem(x[:PROBED]))
            return found | {"broyden_bytes": float(peak_memory(work, x.device))}

    def _stopped(self, layer: DEQ, injected: Tensor, steps: int) -> Any:
        """Return the state after `steps` steps, solved by a separate layer so that `record` does not see it."""
        stop = dataclasses.replace(layer.stop, max_steps=steps)
        return DEQ(layer.cell, layer.init, layer.solver, stop, batched=layer.batched).eval()(injected)

    def _vary_steps(self, model: nn.Module, step: int) -> None:
        """Draw the solver's step limit for a step with the Jacobian penalty, if there is jitter."""
        layer, s = inside(model, MDEQ).layer, self.settings
        if s.jitter and isinstance(layer, DEQ):
            own = self.settings.model.config(self.data.shape[0]).forward_steps
            stop = dataclasses.replace(layer.stop, max_steps=own)
            layer.stop = random_max_steps(stop, step, s.jitter, 1) if self.jacobian(step) else stop
            layer.eval_stop = stop  # evaluation uses the fixed limit, not the one drawn for the last step

    def _cosines(self, mdeq: MDEQ, x: Tensor, y: Tensor) -> dict[str, float]:
        """Return cosines of phantom gradients with the exact one, over the cell's parameters; empty without a DEQ."""
        if not isinstance(mdeq.layer, DEQ):
            return {}
        damping = self.settings.model.damping
        gradients: dict[str, Gradient] = {}
        for k in self.settings.cosines:
            gradients[f"cosine_upg_{k}"] = UnrolledPhantom(steps=k, damping=damping)
            gradients[f"cosine_npg_{k}"] = NeumannPhantom(steps=k, damping=damping)
        with warnings.catch_warnings(record=True) as caught, untouched(mdeq, x):
            warnings.simplefilter("always")
            with torch.no_grad():
                injected = mdeq.stem(x)
            own = mdeq.layer
            # for the exact gradient a solver that converges even if the cell does not contract
            layer = DEQ(own.cell, own.init, Anderson(history=20), own.stop, batched=own.batched).train(own.training)
            found = gradient_agreement(layer, injected, gradients, lambda z: judged(mdeq.head(z), y)[0])
        if any(issubclass(warning.category, ConvergenceWarning) for warning in caught):
            return {"cosines_known": 0.0}
        return {"cosines_known": 1.0} | {agreement.name: agreement.cosine for agreement in found}
