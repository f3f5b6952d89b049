"""The problem that a `Case` names: a cell with its float64 twin, an input, a start, and the call that solves it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import equilibria as eq
from tests.fuzz.strategies import GRADIENTS, NORMS, SOLVERS, Case

HALF_SCALES = (1e-3, 1e3)  # float16 holds 6e-5 to 65504, and below 6e-5 few digits
STRONG_COUPLING = 0.4
FACTOR_BEFORE = 0.5  # of the weight, until it is changed


class Cell(nn.Module):
    """scale * g((factor * z W' + x + coupling * mean(z)) / scale), where g has a slope of at most 1.

    affine      g(t) = t
    tanh        g(t) = tanh(t), of real numbers
    bounded     g(t) = t / sqrt(1 + |t|^2)
    batch-norm  g(t) = 0.3 batch_norm(t), of float32 and float64
    """

    def __init__(self, kind: str, w: Tensor, scale: float, coupling: float, in_place: str, structure: str) -> None:
        super().__init__()
        self.kind, self.scale, self.coupling = kind, scale, coupling
        self.in_place, self.structure, self.factor = in_place, structure, 1.0
        self.w = nn.Parameter(w)
        self.norm = nn.BatchNorm1d(w.shape[0], dtype=w.dtype) if kind == "batch-norm" else None

    def forward(self, z: Any, x: Tensor) -> Any:
        if self.in_place == "state":
            for leaf in pytree.tree_leaves(z):
                leaf.mul_(0.5)
        y = join(z, x)
        out = self.core(y * 2 if self.in_place == "state" else y, x, self.w)
        return split(out, self.structure, z)

    def core(self, y: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """Return the map on rows, (batch, width)."""
        t = self.factor * (y @ w.T)
        t = t.add_(x) if self.in_place == "own" and t.dtype == x.dtype else t + x
        if self.coupling:
            t = t + self.coupling * y.mean(dim=0)
        return t if self.kind == "affine" else self.scale * self.bend(t / self.scale)

    def bend(self, t: Tensor) -> Tensor:
        if self.kind == "tanh":
            return torch.tanh(t)
        if self.norm is not None:
            out: Tensor = 0.3 * self.norm(t)
            return out
        return t / (1 + t.abs() ** 2).sqrt()

    @property
    def couples(self) -> bool:
        return self.coupling != 0 or (self.norm is not None and self.norm.training)

    def widened(self) -> Cell:
        """Return a copy of this function in double precision that shares nothing with it."""
        twin = copy.deepcopy(self)
        twin.in_place = "none"
        twin.w = nn.Parameter(self.w.detach().to(wide(self.w.dtype)))
        if twin.norm is not None:
            twin.norm.double()
        return twin


class PreparedCell(Cell):
    """A cell whose terms without z are computed once per solve."""

    def prepare(self, x: Tensor) -> Tensor:
        return x * 1


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def join(z: Any, like: Tensor) -> Tensor:
    """Return the tensors of a state side by side, (batch, width), in one dtype."""
    leaves = pytree.tree_leaves(z)
    if len(leaves) == 1:
        return leaves[0].reshape(like.shape).to(like.dtype)
    return torch.cat([leaf.flatten(1).to(like.dtype) for leaf in leaves], dim=1)


def split(y: Tensor, structure: str, like: Any = None) -> Any:
    """Return rows (batch, width) as a state with the structure and dtypes of `like`."""
    batch, width = y.shape
    if structure in ("tensor", "whole"):
        state: Any = y
    elif structure == "vector":
        state = y.reshape(batch)
    elif structure == "image":
        state = y.reshape(batch, 1, width)
    elif structure in ("tuple", "mixed"):
        state = (y[:, : width // 2], y[:, width // 2 :])
    else:
        third = width // 3
        parts = y[:, :third], y[:, third : 2 * third].reshape(batch, 1, third), y[:, 2 * third :]
        state = {"a": parts[0], "b": (parts[1], [parts[2]])}
    if like is None:
        return state
    return pytree.tree_map(lambda part, old: part.to(old.dtype) if part.dtype == y.dtype != old.dtype else part, state, like)


def rows_of(state: Any, whole: bool) -> Tensor:
    """Return a state as a float64 matrix with a row per sample and complex numbers as pairs."""
    leaves = [leaf.detach() for leaf in pytree.tree_leaves(state)]
    real = [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in leaves]
    if whole:
        return torch.cat([leaf.double().reshape(1, -1) for leaf in real], dim=1)
    return torch.cat([leaf.double().reshape(len(leaf), prod(leaf.shape[1:])) for leaf in real], dim=1)


@dataclass
class Problem:
    case: Case
    cell: Cell
    deq: eq.DEQ | None
    x: Tensor
    z0: Any
    cotangents: Any  # a state
    dtype: torch.dtype

    @property
    def whole(self) -> bool:
        return self.case.structure == "whole"

    @property
    def precision(self) -> float:
        """The coarsest spacing of the numbers with which the cell computes."""
        dtypes = [leaf.dtype for leaf in pytree.tree_leaves(self.z0)] + ([torch.bfloat16] if self.case.autocast else [])
        return max(torch.finfo(dtype).eps for dtype in dtypes)

    @property
    def rtol(self) -> float:
        """The required tolerance; if none is given, one that the dtype can reach."""
        return max(eq.Stop().rtol, self.precision) if self.case.rtol is None else self.case.rtol

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.case.autocast else contextlib.nullcontext()

    def tangent(self) -> Tensor:
        """The cotangents, used as a tangent of the input."""
        return join(self.cotangents, self.x).detach().clone()

    def solve(self, x: Tensor) -> eq.Solution:
        case, cell, z0 = self.case, self.cell, self.z0
        if self.deq is not None:
            return self.deq.solve(x)
        settings: dict[str, Any] = {
            "solver": SOLVERS[case.solver],
            "stop": stop_of(case),
            "gradient": GRADIENTS[case.gradient],
            "batched": not self.whole,
        }
        if case.call == "closure":
            return eq.fixed_point(lambda z: cell(z, x), z0, **settings)
        if case.call == "function" and case.in_place != "state" and cell.norm is None:
            structure, core = case.structure, cell.core
            return eq.fixed_point(lambda z, x, w: split(core(join(z, x), x, w), structure, z), z0, x, cell.w, **settings)
        return eq.fixed_point(cell, z0, x, **settings)


def stop_of(case: Case) -> eq.Stop:
    stop = eq.Stop() if case.rtol is None else eq.Stop(rtol=case.rtol)
    return replace(
        stop,
        atol=case.atol,
        max_steps=case.max_steps,
        norm=NORMS[case.norm],
        on_failure=case.on_failure,  # type: ignore[arg-type]
        check_every=case.check_every,
        patience=case.patience,
        compact=case.compact,
        trace=case.trace,
    )


def build(case: Case) -> Problem:
    """Return the problem in the state in which it is checked, which is that of the second of two calls."""
    case = legal(case)
    dtype: torch.dtype = getattr(torch, case.dtype)
    draw = torch.Generator().manual_seed(case.seed)
    cell = make_cell(case, dtype, draw)
    x = make_input(case, dtype, draw)
    z0 = make_start(case, x, draw)
    deq = None
    if case.call in ("deq", "prepare"):
        init: Callable[..., Any] | None = (lambda x: z0) if case.structure != "tensor" or case.start != "zeros" else None
        deq = eq.DEQ(
            cell,
            init=init,
            solver=SOLVERS[case.solver],
            stop=stop_of(case),
            gradient=GRADIENTS[case.gradient],
            batched=case.structure != "whole",
        )
    if case.mode == "eval":
        (deq or cell).eval()
    return Problem(case, cell, deq, x, z0, make_cotangents(case, z0, draw), dtype)


def legal(case: Case) -> Case:
    """Return the nearest valid case."""
    fixed: dict[str, Any] = {}
    complex_ = case.dtype.startswith("complex")
    if case.cell == "tanh" and complex_:
        fixed["cell"] = "bounded"
    if case.cell == "batch-norm" and case.dtype not in ("float32", "float64"):
        fixed["cell"] = "affine"
    if case.structure == "vector":
        fixed["width"] = 1
    if case.structure == "mixed" and case.dtype != "float64":
        fixed["structure"] = "tuple"
    if case.dtype == "float16":
        fixed["scale"] = min(max(case.scale, HALF_SCALES[0]), HALF_SCALES[1])
    if case.cotangent in ("tiny", "huge") and not 1e-11 < case.scale < 1e11 and case.dtype != "float64":
        fixed["cotangent"] = "random"  # the cell multiplies by its scale on the way back, which the dtype would not hold
    rare = case.seed % 4 == 0  # to be refused once in a while is enough
    if case.gradient.startswith("shine") and not rare:
        fixed["solver"] = "broyden" if case.seed % 2 else "broyden-search"
    if case.gradient == "reversible" and not rare:
        fixed["solver"] = "picard"
    if case.gradient.startswith("unrolled") and not getattr(SOLVERS[case.solver], "differentiable", True) and not rare:
        fixed["solver"] = "anderson"
    if case.change != "none" or case.threads > 1:
        fixed["call"] = "deq"  # the same layer is called again
    if case.mode == "forward":
        fixed["threads"] = 1  # torch has one stack of dual levels for all threads
        if case.memory == "expanded":
            fixed["memory"] = "contiguous"  # torch makes no dual of an expanded tensor
        if not case.gradient.startswith(("implicit", "neumann", "escalate")) and not rare:
            fixed["gradient"] = "implicit"
    if (case.threads > 1 or case.mode in ("no_grad", "inference", "forward")) and case.change.endswith(
        ("backward", "between")
    ):
        fixed["change"] = "none"
    return Case(**{**vars(case), **fixed})


def make_cell(case: Case, dtype: torch.dtype, draw: torch.Generator) -> Cell:
    n = case.width
    base = torch.randn(n, n, dtype=wide(dtype), generator=draw)
    if case.gain == 1.0 or n == 0:
        w = torch.eye(n, dtype=wide(dtype))
    else:
        w = case.gain * base / torch.linalg.matrix_norm(base, 2).clamp_min(1e-9)
    kind = PreparedCell if case.call == "prepare" else Cell
    return kind(case.cell, w.to(dtype), case.scale, case.coupling, case.in_place, case.structure)


def make_input(case: Case, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Return the input, (batch, width), as a view of a leaf if `memory` asks for one."""
    batch, n = case.batch, case.width
    x = torch.randn(batch, n, dtype=wide(dtype), generator=draw) * case.scale
    x = x * 10 ** (case.spread * (2 * torch.rand(batch, 1, dtype=torch.float64, generator=draw) - 1))
    x = x.to(dtype)
    info = torch.finfo(dtype)
    specials = {
        "nan": float("nan"),
        "inf": float("inf"),
        "-inf": -float("inf"),
        "zero": 0.0,
        "denormal": info.smallest_normal / 4,
        "huge": info.max / 8,
    }
    if case.special in specials and batch:
        x[0] = specials[case.special]
    grad = case.mode in ("grad", "eval")
    if case.memory == "transposed":
        return x.T.contiguous().requires_grad_(grad).T
    if case.memory == "strided":
        return torch.stack((x, x), dim=-1).requires_grad_(grad)[..., 0]
    if case.memory == "expanded" and batch:
        return x[:1].clone().requires_grad_(grad).expand(batch, n)
    return x.requires_grad_(grad)


def make_start(case: Case, x: Tensor, draw: torch.Generator) -> Any:
    y = torch.zeros_like(x.detach(), memory_format=torch.contiguous_format)
    noise = torch.randn(x.shape, dtype=wide(x.dtype), generator=draw) * case.scale
    if case.start == "random":
        y = noise.to(x.dtype)
    elif case.start == "far":
        y = (noise * (30 if x.dtype == torch.float16 else 1e6)).to(x.dtype)
    elif case.start == "input":
        y = x.detach().clone()
    elif case.start == "nan-row" and len(y):
        y[-1] = float("nan")
    elif case.start == "expanded" and case.structure in ("tensor", "whole"):
        y = y[:1].expand(y.shape)
    state = split(y, case.structure)
    return (state[0].float(), state[1]) if case.structure == "mixed" else state


def make_cotangents(case: Case, z0: Any, draw: torch.Generator) -> Any:
    """Return a cotangent for each tensor of the state."""
    sizes = {"tiny": 1e-20, "huge": 1e20}
    batch = case.batch
    factor = torch.ones(batch, dtype=torch.float64)
    if case.cotangent in ("rows", "random"):
        factor = (
            10 ** (6 * torch.rand(batch, dtype=torch.float64, generator=draw) - 3) if case.cotangent == "rows" else factor
        )
    elif case.cotangent in sizes:
        factor = (
            factor * (1e-4 if case.cotangent == "tiny" else 1e3)
            if case.dtype == "float16"
            else factor * sizes[case.cotangent]
        )
    elif case.cotangent == "zero":
        factor = factor * 0
    elif case.cotangent == "zero-row" and batch:
        factor[0] = 0
    elif case.cotangent == "nan-row" and batch:
        factor[0] = float("nan")

    def cotangent(leaf: Tensor) -> Tensor:
        v = torch.ones(leaf.shape, dtype=wide(leaf.dtype))
        v = v if case.cotangent == "one" else torch.randn(leaf.shape, dtype=wide(leaf.dtype), generator=draw)
        return (v * factor.view(-1, *[1] * (leaf.dim() - 1))).to(leaf.dtype)

    return pytree.tree_map(cotangent, z0)
