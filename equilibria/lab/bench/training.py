"""Time training steps of models with our solvers and with TorchDEQ's: `python -m equilibria.lab.bench.training`.

A model is trained for some updates on random data. The model and copies of it then take training steps (forward, loss,
backward) in turns. For each setting of TorchDEQ there is a copy in which TorchDEQ solves the same cell. Step limits are the
same. By default the tolerance of TorchDEQ is the loosest of a fixed list with which its worst sample meets the stop of our
layer. If no tolerance of the list suffices within the step limit, TorchDEQ has the tolerance of our layer. With `--equal
limits` it always has this tolerance, although TorchDEQ measures it in the norm of the whole state. Parametrized weights and
dropout masks are computed once per solve on both sides. Times are processor time on one thread. All steps use one batch.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria._core.frozen_cell import FrozenCell
from equilibria._core.packing import State
from equilibria.deq import DEQ
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB
from equilibria.lab.bench.driver import setting
from equilibria.lab.bench.methods import torchdeq
from equilibria.lab.bench.rules import clock
from equilibria.models.images.implicit_resnet import EXACT, ImplicitResNet, MNISTResNet
from equilibria.models.images.mdeq import MDEQ
from equilibria.models.images.mdeq_configs import MDEQ_CONFIGS
from equilibria.models.language.deq_transformer import DEQTransformer
from equilibria.models.language.transformer_configs import TRANSFORMER_CONFIGS
from equilibria.models.solve_options import relative_stop
from equilibria.starts import prepared, start_of
from equilibria.stop import Stop

OURS = "equilibria"
FACTORS = (30.0, 10.0, 3.0, 1.0, 0.5, 0.25, 0.1, 0.03)  # multiples of our tolerance, tried for TorchDEQ in this order
UPDATES, ROUNDS, RATE = 20, 5, 1e-3
KEPT = 2  # number of settings of TorchDEQ that are timed in all rounds: the fastest ones of the first round


@dataclass(frozen=True)
class Task:
    """A model with an equilibrium layer in `model.layer`, and its loss on a fixed batch."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]


@dataclass
class Solved:
    """The results of a solve that a model uses: the state and the map."""

    z: State
    f: Callable[[State], State]


class PeerLayer(nn.Module):
    """A layer that solves the cell of a DEQ by TorchDEQ, with the settings of `method`, the DEQ's step limits and `tol`."""

    gradient = None

    def __init__(self, layer: DEQ, method: Any, tol: float) -> None:
        super().__init__()
        from torchdeq import get_deq

        self.cell, self.init, self.options = layer.cell, layer.init, method.options
        adjoint = getattr(layer.gradient, "stop", None) or layer.stop
        limits: dict[str, Any] = {"f_solver": method.solver, "f_tol": tol, "f_max_iter": layer.stop.max_steps}
        limits |= {"b_solver": method.solver, "b_tol": adjoint.rtol or tol, "b_max_iter": adjoint.max_steps}
        limits |= {"f_stop_mode": "rel" if layer.stop.rtol else "abs", "b_stop_mode": "rel"}
        free = isinstance(layer.gradient, JFB)
        way = {"grad": 1, "ift": False, "hook_ift": False} if free else {"hook_ift" if method.hook else "ift": True}
        self.deq = get_deq(**limits, **way)

    def solve(self, *inputs: Any, init: State | None = None) -> Solved:
        """Return the solution, as `DEQ.solve` does; `init` is a state."""
        frozen = FrozenCell(self.cell)
        with frozen.in_place():
            given = prepared(frozen.cell, inputs)
        cell = frozen if frozen.holds else frozen.cell
        if init is None:
            init = start_of(self.init, cell, lambda z: cell(z, *given), inputs, batched=True)
        leaves, structure = pytree.tree_flatten(init)

        def f(*z: Tensor) -> Any:
            out = pytree.tree_leaves(cell(pytree.tree_unflatten(list(z), structure), *given))
            return out if len(out) > 1 else out[0]

        start = leaves if len(leaves) > 1 else leaves[0]
        self.deq.train(torch.is_grad_enabled())  # in training mode TorchDEQ sets up a gradient even if autograd records none
        z = self.deq(f, start, solver_kwargs=dict(self.options))[0][-1]
        state = pytree.tree_unflatten(list(z) if len(leaves) > 1 else [z], structure)
        return Solved(state, lambda z: cell(z, *given))

    def forward(self, *inputs: Any, init: State | None = None) -> State:
        return self.solve(*inputs, init=init).z


def mdeq_tiny() -> Task:
    """Return the task of MDEQ for CIFAR-10 with two resolutions, at most 22 forward and 24 backward steps."""
    images, labels = _images(8, (3, 32, 32))
    return Task(MDEQ(MDEQ_CONFIGS["cifar-tiny"]), lambda model: F.cross_entropy(model(images), labels))


def implicit_resnet(exact: bool) -> Task:
    """Return the task of the implicit residual network for MNIST, with exact or with Jacobian-free gradients."""
    images, labels = _images(32, (1, 28, 28))
    model = ImplicitResNet(MNISTResNet(latent_norm=False), gradient=EXACT) if exact else ImplicitResNet(MNISTResNet())
    return Task(model, lambda model: F.cross_entropy(model(images), labels))


def nano_transformer() -> Task:
    """Return the task of the nano DEQ transformer, whose forward and backward solves have rtol=1e-3."""
    stop = relative_stop(1e-3, 80)
    model = DEQTransformer(TRANSFORMER_CONFIGS["nano"], tokens=500, stop=stop, gradient=Implicit(stop=stop))
    tokens = torch.randint(500, (8, 65))
    return Task(model, lambda model: model(tokens[:, :-1], None, tokens[:, 1:])[0])


TASKS: dict[str, Callable[[], Task]] = {
    "mdeq-tiny": mdeq_tiny,
    "implicit-resnet-jfb": lambda: implicit_resnet(exact=False),
    "implicit-resnet-exact": lambda: implicit_resnet(exact=True),
    "transformer-nano": nano_transformer,
}


@dataclass(frozen=True)
class TaskResult:
    """The result of one task: seconds of a training step of our model and of the fastest setting of TorchDEQ, as medians.

    residuals  residual of the worst sample over the tolerance of our stop, by method; above 1 the sample did not converge
    """

    task: str
    ours: float
    theirs: float | None
    fastest: str | None
    residuals: Mapping[str, float]

    @property
    def ratio(self) -> float | None:
        """Our time divided by theirs; None without TorchDEQ."""
        return None if self.theirs is None else self.ours / self.theirs


def run(
    name: str,
    updates: int = UPDATES,
    rounds: int = ROUNDS,
    methods: Sequence[Any] | None = None,
    factors: Sequence[float] = FACTORS,
) -> TaskResult:
    """Train the model of a task for some updates, and time its steps and those of its copies with TorchDEQ."""
    torch.manual_seed(0)
    task = TASKS[name]()
    optimizer = torch.optim.Adam(task.model.parameters(), lr=RATE)
    for _ in range(updates):
        optimizer.zero_grad()
        task.loss(task.model).backward()
        optimizer.step()
    models = {OURS: task.model}
    residuals = {OURS: _excess(task.model, task)}
    for method in torchdeq() if methods is None else methods:
        models[method.name], residuals[method.name] = peer(task, method, factors)
    times: dict[str, list[float]] = {each: [] for each in models}
    for done in range(rounds):
        for each in list(times):
            _step(models[each], task) if not done else None  # the first step of a model is not timed
            times[each].append(_step(models[each], task))
        if not done:
            ordered = sorted((each for each in times if each != OURS), key=lambda each: times[each][0])
            times = {each: times[each] for each in (OURS, *ordered[:KEPT])}
    found = {each: statistics.median(seconds) for each, seconds in times.items()}
    best = min((each for each in found if each != OURS), key=lambda each: found[each], default=None)
    return TaskResult(name, found[OURS], None if best is None else found[best], best, residuals)


def peer(task: Task, method: Any, factors: Sequence[float] = FACTORS) -> tuple[nn.Module, float]:
    """Return a copy of the model with its layer replaced, and its worst residual over the tolerance of our layer."""
    layer: Any = task.model.layer
    tol = layer.stop.rtol or layer.stop.atol
    found: tuple[nn.Module, float] | None = None
    for factor in factors:
        model: Any = copy.deepcopy(task.model)
        model.layer = PeerLayer(model.layer, method, factor * tol)
        excess = _excess(model, task, layer.stop)
        if excess <= 1 or factor == 1:
            found = model, excess
        if excess <= 1:
            break
    assert found is not None
    return found


def _excess(model: nn.Module, task: Task, stop: Stop | None = None) -> float:
    """Return the residual of the worst sample over its tolerance by `stop`; None uses the stop of the model's layer."""
    layer: Any = model.layer
    stop = stop or layer.stop
    solve, seen = layer.solve, []

    def kept(*inputs: Any, **options: Any) -> Any:
        seen.append(solve(*inputs, **options))
        return seen[-1]

    layer.solve = kept
    try:
        with torch.no_grad():
            task.loss(model)
    finally:
        del layer.solve
    worst = 0.0
    for solution in seen:
        with torch.no_grad():
            z, fz = (_matrix(state) for state in (solution.z, solution.f(solution.z)))
        wanted = stop.atol + stop.rtol * stop.norm(fz)
        worst = max(worst, float((stop.norm(fz - z) / wanted).max()))
    return worst


def _step(model: nn.Module, task: Task) -> float:
    """Take a training step without an update; returns its seconds."""
    model.zero_grad()
    begin = clock()
    task.loss(model).backward()
    return clock() - begin


def _matrix(state: State) -> Tensor:
    """Return all tensors of a state side by side, (batch, n)."""
    return torch.cat([part.flatten(1) for part in pytree.tree_leaves(state)], dim=1)


def _images(batch: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return random images and labels."""
    return torch.randn(batch, *shape), torch.randint(10, (batch,))


def table(results: Sequence[TaskResult]) -> str:
    """Return a Markdown table with a row per task."""
    lines = ["| model | ours | TorchDEQ | ratio | fastest TorchDEQ |", "|---|---:|---:|---:|---|"]
    for each in results:
        theirs = "–" if each.theirs is None else f"{1e3 * each.theirs:.0f} ms"
        ratio = "–" if each.ratio is None else f"{each.ratio:.2f}"
        lines.append(f"| {each.task} | {1e3 * each.ours:.0f} ms | {theirs} | {ratio} | {each.fastest or '–'} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Training steps of models beside the same models with TorchDEQ.")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--updates", type=int, default=UPDATES, help="number of training updates before the measurement")
    parser.add_argument(
        "--equal",
        choices=("residuals", "limits"),
        default="residuals",
        help="quantity that is equal on both sides besides the step limits",
    )
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    factors = FACTORS if options.equal == "residuals" else (1.0,)
    results = [run(name, options.updates, options.rounds, factors=factors) for name in options.tasks]
    print(table(results))
    for each in results:
        print(f"{each.task}: residual over tolerance", {name: float(f"{x:.2g}") for name, x in each.residuals.items()})
    if options.json is not None:
        found = {"setting": setting(), "tasks": [asdict(each) for each in results]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
