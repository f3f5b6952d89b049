"""The memory of one native solve: a struct for the kernels, and the tensors behind its pointers."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

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
)  # one of the dtype of the state per row
COUNTERS = ("steps", "best_step", "waiting", "waited", "limit", "count")  # one int64 per row


class Context(ctypes.Structure):
    """`struct Context` of context.h, field for field; that file says what they mean."""

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
            )
        ],
    ]


CONTEXT_SIZE = ctypes.sizeof(Context)
