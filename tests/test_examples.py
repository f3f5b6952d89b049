"""The examples run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

DIGITS = Path(__file__).parent.parent / "examples" / "digits.py"


def test_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["digits.py", "--epochs", "2", "--plot", str(tmp_path / "digits.png")])
    runpy.run_path(str(DIGITS), run_name="__main__")
    assert (tmp_path / "digits.png").stat().st_size > 10_000
    assert "implicit gradient" in capsys.readouterr().out
