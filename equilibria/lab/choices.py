"""Settings with a few allowed words. This module imports nothing, since the command line lists them in its help."""

from __future__ import annotations

from typing import Literal, get_args

Scale = Literal["debug", "reduced", "full"]  # scale of an experiment: toy data, a small budget, the protocol of the paper
SCALES: tuple[Scale, ...] = get_args(Scale)
Strategy = Literal["auto", "ddp", "fsdp"]  # how a model is distributed over several devices
Cluster = Literal["slurm", "local"]  # where submitit runs jobs
Which = Literal["last", "best", "raw"]  # weights of a run; raw: those of the last epoch, not averaged
