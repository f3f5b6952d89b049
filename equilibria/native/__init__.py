"""Compiled solver steps for the CPU. Optional: without them, or with EQUILIBRIA_NATIVE=0, the same steps run in torch.

One call does all that lies between two evaluations of a map: the record of every row and the algebra of the solver. The
kernels are plain C++ on the memory of tensors (`methods.h`, `record.h`), reached through an extension module of Python's
stable ABI: a call costs less than a microsecond, a third of what ctypes takes, and one build serves every version of Python.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from equilibria.native.context import CONTEXT_SIZE

__all__ = ["available", "disabled", "reason"]

_off: ContextVar[bool] = ContextVar("equilibria_native_off", default=False)


def _load() -> tuple[Any, str]:
    """The extension module, or None and why there is none."""
    if os.environ.get("EQUILIBRIA_NATIVE", "1") == "0":
        return None, "EQUILIBRIA_NATIVE=0 turns the compiled kernels off."
    try:
        found = importlib.import_module("equilibria.native._kernels")
    except ImportError as error:
        return None, f"The compiled kernels are not built ({error}); install again where there is a C++ compiler."
    if found.context_size != CONTEXT_SIZE:
        return None, "The compiled kernels were built from other sources; install again."
    return found, ""


kernels, _reason = _load()


def available() -> bool:
    """True if solves on the CPU run compiled steps here."""
    return kernels is not None and not _off.get()


def reason() -> str:
    """Why `available()` is False; empty if it is True."""
    return "equilibria.native.disabled() is active." if _off.get() and kernels is not None else _reason


@contextmanager
def disabled() -> Iterator[None]:
    """Run solves of this thread by the pure torch steps, as a reference to compare with."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)
