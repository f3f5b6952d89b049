"""Started by torchrun: python -m torch.distributed.run ... -m tests.lab.training.launched STRATEGY FOLDER [STOP_AT]."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.lab.choices import Strategy
from equilibria.lab.training import Optimizer, Trainer, Training
from tests.lab.training.tasks import CLASSES, WIDTH, Classifying, Noted
from tests.problems import TanhCell

# 40 samples in batches of 12: the last batch has 4
TRAINING = Training(epochs=3, batch_size=12, optimizer=Optimizer(lr=0.05), clip_norm=0.5, ema=0.9)
TIGHT = eq.Stop(rtol=1e-12, atol=0.0, max_steps=200, on_failure="ignore")


class Prepared(TanhCell):
    """The same cell, with the product of the input computed once per solve."""

    def prepare(self, x: Tensor) -> Tensor:
        return x @ self.u.T

    def forward(self, z: Tensor, injected: Tensor) -> Tensor:
        return torch.tanh(z @ self.w.T + injected + self.b)


class Shared(Classifying):
    """The task in float64, without dropout and batch statistics, which differ between processes."""

    def __init__(self) -> None:
        super().__init__(TIGHT, torch.float64)

    def model(self) -> nn.Module:
        layer = eq.DEQ(Prepared(WIDTH, norm=0.9), stop=self.stop)
        return nn.Sequential(layer, nn.Linear(WIDTH, CLASSES)).double()


def main(strategy: Strategy, folder: Path, stop_at: int | None = None) -> Noted:
    listener = Noted(stop_at)
    Trainer(Shared(), TRAINING, folder, accelerator="cpu", strategy=strategy, listener=listener).fit()
    return listener


if __name__ == "__main__":
    main(cast(Strategy, sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
