"""Kill training with SIGKILL and resume it: python -m tests.lab.training.killing FOLDER MOMENTS CHAIN.

For each of MOMENTS a separate run is killed once; then one run is killed CHAIN times. Each must end like a run that was
never killed. Processes are forked from this one, which never computes anything itself, so that each starts at once.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from equilibria.lab.training import Optimizer, Trainer, Training
from tests.lab.training.tasks import Classifying, Noted, timeless, weights

TRAINING = Training(epochs=5, batch_size=4, optimizer=Optimizer(lr=0.02), ema=0.9, checkpoint_minutes=0.001)


def start(folder: Path) -> int:
    """Start and return the training process."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        Trainer(Classifying(), TRAINING, folder, accelerator="cpu", listener=Noted()).fit()
        code = 0
    finally:
        os._exit(code)


def finish(folder: Path) -> float:
    begin = time.monotonic()
    _, status = os.waitpid(start(folder), 0)
    assert status == 0, f"training in {folder} failed"
    return time.monotonic() - begin


def kill_after(folder: Path, seconds: float) -> bool:
    """Kill the process after a delay; returns True if it was still running."""
    process = start(folder)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return os.WIFSIGNALED(status)


def kill_before_its_end(folder: Path, seconds: float) -> None:
    """Kill the run at a random moment before its end; start again if it ended earlier, since load varies."""
    while not kill_after(folder, random.uniform(0, seconds)):
        shutil.rmtree(folder)
        seconds /= 2


def compare(folder: Path, reference: Path, kills: int) -> dict[str, Any]:
    ours, theirs = weights(folder, Classifying()), weights(reference, Classifying())
    equal = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return {"kills": kills, "weights": equal, "metrics": timeless(folder) == timeless(reference)}


def main(folder: Path, moments: int, chain: int) -> None:
    importlib.import_module("torch.utils.tensorboard")
    random.seed(0)
    seconds = finish(folder / "reference")
    found = []
    for i in range(moments):
        kill_before_its_end(folder / str(i), seconds)
        finish(folder / str(i))
        found.append((folder / str(i), 1))
    if chain:
        kills = sum(kill_after(folder / "chain", random.uniform(0, seconds / 3)) for _ in range(chain))
        finish(folder / "chain")
        found.append((folder / "chain", kills))
    print(json.dumps([compare(path, folder / "reference", kills) for path, kills in found]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
