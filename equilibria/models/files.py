"""Model files: weights in safetensors, with the name and options from which the model is created again.

    eq.models.save(model, "digits.safetensors")
    model = eq.models.load("digits.safetensors")

Files are written atomically, verified when they are read, and cannot run code. Any program that reads safetensors can read
the weights. This needs safetensors, which comes with the extra `train`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

import equilibria
from equilibria._core.files import optional, replace_file
from equilibria.models.origins import from_data, origin_of, to_data
from equilibria.models.registry import create
from equilibria.models.states import bare, check_fit, check_storable, identities, on_host, take_dtypes

FORMAT = 1  # version of the file format; a library refuses files with a larger number than its own
# metadata are under one key, because safetensors writes several keys in arbitrary order: equal models must give equal bytes
KEY = "equilibria"

StateDict = dict[str, Any]
M = TypeVar("M", bound=nn.Module)


class ModelFileError(RuntimeError):
    """Raised if a file holds no model, or a model that does not fit the request."""


@dataclass(frozen=True)
class SavedModel:
    """The description of a model in a file.

    kind     its class
    name     the name by which `create` made it; None: it was constructed directly
    lost     options that a file cannot hold, with a description; such a model cannot be created from the file
    version  version of the library that wrote it; None: another program did
    shapes   shapes of the tensors in the file
    aliases  names that refer to another name's tensor, as for tied weights
    """

    path: Path
    kind: str | None
    name: str | None
    lost: Mapping[str, str]
    version: str | None
    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    notes: Mapping[str, Any] = field(repr=False)  # the metadata as stored in the file

    @property
    def options(self) -> dict[str, Any]:
        """The options given to `create`, without those that a file cannot hold."""
        try:
            return {name: from_data(data) for name, data in self.notes.get("options", {}).items()}
        except (TypeError, ValueError) as error:
            raise ModelFileError(
                f"{self.path} has options that this version of the library, {equilibria.__version__}, cannot read: {error} "
                f"It was written by version {self.version}. Install that version, or create the model and load(path, model)."
            ) from error


def save(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write the weights and buffers of a model, and the arguments of `create` that made it; returns the path.

    Changes made to the model after its creation, such as `model.layer.solver`, are not saved. Missing folders are created;
    an existing file is replaced atomically.
    """
    path, model, safetensors = Path(path), bare(model), optional("safetensors.torch", "train")
    tensors, notes = _described(model)
    notes["sha256"] = _digest(tensors, notes)
    metadata = {KEY: json.dumps(notes, allow_nan=False)}
    data = safetensors.save(tensors, metadata)
    replace_file(path, data)
    return path


@overload
def load(path: str | os.PathLike[str]) -> nn.Module: ...
@overload
def load(path: str | os.PathLike[str], model: M) -> M: ...
def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Return the model in a file.

    Without a `model`, one is created by the name and options in the file, with the saved dtypes. Otherwise the weights are
    copied into `model`, in its own dtypes; if they do not fit, it is left unchanged and ModelFileError is raised.
    """
    with _opened(Path(path)) as file:
        saved = _saved(Path(path), file)
        state = _state(saved, file)  # verified before a model is created
    target = _created(saved) if model is None else model
    if problem := check_fit(bare(target), state):
        raise ModelFileError(f"{path} does not fit this {type(bare(target)).__name__}: {problem} {_advice(saved, model)}")
    if model is None:
        take_dtypes(target, state)  # `create` makes models in torch's default dtype
    bare(target).load_state_dict(state)
    return target


def read_info(path: str | os.PathLike[str]) -> SavedModel:
    """Return the description of the model in a file; the weights are neither read nor verified."""
    with _opened(Path(path)) as file:
        return _saved(Path(path), file)


def _described(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors to write, each once, and the metadata."""
    state = model.state_dict()
    extra = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    every = {name: value for name, value in state.items() if name not in extra}
    for name, tensor in every.items():
        check_storable(name, tensor)
    first: dict[Any, str] = {}
    aliases = {name: first[key] for name, key in identities(every).items() if first.setdefault(key, name) != name}
    # safetensors refuses tensors that share memory: tied ones are written once, and their names stored
    once = {name: tensor for name, tensor in every.items() if name not in aliases}
    origin = origin_of(model)
    options, lost = _divided({} if origin is None else origin.options)
    notes = {
        "format": FORMAT,
        "version": equilibria.__version__,
        "kind": type(model).__name__,
        "name": None if origin is None else origin.name,
        "options": options,
        "lost": lost,
        "aliases": aliases,
        "complex": [name for name, tensor in once.items() if tensor.is_complex()],
        "extra": {name: _extra(name, value) for name, value in extra.items()},
    }
    return on_host(once), notes


def _divided(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options as JSON data, and descriptions of those that JSON cannot hold."""
    kept, lost = {}, {}
    for name, value in options.items():
        try:
            kept[name] = to_data(value)
        except TypeError:
            lost[name] = type(value).__name__
    return kept, lost


def _extra(name: str, value: Any) -> Any:
    """Return a value of the state dict that is no tensor as JSON data; raises TypeError with its name."""
    try:
        return to_data(value)
    except TypeError as error:
        raise TypeError(f"The state of the model has a value at {name} that a file cannot hold: {error}") from error


def _digest(tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> str:
    """Return the checksum of all tensors and metadata."""
    rest = {name: value for name, value in notes.items() if name != "sha256"}
    sums = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        sums.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sums.update(tensor.reshape(-1).view(torch.uint8).numpy().data)  # as bytes: numpy has no bfloat16
    return sums.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; raises FileNotFoundError or ModelFileError with a remedy."""
    safetensors = optional("safetensors", "train")
    if not path.is_file():
        seen = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {seen}: pass a file written by eq.models.save(model, path).")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise ModelFileError(
            f"{path} is damaged or not a safetensors file: {error}. Copy it again, or save the model again with "
            "save(model, path). Files of torch.save are read by torch.load(path, weights_only=True)."
        ) from error


def _saved(path: Path, file: Any) -> SavedModel:
    """Parse the metadata of an open file; raises ModelFileError for a newer format or damaged metadata."""
    text = (file.metadata() or {}).get(KEY)
    try:
        notes = {} if text is None else json.loads(text)
        if notes.get("format", FORMAT) > FORMAT:
            raise ModelFileError(
                f"{path} was written by version {notes.get('version')} of the library, in format {notes['format']}; this "
                f"version, {equilibria.__version__}, reads up to format {FORMAT}. Install the newer one."
            )
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        shapes |= {name: shapes[name][:-1] for name in notes.get("complex", ())}  # stored as pairs of real numbers
        shapes |= {name: shapes[other] for name, other in notes.get("aliases", {}).items()}
        kind, name, version = (notes.get(key) for key in ("kind", "name", "version"))
        return SavedModel(path, kind, name, notes.get("lost", {}), version, shapes, notes.get("aliases", {}), notes)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"{path} is damaged: its metadata is invalid ({error}). Save the model again.") from error


def _state(saved: SavedModel, file: Any) -> StateDict:
    """Return the state dict, verified against the checksum if the file has one."""
    # copied to torch's own alignment: copying complex numbers directly from the mapped file crashed the process
    tensors = {name: torch.clone(file.get_tensor(name)) for name in file.keys()}
    if saved.notes and _digest(tensors, saved.notes) != saved.notes.get("sha256"):
        raise ModelFileError(f"{saved.path} is damaged: its sha256 differs. Copy it again, or save the model again.")
    state: StateDict = tensors | {name: torch.view_as_complex(tensors[name]) for name in saved.notes.get("complex", ())}
    state |= {name: state[other] for name, other in saved.aliases.items()}
    return state | {name: from_data(data) for name, data in saved.notes.get("extra", {}).items()}


def _created(saved: SavedModel) -> nn.Module:
    """Create the model from its name and options; raises ModelFileError if the file does not determine it."""
    by_hand = "Create the model yourself and load the weights into it: load(path, model)."
    if saved.name is None:
        what = f"It holds a {saved.kind} that create() did not make" if saved.kind else "Another program wrote it"
        raise ModelFileError(f"{saved.path} does not describe how to create its model. {what}. {by_hand}")
    if saved.lost:
        what = ", ".join(f"{name} (a {kind})" for name, kind in saved.lost.items())
        raise ModelFileError(
            f"{saved.path} lacks these options of its {saved.name}, which a file cannot hold: {what}. {by_hand}"
        )
    options = saved.options
    try:
        with torch.random.fork_rng(devices=[]):  # the initial weights are discarded, and the random state is restored
            return create(saved.name, **options)
    except (TypeError, ValueError) as error:
        raise ModelFileError(
            f"{saved.path} holds a {saved.name} of version {saved.version}, which this version, {equilibria.__version__}, "
            f"cannot make: {error} {by_hand}"
        ) from error


def _advice(saved: SavedModel, model: nn.Module | None) -> str:
    """Return a remedy for weights that do not fit."""
    if model is None:
        return (
            f"The model was changed after its creation, or version {saved.version} created it differently. Create it in the "
            "same way and load the weights into it: load(path, model)."
        )
    if saved.name is None or saved.lost:
        return "Create the model with the options of the saved one."
    return f"The file holds {saved.name}: load(path) creates it, and read_info(path).options are its options."
