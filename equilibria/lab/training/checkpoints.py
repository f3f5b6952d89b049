"""Checkpoints: trees of tensors and plain values as safetensors and JSON, written atomically and verified when read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from equilibria._core.files import sync_folder
from equilibria.lab.errors import CorruptCheckpointError
from equilibria.lab.training.durable import write_new

MANIFEST = "manifest.json"
STRUCTURE = "state.json"

Tree = Any  # tensors, numbers, strings, None, in dicts, lists and tuples


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read and verified."""

    path: Path
    step: int
    parts: dict[str, Tree]


class Checkpoints:
    """Folders `step-00001875`, the newest `keep` of them.

    Each has a safetensors file for every part of the tree, the structure in state.json, and manifest.json with the sha256 of
    all these files. It is written under a temporary name, synced to disk and renamed, so that it is either complete or
    absent. Older checkpoints are removed only after that. Reading a checkpoint cannot run code.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def write(self, step: int, parts: Mapping[str, Tree]) -> Path:
        """Write a checkpoint of these parts, each a tree, and remove old ones; returns its path."""
        path = self.folder / f"step-{step:08d}"
        temporary = self.folder / f".{path.name}.tmp-{os.getpid()}"
        try:
            temporary.mkdir(parents=True)
            files = _files(parts)
            for name, data in files.items():
                write_new(temporary / name, data)
            sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
            write_new(temporary / MANIFEST, (json.dumps({"step": step, "sha256": sums}, indent=1) + "\n").encode())
            sync_folder(temporary)  # before the rename: after a crash the named folder must not lack files
            self._put(temporary, path)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            kept = self.paths()
            last = (
                f"{kept[-1].name} is kept: free disk space and start the run again to continue from it"
                if kept
                else "there is no earlier one"
            )
            raise OSError(
                error.errno, f"cannot write the checkpoint {path.name} in {self.folder}: {error.strerror or error}; {last}"
            ) from error
        for old in self.paths()[: -self.keep]:  # only now, since they are needed until the new one has its name
            shutil.rmtree(old)
        return path

    def _put(self, temporary: Path, path: Path) -> None:
        """Rename a finished checkpoint; one of the same step, written before the evaluation, is kept aside until then."""
        aside = path.with_name(f".{path.name}.old")
        if path.exists():
            os.rename(path, aside)
        os.rename(temporary, path)
        sync_folder(self.folder)
        shutil.rmtree(aside, ignore_errors=True)

    def paths(self) -> list[Path]:
        """Return the checkpoints from old to new, intact or not; one that was set aside counts until it is replaced."""
        found = {path.name: path for path in self.folder.glob("step-*") if path.is_dir() and path.name[5:].isdigit()}
        asides = {_named(aside).name: aside for aside in self.folder.glob(".step-*.old") if aside.is_dir()}
        return [path for _, path in sorted((asides | found).items())]

    def newest(self, tell: Callable[[str], None]) -> Found | None:
        """Return the newest checkpoint that is intact; None if there never was one.

        Newer ones that are corrupt are reported by `tell` and renamed to `step-N.corrupt`. If no checkpoint is intact, an
        error is raised and nothing is renamed.
        """
        found, problems = self.read_newest()
        if found is None:
            return None
        for path, error in problems.items():
            tell(f"{error} Continuing from the one before.")
            aside = path.with_name(f"{path.name}.corrupt")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        return found

    def read_newest(self, parts: Collection[str] | None = None) -> tuple[Found | None, dict[Path, CorruptCheckpointError]]:
        """Return the newest intact checkpoint, or these parts of it, and the errors of newer ones that are corrupt.

        Nothing in the folder is changed. Returns (None, {}) if there never was a checkpoint; raises if none is intact.
        """
        problems: dict[Path, CorruptCheckpointError] = {}
        paths = self.paths()
        for path in reversed(paths):
            try:
                return read(path, parts), problems
            except CorruptCheckpointError as error:
                problems[path] = error
        if self.paths() != paths:  # the training process has written or removed one in the meantime
            return self.read_newest(parts)
        names = sorted(path.name for path in (*paths, *self.folder.glob("step-*.corrupt")))
        if names:
            raise CorruptCheckpointError(
                f"All checkpoints in {self.folder} are corrupt: {', '.join(names)}. "
                + "".join(f"{error} " for error in problems.values())
                + "Restore one of them from a copy, or start a new run in another folder."
            )
        return None, problems

    @property
    def empty(self) -> bool:
        """True if there is no checkpoint, not even a corrupt one."""
        return not self.paths() and not any(self.folder.glob("step-*"))

    def sweep(self) -> None:
        """Complete or undo the writes of a process that was killed."""
        for aside in self.folder.glob(".step-*.old"):
            path = _named(aside)
            shutil.rmtree(aside) if path.exists() else aside.rename(path)
        for path in self.folder.glob(".step-*.tmp-*"):
            shutil.rmtree(path, ignore_errors=True)


def read(path: Path, parts: Collection[str] | None = None) -> Found:
    """Read a checkpoint, or these parts of it, and verify it; raises CorruptCheckpointError."""
    sums, step = _manifest(path)
    structure = _object(path, STRUCTURE, _checked(path, STRUCTURE, sums))
    names = [name for name in structure if parts is None or name in parts]
    return Found(path, step, {name: _part(path, name, structure[name], sums) for name in names})


def encode(value: Tree, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Return a tree as JSON data that keeps the types of containers and keys; tensors are added to `tensors` by path."""
    if isinstance(value, Tensor):
        if path in tensors:
            raise ValueError(f"Two tensors of a checkpoint have the same path {path!r}: rename a key of the state.")
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [encode(each, tensors, _join(path, i)) for i, each in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        pairs = [[encode(key, {}), encode(each, tensors, _join(path, key))] for key, each in value.items()]
        return {"dict": dict(pairs)} if all(isinstance(key, str) for key in value) else {"pairs": pairs}
    raise TypeError(
        f"A checkpoint holds tensors, numbers, strings and None in dicts, lists and tuples; got {type(value).__name__} "
        f"at {path!r}."
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Tree:
    """Return the tree that `encode` was given."""
    if isinstance(value, list):
        return [decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    (kind, inner), *_ = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "float":
        return float(inner)
    if kind == "tuple":
        return tuple(decode(each, tensors) for each in inner)
    pairs = inner.items() if kind == "dict" else inner
    return {decode(key, tensors): decode(each, tensors) for key, each in pairs}


def _named(aside: Path) -> Path:
    """Return the original path of a checkpoint that was set aside as `.step-N.old`."""
    return aside.with_name(aside.name[1 : -len(".old")])


def _part(path: Path, name: str, structure: Any, sums: Mapping[str, str]) -> Tree:
    """Read and verify one part of a checkpoint."""
    tensors = _tensors(path, name, sums)
    try:
        return decode(structure, tensors)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise _corrupt(path, f"{STRUCTURE} does not describe the part {name!r} ({type(error).__name__}: {error})") from error


def _corrupt(path: Path, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"The checkpoint {path} is corrupt: {reason}.")


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _files(parts: Mapping[str, Tree]) -> dict[str, bytes]:
    """Return the content of all files of a checkpoint but the manifest, by name."""
    files, structure = {}, {}
    for name, tree in parts.items():
        tensors: dict[str, Tensor] = {}
        structure[name] = encode(tree, tensors)
        if tensors:
            files[f"{name}.safetensors"] = safetensors.torch.save(_stored(tensors))
    files[STRUCTURE] = (json.dumps(structure, allow_nan=False) + "\n").encode()
    return files


def _stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the host, none sharing memory with another, since safetensors refuses tied weights."""
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        host = tensor.detach().cpu().contiguous()
        pointer = host.untyped_storage().data_ptr()
        stored[name] = host.clone() if pointer in seen else host
        seen.add(pointer)
    return stored


def _manifest(path: Path) -> tuple[dict[str, str], int]:
    """Return the checksums by file and the step of a checkpoint."""
    manifest = _object(path, MANIFEST, _bytes(path, MANIFEST))
    sums, step = manifest.get("sha256"), manifest.get("step")
    if not isinstance(sums, dict) or not isinstance(step, int):
        raise _corrupt(path, f"{MANIFEST} must have a number 'step' and an object 'sha256', got {manifest!s:.80}")
    return sums, step


def _object(path: Path, name: str, data: bytes) -> dict[str, Any]:
    """Parse a JSON object; raises CorruptCheckpointError if `data` is something else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"{name} is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise _corrupt(path, f"{name} must be a JSON object, got {found!s:.80}")
    return found


def _bytes(path: Path, name: str) -> bytes:
    """Read a file. A missing file makes the checkpoint corrupt; other errors, such as denied access, are passed on."""
    try:
        return (path / name).read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise _corrupt(path, f"cannot read {name}, {error.strerror}") from error


def _checked(path: Path, name: str, sums: Mapping[str, str]) -> bytes:
    """Read a file and compare its checksum with the manifest."""
    data = _bytes(path, name)
    if hashlib.sha256(data).hexdigest() != sums.get(name):
        raise _corrupt(path, f"{name} does not have the sha256 of the manifest")
    return data


def _tensors(path: Path, name: str, sums: Mapping[str, str]) -> dict[str, Tensor]:
    """Read the tensors of a part; empty if it has none."""
    file = f"{name}.safetensors"
    if file not in sums:
        return {}
    try:
        found = safetensors.torch.load(_checked(path, file, sums))
    except safetensors.SafetensorError as error:
        raise _corrupt(path, f"{file} is no safetensors file ({error})") from error
    # a copy has torch's alignment; kernels may round differently on tensors with another one
    return {key: torch.clone(tensor) for key, tensor in found.items()}
