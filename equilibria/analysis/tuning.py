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

from equilibria._core.checks import require
from equilibria.analysis.agreement import NAN, Bench, RandomFunctional
from equilibria.analysis.measuring import LayerCall, brief, captured, untouched
from equilibria.analysis.tuning_settings import MAX_STEPS, Candidates, Measurement, Setting, Tuning, Tunings, nearest_to
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB
from equilibria.solution import ConvergenceWarning, Stats, Status
from equilibria.stop import Stop

T = TypeVar("T")

CHEAP = JFB()  # the gradient with which solvers are compared: it works for every cell and needs no backward solve
SKIP_RATIO = 1.4  # a setting expected to take this many times as long as the best is not measured further
RETIME_RATIO = 1.25  # settings slower than the fastest by at most this factor are timed again
RETIME_ROUNDS = 3  # factor on the number of rounds for these
MISS_RATIO = 1.3  # a gradient whose 1 - cosine exceeds the allowed value by more is not tried with another solver
# the first solve of a candidate is stopped early: after max_steps / PATIENCE_DIVISOR steps without progress, or after
# TIME_RATIO times the seconds of the quickest candidate
PATIENCE_DIVISOR = 10
TIME_RATIO = 10
LEAST_SECONDS = 1.0  # time every first solve gets: the first forward-mode derivative of a process is slow
CLOCK = time.perf_counter if sys.platform == "win32" else time.thread_time  # thread_time ticks only every 16 ms on Windows


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
    """Find the fastest settings for every DEQ in `model`, measured on the inputs it gets in model(batch).

        print(tunings := tune(model, x))
        tunings.apply(model)

    A setting is accepted if it solves every sample to the residual and its gradient agrees with the exact gradient of the
    same equilibrium. The time is that of a training step of the layer alone, for a random cotangent; rounds are interleaved,
    and on the CPU time spent in other processes does not count. The present setting always takes part. The model is left
    unchanged: settings, mode, buffers, `.grad` and random state. Tuning takes as long as about 200 to 500 training steps of
    the layer.

    batch       input of the model: a tensor, or a tuple or list of several arguments
    residual    largest allowed relative residual of a sample
    agreement   smallest allowed cosine between the gradient and the exact one, over all parameters and inputs of the layer
    candidates  settings to try
    rounds      timed runs of each setting; the fastest get three times as many more
    backward    False: inference only, without gradients
    generator   for the cotangent, on the CPU; None: torch's own
    """
    require(residual > 0, f"The residual to reach must be positive, got {residual}.")
    require(0 < agreement <= 1, f"The agreement to reach is a cosine, in (0, 1], got {agreement}.")
    require(rounds >= 1, f"rounds must be at least 1, got {rounds}.")
    calls = captured(model, batch)
    require(bool(calls), "The model has DEQs but solves none of them on this batch; pass another batch.")
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # Implicit(on_failure="fall_back") always warns
        for name, call in calls.items():
            search = _Search(_TunedLayer(call, backward, generator), residual, agreement if backward else None, rounds)
            found[name] = search.run(name, candidates or Candidates())
    return Tunings(found)


class _Trial:
    """A setting and its measurements so far."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.step = NAN  # seconds relative to the reference in the same rounds
        self.residual = self.cosine = NAN
        self.evaluations = 0
        self.reason: str | None = None

    @property
    def ran(self) -> bool:
        """True if the setting was solved with, whether or not it was accepted."""
        return not math.isnan(self.residual)

    def measurement(self, unit: float) -> Measurement:
        """Return the result; `unit` is the time of the reference in seconds."""
        return Measurement(self.setting, unit * self.step, self.residual, self.cosine, self.evaluations, self.reason)


@dataclass(frozen=True)
class _TrialRun:
    """One solve with its backward pass; `grads` is empty for inference."""

    stats: Stats
    grads: Sequence[Tensor | None]
    seconds: float


class _TunedLayer:
    """A DEQ with its inputs, run with any setting on a twin around the same cell."""

    def __init__(self, call: LayerCall, backward: bool, generator: torch.Generator | None) -> None:
        deq, self.inputs, loss = call.deq, call.inputs, RandomFunctional(generator)
        self.twin = DEQ(deq.cell, deq.init, gradient=deq.gradient, batched=deq.batched)
        self.twin.training = backward  # only the twin; its cell stays in its mode
        if self.twin.solves is not None and deq.solves is not None:
            self.twin.solves.copy_(deq.solves)
        self.bench = Bench(self.twin, self.inputs, loss) if backward else None
        tensors = [leaf for leaf in pytree.tree_leaves(self.inputs) if isinstance(leaf, Tensor)]
        self.devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        stop = deq.stop if backward or deq.eval_stop is None else deq.eval_stop
        self.present = Setting(deq.solver, stop, deq.gradient if backward else None)

    def run(self, setting: Setting) -> _TrialRun:
        """Solve, and run a backward pass if gradients are wanted."""
        _silent(setting).apply(self.twin)
        grads: Sequence[Tensor | None] = ()
        with untouched(self.twin, self.inputs), torch.set_grad_enabled(self.bench is not None):
            began = self._now()
            solution = self.twin.solve(*self.inputs)
            if self.bench is not None:
                grads = torch.autograd.grad(self.bench.loss(solution.z), self.bench.wanted, allow_unused=True)
            return _TrialRun(solution.stats, grads, self._now() - began)

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Make runs of the cell raise RuntimeError after `seconds`; a cell that is no module has no hooks and no limit."""

        def look(module: nn.Module, inputs: Any) -> None:
            if self._now() > end:
                raise RuntimeError(f"stopped after {seconds:.2g} s: other solvers were much faster")

        end, cell = self._now() + seconds, self.twin.cell
        hook = cell.register_forward_pre_hook(look) if isinstance(cell, nn.Module) else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def cosine(self, run: _TrialRun, exact: Tensor) -> float:
        """Return the cosine between the gradient of a run and the exact one, (numbers,)."""
        assert self.bench is not None
        return float(torch.cosine_similarity(self.bench.flat(run.grads), exact, dim=0))

    def exact(self, setting: Setting) -> Tensor:
        """Return the exact gradient, (numbers,), at the equilibrium that the solver of this setting finds.

        Raises ConvergenceWarning if it cannot be computed.
        """
        assert self.bench is not None
        _silent(setting).apply(self.twin)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConvergenceWarning)
            return self.bench.exact()

    def _now(self) -> float:
        """Return seconds; on the CPU the time of this thread, so that other load does not affect the comparison."""
        if not self.devices:
            return CLOCK()
        for device in self.devices:
            torch.accelerator.synchronize(device)
        return time.perf_counter()


class _Search:
    """Tries all solvers with one gradient, all gradients with the fastest solver, then the promising combinations.

    The costs of forward and backward pass are nearly independent, so the full product would find little more.
    """

    def __init__(self, layer: _TunedLayer, residual: float, agreement: float | None, rounds: int) -> None:
        self.layer, self.residual, self.agreement, self.rounds = layer, residual, agreement, rounds
        self.present = _Trial(layer.present)
        self.reference = self.present  # the trial that runs in every round; times are relative to it
        self.unit = math.inf  # seconds of the reference
        self.quickest = math.inf  # shortest first solve that finished, in seconds
        given = layer.present.stop
        # atol = 0: for a small state an absolute tolerance would end the solve before the required relative residual
        self.stop = replace(given, rtol=residual, atol=0.0, max_steps=max(given.max_steps, MAX_STEPS))

    def run(self, name: str, candidates: Candidates) -> Tuning:
        """Measure all candidates of one layer and return the result."""
        cheap = None if self.agreement is None else CHEAP
        trials = [_Trial(Setting(solver, self.stop, cheap)) for solver in candidates.solvers]
        for trial in (self.present, *trials):
            self._attempt(trial, self._check)
        self.reference = next((trial for trial in (self.present, *trials) if trial.ran), self.present)
        if self.agreement is not None:
            self._compare([self.present])
            trials = self._combine(trials, candidates.gradients)
        trials = [self.present, *(trial for trial in trials if trial.setting != self.present.setting)]
        return self._result(name, self._fastest([trial for trial in trials if trial.reason is None]), trials)

    def _result(self, name: str, best: _Trial | None, trials: Sequence[_Trial]) -> Tuning:
        """Return the Tuning with the best setting, or the nearest one if none was accepted."""
        measured = sorted(
            (trial.measurement(self.unit) for trial in trials),
            key=lambda m: (not m.accepted, math.isnan(m.seconds), m.seconds),
        )
        chosen = nearest_to(measured, self.residual) if best is None else best.measurement(self.unit)
        setting = chosen.setting
        if math.isnan(chosen.cosine):  # a rejected solver ran only with CHEAP
            setting = replace(setting, gradient=self.present.setting.gradient)
        return Tuning(name, self.residual, self.agreement, self.present.setting, setting, tuple(measured))

    def _combine(self, first: Sequence[_Trial], gradients: Sequence[Gradient]) -> list[_Trial]:
        """Try the solvers of `first` with the gradients, the fastest solver with all of them.

        Returns all trials. Solvers that failed or are too slow appear once, with the gradient that they had.
        """
        solved = [trial for trial in first if trial.reason is None]
        self._time_interleaved(solved, self.rounds)
        solved.sort(key=lambda trial: trial.step)
        found: list[_Trial] = []
        for trial in solved:
            delay = trial.step - solved[0].step
            settings = [replace(trial.setting, gradient=g) for g in self._promising(gradients, found, delay)]
            if not settings:
                slower, fastest = trial.step / solved[0].step, brief(solved[0].setting.solver)
                trial.reason = f"{slower:.1f} times as slow as {fastest}, not tried with other gradients"
            found += self._compare([_Trial(setting) for setting in settings]) or [trial]
        return [*found, *(trial for trial in first if trial not in solved)]

    def _promising(self, gradients: Sequence[Gradient], found: Sequence[_Trial], delay: float) -> list[Gradient]:
        """Return the gradients to try with a solver that is slower than the fastest one by `delay`.

        `found` holds the trials of the fastest solver first, in the order of `gradients`.
        """
        best = min((trial.step for trial in found if trial.reason is None), default=math.inf)
        if math.isinf(best):
            return list(gradients)
        allowed = MISS_RATIO * (1 - (self.agreement or 0.0))
        known = zip(gradients, found, strict=False)
        return [
            gradient
            for gradient, trial in known
            if math.isnan(trial.cosine) or (1 - trial.cosine <= allowed and trial.step + delay <= SKIP_RATIO * best)
        ]

    def _check(self, trial: _Trial) -> None:
        """Run the setting once, stopping early without progress, and set its reason if it does not solve the layer."""
        stop = trial.setting.stop
        hasty = (
            stop if trial is self.present else replace(stop, patience=stop.patience or stop.max_steps // PATIENCE_DIVISOR)
        )
        with self.layer.limited(max(TIME_RATIO * self.quickest, LEAST_SECONDS)):
            run = self.layer.run(replace(trial.setting, stop=hasty))
        self._check_requirements(trial, run.stats)
        if trial.reason is None:
            self.quickest = min(self.quickest, run.seconds)

    def _check_requirements(self, trial: _Trial, stats: Stats) -> None:
        """Store residual and evaluations, and the reason if the solve missed the requirements."""
        trial.residual, trial.evaluations = float(stats.residual.max()), stats.evaluations
        lost = stats.count(Status.NONFINITE)
        if lost:
            trial.reason = f"{lost} of {stats.status.numel()} samples are not finite"
        elif not trial.residual <= self.residual:
            trial.reason = f"residual {trial.residual:.4e}"
        elif trial.setting.stop.on_failure != "ignore" and not bool(stats.converged.all()):
            short = int((~stats.converged).sum())
            trial.reason = f"would warn: {short} of {stats.status.numel()} samples miss the tolerance of the setting"

    def _compare(self, trials: list[_Trial]) -> list[_Trial]:
        """Measure cosines and times of settings that share solver and stop.

        They share one exact gradient; another solver may find another equilibrium, whose exact gradient differs.
        """
        exact: list[Tensor] = []

        def compare(trial: _Trial) -> None:
            if not exact:
                exact.append(self.layer.exact(trial.setting))
            run = self.layer.run(trial.setting)
            self._check_requirements(trial, run.stats)
            trial.cosine = self.layer.cosine(run, exact[0])
            if trial.reason is None and not trial.cosine >= (self.agreement or 0.0):
                trial.reason = f"cosine {trial.cosine:.4f}"

        for trial in trials:
            if trial.reason is None:
                self._attempt(trial, compare)
        self._time_interleaved([trial for trial in trials if trial.ran], self.rounds)
        return trials

    def _fastest(self, trials: Sequence[_Trial]) -> _Trial | None:
        """Return the fastest of the trials, or None if there are none; settings close to the fastest get more rounds."""
        self._time_interleaved(_leaders(trials, SKIP_RATIO), self.rounds)
        close = _leaders(trials, RETIME_RATIO)
        if len(close) > 1:
            self._time_interleaved(close, RETIME_ROUNDS * self.rounds)
        return min(close, key=lambda trial: trial.step, default=None)

    def _time_interleaved(self, trials: Sequence[_Trial], rounds: int) -> None:
        """Time the settings in rounds in which each runs once."""
        runners = [self.reference, *(trial for trial in trials if trial is not self.reference)]
        times = [[self.layer.run(trial.setting).seconds for trial in runners] for _ in range(rounds)]
        unit, *_ = medians = [statistics.median(seconds) for seconds in zip(*times, strict=True)]
        for trial, seconds in zip(runners, medians, strict=True):
            trial.step = seconds / unit  # relative to the same rounds: machine load varies over time
        self.unit = min(self.unit, unit)

    def _attempt(self, trial: _Trial, measure: Callable[[_Trial], None]) -> None:
        """Run `measure` on a setting; an error, as from Shine without Broyden, becomes its reason."""
        try:
            measure(trial)
        except (TypeError, ValueError, RuntimeError, ConvergenceWarning) as error:
            trial.reason = f"{type(error).__name__}: {error}"


def _leaders(trials: Sequence[_Trial], factor: float) -> list[_Trial]:
    """Return the trials at most `factor` times as slow as the fastest, and those not timed yet."""
    best = min((trial.step for trial in trials), default=NAN)
    return [trial for trial in trials if not trial.step > factor * best]


def _silent(part: T) -> T:
    """Return the same settings with on_failure="ignore".

    A filter of warnings would not do: a warning is issued once per cell, and training would not see it any more.
    """
    if isinstance(part, Stop):
        return replace(part, on_failure="ignore")
    if not isinstance(part, (Setting, Gradient)) or not dataclasses.is_dataclass(part):
        return part
    changes = {field.name: _silent(getattr(part, field.name)) for field in dataclasses.fields(part)}
    if isinstance(part, Implicit) and part.on_failure in ("warn", "raise"):
        changes["on_failure"] = "ignore"
    return cast(T, replace(cast(Any, part), **changes))
