"""Stop, the rule by which each sample's solve ends, and the per-sample norms, (batch, n) -> (batch,), it is stated in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from equilibria._core.checks import require

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Stop", "euclidean_norm", "max_norm", "rms_norm"]

OnFailure = Literal["ignore", "warn", "raise"]
FLOOR = 8.0  # relative residuals below this many machine epsilons are rounding
# a residual updated by recurrence may differ from the measured one by this share of the tolerance, or by FLOOR epsilons,
# whichever is less
RECURRENCE = 0.1
Norm = Callable[[Tensor], Tensor]


def usual_range(dtype: torch.dtype) -> tuple[float, float]:
    """Return the norms (least, most) between which squares of a vector and of its residuals stay in the dtype."""
    info = torch.finfo(dtype)
    least = float(info.tiny**0.5 / info.eps)
    return least, 1 / least


USUAL = {dtype: usual_range(dtype) for dtype in (torch.float32, torch.float64)}  # for the dtypes of packed states


def binary_size(*vectors: Tensor) -> Tensor:
    """Return (batch,), a power of two near the largest absolute entry of each row; 1 for zero or non-finite rows.

    Division by a power of two is exact, so that a scaled problem is solved with the same mantissas.
    """
    largest = torch.stack([max_norm(x.detach()) for x in vectors]).amax(dim=0)
    _, exponent = torch.frexp(largest)
    bound = 120 if largest.dtype == torch.float32 else 1000  # keeps the reciprocal finite too
    power = torch.ldexp(torch.ones_like(largest), exponent.clamp(-bound, bound))
    return torch.where((largest > 0) & (largest < float("inf")), power, torch.ones_like(largest))


def scaled_norm(norm: Norm, x: Tensor) -> Tensor:
    """Return (batch,), `norm` of each row without overflow: rows are divided by their `binary_size` first."""
    size = binary_size(x)
    return norm(x / size.unsqueeze(1)) * size


def rms_norm(x: Tensor) -> Tensor:
    """Return the root mean square of each row; a tolerance then does not depend on the number of entries."""
    return torch.linalg.vector_norm(x, dim=1) / max(x.shape[1], 1) ** 0.5


def euclidean_norm(x: Tensor) -> Tensor:
    """Return the Euclidean norm of each row, in which most of the literature states its tolerances."""
    return torch.linalg.vector_norm(x, dim=1)


def max_norm(x: Tensor) -> Tensor:
    """Return the largest entry of each row in absolute value."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0])
    return x.abs().amax(dim=1)  # several times faster on a CPU than vector_norm


class DefaultTolerance(float):
    """The default value of a tolerance, which `Stop.reachable` may raise."""


ALWAYS_SHOWN = ("rtol", "atol", "max_steps")  # in the repr of a Stop


@dataclass(frozen=True, kw_only=True, repr=False)
class Stop:
    """The stopping rule |f(z) - z| <= atol + rtol |f(z)|, applied to every sample by itself.

    rtol, atol     tolerances. If rtol is left out and the cell computes in half precision (a state in bfloat16, or
                   autocast), it is at least the machine epsilon, 0.0078 for bfloat16. An rtol that is given is never
                   changed; samples that cannot reach it end STALLED
    max_steps      largest number of steps
    norm           per-sample norm, (batch, n) -> (batch,); the default does not depend on the size of the state
    on_failure     the action for samples that did not converge: "ignore", "warn" (once per cell and cause) or "raise";
                   the statistics report them in any case
    check_every    check every `check_every` steps whether all samples have stopped, because each check waits for the
                   device. The result is the same; up to check_every - 1 further evaluations are made
    patience       a sample is STALLED after this number of steps in which its residual did not fall by a tenth
    compact        drop samples that have stopped from the batch, if rows do not depend on each other
    trace          keep the residual of every iterate in Stats.trace
    keep_every     keep every keep_every-th iterate in Solution.iterates; samples that have stopped are there with their
                   result
    process_group  ranks that must take the same number of steps, because evaluating the cell is a collective operation
                   (sharded weights): a ProcessGroup, or "world"
    """

    rtol: float = DefaultTolerance(1e-3)
    atol: float = 1e-6
    max_steps: int = 40
    norm: Norm = rms_norm
    on_failure: OnFailure = "warn"
    check_every: int = 1
    patience: int | None = None
    compact: bool = True
    trace: bool = False
    keep_every: int | None = None
    process_group: ProcessGroup | Literal["world"] | None = None

    def __post_init__(self) -> None:
        require(
            self.rtol >= 0 and self.atol >= 0, f"Tolerances must not be negative, got rtol={self.rtol}, atol={self.atol}."
        )
        require(self.max_steps >= 0, f"max_steps must not be negative, got {self.max_steps}.")
        require(self.check_every >= 1, f"check_every must be at least 1, got {self.check_every}.")
        require(self.patience is None or self.patience >= 1, f"patience must be at least 1 or None, got {self.patience}.")
        require(self.keep_every is None or self.keep_every >= 1, f"keep_every must be at least 1, got {self.keep_every}.")
        choices = ("ignore", "warn", "raise")
        require(self.on_failure in choices, f"on_failure must be one of {choices}, got {self.on_failure!r}.")

    def __repr__(self) -> str:
        """Return tolerances, max_steps and what differs from its default; functions by name, without their addresses."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = {field.name for field in dataclasses.fields(self) if values[field.name] != field.default}
        shown = {name: value for name, value in values.items() if name in ALWAYS_SHOWN or name in changed}
        parts = (f"{name}={getattr(value, '__name__', repr(value))}" for name, value in shown.items())
        return f"Stop({', '.join(parts)})"

    def reachable(self, precision: float) -> Stop:
        """Return this stop for a machine epsilon of `precision`, which is the smallest value of a default rtol."""
        if not isinstance(self.rtol, DefaultTolerance) or self.rtol >= precision:
            return self
        return dataclasses.replace(self, rtol=DefaultTolerance(precision))

    def any_rank(self) -> Callable[[bool], bool] | None:
        """Return a function that is True if its argument is True on any rank of `process_group`; None without a group."""
        return None if self.process_group is None else lambda here: bool(self.largest(int(here)))

    def largest(self, here: int) -> int:
        """Return the largest of a number over the ranks of `process_group`."""
        if self.process_group is None:
            return here
        group = dist.group.WORLD if self.process_group == "world" else self.process_group
        number = torch.tensor(here, device=torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
        return int(number)
