"""Fields against their formulas, derivatives against dense algebra; contraction and fitting."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria import models
from equilibria.models import EquilibriumField, ExplicitField, FieldConfig, coordinate_grid
from equilibria.models.fields.filters import GaborFilter

SOLVED = 1e-9  # float64, solves to a residual of 1e-12
TIGHT = eq.Stop(rtol=1e-12, atol=1e-14, max_steps=300, on_failure="raise")
EXACT = eq.Implicit(stop=TIGHT)
SMALL = FieldConfig(width=12, outputs=3, scale=4.0, bound=0.8)
KINDS = ["siren", "fourier", "gabor"]


def small(kind: str, **changes: Any) -> EquilibriumField:
    """Return a field in double precision, solved tightly and with exact gradients."""
    torch.manual_seed(0)
    config = dataclasses.replace(SMALL, kind=kind)  # type: ignore[arg-type]
    return EquilibriumField(config, **{"stop": TIGHT, "gradient": EXACT, **changes}).double().eval()


def points(count: int = 5) -> Tensor:
    return torch.rand(count, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1


def filtered(x: Tensor, filter: nn.Module) -> Tensor:
    """Return a filter by its formula."""
    w = dict(filter.named_parameters())
    out = torch.sin(x @ w["waves.map.weight"].T + w["waves.map.bias"])
    if "centres" not in w:
        return out
    squares = (x.unsqueeze(1) - w["centres"]).square().sum(dim=-1)
    return out * torch.exp(-0.5 * w["sharpness"] * squares)


def equilibrium(field: EquilibriumField, x: Tensor) -> Tensor:
    """Return the equilibrium of a multiplicative filter cell by a dense linear solve per point."""
    cell: Any = field.layer.cell
    g, h = filtered(x, cell.first), filtered(x, cell.second)
    weight = cell.state.weight
    matrices = torch.eye(len(weight), dtype=x.dtype) - h.unsqueeze(2) * weight
    return torch.linalg.solve(matrices, h * (g @ weight.T + cell.state.bias))


@pytest.mark.parametrize("kind", ["fourier", "gabor"])
def test_a_filter_equilibrium_is_the_solution_of_its_linear_system(kind: str) -> None:
    field, x = small(kind), points()
    values, state = field(x, with_state=True)
    torch.testing.assert_close(state, equilibrium(field, x), rtol=SOLVED, atol=SOLVED)
    torch.testing.assert_close(values, field.head(equilibrium(field, x)), rtol=SOLVED, atol=SOLVED)


def test_a_siren_equilibrium_satisfies_its_equation() -> None:
    field, x = small("siren"), points()
    _, z = field(x, with_state=True)
    cell: Any = field.layer.cell
    injected = x @ cell.waves.map.weight.T + cell.waves.map.bias
    again = torch.sin((z + filtered(x, cell.first)) @ cell.state.weight.T + injected)
    torch.testing.assert_close(again, z, rtol=SOLVED, atol=SOLVED)


@pytest.mark.parametrize("kind", ["fourier", "gabor"])
def test_derivatives_are_those_of_the_dense_solution(kind: str) -> None:
    field, x = small(kind), points(3).requires_grad_()
    weights = [x, *field.parameters()]

    def derivatives(values: Tensor) -> list[Tensor]:
        slopes = torch.autograd.grad(values.square().sum(), x, create_graph=True)[0]
        return [slopes, *torch.autograd.grad(slopes.square().sum() + values.sum(), weights)]

    for ours, dense in zip(derivatives(field(x)), derivatives(field.head(equilibrium(field, x))), strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-6, atol=1e-7)  # second derivatives of ill-scaled filters


def test_derivatives_of_a_siren_pass_gradcheck() -> None:
    field = small("siren")
    assert torch.autograd.gradcheck(field, points(2).requires_grad_())
    assert torch.autograd.gradgradcheck(field, points(2).requires_grad_())


@pytest.mark.parametrize("kind", KINDS)
def test_a_bound_below_one_makes_the_cell_contract(kind: str) -> None:
    field, x = small(kind), points(4)
    cell: Any = field.layer.cell
    with torch.no_grad():
        cell.state.parametrizations.weight.original.mul_(50)
    field.train()
    for _ in range(30):  # power iterations
        field(x)
    s = field.eval().layer.solve(x)
    jacobian = eq.analysis.dense_jacobian(s)
    norms = torch.linalg.matrix_norm(jacobian, ord=2)
    assert float(norms.detach().max()) <= 0.8 * (1 + 1e-3)  # the norm is estimated from below
    assert bool(s.stats.converged.all())


@pytest.mark.parametrize("kind", KINDS)
def test_an_explicit_field_is_its_formula(kind: str) -> None:
    torch.manual_seed(0)
    field = ExplicitField(dataclasses.replace(SMALL, kind=kind), layers=3).double()  # type: ignore[arg-type]
    x = points()
    h = filtered(x, field.filters[0])
    for i, layer in enumerate(field.hidden, start=1):
        assert isinstance(layer, nn.Linear)
        mixed = h @ layer.weight.T + layer.bias
        h = torch.sin(30 * mixed) if kind == "siren" else filtered(x, field.filters[i]) * mixed
    torch.testing.assert_close(field(x), h @ field.head.weight.T + field.head.bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("explicit", [False, True])
def test_a_field_fits_a_wave(kind: str, explicit: bool) -> None:
    torch.manual_seed(0)
    config = FieldConfig(kind=kind, inputs=1, width=32, scale=20.0)  # type: ignore[arg-type]
    field: nn.Module = ExplicitField(config, layers=2) if explicit else EquilibriumField(config)
    x = coordinate_grid(64)
    y = torch.sin(9 * x) * x
    optimizer = torch.optim.Adam(field.parameters(), lr=3e-3)
    losses = []
    for _ in range(80):
        loss = F.mse_loss(field(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 20


def test_a_solve_from_the_last_state_takes_fewer_evaluations() -> None:
    torch.manual_seed(0)
    field, x = EquilibriumField(SMALL), points().float()
    with eq.record(field) as solutions:
        values, state = field(x, with_state=True)
        again = field(x, state)
    first, second = (s.stats.evaluations for s in solutions)
    assert second < first and not state.requires_grad
    torch.testing.assert_close(again, values, rtol=0, atol=0.05)  # both to the tolerance of the solve


def test_the_grid_has_the_centres_of_its_cells() -> None:
    assert coordinate_grid(2, 4).tolist() == [[a, b] for a in (-0.5, 0.5) for b in (-0.75, -0.25, 0.25, 0.75)]


def test_gabor_filters_are_local() -> None:
    torch.manual_seed(0)
    filter = GaborFilter(2, 16, 4.0)
    far = filter(filter.centres.detach() + 30.0)
    assert float(far.detach().diagonal().abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [({"kind": "relu"}, "kind must be one of"), ({"width": 0}, "width must be at least 1"), ({"bound": 0.0}, "bound must")],
)
def test_invalid_settings_of_a_field_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_coordinates_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(points, 2\), got \(4, 4, 2\)"):
        models.create("field-siren")(torch.zeros(4, 4, 2))


def test_published_sizes() -> None:
    """A field of width h has h^2 weights between states, two filters of the coordinates, and the head."""
    h = 256
    assert models.info("field-siren").parameters == h * h + 2 * 3 * h + h + 1
    assert models.info("field-fourier").parameters == h * h + h + 2 * 3 * h + h + 1
    assert models.info("field-gabor").parameters == models.info("field-fourier").parameters + 2 * 3 * h
    assert models.info("field-siren-explicit").parameters == 3 * h + 3 * (h * h + h) + h + 1
