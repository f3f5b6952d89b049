"""Models of the zoo are served or rejected with a reason; texts of different lengths share a solve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.serving import Engine, InvalidRequestError, Padding, UnservableModelError
from tests.serving.nets import alone

SERVED = {
    "skip-mlp-vanilla": (1, 28, 28),
    "skip-mlp-skip": (1, 28, 28),
    "skip-mlp-v2": (1, 28, 28),
    "mon-mlp-mnist": (1, 28, 28),
    "mon-tiers-mnist": (1, 28, 28),
    "jfb-resnet-mnist": (1, 28, 28),
    "mdeq-nano": (3, 32, 32),
    "deq-trellisnet-nano": (9,),
    "deq-transformer-nano": (9,),
}
REFUSED = {
    "resnet-56": "no equilibrium layer",
    "gru-copy": "no equilibrium layer",
    "skip-polynomial-v2": "Picard, Anderson and Broyden",
}


def samples(shape: tuple[int, ...], count: int, lengths: tuple[int, ...] = ()) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    if len(shape) > 1 or shape == (1,):
        return [torch.rand(shape, generator=generator) for _ in range(count)]
    return [torch.randint(1, 9, (n,), generator=generator) for n in (lengths or shape * count)]


def scores(output: Any) -> Any:
    return output[0]


@pytest.mark.parametrize("model_name", SERVED)
def test_a_model_of_the_zoo_gives_its_own_answers(model_name: str) -> None:
    torch.manual_seed(0)
    model, shape = eq.models.create(model_name).eval(), SERVED[model_name]
    language = len(shape) == 1
    engine = Engine(model, rows=2, output=scores if language else None)
    inputs = samples(shape, 3)
    tickets = [engine.submit(x) for x in inputs]
    engine.run()
    for x, ticket in zip(inputs, tickets, strict=True):
        output, stats = alone(model, x)
        answer = ticket.result(0)
        assert (answer.status, answer.steps) == (int(stats.status[0]), int(stats.steps[0]))
        expected = output[0][0] if language else output[0]
        # float32: kernels for other batch sizes add in another order, and steps amplify it
        torch.testing.assert_close(answer.output, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("model_name", REFUSED)
def test_other_models_of_the_zoo_are_rejected_with_a_reason(model_name: str) -> None:
    with pytest.raises(UnservableModelError, match=REFUSED[model_name]):
        engine = Engine(eq.models.create(model_name), rows=2)
        ticket = engine.submit(torch.ones(1))
        engine.run()
        ticket.result(0)


def test_boards_of_a_reasoner_have_their_own_depths() -> None:
    torch.manual_seed(0)
    stop = eq.Stop(rtol=0.0, atol=0.0, max_steps=8, on_failure="ignore")
    model = eq.models.create("reasoner-trm-nano", stop=stop).double().eval()
    config: Any = model.config
    boards = [torch.randint(config.tokens, (config.positions,)) for _ in range(4)]
    engine = Engine(model, rows=2)
    tickets = [engine.submit(board, max_steps=depth) for board, depth in zip(boards, (2, 8, 3, 5), strict=True)]
    engine.run()
    for board, depth, ticket in zip(boards, (2, 8, 3, 5), tickets, strict=True):
        output, _ = alone(model, board, max_steps=depth)
        assert ticket.result(0).steps == depth
        torch.testing.assert_close(ticket.result(0).output, output[0], rtol=1e-8, atol=1e-8)


def test_noise_drawn_per_batch_is_rejected() -> None:
    engine = Engine(eq.models.create("reasoner-nano", stop=eq.Stop()), rows=2)
    ticket = engine.submit(torch.ones(81, dtype=torch.int64))
    engine.run()
    with pytest.raises((UnservableModelError, InvalidRequestError)):
        ticket.result(0)


def transformer(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    # an untrained transformer does not contract: after 40 steps rounding has grown to 1e-7, after 12 it is far below
    stop = eq.Stop(rtol=2e-2, atol=1e-10, max_steps=12, on_failure="ignore")
    return eq.models.create("deq-transformer-nano", tokens=12, stop=stop, **options).double().eval()


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=lambda s: type(s).__name__)
def test_texts_of_different_lengths_get_the_answers_of_separate_solves(solver: Any) -> None:
    model = transformer(solver=solver)
    engine = Engine(model, rows=4, padding=Padding(multiple=8), output=scores)
    inputs = samples((9,), 7, (3, 8, 5, 1, 9, 12, 7))
    tickets = []
    for x in inputs:
        tickets.append(engine.submit(x))
        engine.step()
    engine.run()
    assert len(engine.pools) == 2  # of 8 and of 16 positions
    for x, ticket in zip(inputs, tickets, strict=True):
        (expected, _), stats = alone(model, x)
        answer = ticket.result(0)
        assert (answer.status, answer.steps) == (int(stats.status[0]), int(stats.steps[0]))
        torch.testing.assert_close(answer.output, expected[0], rtol=1e-9, atol=1e-9)


def test_padding_needs_a_causal_model() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(12, 4)
            self.layer = eq.DEQ(lambda z, x: torch.tanh(0.5 * z.mean(dim=1, keepdim=True) + x))

        def forward(self, tokens: Tensor) -> Any:
            return self.layer(self.embedding(tokens))

    engine = Engine(Mean(), rows=2, padding=Padding(multiple=8))
    ticket = engine.submit(torch.tensor([1, 2, 3]))
    engine.run()
    with pytest.raises(UnservableModelError, match="no position depends on a later one"):
        ticket.result(0)


def test_an_invalid_token_fails_only_its_request() -> None:
    engine = Engine(transformer(), rows=4, output=scores)
    good, bad = engine.submit(torch.tensor([1, 2, 3])), engine.submit(torch.tensor([1, 99, 3]))
    engine.run()
    assert good.result(0).output.shape == (3, 12)
    with pytest.raises(InvalidRequestError, match="Tokens go from 0 to 11"):
        bad.result(0)
