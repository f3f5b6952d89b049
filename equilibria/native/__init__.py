"""Compiled solver steps for the CPU. Optional: without them, or with EQUILIBRIA_NATIVE=0, the same steps run in torch.

One call does all the work between two evaluations of a map: the record of every row and the algebra of the solver. The
kernels are plain C++ on the memory of tensors in an extension module built for Python's stable ABI: `record.h` and one
header per method, and `measures.h` for what is computed once per solve. A call takes less than a microsecond, a third of a
ctypes call, and one build serves every version of Python.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from equilibria.native.context import CONTEXT_SIZE, INTERFACE

__all__ = ["available", "disabled", "reason"]

off: ContextVar[bool] = ContextVar("equilibria_nativeoff", default=False)


def _load() -> tuple[Any, str]:
    """Return the extension module and an empty reason, or None and the reason why it is not available."""
    if os.environ.get("EQUILIBRIA_NATIVE", "1") == "0":
        return None, "EQUILIBRIA_NATIVE=0 turns the compiled kernels off."
    try:
        found = importlib.import_module("equilibria.native._kernels")
    except ImportError as error:
        return None, f"The compiled kernels are not built ({error}); install again where there is a C++ compiler."
    if (found.context_size, getattr(found, "interface", 1)) != (CONTEXT_SIZE, INTERFACE):
        return None, "The compiled kernels were built from other sources; install again."
    return found, ""


kernels, _reason = _load()


def available() -> bool:
    """Return True if solves on the CPU run compiled steps."""
    return kernels is not None and not off.get()


def reason() -> str:
    """Return why `available()` is False; empty if it is True."""
    return "equilibria.native.disabled() is active." if off.get() and kernels is not None else _reason


@contextmanager
def disabled() -> Iterator[None]:
    """Run the solves of this thread with the torch steps inside the context, as a reference to compare with."""
    token = off.set(True)
    try:
        yield
    finally:
        off.reset(token)
