"""Files that a report reads and cannot use are named, with what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from equilibria.lab.experiments.catalogue import table
from equilibria.lab.reports.overview import write_overview
from equilibria.lab.reports.run import write_run_report
from equilibria.lab.reports.write import reported_scale, write_report
from equilibria.lab.training.gallery import write_gallery
from tests.lab.reports.runs import write_run
from tests.lab.training.damages import DAMAGES

DIGITS = table("digits")
BROKEN = {name: damage for name, damage in DAMAGES.items() if name not in ("no keys", "other types", "directory")}


def refused(act: Callable[[], object], path: Path) -> None:
    with pytest.raises((ValueError, OSError), match=path.name) as error:
        act()
    assert str(path) in str(error.value) and not isinstance(error.value, (json.JSONDecodeError, UnicodeDecodeError))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "table", DIGITS, "deq", 0, {"accuracy": 0.9})


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_a_damaged_run_of_a_table_is_named(name: str, damage: Callable[[Path], None], run: Path, tmp_path: Path) -> None:
    damage(run / name)
    refused(lambda: write_report(DIGITS, "full", tmp_path / "table"), run / name)
    refused(lambda: write_run_report(run), run / name)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_settings_of_a_run_are_named(damage: Callable[[Path], None], run: Path) -> None:
    damage(run / "config.json")
    refused(lambda: write_run_report(run), run if (run / "config.json").is_dir() else run / "config.json")


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_damaged_files_next_to_a_run_are_named(damage: Callable[[Path], None], run: Path, tmp_path: Path) -> None:
    write_gallery(run, {"some": ("Some picture", b"png")})
    damage(run / "gallery" / "titles.json")
    refused(lambda: write_run_report(run), run / "gallery" / "titles.json")
    (run / "gallery" / "titles.json").unlink()
    damage(run / "machine.json")
    refused(lambda: write_report(DIGITS, "full", tmp_path / "table"), run / "machine.json")


def test_a_missing_picture_is_named(run: Path) -> None:
    write_gallery(run, {"some": ("Some picture", b"png")})
    (run / "gallery" / "some.png").unlink()
    refused(lambda: write_run_report(run), run / "gallery" / "some.png")


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_damaged_numbers_of_a_table_are_named(damage: Callable[[Path], None], run: Path, tmp_path: Path) -> None:
    write_report(DIGITS, "full", tmp_path / "table", tmp_path / "digits")
    assert reported_scale(tmp_path / "digits") == "full"
    file = tmp_path / "digits" / "table.json"
    damage(file)
    refused(lambda: reported_scale(tmp_path / "digits"), file)
    refused(lambda: write_overview(tmp_path, {"digits": DIGITS}), file)


def test_numbers_of_a_table_without_its_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "table.json").write_text("{}")
    refused(lambda: write_overview(tmp_path, {"digits": DIGITS}), tmp_path / "digits" / "table.json")
