"""Two processes under torchrun train like one on the joined batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from equilibria.lab.training import Run
from tests.lab.training.launched import Shared, main
from tests.lab.training.tasks import timeless

TOLERANCE = 1e-10  # float64, solves to 1e-12: what is left is the order of sums


def torchrun(strategy: str, folder: Path, *more: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.lab.training.launched", strategy, str(folder), *map(str, more)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})


def run(strategy: str, folder: Path) -> None:
    done = torchrun(strategy, folder)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    main("auto", folder)
    return folder


def assert_same(folder: Path, alone: Path) -> None:
    ours, theirs = Run.open(folder), Run.open(alone)
    for a, b in zip(ours.metrics, theirs.metrics, strict=True):
        for split in ("train", "valid"):
            for name in ("loss", "accuracy"):
                assert a["split"][split][name] == pytest.approx(b["split"][split][name], rel=TOLERANCE)
    for which in ("raw", "last"):
        first, second = (each.model(Shared(), which).state_dict() for each in (ours, theirs))
        for name in second:
            torch.testing.assert_close(first[name], second[name], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.recorded
def test_data_parallel_processes_have_the_curve_of_one(alone: Path, tmp_path: Path) -> None:
    run("ddp", tmp_path)
    assert_same(tmp_path, alone)


@pytest.mark.slow
def test_sharded_processes_have_the_curve_of_one(alone: Path, tmp_path: Path) -> None:
    run("fsdp", tmp_path)
    assert_same(tmp_path, alone)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_interrupted_processes_resume_together(strategy: str, alone: Path, tmp_path: Path) -> None:
    assert "cut off" in torchrun(strategy, tmp_path / "cut", 6).stderr
    run(strategy, tmp_path / "cut")
    run(strategy, tmp_path / "whole")
    assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")
    assert_same(tmp_path / "cut", alone)


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_processes(alone: Path, tmp_path: Path) -> None:
    assert "cut off" in torchrun("ddp", tmp_path, 6).stderr
    listener = main("auto", tmp_path)
    assert listener.messages[1].startswith("There were 2 processes, now there are 1")
    assert_same(tmp_path, alone)


@pytest.mark.slow
def test_a_language_model_is_trained_in_shards_and_its_penalty_is_refused(tmp_path: Path) -> None:
    """Measurements on copies are left out, and the penalty is refused because it needs a second derivative."""

    def train(name: str) -> subprocess.CompletedProcess[str]:
        words = [
            sys.executable,
            "-m",
            "equilibria",
            "train",
            name,
            "--scale",
            "debug",
            "--devices",
            "2",
            "--strategy",
            "fsdp",
        ]
        return subprocess.run([*words, "--folder", str(tmp_path / name)], capture_output=True, text=True)

    done = train("wikitext-deq-adaptive")
    assert done.returncode == 0, done.stderr
    assert Run.open(tmp_path / "wikitext-deq-adaptive").summary is not None
    refused = train("jr-language-post-jr")
    assert refused.returncode != 0 and "second derivative" in refused.stderr
