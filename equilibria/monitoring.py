"""`monitor` logs the convergence of every DEQ of a model, step by step, to any logger that takes a dict of floats."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from equilibria.solution import Solution, Stats, collecting, empty_stats

__all__ = ["Monitor", "monitor"]

QUANTITIES = frozenset(empty_stats(0, torch.device("cpu")).summary())
Log = Callable[[dict[str, float], int], Any]  # a function of a row and its step


def monitor(
    model: nn.Module,
    to: Any = None,
    *,
    every: int = 1,
    prefix: str = "deq/",
    quantities: Collection[str] | None = None,
    manual: bool = False,
    first_step: int = 0,
) -> Monitor:
    """Log `Stats.summary()` of every DEQ in `model` for each forward pass, with the adjoint's after a backward pass.

        with eq.monitor(model, to=wandb):  # anything with log(dict), log_dict(dict) or add_scalar(name, value, step)
            for x, y in batches:
                criterion(model(x), y).backward()

    A forward pass is logged when the next one begins, or when the block ends, because its adjoint is solved only then.
    Names are `prefix` + layer + "/" + quantity, adjoint quantities under layer + "/adjoint". `eq.integrations` has callbacks
    for Lightning, the Hugging Face Trainer, accelerate and TensorBoard.

    to          a function of a dict, or an object with `log`, `log_dict` or `add_scalar`; None: rows are kept in
                `Monitor.rows`
    every       number of forward passes from one logged pass to the next
    prefix      prefix of all names
    quantities  the entries of `Stats.summary()` to log, such as ("converged", "steps_mean"); None: all
    manual      log only when `Monitor.flush()` is called, with all solves since the last call in one row; for training
                loops that run the model several times per step
    first_step  the number of the first forward pass, for a run that is resumed
    """
    if every < 1:
        raise ValueError(f"monitor's every must be at least 1, got {every}.")
    unknown = sorted(set(quantities or ()) - QUANTITIES)
    if unknown:
        raise ValueError(f"monitor's quantities must be among {', '.join(sorted(QUANTITIES))}: got {', '.join(unknown)}.")
    chosen = QUANTITIES if quantities is None else frozenset(quantities)
    return Monitor(model, _logger(to), every, prefix, chosen, manual, first_step)


class Monitor:
    """A context manager made by `monitor`.

    rows    one dict per logged forward pass; empty if the monitor logs to an object
    passes  the number of the next forward pass
    step    the number of the last logged pass; while a row is logged, the number of its pass
    """

    def __init__(
        self,
        model: nn.Module,
        log: Log | None,
        every: int,
        prefix: str,
        quantities: frozenset[str],
        manual: bool,
        first_step: int,
    ) -> None:
        self.model, self.every, self.prefix, self.quantities, self.manual = model, every, prefix, quantities, manual
        self.rows: list[dict[str, float]] = []
        self.passes = first_step
        self.step = first_step - 1
        self._log = log
        self._solutions: list[Solution] = []
        self._stack: ExitStack | None = None
        self._hook: RemovableHandle | None = None

    def __repr__(self) -> str:
        return f"Monitor({len(self.rows)} rows, next pass {self.passes})"

    def __enter__(self) -> Monitor:
        if self._stack is not None:
            raise RuntimeError("This monitor is already running. Make another one with eq.monitor(model).")
        self._stack = ExitStack()
        self._solutions = self._stack.enter_context(collecting(self.model))
        if not self.manual:
            self._hook = self.model.register_forward_pre_hook(lambda module, inputs: self.flush())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.flush()
        assert self._stack is not None
        if self._hook is not None:
            self._hook.remove()
        self._stack.close()
        self._stack = self._hook = None

    def flush(self) -> None:
        """Log the last forward pass, if it has not been logged yet."""
        solutions, count = list(self._solutions), self.passes
        self.discard()
        if not solutions:
            return
        self.passes += 1
        if count % self.every:
            return
        row, self.step = self._row(solutions), count
        if self._log is None:
            self.rows.append(row)
        else:
            self._log(row, count)

    def discard(self) -> None:
        """Drop the last forward pass without logging it."""
        self._solutions.clear()  # solutions keep equilibria and inputs alive

    def _row(self, solutions: list[Solution]) -> dict[str, float]:
        row: dict[str, float] = {}
        seen: dict[str, int] = {}
        for solution in solutions:
            layer = solution.layer or "layer"
            seen[layer] = times = seen.get(layer, 0) + 1
            name = layer if times == 1 else f"{layer}.{times}"  # a layer may be solved several times in a pass
            row |= self._named(name, solution.stats)
            if solution.adjoint is not None:
                row |= self._named(f"{name}/adjoint", solution.adjoint)
        return row

    def _named(self, name: str, stats: Stats) -> dict[str, float]:
        return {f"{self.prefix}{name}/{key}": value for key, value in stats.summary().items() if key in self.quantities}


def _logger(to: Any) -> Log | None:
    """Return a function of a row and its step that logs to `to`."""
    if to is None:
        return None
    for name in ("log_dict", "log"):  # a LightningModule has both, and its log takes a name and a value
        if callable(getattr(to, name, None)):
            return lambda row, step: getattr(to, name)(row)
    if callable(getattr(to, "add_scalar", None)):
        return lambda row, step: [to.add_scalar(name, value, step) for name, value in row.items()]
    if callable(to):
        return lambda row, step: to(row)
    raise TypeError(
        f"monitor cannot log to an object of type {type(to).__name__}. Pass a function of a dict, or an object with "
        "log(dict), log_dict(dict) or add_scalar(name, value, step)."
    )
