"""Image readers on tiny files in the official formats, whole and damaged."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from equilibria.lab import data
from equilibria.lab.data.images import read_idx
from tests.lab.data.formats import cifar_root, idx, idx_root, random_bytes, write


def load(name: str, root: Path) -> data.Dataset[data.Split]:
    return data.load(name, root, download=False)


@pytest.mark.parametrize(
    ("name", "folder", "zipped"),
    [
        ("mnist", "mnist", True),
        ("mnist", "mnist", False),
        ("mnist", "MNIST/raw", True),
        ("fashion-mnist", "fashion-mnist", True),
        ("fashion-mnist", "FashionMNIST/raw", False),
    ],
)
def test_idx_sets_are_read(tmp_path: Path, name: str, folder: str, zipped: bool) -> None:
    arrays = idx_root(tmp_path, folder, zipped)
    found = load(name, tmp_path)
    for split, file in ((found.train, "train"), (found.test, "t10k")):
        assert torch.equal(split.x, arrays[f"{file}-images-idx3-ubyte"].unsqueeze(1))
        assert torch.equal(split.y, arrays[f"{file}-labels-idx1-ubyte"].long())
    assert found.valid is None and len(found.classes) == 10
    assert found.train.x.dtype == torch.uint8 and found.train.y.dtype == torch.int64


IMAGES = random_bytes(2, 28, 28)
GOOD = idx(IMAGES)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "begins with nothing"),
        (b"\0\0\x0d\x03" + GOOD[4:], "begins with 00000d03"),
        (b"<html>not here</html>", "no IDX file"),
        (idx(IMAGES[:, 0]), "2 dimensions, expected 3"),
        (GOOD[:8], "dimensions"),
        (GOOD[:-1], "1,583 bytes"),
        (GOOD + b"x", "1,585 bytes"),
        (gzip.compress(GOOD)[:-20], "damaged"),
        (gzip.compress(GOOD)[:-8] + b"12345678", "damaged"),
        (b"\x1f\x8b" + b"rubbish" * 9, "damaged"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = write(tmp_path / "train-images-idx3-ubyte.gz", content)
    with pytest.raises(data.DataError, match=complaint) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("file", "values", "complaint"),
    [
        ("train-images-idx3-ubyte", random_bytes(4, 28, 27), "28x27 pixels, expected 28x28"),
        ("train-labels-idx1-ubyte", random_bytes(3, high=10), "3 labels for the 4 images"),
        ("t10k-labels-idx1-ubyte", torch.tensor([1, 2, 10], dtype=torch.uint8), "labels from 1 to 10, expected 0 to 9"),
    ],
)
def test_idx_files_must_fit_together(tmp_path: Path, file: str, values: torch.Tensor, complaint: str) -> None:
    idx_root(tmp_path)
    write(tmp_path / "mnist" / f"{file}.gz", gzip.compress(idx(values)))
    with pytest.raises(data.DataError, match=complaint):
        load("mnist", tmp_path)


def test_cifar_is_read_with_its_channels(tmp_path: Path) -> None:
    rows = cifar_root(tmp_path)
    found = load("cifar10", tmp_path)
    assert torch.equal(torch.cat([found.train.x, found.test.x]).flatten(1), rows[:, 1:])
    assert torch.equal(torch.cat([found.train.y, found.test.y]), rows[:, 0].long())
    assert found.train.x.shape == (10, 3, 32, 32) and found.classes[6] == "frog"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"", "0 bytes"), (b"\1" * 3072, "3,072 bytes"), (b"\x0a" * 3073, "labels from 10 to 10")],
)
def test_damaged_cifar_files_are_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    cifar_root(tmp_path)
    write(tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin", content)
    with pytest.raises(data.DataError, match=complaint) as caught:
        load("cifar10", tmp_path)
    assert "data_batch_3.bin" in str(caught.value)


def svhn_root(root: Path, **arrays: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    savemat = pytest.importorskip("scipy.io").savemat
    (root / "svhn").mkdir()
    for split in ("train", "test"):
        savemat(root / "svhn" / f"{split}_32x32.mat", arrays)


def test_svhn_is_read_with_the_digit_0_as_0(tmp_path: Path) -> None:
    pixels = random_bytes(32, 32, 3, 4).numpy()
    svhn_root(tmp_path, X=pixels, y=np.array([[1], [10], [9], [2]], dtype=np.uint8))
    found = load("svhn", tmp_path)
    assert torch.equal(found.train.x[2, 1], torch.from_numpy(pixels)[:, :, 1, 2])
    assert found.train.y.tolist() == [1, 0, 9, 2]
    states = data.check("svhn", tmp_path)
    assert set(states.values()) == {data.FileState.DIFFERS}


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "no numbers under 'y'; it holds X"),
        ({"X": np.zeros((28, 28, 3, 2), np.uint8), "y": np.ones((2, 1), np.uint8)}, r"\(28, 28, 3, 2\)"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((3, 1), np.uint8)}, r"y of shape \(3, 1\)"),
        ({"X": np.zeros((32, 32, 3, 1), np.uint8), "y": np.array([[11]], np.uint8)}, "labels from 11"),
    ],
)
def test_svhn_files_of_another_kind_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]], complaint: str
) -> None:
    svhn_root(tmp_path, **arrays)
    with pytest.raises(data.DataError, match=complaint):
        load("svhn", tmp_path)


@pytest.mark.parametrize("keep", [0, 60, 300])
def test_truncated_svhn_files_are_named(tmp_path: Path, keep: int) -> None:
    svhn_root(tmp_path, X=random_bytes(32, 32, 3, 2).numpy(), y=np.ones((2, 1), np.uint8))
    path = tmp_path / "svhn" / "train_32x32.mat"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(data.DataError, match=r"train_32x32\.mat"):
        load("svhn", tmp_path)


def test_digits_are_split_with_equal_shares_of_classes() -> None:
    pytest.importorskip("sklearn")
    found = data.load("digits")
    assert (len(found.train), len(found.test)) == data.info("digits").counts[::2]
    assert found.train.x.shape[1:] == (1, 8, 8) and float(found.train.x.max()) == 1
    shares = found.test.y.bincount() / (found.train.y.bincount() + found.test.y.bincount())
    assert float((shares - 0.2).abs().max()) < 0.01
    assert torch.equal(data.load("digits").test.x, found.test.x)
    assert not torch.equal(data.load("digits", seed=1).test.x, found.test.x)
    assert float(found.normalize(found.train.x).std()) == pytest.approx(1, abs=0.01)
