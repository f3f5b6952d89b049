"""Properties that hold for every size, seed, contraction, batch and solver."""

from __future__ import annotations

import os
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equilibria as eq
from equilibria._core.loop import solve
from equilibria._core.packing import Layout
from equilibria.solvers.fallback import AnySolver
from tests.problems import LINEAR_SOLVERS, NONLINEAR_SOLVERS, TanhCell, affine, inputs, unrolled

EXAMPLES = int(os.environ.get("EQUILIBRIA_EXAMPLES", "25"))
settings.register_profile("equilibria", derandomize=True, deadline=None, max_examples=EXAMPLES)
settings.load_profile("equilibria")

seeds = st.integers(0, 10_000)
sizes = st.integers(1, 24)
batches = st.integers(1, 6)
contractions = st.floats(0.05, 0.9)
kinds = st.sampled_from(["symmetric", "orthogonal"])
nonlinear: st.SearchStrategy[AnySolver] = st.sampled_from(NONLINEAR_SOLVERS)
every: st.SearchStrategy[AnySolver] = st.sampled_from([*NONLINEAR_SOLVERS, *LINEAR_SOLVERS])


@given(every, kinds, sizes, batches, contractions, seeds)
def test_contractions_are_solved(solver: AnySolver, kind: str, n: int, batch: int, norm: float, seed: int) -> None:
    problem = affine(kind, n, norm, batch, seed)
    flat = solve(problem.f, problem.z0, solver, eq.Stop(rtol=1e-12, atol=0, max_steps=600))
    assert bool(flat.stats.converged.all())
    error = (flat.z - problem.exact).norm(dim=1) / problem.exact.norm(dim=1)
    assert float(error.max()) <= 1e-12 * (1 + norm) / (1 - norm) * 10


@given(nonlinear, sizes, contractions, seeds, st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_a_sample_gives_the_same_in_any_batch(solver: AnySolver, n: int, norm: float, seed: int, rows: list[int]) -> None:
    cell, x = TanhCell(n, norm=norm, seed=seed), inputs(6, n, seed=seed + 1)
    stop = eq.Stop(rtol=1e-7, atol=0, max_steps=600, on_failure="raise")
    deq = eq.DEQ(cell, solver=solver, stop=stop)
    with torch.no_grad():
        company = deq.solve(x[rows])
        for place, row in enumerate(rows):
            alone = deq.solve(x[row : row + 1])
            torch.testing.assert_close(company.z[place], alone.z[0], rtol=1e-10, atol=1e-12)
            assert company.stats.steps[place] == alone.stats.steps[0]


@given(nonlinear, sizes, batches, st.floats(0.1, 3.0), seeds, st.integers(0, 30))
def test_what_is_reported_is_what_is_returned(
    solver: AnySolver, n: int, batch: int, norm: float, seed: int, most: int
) -> None:
    """Residual, status and counts are right for all gains, also where nothing converges."""
    cell, x = TanhCell(n, norm=norm, seed=seed), inputs(batch, n, seed=seed + 1)
    stop = eq.Stop(rtol=1e-6, atol=1e-9, max_steps=most, on_failure="ignore", trace=True)
    with torch.no_grad():
        s = eq.DEQ(cell, solver=solver, stop=stop).solve(x)
        fz = cell(s.z, x)
    length, size = (fz - s.z).norm(dim=1), fz.norm(dim=1)
    torch.testing.assert_close(s.stats.residual, length / size, rtol=1e-6, atol=1e-14)
    # rounding may tip a sample that lies on the line
    within = length <= (1 + 1e-9) * (stop.atol * n**0.5 + stop.rtol * size)
    assert bool((s.stats.converged <= within).all())
    assert s.stats.trace is not None
    for i, trace in enumerate(s.stats.trace):
        assert len(trace) == int(s.stats.steps[i]) + 1
        assert float(s.stats.residual[i]) <= float(trace.min()) * (1 + 1e-6) + 1e-12 or bool(s.stats.converged[i])


@given(sizes, batches, contractions, seeds)
def test_implicit_gradients_equal_unrolled_ones(n: int, batch: int, norm: float, seed: int) -> None:
    cell, x = TanhCell(n, norm=norm, seed=seed), inputs(batch, n, seed=seed + 1).requires_grad_()
    z = eq.DEQ(cell, stop=eq.Stop(rtol=1e-13, atol=1e-15, max_steps=900, on_failure="ignore"))(x)
    ours = torch.autograd.grad(z.square().sum(), [x, *cell.parameters()])
    reference = unrolled(cell, torch.zeros_like(x), x, steps=350).square().sum()
    for a, b in zip(ours, torch.autograd.grad(reference, [x, *cell.parameters()]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
trees: st.SearchStrategy[Any] = st.recursive(
    shapes,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
        st.tuples(st.just("pair"), inner, inner),
    ),
    max_leaves=5,
)


def build(tree: Any, batch: int) -> Any:
    if isinstance(tree, dict):
        return {key: build(value, batch) for key, value in tree.items()}
    if isinstance(tree, list):
        return [build(value, batch) for value in tree]
    if tree and tree[0] == "pair":
        return (build(tree[1], batch), build(tree[2], batch))
    return torch.randn(batch, *tree, dtype=torch.float64)


@given(trees, batches)
def test_packing_is_lossless(tree: Any, batch: int) -> None:
    state = build(tree, batch)
    layout = Layout.of(state)
    back = layout.unpack(layout.pack(state))
    left, right = torch.utils._pytree.tree_leaves(back), torch.utils._pytree.tree_leaves(state)
    assert torch.utils._pytree.tree_structure(back) == torch.utils._pytree.tree_structure(state)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
