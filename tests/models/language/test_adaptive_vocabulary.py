"""Embeddings and softmaxes over clusters of a vocabulary, and the layers that sequence models share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import equilibria as eq
from equilibria.models.entries import parameters
from equilibria.models.language.adaptive_vocabulary import AdaptiveVocabulary, VocabularyConfig
from equilibria.models.language.sequence_layers import WeightDrop, WeightNorm, linear, normalized

TOKENS, WIDTH = 23, 8
PLAIN = VocabularyConfig(tokens=TOKENS)
CLUSTERS = VocabularyConfig(tokens=TOKENS, cutoffs=(5, 9, 17), divisor=2)
ALL = {
    "plain": PLAIN,
    "untied": VocabularyConfig(tokens=TOKENS, tied=False),
    "projected": VocabularyConfig(tokens=TOKENS, width=6),
    "clusters": CLUSTERS,
    "clusters shared": VocabularyConfig(tokens=TOKENS, cutoffs=(5, 9, 17), divisor=2, shared_projections=True),
    "clusters untied": VocabularyConfig(tokens=TOKENS, cutoffs=(5, 9), divisor=2, tied=False),
    "clusters of one width": VocabularyConfig(tokens=TOKENS, cutoffs=(5, 9)),
    "clusters of one other width": VocabularyConfig(tokens=TOKENS, width=6, cutoffs=(5, 9)),
}


def made(config: VocabularyConfig, scale: float = 1.0) -> AdaptiveVocabulary:
    """Return a vocabulary in float64 with large weights."""
    torch.manual_seed(0)
    vocabulary = AdaptiveVocabulary(config, WIDTH, scale=scale).double()
    with torch.no_grad():
        for parameter in vocabulary.parameters():
            parameter.normal_()
    return vocabulary


def states() -> Tensor:
    return torch.randn(3, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ALL)
def test_probabilities_sum_to_one(name: str) -> None:
    scores = made(ALL[name])(states())
    assert scores.shape == (3, 4, TOKENS)
    torch.testing.assert_close(torch.softmax(scores, -1).sum(-1), torch.ones(3, 4, dtype=torch.float64))
    if ALL[name].cutoffs:
        torch.testing.assert_close(scores.exp().sum(-1), torch.ones(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("name", ALL)
def test_losses_are_those_of_the_scores(name: str) -> None:
    vocabulary, h = made(ALL[name]), states()
    for targets in (torch.arange(12).view(3, 4), 11 + torch.arange(12).view(3, 4), torch.zeros(3, 4, dtype=torch.int64)):
        expected = F.cross_entropy(vocabulary(h).flatten(0, 1), targets.flatten(), reduction="none").view(3, 4)
        torch.testing.assert_close(vocabulary.losses(h, targets), expected)
        torch.testing.assert_close(vocabulary(h, targets), expected.mean())
        torch.testing.assert_close(vocabulary(h, targets.int()), expected.mean())


def test_one_cluster_is_the_full_softmax() -> None:
    vocabulary, h = made(PLAIN), states()
    expected = h @ vocabulary.tables[0].mT + vocabulary.biases[0]
    torch.testing.assert_close(vocabulary(h), expected)
    torch.testing.assert_close(vocabulary.embed(torch.tensor([[3, 1]])), vocabulary.tables[0][[3, 1]][None])


def test_clusters_follow_the_formula() -> None:
    v, h = made(CLUSTERS), states()[0, 0]
    assert [tuple(table.shape) for table in v.tables] == [(5, 8), (4, 4), (8, 2), (6, 1)]
    assert v.cluster_weight is not None and v.cluster_bias is not None
    first = h @ v.out_projections[0]
    head = torch.cat([v.tables[0] @ first + v.biases[0], v.cluster_weight @ first + v.cluster_bias]).log_softmax(0)
    tail = (v.tables[2] @ (h @ v.out_projections[2]) + v.biases[2]).log_softmax(0)
    torch.testing.assert_close(v(h)[9:17], head[-2] + tail)  # cluster 2 has the last entry but one
    torch.testing.assert_close(v(h)[:5], head[:5])


@pytest.mark.parametrize("name", ALL)
def test_every_token_has_its_own_vector(name: str) -> None:
    vocabulary = made(ALL[name], scale=3.0)
    tokens = torch.randperm(TOKENS).view(1, TOKENS)
    x = vocabulary.embed(tokens)
    assert x.shape == (1, TOKENS, WIDTH)
    for place, token in enumerate(tokens[0].tolist()):
        torch.testing.assert_close(x[0, place], vocabulary.embed(torch.tensor([[token]]))[0, 0])
    cluster = 1 if ALL[name].cutoffs else 0
    token = ALL[name].cutoffs[0] if cluster else 7
    row = vocabulary.tables[cluster][token - vocabulary.starts[cluster]]
    matrices = list(vocabulary.projections)
    lifted = matrices[min(cluster, len(matrices) - 1)] @ row if matrices else row
    torch.testing.assert_close(vocabulary.embed(torch.tensor([[token]]))[0, 0], 3.0 * lifted)


@pytest.mark.parametrize("name", ALL)
def test_gradients_reach_every_parameter_and_are_right(name: str) -> None:
    vocabulary, h = made(ALL[name]), states()[:1].requires_grad_()
    tokens, targets = torch.tensor([[0, 5, 9, 22]]), torch.tensor([[22, 12, 6, 1]])

    def loss(h: Tensor, *tensors: Tensor) -> Tensor:
        named = dict(zip(names, tensors, strict=True))
        return torch.func.functional_call(Both(vocabulary), named, (tokens, h, targets))

    names = [f"inner.{name}" for name, _ in vocabulary.named_parameters()]
    assert torch.autograd.gradcheck(loss, (h, *vocabulary.parameters()), fast_mode=True)
    Both(vocabulary)(tokens, h, targets).backward()
    assert all(p.grad is not None and p.grad.any() for p in vocabulary.parameters())


class Both(nn.Module):
    """A module with embedding and loss in one forward."""

    def __init__(self, inner: AdaptiveVocabulary) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor, h: Tensor, targets: Tensor) -> Tensor:
        return self.inner(h * self.inner.embed(tokens), targets)


def test_tails_project_back_with_a_copy_of_their_own() -> None:
    vocabulary = AdaptiveVocabulary(CLUSTERS, WIDTH)
    assert not torch.equal(vocabulary.out_projections[0], vocabulary.projections[0])
    for i in (1, 2, 3):
        assert torch.equal(vocabulary.out_projections[i], vocabulary.projections[i])
        assert vocabulary.out_projections[i] is not vocabulary.projections[i]
    shared = AdaptiveVocabulary(ALL["clusters shared"], WIDTH)
    assert parameters(vocabulary) - parameters(shared) == WIDTH * (4 + 2 + 1)


def test_the_adaptive_vocabulary_of_wikitext_has_the_known_size() -> None:
    with torch.device("meta"):
        vocabulary = AdaptiveVocabulary(VocabularyConfig(tokens=267_735, cutoffs=(20_000, 40_000, 200_000), divisor=4), 700)
    assert [table.shape[1] for table in vocabulary.tables] == [700, 175, 43, 10]
    assert parameters(vocabulary) == 26_626_388


@pytest.mark.parametrize("name", ALL)
def test_a_vocabulary_round_trips(name: str) -> None:
    vocabulary, other = made(ALL[name]), AdaptiveVocabulary(ALL[name], WIDTH).double()
    other.load_state_dict(vocabulary.state_dict())
    torch.testing.assert_close(other(states()), vocabulary(states()), rtol=0, atol=0)
    pointers = [tensor.data_ptr() for tensor in vocabulary.state_dict().values()]
    assert len(set(pointers)) == len(pointers)  # what is tied is stored once: file formats refuse shared tensors


def test_invalid_tokens_and_settings_are_named() -> None:
    vocabulary = made(CLUSTERS)
    with pytest.raises(ValueError, match="from 0 to 22 in this vocabulary, got 1 to 23"):
        vocabulary.embed(torch.tensor([[1, 23]]))
    with pytest.raises(TypeError, match=r"int64 or int32, got torch\.float32"):
        vocabulary.embed(torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"one target: got targets of shape \(3,\) for states of \(3, 4, 8\)"):
        vocabulary(states(), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"cutoffs must grow .* 23, got \(9, 5\)"):
        VocabularyConfig(tokens=TOKENS, cutoffs=(9, 5))
    with pytest.raises(ValueError, match=r"got \(5, 40\)"):
        VocabularyConfig(tokens=TOKENS, cutoffs=(5, 40))
    with pytest.raises(ValueError, match="use fewer cutoffs"):
        AdaptiveVocabulary(VocabularyConfig(tokens=TOKENS, cutoffs=(5, 9), divisor=8), WIDTH)


# weight norm and weight drop


def test_weight_norm_is_torch_s_with_the_right_second_derivative() -> None:
    torch.manual_seed(0)
    ours, theirs = normalized(nn.Linear(3, 4)), weight_norm(nn.Linear(3, 4), dim=0)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours.weight, theirs.weight)
    g = torch.rand(4, 1, dtype=torch.float64, requires_grad=True)
    v = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(WeightNorm(), (g, v))
    assert torch.autograd.gradgradcheck(WeightNorm(), (g, v))


def test_weights_begin_small_and_norm_does_not_change_them() -> None:
    torch.manual_seed(0)
    plain = linear(50, 40)
    torch.manual_seed(0)
    normed = linear(50, 40, norm=True)
    torch.testing.assert_close(normed.weight, plain.weight)
    assert float(plain.weight.detach().std()) == pytest.approx(0.01, rel=0.1) and not plain.bias.any()
    assert parameters(normed) == parameters(plain) + 40


def test_weight_drop_leaves_the_other_columns_alone() -> None:
    torch.manual_seed(0)
    weight, drop = torch.ones(30, 8), WeightDrop(0.5, columns=5)
    dropped = drop(weight)
    assert set(dropped[:, :5].unique().tolist()) == {0.0, 2.0} and torch.equal(dropped[:, 5:], weight[:, 5:])
    assert torch.equal(drop.eval()(weight), weight)
    assert not torch.equal(WeightDrop(0.5)(weight)[:, 5:], weight[:, 5:])
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\), got 1"):
        WeightDrop(1)


def test_a_solve_drops_the_same_weights_throughout() -> None:
    torch.manual_seed(0)
    cell: Any = Dropped()
    seen: list[Tensor] = []
    handle = cell.register_forward_pre_hook(lambda module, _: seen.append(module.linear.weight.detach().clone()))
    layer = eq.DEQ(cell, stop=eq.Stop(rtol=1e-5))
    layer(torch.randn(2, 6)).sum().backward()
    handle.remove()
    assert len(seen) > 3 and all(torch.equal(weight, seen[0]) for weight in seen) and (seen[0] == 0).any()
    stored = cell.linear.parametrizations.weight.original
    assert stored.grad is not None and not stored.grad[seen[0] == 0].any()


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        nn.init.orthogonal_(self.linear.weight, gain=0.3)
        nn.utils.parametrize.register_parametrization(self.linear, "weight", WeightDrop(0.4))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(z) + x)
