"""What the fuzzer varies: a `Case` names one choice per field, so that it prints, shrinks and can be run again."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

import equilibria as eq

SOLVERS: dict[str, Any] = {
    "picard": eq.Picard(),
    "picard-damped": eq.Picard(damping=0.5),
    "anderson": eq.Anderson(),
    "anderson-3": eq.Anderson(history=3, damping=0.8, ridge=1e-8),
    "broyden": eq.Broyden(),
    "broyden-search": eq.Broyden(history=10, line_search=True),
    "newton": eq.Newton(),
    "newton-bicgstab": eq.Newton(linear=eq.BiCGSTAB()),
    "restart": eq.Restart(eq.Anderson(), every=12),
    "steady-state": eq.SteadyState(),
    "steady-state-bs3": eq.SteadyState(method="bs3", first_step=None),
    "steady-state-heun": eq.SteadyState(method="heun", rtol=0.1),
    "fallback": eq.Fallback(eq.Picard(), eq.Anderson(), eq.Newton()),
    "gmres": eq.GMRES(),
    "gmres-15": eq.GMRES(restart=15),
    "bicgstab": eq.BiCGSTAB(),
    "normal-cg": eq.NormalCG(),
}
for _name in ("TrustRegion", "PseudoTransient", "DFSane", "Robust"):  # solvers that a version may not have
    if _name in eq.solvers.__all__:
        SOLVERS[_name] = getattr(eq.solvers, _name)()

GRADIENTS: dict[str, Any] = {
    "implicit": eq.Implicit(),
    "implicit-anderson": eq.Implicit(solver=eq.Anderson()),
    "implicit-picard": eq.Implicit(solver=eq.Picard()),
    "implicit-broyden": eq.Implicit(solver=eq.Broyden()),
    "implicit-newton": eq.Implicit(solver=eq.Newton()),
    "implicit-bicgstab": eq.Implicit(solver=eq.BiCGSTAB()),
    "implicit-normal-cg": eq.Implicit(solver=eq.NormalCG()),
    "implicit-fallback": eq.Implicit(solver=eq.Fallback(eq.Picard(), eq.GMRES())),
    "implicit-loose": eq.Implicit(stop=eq.Stop(rtol=1e-2, atol=0.0, max_steps=20, on_failure="ignore")),
    "implicit-fall-back": eq.Implicit(on_failure="fall_back"),
    "jfb": eq.JFB(),
    "neumann": eq.NeumannPhantom(),
    "neumann-long": eq.NeumannPhantom(steps=20, damping=0.9),
    "phantom": eq.UnrolledPhantom(),
    "phantom-checkpointed": eq.UnrolledPhantom(steps=3, damping=1.0, checkpoint=True),
    "unrolled": eq.Unrolled(),
    "unrolled-sqrt": eq.Unrolled(checkpoint="sqrt"),
    "unrolled-truncated": eq.Unrolled(truncate=3),
    "unrolled-depth": eq.Unrolled(depth=4),
    "shine": eq.Shine(),
    "shine-refined": eq.Shine(refine=3),
    "reversible": eq.Reversible(),
    "warmup": eq.Warmup(first=eq.Unrolled(depth=3), then=eq.Implicit(), until=1),
    "escalate": eq.Escalate(),
}

NORMS = {"rms": eq.stop.rms_norm, "euclidean": eq.stop.euclidean_norm, "max": eq.stop.max_norm}


@dataclass(frozen=True)
class Case:
    """A problem, its solver settings and its call. The first choice of every field is the simplest."""

    cell: str = "affine"  # which map, see `problems.Cell`
    dtype: str = "float64"
    batch: int = 1
    width: int = 1  # numbers in a row of the state, (before complex ones are counted twice)
    structure: str = "tensor"  # how the state is nested
    gain: float = 0.5  # spectral norm of the weight; 1.0 is the identity, so that z + x has no fixed point
    scale: float = 1.0  # of inputs and states
    spread: int = 0  # rows differ by up to 10 to this power
    start: str = "zeros"
    special: str = "none"  # what stands in one row of the input
    memory: str = "contiguous"  # how the input lies in memory
    in_place: str = "none"  # what the cell writes over
    coupling: float = 0.0  # how strongly rows depend on the mean of all rows
    call: str = "deq"
    mode: str = "grad"
    autocast: bool = False
    solver: str = "picard"
    gradient: str = "implicit"
    cotangent: str = "one"
    change: str = "none"  # what is changed between two calls, or between forward and backward
    threads: int = 1
    rtol: float | None = 1e-3  # None: left out
    atol: float = 0.0
    max_steps: int = 40
    norm: str = "rms"
    check_every: int = 1
    patience: int | None = None
    compact: bool = True
    trace: bool = False
    on_failure: str = "ignore"
    seed: int = 0

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from the simplest case, so that `Case(**...)` is this case again."""
        return {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) != f.default}

    def __str__(self) -> str:
        return f"Case({', '.join(f'{name}={value!r}' for name, value in self.changed().items())})"


# Choices that most cases should share are repeated: a case with ten rarities at once says little about any of them.
CHOICES: dict[str, tuple[Any, ...]] = {
    "cell": ("affine", "tanh", "tanh", "bounded", "batch-norm"),
    "dtype": ("float64", "float64", "float32", "float32", "bfloat16", "float16", "complex64", "complex128"),
    "batch": (1, 0, 2, 3, 5, 7, 9, 16, 33),
    "width": (1, 0, 2, 3, 5, 7),
    "structure": ("tensor", "tensor", "tensor", "vector", "image", "tuple", "nested", "mixed", "whole"),
    "gain": (0.5, 0.5, 0.0, 0.3, 0.9, 0.9, 0.99, 1.0, 1.5, 4.0),
    "scale": (1.0, 1.0, 1.0, 1.0, 1e-30, 1e-22, 1e-10, 1e-3, 1e3, 1e10, 1e22, 1e30),
    "spread": (0, 0, 3),
    "start": ("zeros", "zeros", "zeros", "random", "far", "input", "nan-row", "expanded"),
    "special": ("none",) * 7 + ("nan", "inf", "-inf", "zero", "denormal", "huge"),
    "memory": ("contiguous", "contiguous", "transposed", "strided", "expanded"),
    "in_place": ("none", "none", "none", "own", "state"),
    "coupling": (0.0,) * 8 + (0.4, 0.4, 1e-3, 1e-5),
    "call": ("deq", "deq", "fixed-point", "closure", "prepare", "function"),
    "mode": ("grad", "grad", "grad", "grad", "no_grad", "inference", "eval", "forward"),
    "autocast": (False,) * 7 + (True,),
    "solver": tuple(SOLVERS),
    "gradient": ("implicit",) * 4 + tuple(GRADIENTS),
    "cotangent": ("one", "one", "random", "random", "rows", "tiny", "huge", "zero", "zero-row", "nan-row"),
    "change": ("none",) * 7
    + ("coupling", "gain", "weight", "gain-before-backward", "weight-before-backward", "eval-between"),
    "threads": (1,) * 24 + (3,),
    "rtol": (1e-3, 1e-3, None, 1e-2, 1e-5, 1e-8, 0.0),
    "atol": (0.0, 1e-6, 1e-6),
    "max_steps": (40, 40, 40, 40, 100, 0, 1, 5),
    "norm": ("rms", "rms", "rms", "euclidean", "max"),
    "check_every": (1, 1, 1, 3),
    "patience": (None, None, None, 5),
    "compact": (True, True, True, False),
    "trace": (False, False, False, True),
    "on_failure": ("ignore",) * 8 + ("warn", "raise"),
}
SEEDS = 2**16

cases: st.SearchStrategy[Case] = st.builds(
    Case, **{name: st.sampled_from(choices) for name, choices in CHOICES.items()}, seed=st.integers(0, SEEDS)
)


def numbered(seed: int, number: int) -> Case:
    """Return case `number` of the stream `seed`; it does not depend on the machine or on other cases."""
    draw = random.Random(f"{seed}:{number}")
    return Case(**{name: draw.choice(choices) for name, choices in CHOICES.items()}, seed=draw.randrange(SEEDS))


def uncoupled(case: Case) -> Case:
    """Return the case with rows that do not depend on each other, except for batch statistics."""
    change = "none" if case.change == "coupling" else case.change
    return dataclasses.replace(case, coupling=0.0, change=change)
