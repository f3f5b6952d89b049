"""The notebooks run, and are committed with small outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
QUICK = "01-five-minutes"
LIMIT = 400_000  # bytes of a notebook with its pictures
pytestmark = pytest.mark.recorded  # they run as they are published


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == QUICK else pytest.mark.slow) for name in NAMES])
def test_a_notebook_runs(name: str) -> None:
    for library in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(library, reason="needs the extra `dev`")
    if name == "04-hugging-face":
        pytest.importorskip("transformers", reason="needs the extra `integrations`")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / "execute.py"), "--check", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{name}.ipynb" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_committed_with_small_outputs_and_no_traces_of_a_machine(name: str) -> None:
    text = (FOLDER / f"{name}.ipynb").read_text()
    assert len(text) < LIMIT
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs and not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"], "a warning was committed"
    assert "site-packages" not in text and " at 0x" not in text


def test_the_six_notebooks_are_here_and_listed() -> None:
    assert len(NAMES) == 6
    page = (FOLDER.parent / "docs" / "index.md").read_text()
    assert all(f"`{name}.ipynb`" in page for name in NAMES)
