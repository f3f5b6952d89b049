from __future__ import annotations

import errno
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from equilibria.lab.training import CorruptCheckpointError
from equilibria.lab.training.checkpoints import Checkpoints, read
from equilibria.lab.training.durable import write_new

TREE = {
    "model": {
        "weight": torch.arange(6.0).reshape(2, 3),
        "count": torch.tensor(3),
        "half": torch.ones(2, dtype=torch.bfloat16),
    },
    "optimizer": {"state": {0: {"step": torch.tensor(2.0)}, 1: {}}, "groups": [{"betas": (0.9, 0.999), "foreach": None}]},
    "other": (1, 2.5, True, "text", [math.inf, -math.inf], {"a": {}}),
}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and a == b


def _three(folder: Path) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for step in (1, 2, 3):
        checkpoints.write(step, {"part": {"at": step, "weight": torch.full((1000,), float(step))}})
    return checkpoints


def _flip(path: Path) -> None:
    data = bytearray((path / "part.safetensors").read_bytes())
    data[-7] ^= 1
    (path / "part.safetensors").write_bytes(data)


def _truncate(path: Path) -> None:
    data = (path / "part.safetensors").read_bytes()
    (path / "part.safetensors").write_bytes(data[: len(data) // 2])


def _lose_file(path: Path) -> None:
    (path / "state.json").unlink()


def _lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def _cut_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"step": 3, "sha')


DAMAGES = [_flip, _truncate, _lose_file, _lose_manifest, _cut_manifest]


def test_every_kind_of_value_comes_back_as_it_was(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).write(12, TREE)
    found = read(path)
    assert path.name == "step-00000012" and found.step == 12
    assert _equal(found.parts, TREE)
    assert set(read(path, parts=("model",)).parts) == {"model"}


def test_tied_weights_are_stored_under_both_names(tmp_path: Path) -> None:
    weight = torch.randn(3)
    found = read(Checkpoints(tmp_path).write(1, {"model": {"a": weight, "b": weight, "c": weight[1:]}})).parts["model"]
    assert torch.equal(found["a"], weight) and torch.equal(found["b"], weight) and torch.equal(found["c"], weight[1:])


def test_a_value_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"got object at 'a\.0'"):
        Checkpoints(tmp_path).write(1, {"model": {"a": [object()]}})


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = _three(tmp_path)
    assert [path.name for path in checkpoints.paths()] == ["step-00000002", "step-00000003"]
    found = checkpoints.newest(pytest.fail)
    assert found is not None and found.parts["part"]["at"] == 3
    assert Checkpoints(tmp_path / "none").newest(pytest.fail) is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupt_checkpoint_is_named_and_the_one_before_is_used(damage: Callable[[Path], None], tmp_path: Path) -> None:
    checkpoints, told = _three(tmp_path), list[str]()
    damage(tmp_path / "step-00000003")
    found = checkpoints.newest(told.append)
    assert found is not None and found.step == 2
    assert len(told) == 1 and f"{tmp_path / 'step-00000003'} is corrupt" in told[0]
    checkpoints.write(3, {"part": {"at": 3}})  # the run comes by there again
    found = checkpoints.newest(pytest.fail)
    assert found is not None and found.step == 3


def test_corrupt_checkpoints_alone_raise(tmp_path: Path) -> None:
    checkpoints = _three(tmp_path)
    for path in checkpoints.paths():
        _flip(path)
    with pytest.raises(CorruptCheckpointError, match="step-00000002, step-00000003"):
        checkpoints.newest(lambda text: None)


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_full_disk_leaves_the_last_checkpoint(writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, done = _three(tmp_path), list[Path]()

    def full(path: Path, data: bytes) -> None:
        if len(done) == writes:
            write_new(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        done.append(path)
        write_new(path, data)

    monkeypatch.setattr("equilibria.lab.training.checkpoints.write_new", full)
    with pytest.raises(OSError, match=f"step-00000004 in {tmp_path}: No space left .* step-00000003 is kept") as error:
        checkpoints.write(4, TREE)
    assert error.value.errno == errno.ENOSPC
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    found = checkpoints.newest(pytest.fail)
    assert found is not None and found.step == 3


def test_leftovers_of_killed_writes_are_removed(tmp_path: Path) -> None:
    checkpoints = _three(tmp_path)
    (tmp_path / ".step-00000004.tmp-77").mkdir()
    (tmp_path / "step-00000003").rename(tmp_path / ".step-00000003.old")  # killed before its successor had the name
    checkpoints.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
