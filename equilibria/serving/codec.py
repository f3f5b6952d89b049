"""The wire format of requests and answers: JSON, or tensors in safetensors. Reading them never runs code."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria._core.files import optional
from equilibria.serving.tickets import Answer, InvalidRequestError

JSON, SAFETENSORS = "application/json", "application/x-safetensors"
BINARY = (SAFETENSORS, "application/octet-stream")
DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
OPTIONS = {"rtol": float, "max_steps": int, "deadline": float}


@dataclass(frozen=True)
class DecodedRequest:
    """A decoded request: the arguments of `Engine.submit`."""

    inputs: Any
    rtol: float | None = None
    max_steps: int | None = None
    deadline: float | None = None


def read_json(body: bytes, dtype: torch.dtype) -> DecodedRequest:
    """Decode an object with "inputs" (nested lists of numbers, or an object of such) and optionally "dtype" and options."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from error
    if not isinstance(data, dict) or "inputs" not in data:
        raise InvalidRequestError('The body must be a JSON object with "inputs".')
    unknown = sorted(data.keys() - {"inputs", "dtype", *OPTIONS})
    if unknown:
        raise InvalidRequestError(f"Unknown fields {unknown}; expected inputs, dtype, {', '.join(OPTIONS)}.")
    name = data.get("dtype")
    if name is not None and name not in DTYPES:
        raise InvalidRequestError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}.")
    chosen = dtype if name is None else DTYPES[name]
    inputs = data["inputs"]
    tensors = {key: _tensor(value, chosen) for key, value in inputs.items()} if isinstance(inputs, dict) else None
    return DecodedRequest(_tensor(inputs, chosen) if tensors is None else tensors, **_options(data))


def read_safetensors(body: bytes, query: Mapping[str, str]) -> DecodedRequest:
    """Decode a tensor named "inputs", or tensors named after the model's arguments; options come from the query string."""
    loader = optional("safetensors.torch", "serve")
    try:
        tensors: dict[str, Tensor] = loader.load(body)
    except Exception as error:
        raise InvalidRequestError(f"The body is not a safetensors file: {error}.") from error
    if not tensors:
        raise InvalidRequestError("The safetensors file holds no tensor.")
    unknown = sorted(query.keys() - OPTIONS.keys())
    if unknown:
        raise InvalidRequestError(f"Unknown options {unknown}; expected {', '.join(OPTIONS)}.")
    given = {name: _number(name, value) for name, value in query.items()}
    return DecodedRequest(tensors["inputs"] if list(tensors) == ["inputs"] else tensors, **_options(given))


def _number(name: str, text: str) -> float:
    """Parse an option of the query string; whole numbers become int where the option is an int."""
    try:
        value = float(text)
    except ValueError as error:
        raise InvalidRequestError(f"{name} must be a number, got {text!r}.") from error
    return int(value) if OPTIONS[name] is int and math.isfinite(value) and value == int(value) else value


def _tensor(value: Any, dtype: torch.dtype) -> Tensor:
    try:
        return torch.tensor(value, dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(f"inputs must be numbers in lists of equal lengths: {error}.") from error


def _options(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are set; raises InvalidRequestError for a value of the wrong type."""
    found: dict[str, Any] = {}
    for name, kind in OPTIONS.items():
        value = data.get(name)
        if value is None:
            continue
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (kind is float and isinstance(value, float))):
            raise InvalidRequestError(f"{name} must be {'a whole number' if kind is int else 'a number'}, got {value!r}.")
        found[name] = kind(value)
    return found


def describe_answer(answer: Answer) -> dict[str, Any]:
    """Return everything but the output as a JSON-compatible dict."""
    residual = answer.residual if math.isfinite(answer.residual) else None
    return {
        "status": answer.status.name,
        "steps": answer.steps,
        "residual": residual,
        "late": answer.late,
        "waited": round(answer.waited, 6),
        "seconds": round(answer.seconds, 6),
    }


def write_json(answer: Answer) -> bytes:
    """Encode an answer as JSON; nan and inf, which JSON lacks, become null."""
    output = pytree.tree_map(lambda x: _plain(x.tolist()) if isinstance(x, Tensor) else x, answer.output)
    return json.dumps({"output": output, **describe_answer(answer)}, allow_nan=False).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


def write_safetensors(answer: Answer) -> bytes:
    """Encode the output as tensors named "output", or "output.0", ...; all other fields are text in the metadata."""
    leaves = [leaf for leaf in pytree.tree_leaves(answer.output) if isinstance(leaf, Tensor)]
    names = ["output"] if len(leaves) == 1 else [f"output.{i}" for i in range(len(leaves))]
    tensors = {name: leaf.cpu().contiguous().clone() for name, leaf in zip(names, leaves, strict=True)}
    metadata = {name: json.dumps(value) for name, value in describe_answer(answer).items()}
    data: bytes = optional("safetensors.torch", "serve").save(tensors, metadata)
    return data
