"""Experiments and tables by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("lightning_fabric")
from equilibria._core.plain import to_plain
from equilibria.lab.errors import SettingError, UnknownName
from equilibria.lab.experiments.catalogue import experiment, experiments, table, tables
from equilibria.lab.experiments.definitions import SCALES
from equilibria.lab.experiments.evaluation import experiment_of
from equilibria.lab.experiments.runner import Resources, command, plan, seed_number
from equilibria.lab.training.folder import Run
from tests.lab.reports.runs import write_run


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_has_all_scales_and_survives_its_config(name: str) -> None:
    for scale in SCALES:
        e = experiment(name, scale)
        assert (e.name, e.scale) == (name, scale)
        config = json.loads(json.dumps(e.config() | {"training": to_plain(e.training)}))
        assert experiment(name, scale).changed(["training.epochs=9"]).restored(config) == e


@pytest.mark.parametrize("name", tables())
def test_claims_and_published_figures_name_existing_rows_and_columns(name: str) -> None:
    found = table(name)
    names, rows = [c.name for c in (*found.columns, *found.hidden)], [r.name for r in found.rows]
    columns = set(names)
    assert len(columns) == len(names) and len(set(rows)) == len(rows)
    assert {c.column for c in found.claims} | {c.against for c in found.claims if c.against} <= columns
    assert {name for profile in found.profiles for _, name in profile.points} <= columns
    assert {c.left for c in found.claims} | {c.right for c in found.claims if c.right} <= set(rows)
    assert {name for row in found.rows for name in row.published} <= columns
    assert {c.over for c in found.columns if c.over} <= set(rows)
    assert all(claim.at_least is not None or claim.at_most is not None for claim in found.claims)


def test_the_protocols_are_those_of_the_papers() -> None:
    mnist = experiment("skipdeq-mnist-mlp-deq-jr")
    assert (mnist.training.epochs, mnist.training.batch_size, mnist.seeds) == (25, 32, (6171, 3859, 2961))
    assert (mnist.settings.jacobian_weight, mnist.settings.skip_weight) == (1.0, 5.0)
    polynomial = experiment("skipdeq-polynomial-skip")
    assert (polynomial.training.epochs, polynomial.settings.skip_weight) == (300, 0.01)
    assert (polynomial.settings.solver.method, polynomial.seeds) == ("bs3", (1, 11, 1111))


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="Did you mean skipdeq-polynomial"):
        table("skipdeq-polynom")
    with pytest.raises(UnknownName, match="skipdeq-mnist-mlp-v2"):
        experiment("skipdeq-mnist-mlp-v3")
    with pytest.raises(UnknownName, match="There are: digits"):
        table("zzz")
    with pytest.raises(SettingError, match=r"Did you mean training\.epochs"):
        experiment("digits-deq").changed(["training.epoch=3"])


def test_a_plan_runs_the_first_seed_of_every_row_first(tmp_path: Path) -> None:
    jobs = plan(table("skipdeq-mnist-mlp"), "full", tmp_path, assignments=["training.epochs=1"])
    assert len(jobs) == 18
    assert [job.seed for job in jobs[:7]] == [6171] * 6 + [3859]
    assert jobs[0].folder == tmp_path / "skipdeq-mnist-mlp" / "full" / "deq" / "seed-6171"
    words = command(jobs[0], Resources(tmp_path, 2, "fsdp"))
    assert words[3:5] == ["train", "skipdeq-mnist-mlp-deq"]
    assert "--set" in words and "training.epochs=1" in words
    assert words[words.index("--strategy") + 1] == "fsdp"
    with pytest.raises(UnknownName, match="has no row 'v4'"):
        plan(table("skipdeq-mnist-mlp"), "full", tmp_path, rows=["v4"])


def test_more_seeds_than_in_the_paper_are_new_ones() -> None:
    e = experiment("skipdeq-polynomial-deq")
    assert [seed_number(e, i) for i in range(6)] == [1, 11, 1111, 0, 2, 3]


def test_a_former_name_of_a_table_is_accepted_and_its_runs_are_found(tmp_path: Path) -> None:
    validated = table("ignn-cox2-honest")
    assert validated is table("ignn-cox2-validated")
    assert experiment("ignn-cox2-honest-gcn", "debug") == experiment("ignn-cox2-validated-gcn", "debug")
    assert validated.folder(tmp_path, "debug") == tmp_path / "ignn-cox2-validated" / "debug"
    folder = write_run(tmp_path / "ignn-cox2-honest" / "debug", validated, "gcn", 0, {"accuracy": 0.7}, scale="debug")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"experiment": "ignn-cox2-honest-gcn"}))
    (job,) = plan(validated, "debug", tmp_path, rows=["gcn"])
    assert job.folder == folder and job.finished
    job.check_settings()  # the old name is no other setting
    assert experiment_of(Run.open(folder)).name == "ignn-cox2-validated-gcn"
