"""The examples run."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.recorded  # they run as they are published


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
        ("parallel_sampling.py", ["--training", "20", "--steps", "10", "--iterations", "2"], "sequential chain: 10 rounds"),
        ("fit_image.py", ["--steps", "5", "--size", "16"], "equilibrium, 1,921 weights"),
        ("deblurring.py", ["--steps", "2"], "equilibrium: PSNR in dB after 1"),
        ("bratu.py", [], "true 2.000"),
    ],
)
def test_the_example_runs(
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


@pytest.mark.parametrize("name", ["parallel_sampling.py", "fit_image.py", "deblurring.py", "bratu.py"])
def test_examples_of_applications_are_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 100


def test_the_bratu_problem_and_its_derivatives_are_those_of_scipy() -> None:
    """Solution, gradient and Hessian of the misfit against scipy's solver and its central differences."""
    pytest.importorskip("scipy")
    pytest.importorskip("matplotlib")
    found = runpy.run_path(str(EXAMPLES / "bratu.py"))
    theta = torch.tensor([2.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(found["temperature"](theta), found["reference"](theta), rtol=0, atol=1e-9)
    data, scale = found["reference"](found["TRUTH"]), 2 * found["NOISE"] ** 2

    def misfit(theta: Tensor) -> float:
        return float((found["reference"](theta) - data).square().sum() / scale)

    step = torch.eye(2, dtype=torch.float64) * 1e-3
    slope = [(misfit(theta + e) - misfit(theta - e)) / 2e-3 for e in step]
    torch.testing.assert_close(
        torch.func.grad(found["misfit"])(theta, data), torch.tensor(slope).double(), rtol=1e-4, atol=0
    )
    gradients = [torch.func.grad(found["misfit"])(theta + e, data) for e in (*step, *-step)]
    curvature = torch.stack([(gradients[i] - gradients[i + 2]) / 2e-3 for i in range(2)])
    torch.testing.assert_close(torch.func.hessian(found["misfit"])(theta, data), curvature, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("drop_in_layer.py", "accuracy 9"),
        ("own_experiment.py", "test accuracy"),
        ("multi_tensor_state.py", "3 samples: 3 converged"),
        ("skip_deq.py", "steps of the solver on average"),
        ("phantom_gradient.py", "implicit: cosine 1.0000"),
        ("continuous_deq.py", "steps rejected"),
        ("second_derivatives.py", "forward mode"),
        ("graph_layer.py", "implicit graph network: 100.0%"),
        ("in_a_transformer.py", "2 samples: 2 converged"),
    ],
)
def test_the_short_example_runs(
    name: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(name, [], monkeypatch)
    assert printed in capsys.readouterr().out


def test_a_reasoner_is_trained_on_sudoku(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("sudoku.py", ["--steps", "100"], monkeypatch)
    told = capsys.readouterr().out
    assert "step 100: loss" in told and "starts on average" in told
    assert len((EXAMPLES / "sudoku.py").read_text().splitlines()) < 80


def test_optical_flow_is_trained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("optical_flow.py", ["--steps", "25", "--pairs", "48"], monkeypatch)
    told = capsys.readouterr().out
    assert "step 25: end-point error" in told and "warm starts: end-point error" in told
    assert len((EXAMPLES / "optical_flow.py").read_text().splitlines()) < 100


@pytest.mark.slow
def test_the_pictures_of_flow_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning_fabric")
    from equilibria.lab.experiments import experiment
    from equilibria.lab.training import Silent, Trainer

    e = experiment("flow-scenes-deq", "debug").changed(["data.test=4"])
    Trainer(e.task(), e.training, tmp_path / "run", config=e.config(), accelerator="cpu", listener=Silent()).fit()
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(sys, "argv", ["flow_pictures.py", str(tmp_path / "run"), "--folder", str(tmp_path / "images")])
    runpy.run_path(str(EXAMPLES.parent / "docs" / "flow_pictures.py"), run_name="__main__")
    assert (tmp_path / "images" / "flow-fields.png").stat().st_size > 5_000


@pytest.mark.slow
def test_the_pictures_of_reasoners_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning_fabric")
    from equilibria.lab.experiments import experiment
    from equilibria.lab.training import Silent, Trainer

    e = experiment("reasoner-sudoku-4x4-eqr", "debug")
    Trainer(e.task(), e.training, tmp_path / "run", config=e.config(), accelerator="cpu", listener=Silent()).fit()
    monkeypatch.setenv("MPLBACKEND", "agg")
    arguments = [str(tmp_path / "run"), "--folder", str(tmp_path / "images"), "--depths", "1", "2", "4"]
    monkeypatch.setattr(sys, "argv", ["reasoner_pictures.py", *arguments])
    runpy.run_path(str(EXAMPLES.parent / "docs" / "reasoner_pictures.py"), run_name="__main__")
    names = {path.name for path in (tmp_path / "images").iterdir()}
    assert names == {"reasoner-scaling.png", "reasoner-residual.png", "reasoner-filling.gif"}


def test_the_corrected_model_has_no_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("diagnose_model.py", [], monkeypatch)
    told = capsys.readouterr().out
    assert -1 < told.find("not contractive") < told.find("No problem found")


@pytest.mark.parametrize("in_a_tuple", [True, False])
def test_a_deq_returns_the_structure_of_the_block_it_replaces(in_a_tuple: bool) -> None:
    """Blocks of Hugging Face's older encoders answer with a tuple, all of them are given masks."""

    class Block(nn.Linear):
        def forward(self, z: Tensor) -> Any:
            return (super().forward(z),) if in_a_tuple else super().forward(z)

    torch.manual_seed(0)
    in_place = runpy.run_path(str(EXAMPLES / "in_a_transformer.py"))["InPlace"](Block(8, 8), 8)
    out = in_place(torch.randn(2, 3, 8), None, encoder_attention_mask=None)
    z = out[0] if in_a_tuple else out
    assert isinstance(out, tuple) == in_a_tuple and z.shape == (2, 3, 8) and z.requires_grad


def test_the_pictures_of_the_docs_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--folder", str(tmp_path)])
    runpy.run_path(str(EXAMPLES.parent / "docs" / "pictures.py"), run_name="__main__")
    assert {path.name for path in tmp_path.iterdir()} == {
        f"concepts-{name}.png" for name in ("residuals", "rows", "spectra")
    }
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())


def test_every_short_example_is_listed() -> None:
    page = (EXAMPLES.parent / "docs" / "index.md").read_text()
    assert all(f"`{path.name}`" in page or f"`examples/{path.name}`" in page for path in EXAMPLES.glob("*.py"))


def test_the_example_of_two_processes_runs() -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, str(EXAMPLES / "two_processes.py")], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "steps of the last solve by process" in done.stdout
