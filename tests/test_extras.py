"""What is not installed is named with the extra that brings it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import equilibria as eq


def test_plots_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    solution = eq.DEQ(lambda z, x: torch.cos(z) + x, stop=eq.Stop(trace=True)).solve(torch.zeros(2, 3))
    with pytest.raises(ImportError, match=r"pip install 'equilibria\[train\]'"):
        eq.analysis.plot_trace(solution)
    with pytest.raises(ImportError, match=r"pip install 'equilibria\[train\]'"):
        eq.analysis.plot_steps(solution)


@pytest.mark.parametrize(
    ("module", "absent", "extra"),
    [
        ("equilibria.lab.training", "lightning_fabric", "train"),
        ("equilibria.lab.experiments", "safetensors", "train"),
        ("equilibria.serving.server", "uvicorn", "serve"),
    ],
)
def test_modules_name_their_extra(module: str, absent: str, extra: str) -> None:
    program = f"import sys; sys.modules[{absent!r}] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and f"pip install 'equilibria[{extra}]'" in done.stderr, done.stderr[-500:]
