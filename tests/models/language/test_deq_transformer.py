"""DEQ transformers, their explicit twins, and what all sequence models share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.models.entries import parameters
from equilibria.models.images.explicit_nets import weight_tied
from equilibria.models.language import relative_attention
from equilibria.models.language.adaptive_vocabulary import VocabularyConfig
from equilibria.models.language.deq_transformer import DEQTransformer, TransformerXL
from equilibria.models.language.relative_attention import RelativeAttention, out_of_sight, relative_shift, sinusoids
from equilibria.models.language.sequence import GRUModel, SequenceModel, generate, unrolled_pretraining
from equilibria.models.language.transformer_cell import TransformerCell
from equilibria.models.language.transformer_configs import TRANSFORMER_CONFIGS, TRANSFORMER_XL_CONFIGS, TransformerConfig
from tests.models.learning import check_that_it_fits_one_batch, with_large_weights

TOKENS = 11
SMALL = TransformerConfig(
    summary="for tests",
    width=8,
    heads=2,
    head_width=4,
    inner=12,
    vocabulary=VocabularyConfig(tokens=TOKENS),
    layers=2,
    memory=20,
)
STANDARD = replace(SMALL, norm="pre")  # z + g(z): explicit networks alone get along with it
STYLES = {
    "post": SMALL,
    "pre": replace(SMALL, norm="pre", skip_from_norm=True),
    "two blocks": replace(SMALL, blocks=2, attention_norm=True),
    "short sight": replace(SMALL, reach=3),
    "clusters": replace(SMALL, vocabulary=VocabularyConfig(tokens=TOKENS, cutoffs=(4, 7), divisor=2)),
}
TIGHT = eq.Stop(rtol=1e-11, atol=0.0, max_steps=200, on_failure="raise")
AGREEMENT = 1e-8  # of two ways to an equilibrium at that tolerance, in float64
DRAWN = replace(SMALL, dropout=0.3, attention_dropout=0.3)


def small(config: TransformerConfig = SMALL, **options: Any) -> Any:
    torch.manual_seed(0)
    explicit = "depth" in options
    tight: dict[str, Any] = {} if explicit else {"stop": TIGHT, "gradient": eq.Implicit(stop=TIGHT)}
    return with_large_weights(DEQTransformer(config, **(tight | options)))


def stack(config: TransformerConfig = SMALL, **options: Any) -> Any:
    torch.manual_seed(0)
    return with_large_weights(TransformerXL(config, **options))


def text(batch: int = 2, length: int = 7, seed: int = 1) -> Tensor:
    return torch.randint(0, TOKENS, (batch, length), generator=torch.Generator().manual_seed(seed))


MODELS: dict[str, Callable[[], Any]] = {
    **{f"equilibrium, {name}": partial(small, config) for name, config in STYLES.items()},
    "weight-tied": lambda: small(depth=3),
    "weight-tied, standard pre": lambda: small(STANDARD, depth=3),
    "untied": stack,
    "untied, pre": lambda: stack(replace(SMALL, norm="pre", affine=True, output_bias=False, weight_norm=False)),
    "gru": lambda: with_large_weights(GRUModel(TOKENS, 9)),
}

# sizes


def count(model: Any, config: TransformerConfig) -> tuple[int, int]:
    """Return the number of all parameters, and without the vocabulary."""
    with torch.device("meta"):
        made = model(config)
    return parameters(made), parameters(made) - parameters(made.vocabulary)


DEQS = {
    "medium": (97_851_488, 71_225_100),
    "medium-regularized": (97_851_488, 71_225_100),
    "medium-regularized-pre": (97_851_488, 71_225_100),
    "medium-v1": (93_645_488, 67_019_100),
    "medium-plain": (171_995_975, 43_215_440),
    "small": (138_646_735, 4_511_500),
    "three-blocks": (97_718_288, 71_091_900),
    "nano": (716_880, 66_880),
    "copy": (13_702, 13_132),
}
STACKS = {"base": (151_119_838, 41_079_520), "small": (139_215_235, 4_930_000), "nano": (718_544, 65_472)}
PUBLISHED = {"medium": (98, 71.2), "medium-v1": (93.6, 67.0), "medium-plain": (172, 43.2), "small": (138.6, 4.51)}


@pytest.mark.parametrize("name", TRANSFORMER_CONFIGS)
def test_equilibria_have_the_known_sizes(name: str) -> None:
    total, inside = count(DEQTransformer, TRANSFORMER_CONFIGS[name])
    assert (total, inside) == DEQS[name]
    for number, published in zip((total, inside), PUBLISHED.get(name, ()), strict=False):
        assert number / 1e6 == pytest.approx(published, rel=2e-3)


@pytest.mark.parametrize("name", TRANSFORMER_XL_CONFIGS)
def test_stacks_have_the_known_sizes(name: str) -> None:
    assert count(TransformerXL, TRANSFORMER_XL_CONFIGS[name]) == STACKS[name]


def test_a_block_has_the_size_of_the_formula() -> None:
    config = TRANSFORMER_CONFIGS["nano"]
    d, D, inner = config.width, config.inner, config.heads * config.head_width
    block = 4 * d * inner + 2 * inner + inner * d + d + 2 * d * D + D + d + (3 * inner + inner + d + D + d)
    model = DEQTransformer(config, 50)
    assert (parameters(model.layer), parameters(model.injection)) == (block, 3 * d * d + 3 * d) == (54_400, 12_480)


# attention


def test_positions_are_sinusoids_of_the_distance() -> None:
    P = sinusoids(4, 6, like=torch.zeros(1, dtype=torch.float64))
    assert P.shape == (1, 4, 6)
    for row, distance in enumerate((3, 2, 1, 0)):
        for column in range(3):
            angle = distance * 10000 ** (-2 * column / 6)
            assert float(P[0, row, column]) == pytest.approx(math.sin(angle))
            assert float(P[0, row, 3 + column]) == pytest.approx(math.cos(angle))
    assert sinusoids(4, 7, like=P).shape == (1, 4, 7)


def test_the_shift_puts_distances_where_they_belong() -> None:
    q, m = 4, 3
    k = m + q
    x = torch.arange(k - 1, -1, -1.0).expand(2, q, k)  # every entry is its own distance
    shifted = relative_shift(x)
    for i in range(q):
        for j in range(i + m + 1):
            assert shifted[0, i, j] == i + m - j


def test_positions_in_the_future_and_out_of_reach_are_masked() -> None:
    hidden = out_of_sight(3, 2, 2, torch.device("cpu"))
    assert hidden.shape == (1, 1, 3, 5)
    expected = [[True, False, False, True, True], [True, True, False, False, True], [True, True, True, False, False]]
    assert hidden[0, 0].tolist() == expected
    assert out_of_sight(3, 2, None, torch.device("cpu")).sum() == 3


@pytest.mark.parametrize("reach", [None, 3])
def test_attention_follows_the_formula(reach: int | None) -> None:
    torch.manual_seed(0)
    H, e, q, m, d = 2, 3, 4, 3, 6
    attention = with_large_weights(RelativeAttention(d, H, e))
    z, memory = torch.randn(1, q, d, dtype=torch.float64), torch.randn(1, m, d, dtype=torch.float64)
    u = torch.randn(1, m + q, 3 * H * e, dtype=torch.float64)
    P = sinusoids(m + q, d, like=z)
    around = attention.around(P, out_of_sight(q, m, reach, z.device), memory, u[:, :m])
    out = attention(z, u[:, m:], around)

    qkv = torch.cat([memory, z], 1)[0] @ attention.qkv.weight.mT + u[0]
    r = P[0] @ attention.position.weight.mT
    expected = torch.zeros(q, H * e, dtype=torch.float64)
    for head in range(H):
        part = slice(head * e, (head + 1) * e)
        queries, keys, values = (x[:, part] for x in qkv.split(H * e, dim=1))
        for i in range(q):
            seen = [j for j in range(m + q) if 0 <= i + m - j < (reach or 99)]
            scores = [
                (queries[m + i] + attention.content_bias[head]) @ keys[j]
                + (queries[m + i] + attention.distance_bias[head]) @ r[m + q - 1 - (i + m - j), part]
                for j in seen
            ]
            weights = torch.softmax(torch.stack(scores) / math.sqrt(e), 0)
            expected[i, part] = weights @ values[seen]
    torch.testing.assert_close(out[0], attention.out(expected))


def test_fused_attention_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = small(), text()
    used: list[int] = []
    fused = F.scaled_dot_product_attention

    def counted(query: Tensor, *rest: Any, **named: Any) -> Tensor:
        used.append(len(query))
        return fused(query, *rest, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    with torch.no_grad():
        _, memory = model(tokens)
        plain = model(tokens, memory)[0]
        assert not used  # too small to be worth it
        monkeypatch.setattr(relative_attention, "FUSED_FROM", 1)
        torch.testing.assert_close(model(tokens, memory)[0], plain, rtol=AGREEMENT, atol=AGREEMENT)
        assert used
        used.clear()
        small(replace(SMALL, fused=False))(tokens)
        small(replace(SMALL, attention_dropout=0.1))(tokens)  # a mask is beyond the fused kernel
        assert not used
    loss, _ = model(tokens, memory, tokens)
    grown = torch.autograd.grad(loss, model.injection.weight)[0]
    monkeypatch.setattr(relative_attention, "FUSED_FROM", 10**9)
    loss, _ = model(tokens, memory, tokens)
    torch.testing.assert_close(torch.autograd.grad(loss, model.injection.weight)[0], grown, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("style", ["post", "pre", "two blocks"])
def test_the_cell_passes_gradcheck(style: str) -> None:
    torch.manual_seed(0)
    config = replace(STYLES[style], width=4, heads=2, head_width=2, inner=3)
    cell = with_large_weights(TransformerCell(config))
    u, z = (torch.randn(1, 3, n, dtype=torch.float64, requires_grad=True) for n in (12, 4))
    memory = tuple(torch.randn(1, 2, n, dtype=torch.float64) for n in (12, *[4] * config.blocks))

    def f(z: Tensor, u: Tensor) -> Tensor:
        return cell(z, *cell.prepare(u, memory))

    assert torch.autograd.gradcheck(f, (z, u))
    assert torch.autograd.gradgradcheck(f, (z, u), fast_mode=True)


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


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("weight-tied")])
def test_segments_with_memory_are_one_long_segment(name: str) -> None:
    model, tokens = MODELS[name](), text(length=12)
    with torch.no_grad():
        whole, _ = model(tokens)
        parts, memory = [], None
        for segment in tokens.split([5, 3, 4], dim=1):
            scores, memory = model(segment, memory)
            parts.append(scores)
        alone = model(tokens[:, 8:])[0]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=AGREEMENT, atol=AGREEMENT)
    assert (alone - whole[:, 8:]).abs().max() > 1e-3  # so memory matters


def test_a_deep_twin_reads_segments_as_the_equilibrium_does() -> None:
    twin, tokens = small(depth=150), text(length=12)
    with torch.no_grad():
        whole = twin(tokens)[0]
        first, memory = twin(tokens[:, :5])
        torch.testing.assert_close(torch.cat([first, twin(tokens[:, 5:], memory)[0]], 1), whole, rtol=1e-7, atol=1e-7)


def test_memory_holds_the_last_positions_detached() -> None:
    model, tokens = small(replace(SMALL, memory=6, eval_memory=9, blocks=2)), text(length=5)
    _, memory = model(tokens)
    assert [tuple(part.shape) for part in memory] == [(2, 5, 24), (2, 5, 8), (2, 5, 8)]
    _, later = model(tokens, memory)
    assert [part.shape[1] for part in later] == [6] * 3 and not any(part.requires_grad for part in later)
    for a, b in zip(later, memory, strict=True):
        torch.testing.assert_close(a[:, 0], b[:, -1], rtol=0, atol=0)
    _, longer = model.eval()(tokens, memory)
    assert [part.shape[1] for part in longer] == [9] * 3
    assert small(replace(SMALL, memory=0))(tokens)[1] == ()


def test_positions_beyond_the_memory_length_are_dropped() -> None:
    model, tokens = small(replace(SMALL, memory=2)), text(length=6)
    with torch.no_grad():
        _, memory = model(tokens[:, :4])
        cut = tuple(part[:, -2:] for part in small()(tokens[:, :4])[1])
        torch.testing.assert_close(memory, cut, rtol=0, atol=0)


# equilibria and their twins


@pytest.mark.parametrize("style", STYLES)
def test_the_gradient_is_that_of_the_deep_twin(style: str) -> None:
    model, twin = small(STYLES[style]), small(STYLES[style], depth=300)
    twin.load_state_dict(model.state_dict())
    tokens = text()
    with eq.record(model) as solutions:
        loss, memory = model(tokens, None, text(seed=2))
        later, _ = model(tokens, memory, text(seed=3))
    assert all(s.stats.converged.all() for s in solutions)
    (loss + later).backward()
    a, kept = twin(tokens, None, text(seed=2))
    b, _ = twin(tokens, memory, text(seed=3))
    torch.testing.assert_close(a + b, loss + later, rtol=AGREEMENT, atol=AGREEMENT)
    torch.testing.assert_close(kept, memory, rtol=1e-7, atol=1e-7)
    (a + b).backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert p.grad is not None and p.grad.any(), name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-9)


def test_standard_norms_in_front_leave_an_equilibrium_no_scale() -> None:
    cell = with_large_weights(TransformerCell(STANDARD))
    torch.manual_seed(0)
    u, z = (torch.randn(2, 5, n, dtype=torch.float64) for n in (24, 8))
    around = cell.prepare(u, ())
    far, near = (cell(scale * z, *around) - scale * z for scale in (1e6, 1e5))
    assert far.norm() > 0.1  # f(z) - z does not shrink towards an equilibrium, nor grow away from one
    torch.testing.assert_close(far, near, rtol=1e-3, atol=1e-3)


def test_a_start_at_the_embedding_ends_at_the_same_equilibrium() -> None:
    a, b = small(), small(start="embedding")
    with eq.record(b) as solutions:
        scores = b(text())[0]
    torch.testing.assert_close(scores, a(text())[0], rtol=AGREEMENT, atol=AGREEMENT)
    torch.testing.assert_close(solutions[0].z0, b.vocabulary.embed(text()).detach())


def test_a_start_at_the_mean_of_the_memory_ends_at_the_same_equilibrium() -> None:
    a, b = small(), small(start="memory")
    scores, memory = b(text())  # nothing to remember yet: zeros
    torch.testing.assert_close(scores, a(text())[0], rtol=0, atol=0)
    with eq.record(b) as solutions:
        scores = b(text(seed=2), memory)[0]
    torch.testing.assert_close(scores, a(text(seed=2), memory)[0], rtol=AGREEMENT, atol=AGREEMENT)
    mean = memory[1].mean(dim=1, keepdim=True)
    torch.testing.assert_close(solutions[0].z0, mean.expand_as(solutions[0].z0), rtol=0, atol=0)


@pytest.mark.parametrize("checkpoint", ["sqrt", "recursive"])
@pytest.mark.parametrize("build", [lambda **o: small(DRAWN, depth=5, **o), lambda **o: stack(layers=5, **o)])
def test_checkpoints_do_not_change_the_gradient(build: Any, checkpoint: str) -> None:
    gradients = []
    for model in (build(), build(checkpoint=checkpoint)):
        torch.manual_seed(3)
        loss, memory = model(text(), None, text(seed=2))
        model(text(), memory, text(seed=3))[0].add(loss).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_stack_of_one_layer_is_a_block_on_the_embedding() -> None:
    model = stack(layers=1)
    block, x = model.blocks[0], model.vocabulary.embed(text())
    around = block.around(sinusoids(7, 8, like=x), out_of_sight(7, 0, 1000, x.device), None, None)
    torch.testing.assert_close(model(text())[0], model.vocabulary(block(x, None, around)))


def test_pretraining_is_the_weight_tied_network_of_that_depth() -> None:
    model, twin = small(), small(depth=3)
    before = model.layer.gradient
    unrolled_pretraining(nn.ModuleList([model]), depth=3)
    loss, memory = model(text(), None, text(seed=2))
    other, kept = twin(text(), None, text(seed=2))
    torch.testing.assert_close((loss, memory), (other, kept))
    loss.backward()
    other.backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    unrolled_pretraining(model)
    assert model.layer.gradient == eq.Unrolled(depth=SMALL.pretraining_depth)
    unrolled_pretraining(model, on=False)
    assert model.layer.gradient is before
    tied: Any = weight_tied(model, 3)
    torch.testing.assert_close(tied(text())[0], twin(text())[0])


def test_solver_stop_and_gradient_are_passed_on() -> None:
    parts: dict[str, Any] = {"solver": eq.Broyden(), "stop": TIGHT, "gradient": eq.JFB(), "eval_stop": eq.Stop()}
    layer: Any = DEQTransformer(SMALL, **parts).layer
    assert {name: getattr(layer, name) for name in parts} == parts
    default: Any = DEQTransformer(SMALL).layer
    assert (default.stop.max_steps, default.gradient.stop.max_steps) == (SMALL.forward_steps, SMALL.backward_steps)
    assert DEQTransformer(TRANSFORMER_CONFIGS["nano"], 50).vocabulary.config.tokens == 50


@pytest.mark.parametrize("style", ["post", "pre", "two blocks"])
def test_jacobian_regularization_reaches_the_parameters(style: str) -> None:
    model = small(STYLES[style])
    with eq.record(model) as solutions:
        model(text())
    eq.jacobian_penalty(solutions[0]).backward()
    for name, parameter in model.layer.cell.named_parameters():
        if not name.endswith(".bias"):  # J may not depend on what is added
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all() and parameter.grad.any(), name


def test_masks_are_fixed_within_a_solve() -> None:
    model = small(DRAWN, stop=replace(TIGHT, compact=False))
    block = model.layer.cell.blocks[0]
    masks: dict[str, list[Tensor]] = {"attention": [], "inner": []}
    block.attention.dropout.register_forward_hook(lambda module, *_: masks["attention"].append(module.mask))
    block.inner_dropout.register_forward_hook(lambda module, *_: masks["inner"].append(module.mask))
    _, memory = model(text())
    for found in masks.values():
        found = [mask for mask in found if len(mask) == 2]  # one row is evaluated without the other
        assert len(found) > 3 and all(torch.equal(mask, found[0]) for mask in found)
    assert masks["attention"][0].shape == (2, 2, 7, 7) and masks["inner"][0].shape == (2, 1, 12)
    assert not torch.equal(model(text())[0], model(text())[0])
    model(text(), memory, text())[0].backward()
    model.eval()
    assert torch.equal(model(text())[0], model(text())[0])


@pytest.mark.parametrize("style", ["two blocks", "clusters"])
def test_states_and_losses_keep_their_precision_under_autocast(style: str) -> None:
    torch.manual_seed(0)
    model = DEQTransformer(STYLES[style])
    with torch.autocast("cpu", torch.bfloat16):
        loss, memory = model(text(), None, text(seed=2))
    loss.backward()
    assert loss.dtype == torch.float32 and all(part.dtype == torch.float32 for part in memory)
    model(text(), memory, text())[0].backward()  # what was remembered serves outside of it too


# learning


@pytest.mark.parametrize("name", ["post", "pre", "clusters", "weight-tied", "standard pre", "untied", "gru"])
def test_a_model_fits_one_batch_and_round_trips(name: str) -> None:
    def build() -> SequenceModel:
        if name == "gru":
            return GRUModel(TOKENS, 16)
        wide = {"width": 16, "head_width": 8, "inner": 32}
        if name == "untied":
            return TransformerXL(replace(SMALL, **wide))  # type: ignore[arg-type]
        style = {"weight-tied": SMALL, "standard pre": STANDARD, **STYLES}[name]
        config = replace(style, **wide, forward_steps=10, backward_steps=10)  # type: ignore[arg-type]
        return DEQTransformer(config, depth=None if name in STYLES else 3)

    check_that_it_fits_one_batch(build, torch.arange(10).view(2, 5))


# generating


@pytest.mark.parametrize("name", ["equilibrium, post", "weight-tied", "untied", "gru"])
def test_text_is_drawn_the_same_under_one_generator(name: str) -> None:
    model, prompt = MODELS[name](), text(2, 3)
    model.train()
    a, b, c = (generate(model, prompt, 5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert a.shape == (2, 8) and torch.equal(a[:, :3], prompt) and torch.equal(a, b) and not torch.equal(a, c)
    assert model.training
    greedy = generate(model, prompt, 5, temperature=0)
    assert torch.equal(greedy, generate(model, prompt, 5, top_k=1))
    if name != "weight-tied":  # whose memory is another
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(greedy[:, :-1])[0].argmax(-1)[:, 2:], greedy[:, 3:])


def test_text_at_a_lower_temperature_is_more_probable() -> None:
    model = with_large_weights(GRUModel(TOKENS, 9))
    prompt = torch.zeros(500, 1, dtype=torch.int64)
    scores = torch.log_softmax(model(prompt)[0][0, 0], -1)
    means = []
    for temperature in (0.3, 1.0, 3.0):
        drawn = generate(model, prompt, 1, temperature, generator=torch.Generator().manual_seed(0))[:, 1]
        means.append(float(scores[drawn].mean().detach()))
    assert means == sorted(means, reverse=True)
    top = set(scores.topk(3).indices.tolist())
    assert set(generate(model, prompt, 1, top_k=3)[:, 1].tolist()) == top


# errors


def test_invalid_input_is_named() -> None:
    model = small()
    with pytest.raises(ValueError, match=r"\(batch, time\), with at least one of each, got \(7,\)"):
        model(text()[0])
    _, memory = model(text())
    with pytest.raises(ValueError, match=r"The memory has 2 rows and the tokens have 3"):
        model(text(3), memory)
    with pytest.raises(ValueError, match="The memory of this model has 2 tensors, got 1"):
        model(text(), memory[:1])
    with pytest.raises(ValueError, match="from 0 to 10 in this vocabulary, got 11 to 11"):
        model(torch.full((1, 2), 11))
    wrong: list[dict[str, Any]] = [{"temperature": -1.0}, {"top_k": 0}, {"count": -1}]
    for options in wrong:
        with pytest.raises(ValueError, match=next(iter(options))):
            generate(model, text(), **({"count": 1} | options))


def test_invalid_settings_are_named() -> None:
    with pytest.raises(ValueError, match='norm must be "post" or "pre", got \'both\''):
        replace(SMALL, norm="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="skip_from_norm needs norm"):
        replace(SMALL, skip_from_norm=True)
    with pytest.raises(ValueError, match="heads must be at least 1, got 0"):
        replace(SMALL, heads=0)
    with pytest.raises(ValueError, match="reach must be at least 1"):
        replace(SMALL, reach=0)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        replace(SMALL, memory=-1)
    with pytest.raises(ValueError, match="start must be one of zero, embedding, memory, got 'warm'"):
        DEQTransformer(SMALL, start="warm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="checkpoint is for explicit networks"):
        DEQTransformer(SMALL, checkpoint="sqrt")
    with pytest.raises(ValueError, match="layers must be at least 1"):
        TransformerXL(SMALL, layers=0)
    with pytest.raises(ValueError, match="but this Linear contains none"):
        unrolled_pretraining(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="this DEQTransformer is an explicit network"):
        unrolled_pretraining(small(depth=2))


def test_three_blocks_are_trained_by_tracked_steps() -> None:
    """Pre-norm blocks with plain sums have no equilibrium, but twelve damped steps have a gradient."""
    torch.manual_seed(0)
    config = replace(
        TRANSFORMER_CONFIGS["three-blocks"], width=8, heads=2, head_width=4, inner=16, memory=4, vocabulary=SMALL.vocabulary
    )
    model = DEQTransformer(config).double()
    tokens = text()
    with eq.record(model) as solutions:
        loss = model(tokens, None, tokens)[0]
    loss.backward()
    assert model.gradient == eq.UnrolledPhantom(steps=12, damping=0.8, checkpoint=True)
    assert solutions[0].stats.evaluations >= 12 and int(solutions[0].stats.steps.max()) == 0
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())
