"""The examples run."""

from __future__ import annotations

import runpy
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
