"""The cases have the properties that their names and notes state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.lab.bench.cases import CASES, Case, make

ROUNDED = 1e-5  # weights are float32


def weight(name: str) -> Tensor:
    parameter = make(name, batch=2).cell.weight
    assert isinstance(parameter, Tensor)
    return parameter.detach().double()


def radius(matrix: Tensor) -> float:
    return float(torch.linalg.eigvals(matrix).abs().max())


@pytest.mark.parametrize(("name", "norm"), [("mlp-b32", 0.9), ("mlp-b512-tight", 0.9), ("mlp-hard", 0.99), ("mixed", 1.0)])
def test_contractions_have_their_norm_and_the_slow_directions(name: str, norm: float) -> None:
    w = weight(name)
    torch.testing.assert_close(w, w.T, rtol=0, atol=1e-6)
    assert float(torch.linalg.matrix_norm(w, 2)) == pytest.approx(norm, abs=ROUNDED)
    assert radius(w) == pytest.approx(norm, abs=ROUNDED)


def test_the_nonnormal_case_grows_before_it_decays() -> None:
    w = weight("mlp-nonnormal")
    assert float(torch.linalg.matrix_norm(w, 2)) == pytest.approx(1.5, abs=ROUNDED)
    assert radius(w) == pytest.approx(0.92, abs=1e-3)  # eigenvalues of a matrix so far from normal feel its rounding


def test_the_oscillating_case_has_eigenvalues_below_minus_one() -> None:
    eigenvalues = torch.linalg.eigvalsh(weight("mlp-osc"))
    assert float(eigenvalues.min()) == pytest.approx(-1.5, abs=ROUNDED)
    assert int((eigenvalues < -1).sum()) == 4
    assert float(eigenvalues.max()) == pytest.approx(0.9, abs=ROUNDED)


def test_a_tenth_of_the_mixed_case_is_hard() -> None:
    gains = make("mixed").inputs[1].flatten()
    assert int((gains == 0.965).sum()) == 51 and int((gains == 0.25).sum()) == 461
    assert not bool((gains[:51] == 0.965).all())


@pytest.mark.parametrize("name", CASES)
def test_the_cell_returns_the_structure_of_its_state(name: str) -> None:
    case = make(name, batch=2)
    with torch.no_grad():
        image = case.cell(case.start, *case.inputs)
    assert [part.shape for part in tensors(image)] == [part.shape for part in tensors(case.start)]
    for other in (case.start, case.cotangent):
        assert pytree.tree_structure(image) == pytree.tree_structure(other)
    assert all(part.dtype == torch.float32 for part in tensors((image, case.start, case.cotangent, case.inputs)))
    assert all(leaf.requires_grad for leaf in case.leaves)


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_reproducible_and_changes_no_global_state(name: str) -> None:
    before = torch.get_rng_state()
    first, second = (everything(make(name, batch=2)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_double_has_the_same_numbers_and_is_a_copy(name: str) -> None:
    case = make(name, batch=2)
    for own, copied in zip(everything(case), everything(case.double()), strict=True):
        assert copied.dtype == torch.float64 and own.dtype == torch.float32
        assert torch.equal(own.double(), copied)


@pytest.mark.parametrize(("name", "width"), [("easy-b48", 96), ("easy-b512", 128)])
def test_an_easy_case_is_an_orthogonal_matrix_with_inputs_of_size_one(name: str, width: int) -> None:
    w = weight(name)
    torch.testing.assert_close(w @ w.T, 0.81 * torch.eye(width, dtype=torch.float64), rtol=0, atol=1e-5)
    assert float(make(name).inputs[0].detach().std()) == pytest.approx(1.0, abs=0.05)


def test_the_graph_is_sparse_and_its_norm_is_at_most_one() -> None:
    adjacency = make("graph", batch=1).cell.adjacency
    assert isinstance(adjacency, Tensor) and adjacency.is_sparse
    dense = adjacency.to_dense().double()
    assert float((dense != 0).double().mean()) < 0.02
    assert float(torch.linalg.matrix_norm(dense, 2)) <= 1 + ROUNDED


def test_trained_cases_are_causal() -> None:
    case = make("trained-0", batch=2)
    (u,), cell = case.inputs, case.cell
    z = torch.randn(tensors(case.start)[0].shape, generator=torch.Generator().manual_seed(1))
    later = z.clone()
    later[:, -1] += 1
    with torch.no_grad():
        assert torch.equal(cell(z, u)[:, :-1], cell(later, u)[:, :-1])


def test_cases_have_their_usual_batch_sizes() -> None:
    batches = {name: make(name).batch for name in CASES}
    assert batches["mlp-b32"] == 32 and batches["mlp-b512"] == batches["mixed"] == 512
    assert batches["conv"] == 32 and batches["mdeq2"] == batches["transformer"] == 16


def test_an_unknown_case_raises_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"no case 'mlp'. Choose one of mlp-b32, "):
        make("mlp")


def everything(case: Case) -> list[Tensor]:
    return [part.detach() for part in tensors((case.leaves, case.start, case.cotangent))]


def tensors(tree: object) -> list[Tensor]:
    return pytree.tree_leaves(tree)
