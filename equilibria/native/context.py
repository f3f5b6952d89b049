"""The `struct Context` of the kernels in ctypes, and the names of its arrays."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

INTERFACE = 3  # the same number as in context.h
NUMBERS = (
    "excess",
    "length",
    "size",
    "first_length",
    "first_size",
    "peak",
    "last",
    "milestone",
    "shortest",
)  # one number per row, in the dtype of the state
COUNTERS = ("steps", "best_step", "waiting", "waited", "limit", "count")  # one int64 per row


class Context(ctypes.Structure):
    """`struct Context` of context.h, field for field; the fields are documented there."""

    _fields_ = [
        *[
            (name, c_int64)
            for name in (
                "n",
                "rows",
                "batch",
                "first_limit",
                "most",
                "slots",
                "wanted",
                "core_size",
                "patience",
                "watchful",
                "threads",
                "patience_of_trust",
            )
        ],
        *[
            (name, c_double)
            for name in (
                "rtol",
                "atol",
                "floor",
                "natural",
                "damping",
                "threshold",
                "slow",
                "lowest",
                "highest",
                "longest",
            )
        ],
        *[
            (name, c_void_p)
            for name in (
                "place",
                "status",
                *COUNTERS,
                "order",
                "current",
                *NUMBERS[:3],
                "scale",
                *NUMBERS[3:8],
                "answer",
                "residual",
                "value",
                "shortest",
                "iterate",
                "other",
                "core",
                "first",
                "second",
                "own",
            )
        ],
    ]


CONTEXT_SIZE = ctypes.sizeof(Context)
PICARD, ANDERSON, BROYDEN, GMRES_BEGIN, GMRES, ANDERSON_GRAM = range(6)  # `enum Method` of kernels.cpp
