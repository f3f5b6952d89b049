"""Weights that come with the package: small models from the tables of results, each with a card.

    model = eq.models.create("jfb-resnet-mnist", pretrained=True)
    eq.models.pretrained.card("jfb-resnet-mnist")["metrics"]

A file of weights is a safetensors file of `eq.models.save`. Its card is a JSON file with the experiment and its settings,
the measurements, checksums of the data, and the commit. `equilibria publish` makes both from a run.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from equilibria._core.names import nearest

__all__ = ["card", "names", "weights"]

FOLDER = Path(__file__).parent / "weights"  # the weights ship with the package


def names() -> list[str]:
    """Return the names of models that have weights."""
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def weights(name: str) -> Path:
    """Return the path of a model's weights; raises ValueError if their checksum is not that of the card."""
    if name not in names():
        raise ValueError(
            f"There are no weights of {name!r}: pretrained=True works for {', '.join(names())}. {nearest(name, names())}"
        )
    path = FOLDER / f"{name}.safetensors"
    found, expected = hashlib.sha256(path.read_bytes()).hexdigest(), card(name)["weights_sha256"]
    if found != expected:
        raise ValueError(f"{path} has the checksum {found}, expected {expected}. Install the package again.")
    return path


def card(name: str) -> dict[str, Any]:
    """Return the card of a model's weights: experiment, metrics, checksums and commit."""
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"There is no card of {name!r}. {nearest(name, names())}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found
