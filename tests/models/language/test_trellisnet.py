"""TrellisNet, explicit and as an equilibrium."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import equilibria as eq
from equilibria.models.entries import parameters
from equilibria.models.images.explicit_nets import weight_tied
from equilibria.models.language.sequence import generate, unrolled_pretraining
from equilibria.models.language.trellis_cell import TRELLIS_CONFIGS, TrellisCell, TrellisConfig, TrellisStack
from equilibria.models.language.trellisnet import TrellisNet, TrellisParts, activation_penalty
from tests.models.learning import check_that_it_fits_one_batch

TOKENS = 9
SMALL = TrellisConfig(summary="for tests", tokens=TOKENS, embedding=4, hidden=3, layers=6)
DROPPED = replace(SMALL, output_dropout=0.2, input_dropout=0.2, hidden_dropout=0.3, word_dropout=0.2, weight_drop=0.4)
TIGHT = eq.Stop(rtol=1e-11, atol=0.0, max_steps=300, on_failure="raise")
AGREEMENT = 1e-8  # of two ways to an equilibrium at that tolerance, in float64


def small(config: TrellisConfig = SMALL, **options: Any) -> Any:
    """Return a model in float64 with large weights."""
    torch.manual_seed(0)
    tight: dict[str, Any] = {} if "depth" in options else {"stop": TIGHT, "gradient": eq.Implicit(stop=TIGHT)}
    return lively(TrellisNet(config, **(tight | options)))


def lively(model: Any) -> Any:
    model = model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "original0" in name or "bias" not in name:
                parameter.mul_(1.0 if "original1" in name else 40.0)
            else:
                parameter.normal_(std=0.3)
    return model


def text(batch: int = 2, length: int = 7, seed: int = 1) -> Tensor:
    return torch.randint(0, TOKENS, (batch, length), generator=torch.Generator().manual_seed(seed))


MODELS: dict[str, Callable[[], Any]] = {
    "equilibrium": small,
    "explicit": partial(small, depth=6),
    "dilated": partial(small, replace(SMALL, dilations=(1, 2)), depth=5),
    "rereading": partial(small, replace(SMALL, carry="tokens", horizon=12)),
    "mixture": partial(small, replace(SMALL, experts=3)),
}

# sizes

KNOWN = {
    "word-ptb": (20_165_600, 24_175_600),
    "wikitext-103": (44_360_448, 181_708_503),
    "deq-word-ptb": (20_182_400, 24_192_400),
    "deq-wikitext-103": (44_368_896, 181_716_951),
    "deq-wikitext-103-script": (40_032_000, 174_167_235),
    "nano": (395_520, 1_045_520),
}


@pytest.mark.parametrize("name", TRELLIS_CONFIGS)
@pytest.mark.parametrize("depth", [None, 2])
def test_networks_have_the_known_sizes(name: str, depth: int | None) -> None:
    with torch.device("meta"):
        model = TrellisNet(TRELLIS_CONFIGS[name], depth=depth)
    assert (parameters(model.layer), parameters(model)) == KNOWN[name]


# the cell


def states(length: int = 5, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    x, h, c = (torch.randn(batch, length, n, dtype=torch.float64, generator=draw) for n in (4, 7, 7))
    return x, h, c


@pytest.mark.parametrize("dilation", [1, 2, 7])
def test_the_layer_follows_the_formula(dilation: int) -> None:
    torch.manual_seed(0)
    cell: Any = lively(TrellisCell(SMALL))
    x, h, c = states()
    h0, c0 = torch.randn(2, 2, 1, 7, dtype=torch.float64)
    out = cell((h, c), cell.injected(x, (), dilation), h0, c0, dilation)
    for t in range(5):
        inside = t >= dilation
        x_before = x[:, t - dilation] if inside else torch.zeros_like(x[:, 0])
        h_before, c_before = (h[:, t - dilation], c[:, t - dilation]) if inside else (h0[:, 0], c0[:, 0])
        injected = torch.cat([x_before, x[:, t]], 1) @ cell.W1.weight.mT
        pre = injected + torch.cat([h_before, h[:, t]], 1) @ cell.W2.weight.mT + cell.W2.bias
        i, o, g, f = pre.split(7, dim=1)
        expected = f.sigmoid() * c_before + i.sigmoid() * g.tanh()
        torch.testing.assert_close(out[1][:, t], expected)
        torch.testing.assert_close(out[0][:, t], o.sigmoid() * expected.tanh())


def test_the_layer_is_a_causal_convolution() -> None:
    torch.manual_seed(0)
    cell: Any = lively(TrellisCell(replace(SMALL, input_bias=True)))
    x, _, _ = states()
    kernel = torch.stack(cell.W1.weight.split(4, dim=1), dim=2)  # (out, in, tap)
    expected = F.conv1d(F.pad(x.mT, (1, 0)), kernel, cell.W1.bias).mT
    torch.testing.assert_close(cell.injected(x, (), 1), expected)


@pytest.mark.parametrize("dilation", [1, 2])
def test_the_cell_passes_gradcheck(dilation: int) -> None:
    torch.manual_seed(0)
    cell: Any = lively(TrellisCell(replace(SMALL, embedding=2, hidden=1)))
    x, h, c = (torch.randn(1, 3, n, dtype=torch.float64, requires_grad=True) for n in (2, 3, 3))
    h0, c0 = torch.randn(2, 1, 1, 3, dtype=torch.float64, requires_grad=True)

    def f(x: Tensor, h: Tensor, c: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = cell((h, c), cell.injected(x, (), dilation), h0, c0, dilation)
        return out

    inputs = (x, h, c, h0.detach().requires_grad_(), c0.detach().requires_grad_())
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs, fast_mode=True)


# reading


@pytest.mark.parametrize("name", MODELS)
def test_no_score_depends_on_a_later_token(name: str) -> None:
    model, tokens = MODELS[name](), text()
    other = tokens.clone()
    other[:, 4:] = (other[:, 4:] + 1) % TOKENS
    with torch.no_grad():
        a, b = model(tokens)[0], model(other)[0]
    torch.testing.assert_close(a[:, :4], b[:, :4], rtol=AGREEMENT, atol=AGREEMENT)
    assert (a[:, 4:] - b[:, 4:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["equilibrium", "mixture", "rereading"])
def test_segments_with_history_are_one_long_sequence(name: str) -> None:
    model, tokens = MODELS[name](), text(length=12)
    with torch.no_grad():
        whole, _ = model(tokens)
        parts, memory = [], None
        for segment in tokens.split([5, 1, 2, 4], dim=1):
            scores, memory = model(segment, memory)
            assert scores.shape[:2] == segment.shape
            parts.append(scores)
        alone = model(tokens[:, 8:])[0]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=AGREEMENT, atol=AGREEMENT)
    assert (alone - whole[:, 8:]).abs().max() > 1e-3


def test_a_deep_network_reads_segments_as_the_equilibrium_does() -> None:
    deep, tokens = small(depth=200), text(length=9)
    with torch.no_grad():
        whole = deep(tokens)[0]
        first, memory = deep(tokens[:, :5])
        second = deep(tokens[:, 5:], memory)[0]
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-7, atol=1e-7)


def test_without_an_input_history_the_first_token_of_a_segment_has_no_neighbour() -> None:
    model, tokens = small(replace(SMALL, input_history=False)), text(length=8)
    with torch.no_grad():
        whole, (_, memory) = model(tokens)[0], model(tokens[:, :4])
        later = model(tokens[:, 4:], memory)[0]
        zeroed = model(tokens[:, 4:], (memory[0], memory[1], 0 * memory[2]))[0]
    assert (later - whole[:, 4:]).abs().max() > 1e-3
    assert torch.equal(later, zeroed)


def test_history_holds_the_last_position_detached() -> None:
    model = small(replace(SMALL, dilations=(1, 3)), depth=4)
    _, memory = model(text(length=2))
    assert [tuple(part.shape) for part in memory] == [(2, 1, 7), (2, 1, 7), (2, 2, 4)]
    _, memory = model(text(length=2), memory)
    assert [tuple(part.shape) for part in memory] == [(2, 1, 7), (2, 1, 7), (2, 3, 4)]
    assert not any(part.requires_grad for part in memory)
    _, memory = small(replace(SMALL, carry="tokens", horizon=5))(text())
    assert torch.equal(memory[0], text()[:, -5:])


# the equilibrium and the explicit network


def test_information_moves_one_position_per_layer() -> None:
    model = small(depth=3)
    x = model.vocabulary.embed(text()).detach().requires_grad_()
    zeros = torch.zeros(2, 7, 7, dtype=torch.float64)
    h, _ = model.layer(x, (), init=(zeros, zeros))
    (gradient,) = torch.autograd.grad(h[:, -1].sum(), x)
    assert (gradient.abs().sum(dim=(0, 2)) > 0).tolist() == [False] * 3 + [True] * 4


@pytest.mark.parametrize("input_bias", [False, True])
def test_the_gradient_is_that_of_the_deep_network(input_bias: bool) -> None:
    config = replace(SMALL, input_bias=input_bias)
    model, deep = small(config), small(config, depth=150)
    deep.load_state_dict(model.state_dict())
    losses = []
    with eq.record(model) as solutions:
        for net in (model, deep):
            loss, memory = net(text(), None, text(seed=2))
            loss = loss + net(text(), memory, text(seed=3))[0]
            loss.backward()
            losses.append(loss)
    assert [tuple(part.shape) for part in solutions[0].z] == [(2, 7, 7)] * 2  # h and c, jointly
    torch.testing.assert_close(losses[0], losses[1], rtol=AGREEMENT, atol=AGREEMENT)
    for (name, p), q in zip(model.named_parameters(), deep.parameters(), strict=True):
        assert p.grad is not None and p.grad.any(), name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-9)


def test_dilations_are_taken_in_turn() -> None:
    model = small(replace(SMALL, dilations=(1, 3)), depth=3)
    cell, x = model.layer.cell, model.vocabulary.embed(text())
    zeros = torch.zeros(2, 7, 7, dtype=torch.float64)
    z = (zeros, zeros)
    for dilation in (1, 3, 1):
        z = cell(z, cell.injected(x, (), dilation), *cell.before(x, ()), dilation)
    torch.testing.assert_close(model.layer(x, (), init=(zeros, zeros)), z)


@pytest.mark.parametrize("checkpoint", ["sqrt", "recursive"])
def test_checkpoints_do_not_change_the_gradient(checkpoint: Any) -> None:
    gradients = []
    for option in (None, checkpoint):
        model = small(replace(DROPPED, auxiliary_every=3, dilations=(1, 2)), depth=7, checkpoint=option)
        torch.manual_seed(3)
        parts, _ = model(text(), None, text(seed=2), with_parts=True)
        (parts.loss + parts.auxiliary).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_auxiliary_losses_are_those_of_shallower_networks() -> None:
    config = replace(SMALL, auxiliary_every=2)
    parts, _ = small(config, depth=5)(text(), None, text(seed=2), with_parts=True)
    alone = [small(config, depth=depth)(text(), None, text(seed=2))[0] for depth in (2, 4, 5)]
    torch.testing.assert_close(parts.loss, alone[2])
    torch.testing.assert_close(parts.auxiliary, alone[0] + alone[1])
    parts, _ = small(config)(text(), None, text(seed=2), with_parts=True)
    assert parts.auxiliary == 0  # an equilibrium has no layers below the last


def test_activations_are_penalized_by_size_and_by_change() -> None:
    output, dropped = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    parts = TrellisParts(torch.zeros(()), torch.zeros(()), output, dropped)
    expected = 2 * dropped.square().mean() + 3 * (output[:, 1:] - output[:, :-1]).square().mean()
    torch.testing.assert_close(activation_penalty(parts, 2, 3), expected)
    short = replace(parts, output=output[:, :1])
    torch.testing.assert_close(activation_penalty(short, 2, 3), 2 * dropped.square().mean())


def test_pretraining_is_the_explicit_network_of_that_depth() -> None:
    model, net = small(), small(depth=4)
    unrolled_pretraining(model, depth=4)
    torch.testing.assert_close(model(text(), None, text(seed=2)), net(text(), None, text(seed=2)))
    unrolled_pretraining(model, on=False)
    assert model.layer.gradient is model.gradient
    tied: Any = weight_tied(model, 4)
    torch.testing.assert_close(tied(text())[0], net(text())[0])
    with pytest.raises(ValueError, match="this TrellisNet is an explicit network"):
        unrolled_pretraining(net)


@pytest.mark.parametrize("depth", [None, 4])
def test_weights_and_masks_are_fixed_from_the_first_layer_to_the_last(depth: int | None) -> None:
    stop = {} if depth else {"stop": replace(TIGHT, compact=False)}
    model = small(DROPPED, **({"depth": depth} if depth else stop))
    seen: list[tuple[Tensor, Tensor]] = []
    cell = model.layer.cell
    cell.dropout.register_forward_hook(lambda module, *_: seen.append((module.mask, cell.W2.weight.detach().clone())))
    model(text())
    seen = [each for each in seen if len(each[0]) == 2]  # one row is evaluated without the other
    assert len(seen) > 3
    assert all(torch.equal(mask, seen[0][0]) and torch.equal(weight, seen[0][1]) for mask, weight in seen)
    assert seen[0][0].shape == (2, 1, 7)
    dropped = seen[0][1] == 0
    assert dropped[:, :7].any() and not dropped[:, 7:].any()  # the half that looks back
    model(text(), None, text(seed=2))[0].backward()
    assert not torch.equal(model(text())[0], model(text())[0])
    model.eval()
    assert torch.equal(model(text())[0], model(text())[0])
    assert parameters(model) == parameters(small())


def test_words_are_dropped_everywhere_at_once() -> None:
    model = small(replace(SMALL, word_dropout=0.5))
    tokens = torch.arange(TOKENS).repeat(2, 2)
    torch.manual_seed(4)
    x = model._embedded(tokens)
    gone = (x == 0).all(dim=-1)
    assert torch.equal(gone[:, :TOKENS], gone[:, TOKENS:]) and torch.equal(gone[0], gone[1])
    assert gone.any() and not gone.all()
    kept = ~gone
    torch.testing.assert_close(x[kept], 2 * model.vocabulary.embed(tokens)[kept])


def test_a_mixture_is_a_sum_of_softmaxes() -> None:
    model = small(replace(SMALL, experts=3))
    mixture, h = model.vocabulary, torch.randn(2, 5, 4, dtype=torch.float64)
    priors = torch.softmax(h @ mixture.priors.weight.mT, -1)
    latents = torch.tanh(mixture.latents(h)).view(2, 5, 3, 4)
    expected = (priors.unsqueeze(-1) * torch.softmax(mixture.vocabulary(latents), -1)).sum(2)
    torch.testing.assert_close(mixture(h).exp(), expected)
    targets = text(2, 5)
    torch.testing.assert_close(mixture(h, targets), -expected.log().gather(2, targets.unsqueeze(2)).mean())


def test_jacobian_regularization_reaches_the_weights() -> None:
    model = small()
    with eq.record(model) as solutions:
        model(text())
    eq.jacobian_penalty(solutions[0]).backward()
    grad = model.layer.cell.W2.parametrizations.weight.original1.grad
    assert grad is not None and torch.isfinite(grad).all() and grad.any()


def test_solver_stop_and_gradient_are_passed_on() -> None:
    parts: dict[str, Any] = {"solver": eq.Anderson(), "stop": TIGHT, "gradient": eq.JFB(), "eval_stop": eq.Stop()}
    layer: Any = TrellisNet(SMALL, **parts).layer
    assert {name: getattr(layer, name) for name in parts} == parts
    default: Any = TrellisNet(SMALL).layer
    assert default.solver == eq.Broyden()
    assert (default.stop.max_steps, default.gradient.stop.max_steps) == (SMALL.forward_steps, SMALL.backward_steps)
    assert isinstance(TrellisNet(SMALL, depth=2).layer, TrellisStack)
    assert TrellisNet(TRELLIS_CONFIGS["nano"], 50).config.tokens == 50


# learning and generating


@pytest.mark.parametrize("name", ["equilibrium", "explicit", "mixture", "rereading"])
def test_a_model_fits_one_batch_and_round_trips(name: str) -> None:
    def build() -> TrellisNet:
        wide = replace(SMALL, embedding=12, hidden=12, forward_steps=10, backward_steps=10)
        if name == "explicit":
            return TrellisNet(wide, depth=5)
        mixed, rereading = replace(wide, experts=2), replace(wide, carry="tokens", horizon=3)
        return TrellisNet({"mixture": mixed, "rereading": rereading}.get(name, wide))

    check_that_it_fits_one_batch(build, torch.arange(8).view(2, 4))


@pytest.mark.parametrize("name", ["equilibrium", "rereading", "explicit"])
def test_text_is_drawn_the_same_under_one_generator(name: str) -> None:
    model, prompt = MODELS[name](), text(2, 3)
    a, b, c = (generate(model, prompt, 5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    greedy = generate(model, prompt, 5, temperature=0)
    if name != "explicit":  # whose history stands for all layers
        with torch.no_grad():
            assert torch.equal(model(greedy[:, :-1])[0].argmax(-1)[:, 2:], greedy[:, 3:])


# errors


def test_invalid_settings_and_inputs_are_named() -> None:
    with pytest.raises(ValueError, match=r"of dilation 1, got dilations=\(1, 2\)"):
        TrellisNet(replace(SMALL, dilations=(1, 2)))
    with pytest.raises(ValueError, match=r"at least 1 each, got \(0,\)"):
        replace(SMALL, dilations=(0,))
    with pytest.raises(ValueError, match='carry must be "state" or "tokens"'):
        replace(SMALL, carry="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="horizon, the number of tokens to read again"):
        replace(SMALL, carry="tokens")
    with pytest.raises(ValueError, match="hidden must be at least 1, got 0"):
        replace(SMALL, hidden=0)
    with pytest.raises(ValueError, match="word_dropout is a share"):
        replace(SMALL, word_dropout=1.0)
    with pytest.raises(ValueError, match="auxiliary_every must be at least 1 layer"):
        replace(SMALL, auxiliary_every=0)
    with pytest.raises(ValueError, match="checkpoint is for explicit networks"):
        TrellisNet(SMALL, checkpoint="sqrt")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        TrellisNet(SMALL, depth=0)
    model = small(depth=2)
    with pytest.raises(ValueError, match="with_parts returns parts of a loss and needs targets"):
        model(text(), with_parts=True)
    with pytest.raises(ValueError, match="The memory of this model has 3 tensors, got 1"):
        model(text(), (text(),))
