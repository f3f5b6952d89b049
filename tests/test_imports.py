"""Who may import whom: the borders between the rooms of the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import equilibria

PACKAGE = Path(equilibria.__file__).parent
# who may not import whom: (importer, imported), by prefix of the dotted name below the package
BORDERS = [
    ("_core", "lab"),
    ("_core", "models"),
    ("_core", "analysis"),
    ("native", "lab"),
    ("native", "gradients"),
    ("solvers", "native"),
    ("solvers", "gradients"),
    ("solvers", "deq"),
    ("gradients", "deq"),
    ("cells", "lab"),
    ("cells", "models"),
    ("analysis", "lab"),
    ("models", "lab"),
    ("serving", "lab"),
    ("integrations", "lab"),
    ("serving", "analysis"),
    ("lab.data", "lab.training"),
    ("lab.data", "lab.experiments"),
    ("lab.training", "lab.experiments"),
    ("lab.training", "lab.reports"),
    ("lab.experiments", "lab.reports"),
    ("lab.experiments", "lab.cli"),
    ("lab.reports", "lab.cli"),
    ("lab.bench", "lab.experiments"),
]
ROOT = {
    "deq",
    "solution",
    "starts",
    "stop",
    "remember",
    "explicit",
    "monitoring",
    "penalties",
    "constraints",
    "nn",
    "export",
    "exportable",
    "__main__",
}
BASES = {"solvers.base", "solvers.fallback", "gradients.base"}  # the classes that the machinery is written for


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__init__.py":
            found[".".join(path.relative_to(PACKAGE).with_suffix("").parts)] = path
    return found


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("equilibria"):
            inner = node.module.removeprefix("equilibria").lstrip(".")
            names |= {inner} if inner else {alias.name for alias in node.names}
    return names


def below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def test_few_modules_stand_at_the_root() -> None:
    assert {name for name in modules() if "." not in name} == ROOT


def test_no_import_crosses_a_border() -> None:
    for name, path in modules().items():
        for other in imported(path):
            for importer, forbidden in BORDERS:
                crosses = below(name, importer) and below(other, forbidden)
                assert not crosses, f"{name} imports {other}: {importer} must not import {forbidden}"


def test_nothing_but_the_command_line_starts_in_the_laboratory() -> None:
    for name, path in modules().items():
        if name != "__main__" and not below(name, "lab"):
            assert not [other for other in imported(path) if below(other, "lab")], name


def test_the_core_needs_torch_alone() -> None:
    extras = {
        "native.anderson_triton": {"triton"},
        "lab.training.checkpoints": {"safetensors"},
        "lab.training.evaluating": {"lightning_fabric"},
        "lab.training.processes": {"lightning_fabric"},
        "lab.training.run_state": {"lightning_fabric"},
        "lab.training.trainer": {"lightning_fabric"},
        "lab.reports.figures": {"matplotlib"},
        "lab.training.folder": {"filelock"},
        "lab.cli.progress": {"rich"},
        "lab.cli.console": {"typer", "rich"},
        "lab.cli.listing": {"typer"},
        "lab.cli.tables": {"typer"},
        "lab.cli.runs": {"typer"},
        "lab.cli.options": {"typer"},
        "lab.cli.view": {"rich"},
        "lab.cli.sweeping": {"typer"},
        "lab.cli.diagnosis": {"typer"},
        "lab.cli.generating": {"typer"},
        "lab.cli.serving": {"typer"},
        "lab.cli.loading": {"typer"},
        "lab.cli.demo": {"typer"},
        "lab.cli.demo_page": {"matplotlib"},
        "lab.cli.watching": {"typer", "rich"},
        "integrations.accelerate": {"accelerate"},
        "integrations.huggingface": {"transformers"},
        "integrations.lightning": {"lightning"},
        "serving.ray": {"ray", "starlette"},
        "serving.server": {"starlette", "uvicorn"},
        "lab.cli.publishing": {"typer"},
        "lab.cli.running": {"typer"},
        "lab.cli.info": {"typer"},
        "analysis.plots": {"matplotlib"},
        "analysis.diagnosis.page": {"matplotlib"},
        "lab.cli.main": {"typer"},
        "lab.bench.methods": {"torchdeq"},
        "lab.bench.training": {"torchdeq"},
        "lab.bench.report": {"matplotlib"},
    }
    for name, path in modules().items():
        allowed = {"torch", "equilibria", "__future__", *extras.get(name, ())}
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for top in {name.split(".")[0] for name in names}:
                assert top in allowed or top in __import__("sys").stdlib_module_names, f"{path.name} imports {top}"


def test_every_public_name_exists() -> None:
    assert all(hasattr(equilibria, name) for name in equilibria.__all__)


def loaded_by(*programs: str) -> list[set[str]]:
    """Return the modules that a new interpreter has loaded after each of several programs; their output is discarded."""
    after = "\nprint(*sys.modules)\n"
    quiet = [f"with contextlib.redirect_stdout(io.StringIO()):\n    {program}{after}" for program in programs]
    code = "import contextlib, io, sys\n" + "".join(quiet)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_the_import_is_cheap_and_packages_load_on_first_use() -> None:
    """torch._dynamo and sympy take longer than torch itself; models and data sets load on first use."""
    imported, used = loaded_by("import equilibria", "equilibria.models.names()")
    dear = {"torch._dynamo", "torch._inductor", "sympy", "matplotlib", "equilibria.models", "equilibria.lab.data"}
    assert imported >= {"equilibria.deq"} and not dear & imported
    assert "equilibria.models" in used


def test_help_loads_no_command() -> None:
    (found,) = loaded_by("from equilibria.lab.cli.main import app; app(['--help'], standalone_mode=False)")
    assert found >= {"equilibria.lab.cli.main", "typer"}
    assert not {"torch._dynamo", "sympy", "lightning_fabric", "matplotlib", "equilibria.models"} & found
    rooms = ("equilibria.lab.cli.", "equilibria.lab.experiments")
    assert [name for name in found if name.startswith(rooms)] == ["equilibria.lab.cli.main"]


# what takes longer to load than the help takes to print; the heavy rooms load all of them
DEAR = {
    "equilibria.lab.experiments",
    "equilibria.lab.reports.run",
    "equilibria.lab.training",
    "jax",
    "lightning_fabric",
    "matplotlib",
    "pandas",
    "safetensors",
    "scipy",
    "sklearn",
    "sympy",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
}


def test_help_of_a_command_loads_neither_experiments_nor_training() -> None:
    """One interpreter shows the help of every command; what one of them loads is found after it."""
    from equilibria.lab.cli.main import COMMANDS

    lines = [(name,) for name in (*COMMANDS, "bench")] + [("data", name) for name in ("list", "fetch", "check")]
    program = (
        "from equilibria.lab.cli.main import app\n"
        "    try: app([{}, '--help'], standalone_mode=False)\n"
        "    except SystemExit: pass"
    )
    found = loaded_by(*(program.format(", ".join(map(repr, line))) for line in lines))
    assert {line: sorted(DEAR & loaded) for line, loaded in zip(lines, found, strict=True) if DEAR & loaded} == {}
    assert "equilibria.lab.cli.runs" in found[-1]


def test_a_misspelt_package_is_refused() -> None:
    assert {"models", "lab"} <= set(dir(equilibria))
    with pytest.raises(AttributeError, match="no attribute 'modles'"):
        equilibria.modles  # noqa: B018
