"""Attractor language models: an equilibrium on a backbone of this library or of another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.models import AttractorHead, AttractorModel, CausalBackbone, token_residuals

TOKENS, WIDTH = 11, 16
TIGHT = eq.Stop(rtol=1e-10, atol=0.0, max_steps=300, on_failure="raise")


def text(rows: int = 3, length: int = 7) -> Tensor:
    return torch.randint(TOKENS, (rows, length), generator=torch.Generator().manual_seed(0))


def model(**options: Any) -> AttractorModel:
    torch.manual_seed(0)
    head = AttractorHead(WIDTH, 2, **options)
    return AttractorModel(CausalBackbone(TOKENS, WIDTH, 2, 1), head, tokens=TOKENS, width=WIDTH)


def test_no_token_sees_a_later_one() -> None:
    net, x = model().double().eval(), text()
    scores, _ = net(x)
    changed = x.clone()
    changed[:, -1] = (changed[:, -1] + 1) % TOKENS
    # to the tolerance alone: a later token changes the residual of its row, and so when and how the row is stopped
    net.head.layer.stop = TIGHT  # type: ignore[union-attr]
    net.head.layer.solver = eq.Picard()  # type: ignore[union-attr]
    a, b = net(x)[0], net(changed)[0]
    torch.testing.assert_close(a[:, :-1], b[:, :-1], rtol=1e-7, atol=1e-7)
    assert not torch.allclose(a[:, -1], b[:, -1]) and scores.shape == (3, 7, TOKENS)


def test_a_solve_starts_at_the_output_of_the_backbone() -> None:
    net = model()
    with eq.record(net) as solutions:
        loss, memory = net(text(), None, text())
    s = solutions[0]
    hidden = net.backbone(text())
    torch.testing.assert_close(s.z0, hidden)  # its layers end with the norm that the head begins with
    assert memory == () and loss.dim() == 0 and int(s.stats.steps.max()) <= 8
    loss.backward()
    assert all(w.grad is not None and bool(torch.isfinite(w.grad).all()) for w in net.parameters())


def test_token_residuals_match_their_formula() -> None:
    net = model(solver=eq.Picard(), stop=TIGHT).double()
    with eq.record(net) as solutions:
        net(text())
    assert token_residuals(solutions[0]).shape == (3, 7) and float(token_residuals(solutions[0]).max()) < 1e-8
    few = model(stop=eq.Stop(max_steps=1, on_failure="ignore"))
    with eq.record(few) as solutions:
        few(text())
    s, residual = solutions[0], token_residuals(solutions[0])
    change = (s.f(s.z) - s.z).norm(dim=-1) / s.f(s.z).norm(dim=-1)
    torch.testing.assert_close(residual, change.detach())


class Foreign(nn.Module):
    """A backbone that returns an object like Hugging Face's models."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = CausalBackbone(TOKENS, WIDTH, 2, 1)

    def forward(self, tokens: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=self.inner(tokens))


def test_a_backbone_of_another_library_is_accepted() -> None:
    net = AttractorModel(Foreign(), AttractorHead(WIDTH, 2, gradient=eq.JFB()), tokens=TOKENS, width=WIDTH)
    loss, _ = net(text(), None, text())
    loss.backward()
    flat = nn.Sequential(nn.Embedding(TOKENS, 3), nn.Flatten())
    with pytest.raises(TypeError, match="must return hidden states"):
        AttractorModel(flat, None, tokens=TOKENS, width=3)(text())


def test_a_causal_model_of_hugging_face_is_accepted() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=WIDTH, n_layer=1, n_head=2, vocab_size=TOKENS, n_positions=16)
    net = AttractorModel(transformers.GPT2Model(config), AttractorHead(WIDTH, 2), tokens=TOKENS, width=WIDTH)
    loss, _ = net(text(), None, text())
    loss.backward()
    assert bool(torch.isfinite(loss))


def test_a_model_fits_one_batch() -> None:
    net, x = model(gradient=eq.JFB()), text(4, 8)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(60):
        loss, _ = net(x, None, x.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 1.0
