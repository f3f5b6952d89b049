"""CamVid: reading the reduced files, and reducing the published ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from equilibria.lab import data
from tests.lab.data.formats import random_bytes, write


def camvid_root(root: Path, labels_high: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = random_bytes(2, 72, 96, 3), random_bytes(2, 72, 96, high=labels_high)
    (root / "camvid").mkdir(parents=True)
    for split in ("train", "val", "test"):
        np.savez(root / "camvid" / f"{split}.npz", images=images.numpy(), labels=labels.numpy())
    return images, labels


def test_void_pixels_have_the_label_ignore(tmp_path: Path) -> None:
    images, labels = camvid_root(tmp_path)
    found = data.load("camvid", tmp_path)
    assert found.valid is not None and len(found.classes) == 11
    assert torch.equal(found.valid.x, images.permute(0, 3, 1, 2))
    assert torch.equal(found.valid.y == data.IGNORE, labels == 11)
    assert torch.equal(found.valid.y[labels < 11], labels[labels < 11].long())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"images": np.zeros((1, 72, 95, 3), np.uint8), "labels": np.zeros((1, 72, 95), np.uint8)}, r"\(1, 72, 95, 3\)"),
        ({"images": np.zeros((1, 72, 96, 3), np.uint8)}, "no numbers under 'labels'; it holds images"),
        ({"images": np.zeros((1, 72, 96, 3), np.uint8), "labels": np.full((1, 72, 96), 12, np.uint8)}, "labels from 12"),
    ],
)
def test_files_of_another_kind_are_refused(
    tmp_path: Path, content: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]], complaint: str
) -> None:
    camvid_root(tmp_path)
    np.savez(tmp_path / "camvid" / "val.npz", **content)  # type: ignore[arg-type]
    with pytest.raises(data.DataError, match=complaint) as caught:
        data.load("camvid", tmp_path)
    assert "val.npz" in str(caught.value)


def test_pickles_inside_files_are_refused(tmp_path: Path) -> None:
    camvid_root(tmp_path)
    np.savez(tmp_path / "camvid" / "val.npz", images=np.array([print], dtype=object), labels=np.zeros(1))
    with pytest.raises(data.DataError, match="allow_pickle=False"):
        data.load("camvid", tmp_path)
    write(tmp_path / "camvid" / "val.npz", b"PK rubbish")
    with pytest.raises(data.DataError, match="damaged"):
        data.load("camvid", tmp_path)


def test_reducing_averages_images_and_takes_the_majority_of_labels(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(72 * 96).reshape(72, 96) % 12
    blocks = np.kron(pixels, np.ones((5, 5))).astype(np.uint8)
    labels = blocks.copy()
    labels[::5] = 11  # a fifth of each block
    for split in ("train", "val", "test"):
        for folder, content in ((split, np.stack([blocks * 10] * 3, axis=-1)), (f"{split}annot", labels)):
            (tmp_path / "CamVid" / folder).mkdir(parents=True)
            image.fromarray(content).save(tmp_path / "CamVid" / folder / "0001.png")
    data.reduce_camvid(tmp_path / "CamVid", tmp_path / "root")
    found = data.load("camvid", tmp_path / "root")
    assert torch.equal(found.train.x[0, 0], torch.from_numpy(pixels * 10).to(torch.uint8))
    expected = torch.from_numpy(pixels)
    assert torch.equal(found.test.y[0], expected.masked_fill(expected == 11, data.IGNORE))


def test_reducing_needs_the_pictures(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="holds no PNG"):
        data.reduce_camvid(tmp_path, tmp_path)
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "train").mkdir()
    image.fromarray(np.zeros((10, 10, 3), np.uint8)).save(tmp_path / "train" / "a.png")
    with pytest.raises(data.DataError, match=r"\(10, 10, 3\), expected \(360, 480, 3\)"):
        data.reduce_camvid(tmp_path, tmp_path)


def test_without_files_the_error_says_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="reduce_camvid"):
        data.load("camvid", tmp_path)
