"""Whether a language model can learn at all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from equilibria.models.language.sequence import SequenceModel


def check_that_it_learns_by_heart(build: Callable[[], SequenceModel], tokens: Tensor, lr: float) -> None:
    """One batch, read backwards; then the weights go to another model, which gives the same bits."""
    torch.manual_seed(0)
    model, targets = build(), tokens.flip(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(60):
        loss, _ = model(tokens, None, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5
    other = build()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.eval()(tokens)[0], model.eval()(tokens)[0], rtol=0, atol=0)
