"""The tables of language models: scales, claims, parameters, runs at debug scale."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning_fabric")
from equilibria._core.plain import to_plain
from equilibria.lab.experiments.definitions import SCALES, Table, TableRow
from equilibria.lab.experiments.deq_language import memory_table, trellis_table, wikitext_table
from equilibria.lab.experiments.deq_language import table as transformer_table
from equilibria.lab.experiments.deq_language.task import network
from equilibria.lab.experiments.jacobian_regularization import language_table as jacobian_table
from equilibria.lab.experiments.phantom import language_table as phantom_table
from equilibria.lab.training.trainer import Trainer

TABLES = [
    table
    for module in (transformer_table, trellis_table, wikitext_table, jacobian_table, phantom_table, memory_table)
    for table in module.tables()
]


def rows() -> list[tuple[Table, TableRow]]:
    return [(table, row) for table in TABLES for row in table.rows]


@pytest.mark.parametrize(("table", "row"), rows(), ids=lambda part: part.name)
def test_every_row_has_all_scales_and_survives_its_config(table: Table, row: TableRow) -> None:
    for scale in SCALES:
        e = row.experiment(scale)
        assert (e.name, e.scale) == (f"{table.name}-{row.name}", scale)
        config = json.loads(json.dumps(e.config() | {"training": to_plain(e.training)}))
        assert row.experiment(scale).restored(config) == e


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_claims_and_published_figures_name_existing_rows_and_columns(table: Table) -> None:
    columns = {column.name for column in (*table.columns, *table.hidden)}
    names = {row.name for row in table.rows}
    used = {c.column for c in table.claims} | {c.against for c in table.claims if c.against}
    assert used <= columns and {name for profile in table.profiles for _, name in profile.points} <= columns
    assert {c.left for c in table.claims} | {c.right for c in table.claims if c.right} <= names
    assert {name for row in table.rows for name in row.published} <= columns
    assert {c.over for c in table.columns if c.over} <= names
    assert set(table.protocol) == set(SCALES)


def counted(row: str, table: str, scale: Any) -> tuple[int, int]:
    """Return the number of parameters with and without embedding."""
    found = next(t for t in TABLES if t.name == table).row(row).experiment(scale)
    with torch.device("meta"):
        net = network(found.task().model())
    inner = [weight for name, weight in net.named_parameters() if not name.startswith("vocabulary")]
    return sum(w.numel() for w in net.parameters()), sum(w.numel() for w in inner)


def test_compared_rows_have_equal_numbers_of_parameters() -> None:
    for scale, deq, untied in (("reduced", 717_010, 718_674), ("full", 3_623_952, 3_630_544)):
        assert counted("deq", "ptb-transformer", scale)[0] == counted("tied", "ptb-transformer", scale)[0] == deq
        assert counted("untied", "ptb-transformer", scale)[0] == untied
    assert counted("trellisnet", "ptb-trellisnet", "reduced") == counted("deq", "ptb-trellisnet", "reduced")


def test_full_sizes_are_the_published_ones() -> None:
    assert counted("deq", "ptb-trellisnet", "full") == (24_192_400, 20_182_400)
    assert counted("deq-medium", "wikitext", "full") == (171_995_975, 43_215_440)
    assert counted("deq-small", "wikitext", "full") == (138_646_735, 4_511_500)
    assert counted("small-4", "wikitext", "full") == (139_215_235, 4_930_000)
    assert counted("deq-trellisnet", "wikitext", "full") == (181_716_951, 44_368_896)
    assert counted("adaptive-18", "wikitext", "full")[1] == 72_112_500
    assert counted("post-jr", "jr-language", "full") == (97_851_488, 71_225_100)


@pytest.mark.parametrize(
    "name", ["ptb-transformer-deq", "ptb-trellisnet-deq", "jr-language-pre-jr", "language-memory-recursive"]
)
def test_debug_runs_give_the_figures_of_their_table(name: str, tmp_path: Path) -> None:
    table, row = next((t, r) for t, r in rows() if f"{t.name}-{r.name}" == name)
    e = row.experiment("debug")
    short = dataclasses.replace(e.settings.data, train=4 * 8 * 6 + 1, valid=4 * 8 * 5 + 1, test=70)
    chosen = dataclasses.replace(e.settings, data=short)
    summary = Trainer(e.make(chosen), e.training, tmp_path).fit()
    split = summary.final["split"]
    assert split["valid"]["perplexity"] == pytest.approx(math.exp(split["valid"]["nll"]))
    assert split["train"]["peak_bytes_layer"] > 0 and 1 < split["test"]["perplexity"] < 100
    for column in table.columns:
        place, _, key = column.key.partition(".")
        if place in ("train", "valid", "test") and not key.startswith(("perplexity_", "peak_bytes_")):
            assert key in split[place], column.name
