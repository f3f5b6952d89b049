"""The package stays easy to walk through: the counts of benchmarks/layout.py are within their limits.

The limits stand in that script. Nothing here depends on time, on the processor or on other
libraries. Comments per line, private functions used once and the time of the import are printed by the script and not held:
they are aims, not limits.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import equilibria as eq
from equilibria import native

ROOT = Path(__file__).parent.parent


def script() -> ModuleType:
    """The script as a module; `benchmarks` is not a package."""
    spec = importlib.util.spec_from_file_location("layout", ROOT / "benchmarks" / "layout.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["layout"] = module  # NamedTuple looks its module up
    spec.loader.exec_module(module)
    return module


layout = script()


@pytest.mark.skipif(not native.available(), reason=native.reason() or "native")
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_training_step_runs_through_few_functions_and_files(part: str) -> None:
    functions, files, switches = layout.LIMITS[part]
    walk = layout.our_step()[part == "backward"]
    assert len(walk.calls) <= functions, walk.calls
    assert walk.files <= files
    assert walk.switches <= switches


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_training_step_in_torch_runs_through_the_steps_of_the_solver_too(part: str) -> None:
    """Without kernels, solver and record are Python functions: some forty more, in at most six more files."""
    functions, files, switches = layout.LIMITS_IN_TORCH[part]
    with native.disabled():
        walk = layout.our_step()[part == "backward"]
    assert len(walk.calls) <= functions, walk.calls
    assert walk.files <= files
    assert walk.switches <= switches


def test_the_walk_counts_functions_of_the_package_alone() -> None:
    walk = layout.walk(lambda: eq.Stop(rtol=1e-3).reachable(0.1), layout.PACKAGE)
    assert {name for _, name, _ in walk.calls} == {"__post_init__", "require", "reachable"}
    assert (walk.files, walk.switches) == (2, 2)


def test_the_root_of_the_package_and_its_public_names_stay_few() -> None:
    assert layout.root_modules() <= layout.ROOT_MODULES
    assert len(eq.__all__) <= layout.PUBLIC_NAMES


def test_the_readme_is_short() -> None:
    assert layout.words(ROOT / "README.md") <= layout.README_WORDS


def test_the_import_loads_no_costly_module() -> None:
    assert layout.loaded() == []
