"""Attractors: each property is built into a small layer and detected."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq

ATTRACTORS = {
    "several equilibria",
    "path dependence",
    "drift with depth",
    "lazy cell",
    "residual separates wrong answers",
    "residual does not separate wrong answers",
}
STOP = eq.Stop(rtol=1e-6, atol=0.0, max_steps=200, on_failure="ignore")


def found(model: nn.Module, batch: Any, **options: Any) -> set[str]:
    torch.manual_seed(0)
    findings = eq.diagnose(model, batch, restarts=6, **options).findings
    assert not any("..." in finding.advice for finding in findings)  # what is advised can be typed
    return {finding.cause for finding in findings} & ATTRACTORS


def batch(rows: int = 8, width: int = 4) -> Tensor:
    return torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def layer(cell: Any, **options: Any) -> eq.DEQ:
    return eq.DEQ(cell, stop=STOP, **{"solver": eq.Picard(), **options})


def test_a_contraction_has_one_equilibrium() -> None:
    assert found(layer(lambda z, x: 0.5 * torch.tanh(z) + x), batch()) == set()


def test_several_equilibria_are_counted() -> None:
    """The first entry converges to 1 or -1, depending on the sign of its start, so there are two equilibria."""

    def cell(z: Tensor, x: Tensor) -> Tensor:
        first = torch.tanh(3 * z[:, :1])
        return torch.cat([first, 0.1 * z[:, 1:] + 0.01 * x[:, 1:]], dim=1)

    model = layer(cell, init=lambda x: torch.ones_like(x))
    torch.manual_seed(0)
    diagnosis = eq.diagnose(model, batch(), restarts=6)
    assert {finding.cause for finding in diagnosis.findings} & ATTRACTORS == {"several equilibria"}  # all start alike
    attractors = diagnosis.layers[0].examination.attractors
    assert attractors is not None and set(attractors.equilibria) <= {1, 2} and 2 in attractors.equilibria
    assert attractors.converged == [6] * 8
    json.loads(diagnosis.to_json())


def test_path_dependence_is_found_by_swapped_inputs() -> None:
    """The start has the sign of the input, so that the equilibrium of another sample may lead to the other equilibrium."""
    x = batch(8, 1).sign() * (1 + batch(8, 1).abs())
    assert len(set(x.sign().flatten().tolist())) == 2
    model = layer(lambda z, x: torch.tanh(3 * z) + 0.0 * x, init=lambda x: x)
    assert found(model, x) == {"several equilibria", "path dependence"}


def test_drift_is_found_where_plain_steps_lead_away() -> None:
    """Newton's method finds the equilibrium of a cell on which plain iteration diverges."""
    model = layer(lambda z, x: 2.5 * torch.cos(z) + 0.1 * x, solver=eq.Newton(), init=lambda x: 1.15 + 0.0 * x)
    assert "drift with depth" in found(model, batch(3, 2))


def test_a_lazy_cell_is_found() -> None:
    model = layer(lambda z, x: x + 1e-4 * torch.tanh(z))
    assert found(model, batch()) == {"lazy cell"}
    assert found(layer(lambda z, x: x + 0.2 * torch.tanh(z)), batch()) == set()


class Answering(nn.Module):
    """Logits whose answer is wrong for the samples with a large first entry; `slow` ones do not converge."""

    def __init__(self, telling: bool) -> None:
        super().__init__()
        self.telling = telling
        self.layer = layer(self.cell)

    def cell(self, z: Tensor, x: Tensor) -> Tensor:
        rate = torch.where(x[:, :1] > 0, 0.999, 0.3) if self.telling else torch.full_like(x[:, :1], 0.3)
        return rate * z + (1 - rate) * torch.ones_like(x)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        wrong = x[:, 0] > 0
        return torch.stack([torch.where(wrong, 1.0, 0.0), torch.where(wrong, 0.0, 1.0)], dim=1) + 0.0 * z[:, :1]


def test_the_residual_is_compared_with_correctness() -> None:
    x, labels = batch(20), torch.ones(20, dtype=torch.int64)
    assert "residual separates wrong answers" in found(Answering(True), x, labels=labels)
    assert "residual does not separate wrong answers" in found(Answering(False), x, labels=labels)


def test_invalid_arguments_raise() -> None:
    model = layer(lambda z, x: 0.5 * z + x)
    with pytest.raises(ValueError, match="labels need restarts"):
        eq.diagnose(model, batch(), labels=torch.zeros(8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"need a model that returns logits of shape \(3, 'classes'\)"):
        eq.diagnose(model, batch(), restarts=2, labels=torch.zeros(3, dtype=torch.int64))


def test_nested_states_and_unbatched_problems_are_measured() -> None:
    def pair(z: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        return 0.4 * z[1] + x, 0.4 * torch.tanh(z[0])

    model = layer(pair, init=lambda x: (torch.zeros_like(x), torch.zeros_like(x)))
    assert found(model, batch()) == set()
    whole = eq.DEQ(lambda z, x: 0.5 * torch.tanh(z) + x, stop=STOP, batched=False)
    assert found(whole, batch()) == set()
