"""Imports run one way: each module uses only what stands before it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import equilibria

PACKAGE = Path(equilibria.__file__).parent
LAYERS = [
    {"norms", "memory", "transforms", "autocast", "state", "stateless", "nn", "cells.circular", "cells.monotone"},
    {"fixing", "maps", "solution", "checkpointing", "cells.monotone_conv", "cells.splitting"},
    {"compaction"},
    {"solvers.base", "solvers.tableaus"},
    {"solvers.picard", "solvers.anderson", "solvers.line_search", "solvers.krylov", "solvers.restart", "solvers.fallback"},
    {"solvers.broyden", "solvers.newton", "solvers.steady_state"},
    {"ledger"},
    {"solve"},
    {"policy", "whole", "equation"},
    {"compiled"},
    {"gradients.base", "gradients.approximations"},
    {"gradients.linear"},
    {"gradients.folded"},
    {"gradients.primitive"},
    {"gradients.attach"},
    {"gradients.implicit", "gradients.phantom", "gradients.unrolled", "gradients.shine", "gradients.reversible"},
    {"gradients.escalate", "gradients.warmup"},
    {"remember", "recording"},
    {"starts"},
    {"deq", "explicit"},
    {"exportable"},
    {"theory", "constraints", "spectrum", "measuring", "penalties", "plots"},
    {"agreement"},
    {"settings", "diagnosis.examine", "diagnosis.illnesses"},
    {"tuning"},
    {"diagnosis.findings"},
    {"diagnosis.layers"},
    {"diagnosis.page"},
    {"diagnosis.doctor"},
    {"bench.cases"},
    {"bench.methods", "bench.jax_cases"},
    {"bench.rules", "bench.jax_methods"},
    {"bench.driver", "bench.counts"},
    {"bench.report"},
    {"bench.command"},
    {"data.files", "data.sets"},
    {"exporting"},
    {"data.sources", "data.download", "data.images", "data.text", "data.graphs", "data.augment"},
    {"data.camvid", "data.planetoid", "data.synthetic", "data.batches"},
    {"data.entries"},
    {"data.catalogue"},
    {"training.settings", "training.durable", "training.listeners"},
    {"training.task", "training.optimisers", "training.processes", "training.checkpoints"},
    {"training.statistics", "training.folder"},
    {"training.state"},
    {"training.stepping", "training.evaluating"},
    {"training.trainer"},
    {"models.skip_mlp", "models.mdeq_configs", "models.explicit_nets", "models.neural_ode", "models.monotone_nets"},
    {"models.origins", "models.states", "models.summary_table"},
    {"models.summary", "models.implicit_resnet", "models.lion"},
    {"models.graph_spectrum", "models.sequence_layers"},
    {"models.adaptive_vocabulary", "models.relative_attention", "models.trellis_cell"},
    {"models.transformer_configs", "models.sequence"},
    {"models.transformer_cell", "models.trellisnet"},
    {"models.deq_transformer"},
    {"models.graph_ops"},
    {"models.graph_input"},
    {"models.ignn", "models.gcn"},
    {"models.graph_nets", "models.mdeq_layers"},
    {"models.mdeq_cell"},
    {"models.mdeq_heads"},
    {"models.mdeq"},
    {"models.entries"},
    {"experiments.images", "experiments.backbones", "experiments.label_pictures", "models.registry"},
    {"experiments.language_data", "experiments.language_models"},
    {"experiments.language_looks"},
    {
        "experiments.skip_tasks",
        "experiments.vision_tasks",
        "experiments.mdeq_task",
        "experiments.prompts_task",
        "experiments.graph_data",
        "experiments.language_task",
    },
    {"experiments.settings", "models.files", "experiments.graph_data"},
    {"experiments.graph_tasks"},
    {"experiments.base", "experiments.segmentation_task", "experiments.graph_node_tasks"},
    {"experiments.cifar_tables", "experiments.graph_node_tables", "experiments.language_recipes"},
    {"experiments.citation_tables"},
    {"experiments.graph_tables"},
    {
        "experiments.digits",
        "experiments.skip_deq",
        "experiments.jfb",
        "experiments.monotone_tables",
        "experiments.jacobian_tables",
        "experiments.phantom_tables",
        "experiments.memory_tables",
        "experiments.segmentation",
        "experiments.prompts",
        "experiments.skip_vision",
        "experiments.copy_task",
        "experiments.language_memory",
        "experiments.language_methods",
        "experiments.language_tables",
        "experiments.trellis_tables",
        "experiments.wikitext_tables",
        "reports.table",
        "reports.document",
        "reports.gallery",
    },
    {"experiments.language_phantom", "experiments.skip_tables", "reports.figures", "reports.markdown", "reports.run"},
    {"experiments.catalogue", "reports.html"},
    {"commands.console", "experiments.evaluation", "experiments.runner", "reports.write"},
    {"reports.overview"},
    {"commands.diagnosis", "commands.listing", "commands.progress"},
    {"commands.running"},
    {"commands.runs"},
    {"commands.generating", "commands.tables"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


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


def test_every_module_has_its_place() -> None:
    assert set(modules()) == set(LEVEL)


def test_imports_run_one_way() -> None:
    for name, path in modules().items():
        for other in imported(path):
            assert LEVEL[other] < LEVEL[name], f"{name} imports {other}, which stands beside or after it"


def test_the_core_needs_torch_alone() -> None:
    extras = {
        "training.checkpoints": {"safetensors"},
        "training.processes": {"lightning_fabric"},
        "training.state": {"lightning_fabric"},
        "training.trainer": {"lightning_fabric"},
        "reports.figures": {"matplotlib"},
        "training.folder": {"filelock"},
        "commands.progress": {"rich"},
        "commands.console": {"typer", "rich"},
        "commands.listing": {"typer"},
        "commands.tables": {"typer"},
        "commands.runs": {"typer"},
        "commands.diagnosis": {"typer"},
        "commands.generating": {"typer"},
        "commands.running": {"typer"},
        "plots": {"matplotlib"},
        "diagnosis.page": {"matplotlib"},
        "cli": {"typer"},
        "bench.methods": {"torchdeq"},
        "bench.report": {"matplotlib"},
    }
    for name, path in modules().items():
        allowed = {"torch", "equilibria", "__future__", *extras.get(name, ())}
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for top in {name.split(".")[0] for name in names}:
                assert top in allowed or top in __import__("sys").stdlib_module_names, f"{path.name} imports {top}"


def test_public_names_exist_and_are_sorted() -> None:
    assert all(hasattr(equilibria, name) for name in equilibria.__all__)


def loaded_by(code: str) -> set[str]:
    """The modules that a new interpreter has after `code`, without what it writes."""
    code = f"import contextlib, io, sys\nwith contextlib.redirect_stdout(io.StringIO()):\n    {code}\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_import_is_cheap() -> None:
    """torch._dynamo and sympy take longer than torch itself; models and data sets load on first use."""
    found = loaded_by("import equilibria")
    dear = {"torch._dynamo", "torch._inductor", "sympy", "matplotlib", "equilibria.models", "equilibria.data"}
    assert found >= {"equilibria.deq"}
    assert not dear & found


def test_help_loads_no_command() -> None:
    found = loaded_by("from equilibria.cli import app; app(['--help'], standalone_mode=False)")
    assert found >= {"equilibria.cli", "typer"}
    assert not {"torch._dynamo", "sympy", "lightning_fabric", "matplotlib", "equilibria.models"} & found
    assert not [name for name in found if name.startswith(("equilibria.commands.", "equilibria.experiments"))]


def test_packages_load_on_first_use() -> None:
    assert "equilibria.models" in loaded_by("import equilibria; equilibria.models.names()")
    assert {"models", "data"} <= set(dir(equilibria))
    with pytest.raises(AttributeError, match="no attribute 'modles'"):
        equilibria.modles  # noqa: B018
