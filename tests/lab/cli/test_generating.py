"""generate: prompts to tokens, tokens to text, and a sample from a run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("lightning_fabric")
from typer.testing import CliRunner

from equilibria._core.plain import to_plain
from equilibria.lab.cli.main import app
from equilibria.lab.cli.sampling import decode, encode, sample, vocabulary
from equilibria.lab.experiments.deq_language.data import TOY_LETTERS, TOY_WORDS
from equilibria.lab.experiments.deq_language.table import characters, ptb
from equilibria.lab.experiments.digits.table import digits
from equilibria.lab.training.folder import Run
from equilibria.lab.training.trainer import Trainer
from tests.lab.training.damages import rewrite_state


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(ptb("deq", "debug"), tmp_path_factory.mktemp("words"))


def trained(e: Any, folder: Path) -> Path:
    data = dataclasses.replace(e.settings.data, train=4 * 8 * 5 + 1, valid=70, test=70)
    e = dataclasses.replace(e, settings=dataclasses.replace(e.settings, data=data))
    Trainer(e.task(), e.training, folder, config=e.config()).fit()
    return folder


def called(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["generate", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def test_prompts_become_tokens_and_text_again() -> None:
    text = "the old cat\nsees a"
    tokens = encode(text, TOY_WORDS, "word")
    assert [TOY_WORDS[i] for i in tokens.tolist()] == ["the", "old", "cat", "<eos>", "sees", "a"]
    assert decode([TOY_WORDS[i] for i in tokens.tolist()], "word") == text
    letters = encode("an  ox", TOY_LETTERS, "character")
    assert decode([TOY_LETTERS[i] for i in letters.tolist()], "character") == "an ox"
    finished = encode("ox ", TOY_LETTERS, "character")
    assert decode([TOY_LETTERS[i] for i in finished.tolist()], "character") == "ox "  # a word follows, not more of this one
    assert [TOY_WORDS[i] for i in encode("", TOY_WORDS, "word").tolist()] == ["<eos>"]


def test_unknown_words_become_unk_or_raise() -> None:
    assert [TOY_WORDS[i] for i in encode("the zebra", TOY_WORDS, "word").tolist()] == ["the", "<unk>"]
    with pytest.raises(ValueError, match="does not know 'zebra', 'yak': its vocabulary has 2 words"):
        encode("zebra yak zebra", ("<eos>", "cat"), "word")


def test_generate_prints_text_from_a_run(run: Path) -> None:
    text = called(str(run), "--prompt", "the old cat", "--length", "12", "--seed", "3")
    assert text.startswith("the old cat") and len(text.split()) + text.strip().count("\n") >= 13
    assert set(text.split()) <= set(TOY_WORDS)
    found = json.loads(called(str(run), "--prompt", "the old cat", "--length", "12", "--seed", "3", "--json"))
    assert found["text"] == text.rstrip("\n") or found["text"] == text[:-1]
    assert found == {"run": str(run), "prompt": "the old cat", "text": found["text"]}
    assert sample(run, "a", 12, seed=1) != sample(run, "a", 12, seed=2)
    assert sample(run, "a", 12, seed=1, temperature=0.0) == sample(run, "a", 12, seed=2, temperature=0.0)
    assert sample(run, "a", 12, seed=1, top_k=1) == sample(run, "a", 12, temperature=0.0)
    assert not sample(run, "", 5).startswith("<eos>")
    assert sample(run, "  ", 5, seed=1) == sample(run, "", 5, seed=1)
    assert sample(run, "a", 12, temperature=1e-300) == sample(run, "a", 12, temperature=0.0)


def test_text_is_generated_by_characters(tmp_path: Path) -> None:
    folder = trained(characters("deq", "debug"), tmp_path)
    text = sample(folder, "the ", 9, which="last")
    assert text.startswith("the") and len(text) >= 12


def test_generate_needs_only_the_folder_of_a_run(run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(run, moved)
    assert {path.suffix for path in (moved / "checkpoints").rglob("*") if path.is_file()} == {".json", ".safetensors"}
    assert vocabulary(Run.open(moved)) == TOY_WORDS
    assert sample(moved, "the", 5) == sample(run, "the", 5)
    shutil.rmtree(moved / "checkpoints")
    assert "no checkpoint in" in called(str(moved), code=1)


def test_a_run_that_is_not_a_language_model_is_refused(run: Path, tmp_path: Path) -> None:
    assert "is not the folder of a run" in called(str(tmp_path), code=1)
    other, e = tmp_path / "digits", digits("explicit", "debug")
    other.mkdir()
    (other / "config.json").write_text(json.dumps(e.config() | {"training": to_plain(e.training)}))
    assert "is a run of digits-explicit, which is not a language model" in called(str(other), code=1)
    assert "Invalid value for '--length'" in called(str(run), "--length", "0", code=2)


def test_a_damaged_checkpoint_is_named(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    (older,) = (folder / "checkpoints").glob("step-*")
    newest = shutil.copytree(older, older.with_name("step-00000999"))
    rewrite_state(newest, lambda state: state | {"processes": [{"dict": {}}]})
    assert str(newest) in called(str(folder), code=1)
    (newest / "state.json").write_text("")
    with pytest.warns(UserWarning, match=f"{newest.name} is corrupt"):
        assert vocabulary(Run.open(folder)) == TOY_WORDS
    (older / "state.json").unlink()
    text = called(str(folder), code=1)
    assert str(older) in text and str(newest) in text and "state.json" in text
