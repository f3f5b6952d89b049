"""Compare gradients with the exact one: their error and their cost."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria._core import autodiff_modes
from equilibria._core.checks import require
from equilibria._core.packing import Layout, State
from equilibria.analysis.measuring import untouched
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.solution import ConvergenceWarning, Solution, Status
from equilibria.solvers.krylov import GMRES
from equilibria.stop import Stop

NAN = float("nan")
DIRECTIONS = 100  # restart length of GMRES for the exact gradient, if its default does not converge


@dataclass(frozen=True)
class Agreement:
    """The comparison of a gradient g with the exact one, and the cost of g; if `error` is set, all numbers are nan or 0."""

    gradient: Gradient
    name: str
    cosine: float  # cosine of the angle between both; nan if either is zero
    norm_ratio: float  # |g| / |exact|
    relative_error: float  # |g - exact| / |exact|
    evaluations: int  # runs of the cell, forward and backward
    products: int  # vector-Jacobian products of the cell
    seconds: float  # time of forward and backward
    error: str | None = None  # why there is no result

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.name}: {self.error}"
        return (
            f"{self.name}: cosine {self.cosine:.4f}, norm ratio {self.norm_ratio:.3g}, relative error "
            f"{self.relative_error:.2g}; {self.evaluations} evaluations, {self.products} products, {self.seconds:.2g} s"
        )


def gradient_agreement(
    deq: DEQ,
    inputs: Any,
    gradients: Sequence[Gradient] | Mapping[str, Gradient],
    loss: Callable[[State], Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> list[Agreement]:
    """Compare each of `gradients` with the exact gradient of `deq`, and measure its cost.

    The compared vector holds the gradients of all parameters of the DEQ and of all inputs that require one, concatenated.
    Each gradient runs as in training, with the DEQ's solver and `stop`, from the same random state. The exact gradient is
    Implicit with both solves run to the precision of the dtype. The DEQ is left unchanged: mode, buffers, `.grad` and random
    state.

    inputs     inputs of the DEQ: a tensor, or a tuple of several
    gradients  by name, or a sequence named by repr; a gradient that raises, such as Shine without Broyden, sets `error`
    loss       equilibrium -> scalar; None: its inner product with a random vector
    generator  for that vector, on the CPU; None: torch's own
    """
    named = gradients.items() if isinstance(gradients, Mapping) else [(repr(gradient), gradient) for gradient in gradients]
    for _, gradient in named:
        if not isinstance(gradient, Gradient):
            raise TypeError(f"Gradients to compare must be objects such as eq.JFB(), got {gradient!r}.")
    bench = Bench(deq, inputs if isinstance(inputs, tuple) else (inputs,), loss or RandomFunctional(generator))
    exact = bench.exact()
    return [_compare(bench, name, gradient, exact) for name, gradient in named]


def _compare(bench: Bench, name: str, gradient: Gradient, exact: Tensor) -> Agreement:
    """Measure one gradient and compare it with `exact`, (numbers,); errors it raises are stored in the result."""
    try:
        measured = bench.measure(gradient)
    except (TypeError, ValueError, RuntimeError) as error:
        return Agreement(gradient, name, NAN, NAN, NAN, 0, 0, NAN, error=f"{type(error).__name__}: {error}")
    g, lengths = measured.gradient, (measured.gradient.norm(), exact.norm())
    return Agreement(
        gradient,
        name,
        cosine=float(g @ exact / (lengths[0] * lengths[1])),
        norm_ratio=float(lengths[0] / lengths[1]),
        relative_error=float((g - exact).norm() / lengths[1]),
        evaluations=measured.meter.evaluations,
        products=measured.meter.products,
        seconds=measured.seconds,
    )


@dataclass(frozen=True)
class _MeasuredGradient:
    """One forward and backward pass with a gradient: its value, the solution and the cost."""

    gradient: Tensor  # (numbers,), on the CPU in float64
    solution: Solution
    meter: CellMeter
    seconds: float

    @property
    def residual(self) -> float:
        """Largest relative residual of both solves, without samples that are not finite."""
        stats, adjoint = self.solution.stats, self.solution.adjoint
        good = stats.status != Status.NONFINITE
        if not bool(good.any()):
            return 0.0
        return max(float(solve.residual[good].max()) for solve in (stats, adjoint) if solve is not None)

    @property
    def exact(self) -> bool:
        """True if both solves used at least half of the digits of the dtype."""
        return self.residual <= self.solution.equation.precision**0.5


class Bench:
    """A DEQ with inputs and a loss, on which gradients are run."""

    def __init__(self, deq: DEQ, inputs: tuple[Any, ...], loss: Callable[[State], Tensor]) -> None:
        self.deq, self.inputs, self.loss = deq, inputs, loss
        self.tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        self.wanted = [tensor for tensor in (*deq.parameters(), *self.tensors) if tensor.requires_grad]
        require(
            bool(self.wanted),
            "Neither a parameter of the DEQ nor an input requires a gradient, so there is none to compare. "
            "Call requires_grad_() on an input.",
        )

    def exact(self) -> Tensor:
        """Return the gradient by Implicit, with both solves run to rounding; warns if they fail."""
        # rtol = 0 is never reached, so a sample stops at the rounding of its dtype or after 100 steps without progress
        given = self.deq.stop
        tight = Stop(
            rtol=0.0,
            atol=0.0,
            max_steps=1000,
            patience=100,
            on_failure="ignore",
            norm=given.norm,
            compact=given.compact,
            process_group=given.process_group,
        )
        measured = self.measure(Implicit(stop=tight), stop=tight)
        if not measured.exact:  # run again with as many directions as a difficult adjoint may need
            measured = self.measure(Implicit(solver=GMRES(restart=DIRECTIONS), stop=tight), stop=tight)
        if not measured.exact:
            warnings.warn(
                "The exact gradient, which is the reference, is not exact: its solves ended with a relative residual of "
                f"{measured.residual:.1e}. Use a solver that converges here, such as eq.Newton().",
                ConvergenceWarning,
                stacklevel=3,
            )
        return measured.gradient

    def measure(self, gradient: Gradient, **changes: Any) -> _MeasuredGradient:
        """Run a gradient as in training, with some settings of the DEQ changed."""
        deq, meter = self.deq, CellMeter()
        with untouched(deq, self.tensors), meter.watch(deq.cell) as cell, torch.enable_grad():
            settings: dict[str, Any] = {"solver": deq.solver, "stop": deq.stop, "gradient": gradient, **changes}
            twin = DEQ(cell, deq.init, batched=deq.batched, **settings)
            if twin.solves is not None and deq.solves is not None:
                twin.solves.copy_(deq.solves)  # Warmup chooses its gradient by the number of solves so far
            began = self._now()
            solution = twin.solve(*self.inputs)
            grads = torch.autograd.grad(self.loss(solution.z), self.wanted, allow_unused=True)
            seconds = self._now() - began
        return _MeasuredGradient(self.flat(grads), solution, meter, seconds)

    def flat(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Concatenate gradients of `wanted` to one real vector on the CPU in float64; None counts as zeros."""
        filled = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, self.wanted, strict=True)]
        return torch.cat([(torch.view_as_real(g) if g.is_complex() else g).flatten().cpu().double() for g in filled])

    def _now(self) -> float:
        """Return seconds of the wall clock after all queued GPU work."""
        for device in {tensor.device for tensor in self.wanted if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return time.perf_counter()


class RandomFunctional:
    """z -> <v, z>; v is drawn for the first z and reused for the others."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
        self.v: Tensor | None = None

    def __call__(self, z: State) -> Tensor:
        flat = Layout.of(z, batched=False).pack(z)
        if self.v is None:
            self.v = torch.randn(flat.shape, dtype=flat.dtype, generator=self.generator).to(flat.device)
        return (self.v * flat).sum()


class OutOfTime(Exception):  # noqa: N818
    """A measurement exceeded its time limit.

    This is no RuntimeError on purpose: compaction reads a RuntimeError of a cell as "this cell needs the full batch".
    """


class CellMeter:
    """Counts the runs of a cell and the cotangents sent back through them; raises OutOfTime after `seconds`."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.evaluations = self.products = 0
        self.seconds, self._end = seconds, time.monotonic() + seconds
        self._hooks: list[Any] = []

    @contextmanager
    def watch(self, cell: Callable[..., State]) -> Iterator[Callable[..., State]]:
        """Yield the cell to run instead of `cell` inside the block."""
        if isinstance(cell, nn.Module):
            self._hooks.append(cell.register_forward_pre_hook(lambda module, inputs: self.begin()))
            self._hooks.append(cell.register_forward_hook(lambda module, inputs, output: self.follow(output)))
        try:
            yield cell if isinstance(cell, nn.Module) else _Watched(cell, self)
        finally:
            for hook in self._hooks:
                hook.remove()

    def begin(self) -> None:
        """Count a run at its start: torch's checkpoint aborts a run that has recomputed enough."""
        self.evaluations += 1
        self._check()

    def follow(self, output: State) -> None:
        """Count every product with this run's Jacobian, by a hook on its first differentiable output."""
        followed = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        # tensors inside a transform take no hooks; one output is enough, since a product passes through all of them
        if followed and not autodiff_modes.inside_transform():
            self._hooks.append(followed[0].register_hook(self._count_product))

    def _count_product(self, cotangent: Tensor) -> None:
        """Count a product with the Jacobian; autograd calls this hook when a cotangent reaches the output."""
        self.products += 1
        self._check()

    def _check(self) -> None:
        """Raise OutOfTime once the allowed seconds have passed."""
        if time.monotonic() >= self._end:
            raise OutOfTime(f"stopped after {self.seconds:g} s")


class _Watched:
    """A plain callable with its runs counted; attributes such as `prepare` are those of the callable."""

    def __init__(self, cell: Callable[..., State], meter: CellMeter) -> None:
        self._cell, self._meter = cell, meter

    def __call__(self, z: State, *inputs: Any) -> State:
        self._meter.begin()
        output = self._cell(z, *inputs)
        self._meter.follow(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cell, name)
