"""Conditions under which a solve uses native steps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria import native
from equilibria.native.context import CONTEXT_SIZE, INTERFACE
from tests.native.choice import can_run

ROOT = Path(__file__).parent.parent.parent
needs_kernels = pytest.mark.skipif(not native.available(), reason=native.reason() or "native")


def output_of(code: str, where: Path | None = None, **environment: str) -> str:
    command, variables = [sys.executable, "-c", code], os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=where)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_environment_variable_disables_native_steps() -> None:
    code = "import equilibria as eq; print(eq.native.available(), eq.native.reason())"
    assert output_of(code, EQUILIBRIA_NATIVE="0") == "False EQUILIBRIA_NATIVE=0 turns the compiled kernels off."


def test_a_reason_is_given_if_and_only_if_there_are_no_kernels() -> None:
    assert bool(native.reason()) is not native.available()
    with native.disabled():
        assert not native.available() and native.reason()


def test_a_package_without_kernels_gives_a_reason_and_still_solves(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "equilibria", tmp_path / "equilibria", ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    )
    code = "import torch, equilibria as eq\n"
    code += "print(eq.native.reason()); print(eq.fixed_point(torch.cos, torch.ones(1, 1)).z.item())"
    reason, value = output_of(code, tmp_path, PYTHONPATH=str(tmp_path), EQUILIBRIA_NATIVE="1").splitlines()
    assert reason.startswith("The compiled kernels are not built")
    assert float(value) == pytest.approx(0.739, abs=2e-3)


@needs_kernels
@pytest.mark.parametrize(
    "solver",
    [eq.Newton(), eq.Broyden(line_search=True), eq.BiCGSTAB(), eq.Restart(eq.Anderson(), every=3), eq.SteadyState()],
)
def test_other_solvers_run_in_torch(solver: Any) -> None:
    assert not can_run(torch.zeros(2, 3), solver, eq.Stop())


@needs_kernels
@pytest.mark.parametrize(
    "stop", [eq.Stop(trace=True), eq.Stop(keep_every=2), eq.Stop(check_every=2), eq.Stop(norm=eq.stop.max_norm)]
)
def test_stops_with_traces_or_other_norms_run_in_torch(stop: eq.Stop) -> None:
    assert not can_run(torch.zeros(2, 3), eq.Anderson(), stop)


@needs_kernels
@pytest.mark.parametrize(
    "z0", [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(0, 3), torch.zeros(2, 0), torch.zeros(2, 3, device="meta")]
)
def test_other_states_run_in_torch(z0: Tensor) -> None:
    assert not can_run(z0, eq.Anderson(), eq.Stop())


@needs_kernels
def test_states_tracked_by_autograd_or_transforms_run_in_torch() -> None:
    z0 = torch.zeros(2, 3, requires_grad=True)
    assert not can_run(z0, eq.Anderson(), eq.Stop())
    with torch.no_grad():
        assert can_run(z0, eq.Anderson(), eq.Stop())
    seen = []

    def look(z: Tensor) -> Tensor:
        seen.append(can_run(z, eq.Anderson(), eq.Stop()))
        return z

    torch.func.vmap(look)(torch.zeros(4, 2, 3))
    with torch.autograd.forward_ad.dual_level():
        seen.append(can_run(torch.zeros(2, 3), eq.Anderson(), eq.Stop()))
    assert seen == [False, False]


@needs_kernels
def test_weights_tracked_by_autograd_run_in_torch() -> None:
    w = torch.tensor(0.5, requires_grad=True)
    s = eq.fixed_point(lambda z, w: w * z + 1, torch.zeros(2, 3), w, gradient=eq.Unrolled(), batched=False)
    s.z.sum().backward()
    assert w.grad is not None and float(w.grad) > 0


def build(folder: Path, **environment: str) -> Path:
    """Build the kernels from a copy of the sources and return the folder they were written to."""
    for part in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, folder)
    shutil.copytree(ROOT / "equilibria" / "native", folder / "equilibria" / "native", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(ROOT / "equilibria" / "__init__.py", folder / "equilibria")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "equilibria" / "native"


def test_the_build_succeeds_without_a_compiler(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    assert not list(build(tmp_path, CC="/bin/false", CXX="/bin/false").glob("*.so"))


@pytest.mark.parametrize(
    "stale", [{}, {"interface": INTERFACE - 1}, {"interface": INTERFACE, "context_size": CONTEXT_SIZE + 8}]
)
def test_kernels_of_other_sources_are_refused(stale: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EQUILIBRIA_NATIVE", raising=False)
    built = SimpleNamespace(**({"context_size": CONTEXT_SIZE} | stale))
    monkeypatch.setitem(sys.modules, "equilibria.native._kernels", built)
    kernels, reason = native._load()
    assert kernels is None and "built from other sources; install again" in reason
