"""Count operations, evaluations and read-backs in a training step, and compare them with a stored baseline.

`python -m equilibria.lab.bench.counts tests/lab/bench/counts.json` writes a new baseline.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from equilibria import native
from equilibria.lab.bench.cases import Case, make
from equilibria.lab.bench.methods import Method, Ours
from equilibria.lab.bench.rules import count

SMALL = ("mlp-b32", "mlp-hard", "mlp-nonnormal", "mlp-osc", "mixed")  # the cases that run in the tests
BATCHES = {"mixed": 64}  # batch sizes below the usual ones, so that the check is fast
SLACK = 0.03  # relative growth allowed for the counts in LOOSE; the other counts must not grow
LOOSE = ("operations", "read_backs")  # counts that change with the version of torch

StepCounts = dict[str, int]


class Operations(TorchDispatchMode):
    """Count dispatched operations, and those of them that read a number back from the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.read_backs = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.read_backs += _reads_back(func, args)
        return func(*args, **(kwargs or {}))


class Lists(TorchFunctionMode):
    """Count calls of `tolist`, a read-back that is not dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.read_backs = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.read_backs += func is Tensor.tolist
        return func(*args, **(kwargs or {}))


def counts(case: Case, method: Method) -> StepCounts:
    """Count one training step to the tolerance of the case, after an uncounted warm-up step."""
    found = asdict(count(case, method, case.rtol))
    with Operations() as seen, Lists() as lists:
        method.counted().step(case, case.rtol)
    return found | {"operations": seen.operations, "read_backs": seen.read_backs + lists.read_backs}


def measured() -> dict[str, Any]:
    """Return the counts of our default on the small cases, and the version of torch, on which counts of operations depend.

    Native steps are switched off, because their operations are not dispatched.
    """
    with native.disabled():
        cases = {name: counts(make(name, BATCHES.get(name)), Ours()) for name in SMALL}
    return {"torch": torch.__version__, "cases": cases}


def regressions(found: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    """Return a line for every count that grew; counts in LOOSE are compared only for the same version of torch."""
    same_torch = found["torch"] == baseline["torch"]
    lines = []
    for case, before in baseline["cases"].items():
        for name, allowed in before.items():
            now = found["cases"][case][name]
            limit = allowed * (1 + SLACK) if name in LOOSE else allowed
            if now > limit and (same_torch or name not in LOOSE):
                lines.append(f"{case}: {name} {now}, were {allowed}")
    return lines


def _reads_back(func: Any, args: Any) -> bool:
    """Return True for operations that read numbers back, and for those whose output shape depends on values."""
    if func is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


def main(arguments: Sequence[str]) -> int:
    """Write the counts to the given path, or print them."""
    torch.set_num_threads(1)
    text = json.dumps(measured(), indent=1) + "\n"
    if arguments:
        Path(arguments[0]).write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
