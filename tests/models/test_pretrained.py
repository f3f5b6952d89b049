"""Weights that come with the package."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

import equilibria as eq

pytest.importorskip("safetensors")
from equilibria.models import pretrained

NAMES = pretrained.names()


def test_there_are_weights() -> None:
    assert "jfb-resnet-mnist" in NAMES and set(NAMES) <= set(eq.models.names())


@pytest.mark.parametrize("name", NAMES)
def test_weights_load_into_the_model_of_their_name(name: str) -> None:
    card = pretrained.card(name)
    model = eq.models.create(name, pretrained=True)
    fresh = eq.models.create(name)
    assert not model.training and fresh.training
    assert sum(weight.numel() for weight in model.parameters()) == card["parameters"]
    assert all(bool(torch.isfinite(weight).all()) for weight in model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_files_are_small_and_match_their_cards(name: str) -> None:
    path, card = pretrained.weights(name), pretrained.card(name)
    assert path.stat().st_size <= 1e6
    assert hashlib.sha256(path.read_bytes()).hexdigest() == card["weights_sha256"]
    assert {"experiment", "scale", "config_sha256", "metrics", "data", "commit", "environment"} <= card.keys()


def test_models_without_weights_say_which_have_some() -> None:
    with pytest.raises(ValueError, match="jfb-resnet-mnist"):
        eq.models.create("mdeq-tiny", pretrained=True)
    with pytest.raises(ValueError, match="There is no card"):
        pretrained.card("mdeq-tiny")


def test_damaged_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in ("safetensors", "json"):
        data = (pretrained.FOLDER / f"jfb-resnet-mnist.{suffix}").read_bytes()
        (tmp_path / f"jfb-resnet-mnist.{suffix}").write_bytes(data[:-1] + b" " if suffix == "safetensors" else data)
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="Install the package again"):
        pretrained.weights("jfb-resnet-mnist")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if "mnist" in name])
def test_accuracies_are_those_of_the_cards(name: str) -> None:
    if not (Path(os.environ.get("EQUILIBRIA_DATA", "nowhere")) / "mnist").is_dir():
        pytest.skip("EQUILIBRIA_DATA has no folder mnist")
    from equilibria.lab.data.catalogue import load

    found, model = load("mnist", Path(os.environ["EQUILIBRIA_DATA"])), eq.models.create(name, pretrained=True)
    right = 0
    with torch.no_grad():
        for x, y in zip(found.test.x.split(500), found.test.y.split(500), strict=True):
            right += int((model(found.normalize(x)).argmax(1) == y).sum())
    # a few of 10,000 images may be decided by rounding
    assert right / 10_000 == pytest.approx(pretrained.card(name)["metrics"]["test"]["accuracy"], abs=5e-4)
