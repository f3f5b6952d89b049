"""The equation of a case in float64: value, Jacobian, products with its transpose, and the rounding of the cell."""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.fuzz.problems import Cell, rows_of, wide
from tests.fuzz.tolerances import CELL_ROUNDING, STATE_SPACINGS, SUBNORMALS
from tests.fuzz.verdict import Run


class Dense:
    """The equation in float64 at the returned state: value, Jacobian and rounding of the cell's dtype."""

    def __init__(self, run: Run) -> None:
        self.problem, self.cell = run.problem, run.cell.widened()
        problem = self.problem
        self.norm = {"rms": rms, "euclidean": length, "max": largest_entry}[problem.case.norm]
        self.z = rows_of(run.solution.z, problem.whole)
        self.x = problem.x.detach().to(wide(problem.dtype))
        with torch.no_grad():
            self.f = self(self.z, self.x)
        with problem.autocast():
            self.rough = rows_of(evaluate(copy.deepcopy(run.cell), run.solution.z, problem.x), problem.whole)
        self.whole = problem.whole or self.cell.couples

    def __call__(self, z: Tensor, x: Tensor) -> Tensor:
        """Return the map on float64 rows, with complex numbers as pairs."""
        y = z.reshape(*x.shape, 2) if x.is_complex() else z.reshape(x.shape)
        out = self.cell.core(torch.view_as_complex(y.contiguous()) if x.is_complex() else y, x, self.cell.w)
        return (torch.view_as_real(out) if out.is_complex() else out).reshape(z.shape)

    def rounding(self) -> Tensor:
        """Return the rounding of the residual in the cell's dtype, (rows,)."""
        own = self.norm((self.rough - self.f).nan_to_num(0.0, 0.0, 0.0))  # a cell that is not finite is found elsewhere
        # |f(z + d) - f(z)| <= slope |d|: z is handed out rounded, f was evaluated before. Batch norm may have a larger slope
        slope = max(1.0, self.problem.case.gain + self.cell.coupling)
        size = slope * self.norm(self.z) + self.norm(self.f)
        smallest = min(torch.finfo(leaf.dtype).smallest_normal for leaf in pytree.tree_leaves(self.problem.z0))
        return STATE_SPACINGS * self.problem.precision * (size + SUBNORMALS * smallest) + CELL_ROUNDING * own

    def jacobian(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return J of each of these rows, (rows, n, n), or of all as one, (1, m, m), and the derivative in x likewise."""
        x = self.x if self.whole else self.x[rows]
        z = (self.z if self.whole else self.z[rows]).clone().requires_grad_()
        x = x.clone().requires_grad_()
        out = self(z, x)
        if self.whole:
            columns = [torch.autograd.grad(part, (z, x), retain_graph=True) for part in out.flatten()]
            J = torch.stack([gz.flatten() for gz, _ in columns])[None]
            B = torch.stack([real(gx).flatten() for _, gx in columns])[None]
        else:
            each = [torch.autograd.grad(out[:, k].sum(), (z, x), retain_graph=True) for k in range(out.shape[1])]
            J = torch.stack([gz for gz, _ in each], dim=1)
            B = torch.stack([real(gx).flatten(1) for _, gx in each], dim=1)
        return J, B

    def pull(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the weight for cotangents u of the output, without rows of u that are nan."""
        good = ~torch.isnan(u).any(dim=1)
        rows = slice(None) if self.whole else good
        x, z = self.x[rows].clone().requires_grad_(), self.z[rows]
        gx, gw = torch.autograd.grad(self(z, x), (x, self.cell.w), u[good])
        full = torch.full_like(self.x, float("nan"))
        full[rows] = gx
        return full, gw

    def pull_rounding(self, run: Run, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rounding errors of pulling u back to z (rows,), to x (rows,) and to the weight, in the cell's dtype.

        A solver cannot know them. Batch norm of equal rows, for example, divides by a variance that is only rounding.
        """
        problem, cell = self.problem, copy.deepcopy(run.cell)
        unit = float(u.abs().max().clamp_min(1e-300))
        leaves, spec = pytree.tree_flatten(run.solution.z)
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        x = problem.x.detach().clone().requires_grad_()
        with problem.autocast():
            out = cell(pytree.tree_unflatten([leaf * 1 for leaf in leaves], spec), x * 1)
        cotangents = self.as_state(u / unit)
        rough = torch.autograd.grad(pytree.tree_leaves(out), [*leaves, x, cell.w], cotangents, allow_unused=True)
        *gz, gx, gw = [torch.zeros_like(t) if g is None else g for g, t in zip(rough, [*leaves, x, cell.w], strict=True)]
        z, wide_x = self.z.clone().requires_grad_(), self.x.clone().requires_grad_()
        exact = torch.autograd.grad(self(z, wide_x), (z, wide_x, self.cell.w), u / unit)
        rows = rows_of(pytree.tree_unflatten(gz, spec), problem.whole)
        off_x = real(gx.to(wide(problem.dtype)) - exact[1]).reshape(len(self.z), -1)
        off_w = torch.linalg.vector_norm(gw.to(wide(problem.dtype)) - exact[2])
        return (
            unit * torch.linalg.vector_norm(rows - exact[0], dim=1),
            unit * torch.linalg.vector_norm(off_x, dim=1),
            unit * off_w,
        )

    def as_state(self, u: Tensor) -> list[Tensor]:
        """Return rows as the tensors of a state, in their dtypes."""
        parts, place = [], 0
        for leaf in pytree.tree_leaves(self.problem.z0):
            numbers = (leaf.numel() if self.problem.whole else prod(leaf.shape[1:])) * (2 if leaf.is_complex() else 1)
            part, place = u[:, place : place + numbers], place + numbers
            part = part.reshape(*leaf.shape, 2) if leaf.is_complex() else part.reshape(leaf.shape)
            parts.append((torch.view_as_complex(part.contiguous()) if leaf.is_complex() else part).to(leaf.dtype))
        return parts


def evaluate(cell: Cell, z: Any, x: Tensor) -> Any:
    with torch.no_grad():
        state = pytree.tree_map(lambda leaf: leaf.detach().clone(), z)
        return cell(state, x.detach().clone())


def real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def length(x: Tensor) -> Tensor:
    """Return the norm of each row, scaled by its largest entry, since squares of 1e307 overflow in float64 too."""
    largest = largest_entry(x)
    usable = (largest > 0) & (largest < float("inf"))
    unit = torch.where(usable, largest, torch.ones_like(largest))
    return torch.linalg.vector_norm(x / unit.unsqueeze(1), dim=1) * unit


def rms(x: Tensor) -> Tensor:
    return length(x) / max(x.shape[1], 1) ** 0.5


def largest_entry(x: Tensor) -> Tensor:
    return x.abs().amax(dim=1) if x.shape[1] else x.new_zeros(x.shape[0])
