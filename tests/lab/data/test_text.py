"""Corpora: tokens, vocabulary and its cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from equilibria.lab import data
from equilibria.lab.data import text
from tests.lab.data.formats import write

TRAIN = " the cat saw the dog \n\n the <unk> ran \n"
VALID = " the bird ran \n"
TEST = " dog \n"


def ptb_root(root: Path, train: str = TRAIN, valid: str = VALID, test: str = TEST) -> Path:
    for split, content in (("train", train), ("valid", valid), ("test", test)):
        write(root / "ptb" / f"ptb.{split}.txt", content.encode())
    return root


def words(found: data.Dataset[torch.Tensor], tokens: torch.Tensor) -> list[str]:
    return [found.classes[i] for i in tokens.tolist()]


def test_words_are_tokens_with_an_end_for_every_line(tmp_path: Path) -> None:
    found = data.load("ptb", ptb_root(tmp_path))
    assert words(found, found.train) == TRAIN.replace("\n", " <eos> ").split()
    assert found.train.dtype == torch.int32
    assert found.valid is not None and words(found, found.valid) == ["the", "<unk>", "ran", "<eos>"]


def test_the_most_frequent_come_first_and_ties_in_order_of_appearance(tmp_path: Path) -> None:
    found = data.load("ptb", ptb_root(tmp_path))
    assert found.classes == ("the", "<eos>", "cat", "saw", "dog", "<unk>", "ran")


def test_characters_are_tokens_with_single_spaces(tmp_path: Path) -> None:
    found = data.load("ptb", ptb_root(tmp_path, "ab  a\n", "a b\n", "b\n"), level="character")
    assert words(found, found.train) == ["a", "b", " ", "a", "<eos>"]
    assert set(found.classes) == {"a", "b", " ", "<eos>"}


def test_unseen_units_are_unknown_even_where_training_text_has_none(tmp_path: Path) -> None:
    found = data.load("ptb", ptb_root(tmp_path, "ab\n", "aß\n", "b\n"), level="character")
    assert found.classes[-1] == "<unk>"
    assert found.valid is not None and words(found, found.valid) == ["a", "<unk>", "<eos>"]


def test_wikitext_reads_the_same_way(tmp_path: Path) -> None:
    for split, content in (("train", " = Title = \n Über 1 @,@ 000 \n"), ("valid", " = \n"), ("test", " 1 \n")):
        write(tmp_path / "wikitext-103" / f"wiki.{split}.tokens", content.encode())
    found = data.load("wikitext-103", tmp_path, download=False)
    assert words(found, found.train) == ["=", "Title", "=", "<eos>", "Über", "1", "@,@", "000", "<eos>"]


def test_the_vocabulary_is_cached_as_json_for_this_very_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = data.load("ptb", ptb_root(tmp_path))
    cache = tmp_path / "ptb" / "vocabulary-word.json"
    assert json.loads(cache.read_text())["units"] == list(first.classes)
    with monkeypatch.context() as patch:
        patch.setattr(text, "_count", None)  # counting again would fail
        assert torch.equal(data.load("ptb", tmp_path).train, first.train)
    ptb_root(tmp_path, "other words\n")
    assert data.load("ptb", tmp_path).classes[:2] == ("other", "words")
    for rubbish in ("{", "[]", '{"sha256": 3}'):
        cache.write_text(rubbish)
        assert data.load("ptb", tmp_path).classes[:2] == ("other", "words")
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_folder_without_write_access_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(text, "atomic", refuse)
    assert len(data.load("ptb", ptb_root(tmp_path)).classes) == 7


@pytest.mark.parametrize(("content", "complaint"), [(b"", "empty"), (b"\xff\xfe\x00", "UTF-8")])
def test_damaged_files_are_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    ptb_root(tmp_path)
    write(tmp_path / "ptb" / "ptb.valid.txt", content)
    with pytest.raises(data.DataError, match=complaint) as caught:
        data.load("ptb", tmp_path)
    assert "ptb.valid.txt" in str(caught.value)


def test_an_unknown_level_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'word' or 'character', got 'byte'"):
        data.load("ptb", ptb_root(tmp_path), level="byte")
