"""Evaluation of a run's model on its splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning_fabric import Fabric
from torch import nn

from equilibria._core.compaction import set_verdicts, verdicts
from equilibria.lab.training.processes import gather, gathered, other_rng
from equilibria.lab.training.run_state import RunState
from equilibria.lab.training.settings import Training
from equilibria.lab.training.statistics import Meter, observe, radius
from equilibria.lab.training.task import Loader, Task
from equilibria.solution import Solution, record


class Evaluator:
    """Computes means over the validation and test splits; `pause` is called after every batch and may raise.

    Evaluation does not affect training: weights, modes and random numbers are restored.
    """

    def __init__(self, state: RunState, training: Training, pause: Callable[[], None]) -> None:
        self.state, self.training, self.pause = state, training, pause

    def splits(self) -> dict[str, dict[str, float]]:
        """Return the means by split name; the first split also has the spectral radius on its first batch."""
        loaders, rank = self.state.loaders, self.state.fabric.global_rank
        given = [(name, loader) for name, loader in (("valid", loaders.valid), ("test", loaders.test)) if loader is not None]
        known = verdicts(self.state.module)  # restored afterwards, so that training counts as many evaluations as without
        try:
            with self.weights(), other_rng(self.training.seed, self.state.progress.epoch, rank):
                found = {name: self._split(loader, look=i == 0) for i, (name, loader) in enumerate(given)}
                return self.state.task.conclude(found)
        finally:
            set_verdicts(self.state.module, known)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Put the model in eval mode inside the block, with its averaged weights if there are any."""
        average, model = self.state.average, self.state.model
        model.eval()
        try:
            with nullcontext() if average is None else average.in_place(self.state.module), gathered(self.state.module):
                yield
        finally:
            model.train()

    def means(self, meter: Meter) -> dict[str, float]:
        """Return the means over all processes, passed through the task's `summarise`; a collective call."""
        return self.state.task.summarise(Meter.merged(gather(self.state.fabric, meter.state())).means())

    def _split(self, loader: Loader[Any], look: bool) -> dict[str, float]:
        """Return the means over one split; `look` adds the spectral radius on its first batch."""

        def after(meter: Meter, position: int, solutions: Sequence[Solution]) -> None:
            if look and position == 0:
                # processes take different numbers of products, and with sharded weights each product is a collective
                found = None if self.state.sharded else radius(solutions, self.training.seed)
                if found is not None:
                    meter.add("spectral_radius", found, 1)
            self.pause()  # between batches, so that an interrupt need not wait for the whole split

        return self.means(evaluate_split(self.state.task, self.state.model, loader, self.state.fabric, after))


def evaluate_split(
    task: Task[Any],
    model: nn.Module,
    loader: Loader[Any],
    fabric: Fabric,
    after: Callable[[Meter, int, Sequence[Solution]], None] = lambda meter, position, solutions: None,
) -> Meter:
    """Evaluate a model in eval mode on all batches of a loader; `after` is called after every batch.

    What earlier solves found out about the cells is cleared first, since finding it out costs an evaluation. Counts of a run
    and of `evaluate` on its weights are then equal.
    """
    meter = Meter()
    set_verdicts(model, {})
    loader.resume({**loader.state(), "epoch": 0, "position": 0})
    for position, batch in enumerate(loader):
        with fabric.autocast(), record(model) as solutions:
            outcome = task.evaluate(model, fabric.to_device(batch))
        meter.add_batch(observe(outcome, solutions))
        after(meter, position, solutions)
    return meter
