"""Pictures that a task draws of its trained model, stored in the folder of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from equilibria._core.files import replace_file
from equilibria.lab.training.durable import read_object

FOLDER, TITLES = "gallery", "titles.json"
# pictures that show samples of a dataset; reports in other folders leave them out, since these may be published
SHOW_DATA = ("segmentation",)


def write_gallery(run: Path, pictures: Mapping[str, tuple[str, bytes]]) -> None:
    """Store the pictures, each a (title, PNG) by name."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    for name, (_, content) in pictures.items():
        replace_file(folder / f"{name}.png", content)
    titles = {name: title for name, (title, _) in pictures.items()}
    replace_file(folder / TITLES, json.dumps(titles).encode())  # last: its presence means that all pictures are stored


def read_gallery(run: Path) -> dict[str, tuple[str, bytes]]:
    """Read the stored pictures; empty if there are none."""
    index = run / FOLDER / TITLES
    if not index.is_file():
        return {}
    titles = read_object(index, f"Remove the folder {run / FOLDER}: a report does without it.")
    pictures = {name: (title, run / FOLDER / f"{name}.png") for name, title in titles.items()}
    return {name: (str(title), picture.read_bytes()) for name, (title, picture) in pictures.items()}
