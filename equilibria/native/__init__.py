"""Compiled solver steps for the CPU. They are optional: without them, or with EQUILIBRIA_NATIVE=0, the steps run in torch.

One call does all the work between two evaluations of a map: it records every row and computes the next point. The kernels
are C++ functions that work on the memory of tensors. `record.h` and one header per method contain the steps, `measures.h`
contains the quantities that are computed once per solve. The extension module uses Python's stable ABI, so one build serves
Python 3.11 and later. A call takes less than a microsecond, a third of a call through ctypes.
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
    """Run the solves of this thread in torch inside the context, as a reference to compare with."""
    token = off.set(True)
    try:
        yield
    finally:
        off.reset(token)
