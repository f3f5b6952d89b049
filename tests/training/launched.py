"""What torchrun starts: python -m torch.distributed.run ... -m tests.training.launched STRATEGY FOLDER [STOP_AT]."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
from torch import nn

import equilibria as eq
from equilibria.training import Optimizer, Trainer, Training
from tests.problems import TanhCell
from tests.training.tasks import CLASSES, WIDTH, Classifying, Noted

# 40 samples in batches of 12: the last batch has 4
TRAINING = Training(epochs=3, batch_size=12, optimizer=Optimizer(lr=0.05), clip_norm=0.5, ema=0.9)
TIGHT = eq.Stop(rtol=1e-12, atol=0.0, max_steps=200, on_failure="ignore")


class Shared(Classifying):
    """In float64, and without what differs between processes: masks and batch statistics."""

    def __init__(self, strategy: str) -> None:
        super().__init__(dataclasses.replace(TIGHT, process_group="world" if strategy == "fsdp" else None), torch.float64)

    def model(self) -> nn.Module:
        layer = eq.DEQ(TanhCell(WIDTH, norm=0.9), stop=self.stop)
        return nn.Sequential(layer, nn.Linear(WIDTH, CLASSES)).double()


def main(strategy: str, folder: Path, stop_at: int | None = None) -> Noted:
    listener = Noted(stop_at)
    Trainer(Shared(strategy), TRAINING, folder, accelerator="cpu", strategy=strategy, listener=listener).fit()
    return listener


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
