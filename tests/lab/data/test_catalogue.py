"""The datasets by name, their files, and the data root."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from equilibria._core.files import atomic
from equilibria.lab import data
from equilibria.lab.data.files import File, digest, state_of
from tests.lab.data.formats import idx_root, write


def test_the_root_is_the_argument_then_the_environment_then_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUILIBRIA_DATA", "/from/environment")
    assert data.data_root("/given") == Path("/given")
    assert data.data_root() == Path("/from/environment")
    monkeypatch.setenv("EQUILIBRIA_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert data.data_root() == Path("/cache/equilibria/data")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert data.data_root() == Path("/home/someone/.cache/equilibria/data")
    assert data.data_root("~/data") == Path("/home/someone/data")


def test_every_dataset_has_a_complete_description() -> None:
    assert len(data.names()) == len(set(data.names())) > 20
    for name in data.names():
        info = data.info(name)
        assert info.name == name and info.summary and info.shape and all(count >= 0 for count in info.counts)
        assert not info.files or (info.terms and info.source)
        paths = [place for file in info.files for place in (file.path, *file.also)]
        assert len(paths) == len(set(paths))
        for file in info.files:
            assert file.urls or file.archive or info.manual
            assert file.checksum.partition(":")[0] in ("", "md5", "sha256")


def test_names_are_found_in_any_spelling() -> None:
    assert data.info("PTC_MR").name == "ptc-mr" and data.info("CIFAR10").name == "cifar10"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("cifar", "Did you mean cifar10"), ("wikitext", "Did you mean wikitext-"), ("zzz", "There are: digits, ")],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, hint: str) -> None:
    for function in (data.info, data.load, data.fetch, data.check):
        with pytest.raises(ValueError, match=f"There is no dataset '{name}'. {hint}"):
            function(name)


def test_unknown_options_are_refused_before_anything_is_read() -> None:
    with pytest.raises(TypeError, match=r"ptb has no option levle\. Its options are: level='word'\."):
        data.load("ptb", levle="word")
    with pytest.raises(TypeError, match=r"mnist has no option size\. Its options are: none"):
        data.load("mnist", size=3)
    assert data.info("mutag").options == {"fold": 0, "folds": 10, "seed": 0, "attributes": False}


def test_check_distinguishes_official_files_from_others(tmp_path: Path) -> None:
    idx_root(tmp_path)
    (tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz").rename(tmp_path / "mnist" / "t10k-images-idx3-ubyte")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert list(data.check("mnist", tmp_path).values()) == [
        data.FileState.DIFFERS,
        data.FileState.DIFFERS,
        data.FileState.UNVERIFIED,
        data.FileState.MISSING,
    ]
    assert data.check("polynomial", tmp_path) == {}


def test_the_state_of_a_file_depends_on_its_checksum(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"abc")
    good = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert digest(path) == good.removeprefix("sha256:")
    assert state_of(File("a", checksum=good), tmp_path) is data.FileState.PRESENT
    assert state_of(File("a", checksum=good.replace("ba", "bb")), tmp_path) is data.FileState.DIFFERS
    assert state_of(File("a"), tmp_path) is data.FileState.UNVERIFIED
    assert state_of(File("b"), tmp_path) is data.FileState.MISSING


def test_fetch_does_not_change_present_files(tmp_path: Path) -> None:
    idx_root(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.gz")}
    assert set(data.fetch("mnist", tmp_path)) == set(before)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.gz")} == before
    assert data.fetch("shapes", tmp_path) == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"old")
    with pytest.raises(RuntimeError, match="half-way"), atomic(path) as out:
        out.write(b"new")
        raise RuntimeError("half-way")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'equilibria\[train\]'"):
        data.load("digits")
