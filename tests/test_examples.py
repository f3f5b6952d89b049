"""The examples run."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("sklearn", "matplotlib"):
        pytest.importorskip(library)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize(
    ("name", "arguments", "printed"),
    [
        ("digits.py", ["--epochs", "2"], "implicit gradient"),
        ("phantom_precision.py", ["--size", "16", "--batch", "4"], "damping 0.5"),
        ("memory.py", ["--width", "16", "--batch", "32"], "last/first"),
        ("stability.py", ["--epochs", "1"], "spectral norm"),
        ("jacobian_regularization.py", ["--epochs", "1", "--runs", "1"], "steps to 1e-3"),
    ],
)
def test_example(
    name: str,
    arguments: list[str],
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(name, [*arguments, "--plot", str(tmp_path / "plot.png")], monkeypatch)
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("drop_in_layer.py", "accuracy 9"),
        ("multi_tensor_state.py", "3 samples: 3 converged"),
        ("skip_deq.py", "Skip DEQ V2"),
        ("phantom_gradient.py", "implicit: cosine 1.0000"),
        ("continuous_deq.py", "steps rejected"),
        ("second_derivatives.py", "forward mode"),
        ("graph_layer.py", "implicit graph network: 100.0%"),
        ("in_a_transformer.py", "2 samples: 2 converged"),
        ("sick_model.py", "not contractive"),
    ],
)
def test_short_example(name: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(name, [], monkeypatch)
    assert printed in capsys.readouterr().out


def test_the_example_of_two_processes() -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, str(EXAMPLES / "two_processes.py")], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "steps of the last solve by process" in done.stdout
