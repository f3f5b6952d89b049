"""Warnings that point at the user's line instead of a line of this package or of torch."""

from __future__ import annotations

import os
import sys
import warnings

import torch

_INSIDE = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (os.path.dirname(__file__), torch.__file__))


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the location of the first caller outside of this package and of torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
