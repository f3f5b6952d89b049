"""Tuning: measure solvers, stops and gradients on a model and a batch, and recommend the fastest that is accurate enough."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria._core.loop import Stop
from equilibria.analysis.agreement import NAN, Bench, RandomFunctional
from equilibria.analysis.measuring import Call, brief, captured, untouched
from equilibria.analysis.tuning_settings import MAX_STEPS, Candidates, Measurement, Setting, Tuning, Tunings, nearest_to
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB
from equilibria.solution import ConvergenceWarning, Stats, Status
from equilibria.solvers.base import require

T = TypeVar("T")

CHEAP = JFB()  # what solvers are compared with: the gradient that works for every cell and has nothing to solve
WORTH = 1.4  # a setting that can be expected to take so many times as long as the best is not looked at any closer
CLOSE = 1.25  # settings so many times as slow as the fastest are timed again
AGAIN = 3  # times as many rounds for these
MISS = 1.3  # 1 - cosine over what is allowed, up to which a gradient may do with another solver
HASTE = 10  # a candidate's first solve is given up after 1 / HASTE of its steps without progress,
HOPELESS = 10  # or after so many times as long as another one took,
GRACE = 1.0  # but not before so many seconds: the first forward-mode derivative of a process takes its time
CLOCK = time.perf_counter if sys.platform == "win32" else time.thread_time  # which there ticks only every 16 ms


def tune(
    model: nn.Module,
    batch: Any,
    *,
    residual: float = 1e-3,
    agreement: float = 0.99,
    candidates: Candidates | None = None,
    rounds: int = 5,
    backward: bool = True,
    generator: torch.Generator | None = None,
) -> Tunings:
    """The fastest settings for every DEQ in `model`, measured on what it is given when the model runs on `batch`.

        print(tunings := tune(model, x))
        tunings.apply(model)

    Accepted is what solves every sample to the residual and, against the exact gradient of the same equilibrium, points
    where it should. Time is that of a training step of the layer alone, for a random cotangent: all settings take turns, and
    on the CPU the time that other processes take does not count.
    The present setting always takes part. The model is left as it is: settings, mode, buffers, `.grad` and random state.
    Takes as long as some 200 to 500 training steps of the layer.

    batch       of the model: a tensor, or a tuple or list of several arguments
    residual    largest relative residual of a sample
    agreement   smallest cosine between the gradient and the exact one, over all parameters and inputs of the layer
    candidates  what to try
    rounds      times that each is run; the fastest get three times as many more
    backward    False: inference alone, without gradients
    generator   of the cotangent, on the CPU; None: torch's own
    """
    require(residual > 0, f"The residual to reach must be positive, got {residual}.")
    require(0 < agreement <= 1, f"The agreement to reach is a cosine, in (0, 1], got {agreement}.")
    require(rounds >= 1, f"rounds must be at least 1, got {rounds}.")
    calls = captured(model, batch)
    require(bool(calls), "The model has DEQs, but solves none of them when it runs on this batch: give it another one.")
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of Implicit(on_failure="fall_back"), which must not be silent
        for name, call in calls.items():
            search = _Search(_Layer(call, backward, generator), residual, agreement if backward else None, rounds)
            found[name] = search.run(name, candidates or Candidates())
    return Tunings(found)


class _Trial:
    """A setting while it is measured."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.step = NAN  # seconds over the reference's in the same rounds
        self.residual = self.cosine = NAN
        self.evaluations = 0
        self.reason: str | None = None

    @property
    def ran(self) -> bool:
        return not math.isnan(self.residual)

    def measurement(self, unit: float) -> Measurement:
        return Measurement(self.setting, unit * self.step, self.residual, self.cosine, self.evaluations, self.reason)


@dataclass(frozen=True)
class _Run:
    stats: Stats
    grads: Sequence[Tensor | None]
    seconds: float


class _Layer:
    """A DEQ with the inputs it gets, run with any setting: on a twin around the same cell."""

    def __init__(self, call: Call, backward: bool, generator: torch.Generator | None) -> None:
        deq, self.inputs, loss = call.deq, call.inputs, RandomFunctional(generator)
        self.twin = DEQ(deq.cell, deq.init, gradient=deq.gradient, batched=deq.batched)
        self.twin.training = backward  # of the twin alone: its cell stays in the mode it is in
        if self.twin.solves is not None and deq.solves is not None:
            self.twin.solves.copy_(deq.solves)
        self.bench = Bench(self.twin, self.inputs, loss) if backward else None
        tensors = [leaf for leaf in pytree.tree_leaves(self.inputs) if isinstance(leaf, Tensor)]
        self.devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        stop = deq.stop if backward or deq.eval_stop is None else deq.eval_stop
        self.present = Setting(deq.solver, stop, deq.gradient if backward else None)

    def run(self, setting: Setting) -> _Run:
        """Solve, and send a cotangent back where gradients are asked for."""
        _silent(setting).apply(self.twin)
        grads: Sequence[Tensor | None] = ()
        with untouched(self.twin, self.inputs), torch.set_grad_enabled(self.bench is not None):
            began = self._now()
            solution = self.twin.solve(*self.inputs)
            if self.bench is not None:
                grads = torch.autograd.grad(self.bench.loss(solution.z), self.bench.wanted, allow_unused=True)
            return _Run(solution.stats, grads, self._now() - began)

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Runs of the cell later than that are refused; where it is a module, other cells have no place to ask."""

        def look(module: nn.Module, inputs: Any) -> None:
            if self._now() > end:
                raise RuntimeError(f"given up after {seconds:.2g} s, as other solvers were much faster")

        end, cell = self._now() + seconds, self.twin.cell
        hook = cell.register_forward_pre_hook(look) if isinstance(cell, nn.Module) else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def cosine(self, run: _Run, exact: Tensor) -> float:
        assert self.bench is not None
        return float(torch.cosine_similarity(self.bench._flat(run.grads), exact, dim=0))

    def exact(self, setting: Setting) -> Tensor:
        """The gradient of the equilibrium that this solver finds; a ConvergenceWarning is raised where it cannot be had."""
        assert self.bench is not None
        _silent(setting).apply(self.twin)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConvergenceWarning)
            return self.bench.exact()

    def _now(self) -> float:
        """Seconds; on the CPU the time of this thread, so that other load does not decide the comparison."""
        if not self.devices:
            return CLOCK()
        for device in self.devices:
            torch.accelerator.synchronize(device)
        return time.perf_counter()


class _Search:
    """Solvers with one gradient, gradients with the fastest solver, then the combinations that these make promising.

    Forward and backward pass hardly depend on each other, so that the full product has little more to tell.
    """

    def __init__(self, layer: _Layer, residual: float, agreement: float | None, rounds: int) -> None:
        self.layer, self.residual, self.agreement, self.rounds = layer, residual, agreement, rounds
        self.present = _Trial(layer.present)
        self.reference = self.present  # runs in every round
        self.unit = math.inf  # its seconds
        self.quickest = math.inf  # seconds of a first solve that came to its end
        given = layer.present.stop
        # without an absolute part, which for a small state would end the solve short of the relative residual asked for
        self.stop = replace(given, rtol=residual, atol=0.0, max_steps=max(given.max_steps, MAX_STEPS))

    def run(self, name: str, candidates: Candidates) -> Tuning:
        cheap = None if self.agreement is None else CHEAP
        trials = [_Trial(Setting(solver, self.stop, cheap)) for solver in candidates.solvers]
        for trial in (self.present, *trials):
            self._attempt(trial, self._check)
        self.reference = next((trial for trial in (self.present, *trials) if trial.ran), self.present)
        if self.agreement is not None:
            self._compare([self.present])
            trials = self._combine(trials, candidates.gradients)
        trials = [self.present, *(trial for trial in trials if trial.setting != self.present.setting)]
        return self._result(name, self._race([trial for trial in trials if trial.reason is None]), trials)

    def _result(self, name: str, best: _Trial | None, trials: Sequence[_Trial]) -> Tuning:
        measured = sorted((trial.measurement(self.unit) for trial in trials), key=_rank)
        chosen = nearest_to(measured, self.residual) if best is None else best.measurement(self.unit)
        setting = chosen.setting
        if math.isnan(chosen.cosine):  # a solver that was refused ran with a gradient that says nothing about the layer
            setting = replace(setting, gradient=self.present.setting.gradient)
        return Tuning(name, self.residual, self.agreement, self.present.setting, setting, tuple(measured))

    def _combine(self, first: Sequence[_Trial], gradients: Sequence[Gradient]) -> list[_Trial]:
        """Solvers with gradients; solvers alone that do not solve, or are too slow to be worth it."""
        solved = [trial for trial in first if trial.reason is None]
        self._take_turns(solved, self.rounds)
        solved.sort(key=lambda trial: trial.step)
        found: list[_Trial] = []
        for trial in solved:
            delay = trial.step - solved[0].step
            settings = [replace(trial.setting, gradient=g) for g in self._promising(gradients, found, delay)]
            if not settings:
                slower, fastest = trial.step / solved[0].step, brief(solved[0].setting.solver)
                trial.reason = f"{slower:.1f} times as slow as {fastest}, tried with no other gradient"
            found += self._compare([_Trial(setting) for setting in settings]) or [trial]
        return [*found, *(trial for trial in first if trial not in solved)]

    def _promising(self, gradients: Sequence[Gradient], found: Sequence[_Trial], delay: float) -> list[Gradient]:
        """Gradients for a solver so much slower than the first one, which was tried with all of them."""
        best = min((trial.step for trial in found if trial.reason is None), default=math.inf)
        if math.isinf(best):
            return list(gradients)
        allowed = MISS * (1 - (self.agreement or 0.0))
        known = zip(gradients, found, strict=False)
        return [
            gradient
            for gradient, trial in known
            if math.isnan(trial.cosine) or (1 - trial.cosine <= allowed and trial.step + delay <= WORTH * best)
        ]

    def _check(self, trial: _Trial) -> None:
        """True if the setting solves the layer; this run also warms up, and stops early without progress."""
        stop = trial.setting.stop
        hasty = stop if trial is self.present else replace(stop, patience=stop.patience or stop.max_steps // HASTE)
        with self.layer.limited(max(HOPELESS * self.quickest, GRACE)):
            run = self.layer.run(replace(trial.setting, stop=hasty))
        self._judge(trial, run.stats)
        if trial.reason is None:
            self.quickest = min(self.quickest, run.seconds)

    def _judge(self, trial: _Trial, stats: Stats) -> None:
        trial.residual, trial.evaluations = float(stats.residual.max()), stats.evaluations
        lost = stats.count(Status.NONFINITE)
        if lost:
            trial.reason = f"{lost} of {stats.status.numel()} samples are not finite"
        elif not trial.residual <= self.residual:
            trial.reason = f"residual {trial.residual:.4e}"
        elif trial.setting.stop.on_failure != "ignore" and not bool(stats.converged.all()):
            short = int((~stats.converged).sum())
            trial.reason = f"would warn: {short} of {stats.status.numel()} samples miss its own tolerance"

    def _compare(self, trials: list[_Trial]) -> list[_Trial]:
        """Cosines of settings with one solver and stop. Another solver may find another equilibrium, of other gradients."""
        exact: list[Tensor] = []

        def compare(trial: _Trial) -> None:
            if not exact:
                exact.append(self.layer.exact(trial.setting))
            run = self.layer.run(trial.setting)
            self._judge(trial, run.stats)
            trial.cosine = self.layer.cosine(run, exact[0])
            if trial.reason is None and not trial.cosine >= (self.agreement or 0.0):
                trial.reason = f"cosine {trial.cosine:.4f}"

        for trial in trials:
            if trial.reason is None:
                self._attempt(trial, compare)
        self._take_turns([trial for trial in trials if trial.ran], self.rounds)
        return trials

    def _race(self, trials: Sequence[_Trial]) -> _Trial | None:
        """The fastest setting: candidates get more rounds, close ones more still."""
        self._take_turns(_leaders(trials, WORTH), self.rounds)
        close = _leaders(trials, CLOSE)
        if len(close) > 1:
            self._take_turns(close, AGAIN * self.rounds)
        return min(close, key=lambda trial: trial.step, default=None)

    def _take_turns(self, trials: Sequence[_Trial], rounds: int) -> None:
        """Measure their steps, in rounds in which each of them runs once."""
        runners = [self.reference, *(trial for trial in trials if trial is not self.reference)]
        times = [[self.layer.run(trial.setting).seconds for trial in runners] for _ in range(rounds)]
        unit, *_ = medians = [statistics.median(seconds) for seconds in zip(*times, strict=True)]
        for trial, seconds in zip(runners, medians, strict=True):
            trial.step = seconds / unit  # of the same rounds: a machine has slow minutes
        self.unit = min(self.unit, unit)

    def _attempt(self, trial: _Trial, measure: Callable[[_Trial], None]) -> None:
        """Run a setting; one that raises, as Shine without Broyden, keeps the reason."""
        try:
            measure(trial)
        except (TypeError, ValueError, RuntimeError, ConvergenceWarning) as error:
            trial.reason = f"{type(error).__name__}: {error}"


def _leaders(trials: Sequence[_Trial], factor: float) -> list[_Trial]:
    """Those that take at most so many times as long as the fastest; and those of which nothing is known."""
    best = min((trial.step for trial in trials), default=NAN)
    return [trial for trial in trials if not trial.step > factor * best]


def _rank(m: Measurement) -> tuple[bool, bool, float]:
    return not m.accepted, math.isnan(m.seconds), m.seconds


def _silent(part: T) -> T:
    """The same settings, ignoring samples that fail. To filter warnings would not do: each is given once per cell."""
    if isinstance(part, Stop):
        return replace(part, on_failure="ignore")
    if not isinstance(part, (Setting, Gradient)) or not dataclasses.is_dataclass(part):
        return part
    changes = {field.name: _silent(getattr(part, field.name)) for field in dataclasses.fields(part)}
    if isinstance(part, Implicit) and part.on_failure in ("warn", "raise"):
        changes["on_failure"] = "ignore"
    return cast(T, replace(cast(Any, part), **changes))
