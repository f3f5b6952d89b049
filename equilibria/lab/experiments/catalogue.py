"""Experiments and tables by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from equilibria._core.names import nearest
from equilibria.lab.errors import UnknownName
from equilibria.lab.experiments.definitions import Experiment, Scale, Table, TableRow
from equilibria.lab.experiments.deq_language.copy_memory import tables as copy_tables
from equilibria.lab.experiments.deq_language.memory_table import tables as language_memory_tables
from equilibria.lab.experiments.deq_language.table import tables as language_tables
from equilibria.lab.experiments.deq_language.trellis_table import tables as trellis_tables
from equilibria.lab.experiments.deq_language.wikitext_table import tables as wikitext_tables
from equilibria.lab.experiments.digits.table import tables as digits_tables
from equilibria.lab.experiments.fields.table import tables as field_tables
from equilibria.lab.experiments.flow.table import tables as flow_tables
from equilibria.lab.experiments.ignn.table import tables as graph_tables
from equilibria.lab.experiments.inverse.table import tables as inverse_tables
from equilibria.lab.experiments.jacobian_regularization.language_table import tables as language_method_tables
from equilibria.lab.experiments.jacobian_regularization.table import tables as jacobian_tables
from equilibria.lab.experiments.jfb.table import tables as jfb_tables
from equilibria.lab.experiments.lion.table import tables as prompt_tables
from equilibria.lab.experiments.mdeq.memory_table import tables as memory_tables
from equilibria.lab.experiments.mdeq.segmentation_table import tables as segmentation_tables
from equilibria.lab.experiments.monotone.table import tables as monotone_tables
from equilibria.lab.experiments.own import installed_experiments, load_experiment
from equilibria.lab.experiments.phantom.language_table import tables as language_phantom_tables
from equilibria.lab.experiments.phantom.table import tables as phantom_tables
from equilibria.lab.experiments.reasoning.attractor_table import tables as attractor_tables
from equilibria.lab.experiments.reasoning.table import tables as reasoning_tables
from equilibria.lab.experiments.sampling.table import tables as sampling_tables
from equilibria.lab.experiments.skip_deq.multiscale_table import tables as skip_vision_tables
from equilibria.lab.experiments.skip_deq.table import tables as skip_tables


@cache  # building all tables and their claims takes a while, and names are looked up in them often
def tables() -> dict[str, Table]:
    """Return all tables by name."""
    found = (
        *digits_tables(),
        *skip_tables(),
        *skip_vision_tables(),
        *jfb_tables(),
        *monotone_tables(),
        *jacobian_tables(),
        *phantom_tables(),
        *memory_tables(),
        *segmentation_tables(),
        *prompt_tables(),
        *graph_tables(),
        *copy_tables(),
        *language_tables(),
        *trellis_tables(),
        *wikitext_tables(),
        *language_method_tables(),
        *language_phantom_tables(),
        *language_memory_tables(),
        *reasoning_tables(),
        *attractor_tables(),
        *flow_tables(),
        *sampling_tables(),
        *field_tables(),
        *inverse_tables(),
    )
    return {table.name: table for table in found}


def table(name: str) -> Table:
    """Return a table by its present or former name; raises UnknownName."""
    name = current_name(name)
    if name not in tables():
        raise UnknownName(f"There is no table {name!r}. {nearest(name, tables())}")
    return tables()[name]


def current_name(name: str) -> str:
    """Return the present name of a table or experiment for its present or former name."""
    for table in tables().values():
        if table.former is not None and (name == table.former or name.startswith(f"{table.former}-")):
            return table.name + name.removeprefix(table.former)
    return name


def experiments() -> dict[str, Callable[[Scale], Experiment[Any]]]:
    """Return all experiments by name: the rows of all tables, as functions of the scale."""
    return {f"{table.name}-{row.name}": row.experiment for table in tables().values() for row in table.rows}


def experiment(name: str, scale: Scale = "full") -> Experiment[Any]:
    """Return an experiment: TABLE-ROW, a name from an installed package, or FILE.py:NAME; raises UnknownName."""
    if ":" in name:
        return load_experiment(name, scale)
    known, name = experiments(), current_name(name)
    # an installed package may replace an experiment of this library by one of the same name
    if name in (installed := installed_experiments()):
        return load_experiment(installed[name], scale, name)
    if name in tables():
        raise UnknownName(f"{name} is a table of several experiments: `equilibria reproduce {name}` runs them all.")
    if name not in known:
        raise UnknownName(
            f"There is no experiment {name!r}. {nearest(name, [*known, *installed])} Pass an experiment of your own as "
            "FILE.py:NAME."
        )
    return known[name](scale)


def row(table: Table, name: str) -> TableRow:
    """Return a row of a table by its name; raises UnknownName."""
    names = [row.name for row in table.rows]
    if name not in names:
        raise UnknownName(f"{table.name} has no row {name!r}. {nearest(name, names)}")
    return table.row(name)
