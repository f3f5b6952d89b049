"""Settings that are one of a few words, in a module that imports nothing: the command line lists them in its help."""

from __future__ import annotations

from typing import Literal, get_args

Scale = Literal["debug", "reduced", "full"]  # of an experiment: toys, a small budget, the protocol of the paper
SCALES: tuple[Scale, ...] = get_args(Scale)
Strategy = Literal["auto", "ddp", "fsdp"]  # of several devices
Cluster = Literal["slurm", "local"]  # where submitit runs jobs
Which = Literal["last", "best", "raw"]  # weights of a run; raw: of the last epoch, never averaged
