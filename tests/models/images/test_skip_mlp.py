"""Skip DEQs of dense layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria import models
from equilibria.models import SkipMLP, SkipPolynomial, SkipSolver

VARIANTS = ("vanilla", "skip", "v2")
TIGHT = SkipSolver(tolerance=1e-5, adjoint_tolerance=1e-5)


def tamed(model: SkipMLP) -> SkipMLP:
    """Return a model whose cell contracts; at this width the initial weights may not."""
    cell: Any = model.layer.cell
    with torch.no_grad():
        cell.state.weight.mul_(0.5)
    return model


def solved(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, eq.Solution]:
    with eq.record(model) as solutions:
        prediction, z = model(x, with_state=True)
    return prediction, z, solutions[0]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("skip-mlp-vanilla", 134_538),
        ("skip-mlp-skip", 151_050),
        ("skip-mlp-v2", 134_538),
        ("skip-polynomial-vanilla", 60_801),
        ("skip-polynomial-skip", 101_101),
        ("skip-polynomial-v2", 60_801),
    ],
)
def test_parameters_are_those_of_the_paper(name: str, count: int) -> None:
    assert models.info(name).parameters == count
    assert models.parameters(models.create(name)) == count


def test_a_model_keeps_its_options_and_refuses_others() -> None:
    model = models.create("skip-mlp-v2", inputs=64, width=16)
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    with pytest.raises(TypeError, match=r"no option widht\. Did you mean width"):
        models.create("skip-mlp-v2", widht=16)
    with pytest.raises(ValueError, match=r"There is no model 'skip-mlp'\. Did you mean skip-mlp-v2"):
        models.create("skip-mlp")


def test_num_classes_is_another_name_of_classes() -> None:
    with torch.device("meta"):
        a, b = models.create("mdeq-tiny", num_classes=7), models.create("mdeq-cifar-tiny", classes=7)
    assert models.parameters(a) == models.parameters(b) != models.info("mdeq-tiny").parameters
    with pytest.raises(TypeError, match="two names of one option"):
        models.create("mdeq-tiny", num_classes=7, classes=7)
    with pytest.raises(TypeError, match="no option num_classes"):
        models.create("skip-polynomial-v2", num_classes=7)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_output_is_f_of_an_equilibrium_of_the_paper_s_cell(variant: Any) -> None:
    torch.manual_seed(0)
    model = SkipMLP(12, width=16, variant=variant, solver=TIGHT)
    x = torch.rand(5, 12)
    _, z, s = solved(model, x)
    features = model.encoder(x)
    cell: Any = model.layer.cell

    def f(z: Tensor) -> Tensor:
        return torch.relu(cell.state(z)) + torch.relu(cell.input(features))

    assert isinstance(s.z, Tensor) and isinstance(s.z0, Tensor)
    torch.testing.assert_close(z, f(s.z))
    torch.testing.assert_close(z, s.z, rtol=1e-3, atol=1e-3)
    start = {"vanilla": torch.zeros_like(z), "v2": f(torch.zeros_like(z))}.get(variant)
    predictor: Any = model.layer.init
    torch.testing.assert_close(s.z0, predictor(features) if start is None else start)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", ["broyden", "tsit5", "bs3"])
def test_every_solver_trains_every_variant(method: Any, variant: Any, together: bool) -> None:
    torch.manual_seed(0)
    model = tamed(SkipMLP(12, width=16, variant=variant, solver=SkipSolver(method=method, together=together)))
    x, y = torch.rand(8, 12), torch.arange(8)
    prediction, _, s = solved(model, x)
    (F.cross_entropy(prediction, y) + eq.skip_penalty(s) + eq.jacobian_penalty(s)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert s.stats.converged.all()


def test_a_batch_as_one_system_stops_no_later_than_its_slowest_sample() -> None:
    torch.manual_seed(0)
    apart = SkipMLP(12, width=16)
    together = SkipMLP(12, width=16, solver=SkipSolver(together=True))
    together.load_state_dict(apart.state_dict())
    x = torch.rand(32, 12)
    alone, whole = solved(apart, x)[2].stats, solved(together, x)[2].stats
    assert whole.status.shape == (1,)
    assert whole.evaluations <= alone.evaluations


@pytest.mark.parametrize(
    ("solver", "a_step", "fixed"),
    [
        (SkipSolver(), 1, 3),
        (SkipSolver(method="tsit5"), 6, 5),
        (SkipSolver(method="bs3"), 3, 5),
        (SkipSolver(method="tsit5", first_step=0.5), 6, 5),
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluations_are_counted_as_published(variant: Any, solver: SkipSolver, a_step: int, fixed: int) -> None:
    torch.manual_seed(0)
    model = SkipMLP(12, width=16, variant=variant, solver=solver)
    stats = solved(model, torch.rand(1, 12))[2].stats
    assert solver.published_count(stats, variant) == a_step * int(stats.steps.max()) + fixed


def test_weights_begin_as_published() -> None:
    torch.manual_seed(0)
    classifier, regressor = SkipMLP(), SkipPolynomial(variant="skip")
    encoder: Any = classifier.encoder[1]  # type: ignore[index]
    weight = encoder.weight.detach()
    assert weight.abs().max() <= (6 / (784 + 128)) ** 0.5
    assert float(weight.std()) == pytest.approx((2 / (784 + 128)) ** 0.5, rel=0.02)
    weights = torch.cat(
        [p.detach().flatten() for n, p in regressor.named_parameters() if n.endswith("weight") and "head" not in n]
    )
    assert float(weights.std()) == pytest.approx(0.01, rel=0.02)
    assert all(not p.any() for model in (classifier, regressor) for n, p in model.named_parameters() if n.endswith("bias"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_fits_one_batch(variant: Any) -> None:
    """Training stops once the batch is learnt: nothing bounds this cell, and its radius later exceeds 1."""
    torch.manual_seed(0)
    model = tamed(SkipMLP(20, width=32, variant=variant))
    x, y = torch.randn(8, 20), torch.randint(10, (8,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss, steps = torch.tensor(torch.inf), 0
    while loss >= 0.1 and steps < 60:  # 25 steps at most over six seeds of every variant
        loss, steps = F.cross_entropy(model(x), y), steps + 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


def test_the_explicit_twin_shares_its_weights() -> None:
    torch.manual_seed(0)
    model = tamed(SkipMLP(12, width=16, solver=TIGHT))
    twin = SkipMLP(12, width=16, depth=60)
    twin.load_state_dict(model.state_dict())
    x = torch.rand(3, 12)
    torch.testing.assert_close(twin(x), model(x), rtol=1e-3, atol=1e-3)


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="variant must be one of vanilla, skip, v2, got 'v3'"):
        SkipMLP(variant="v3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="method must be one of broyden, tsit5, bs3, got 'newton'"):
        SkipSolver(method="newton")  # type: ignore[arg-type]
