"""Errors of the laboratory. This module imports nothing, so that the command line can catch them without loading more."""

from __future__ import annotations


class DataError(RuntimeError):
    """A data file is missing, damaged or of another kind than expected; the message names it."""


class TrainingError(RuntimeError):
    """Training was stopped by its own rules: too many bad steps, or a failed solve where none is allowed."""


class CorruptCheckpointError(RuntimeError):
    """A checkpoint is damaged, or does not fit its run."""


class SettingError(ValueError):
    """A setting that does not exist, or a value of the wrong type; the message lists the choices."""


class UnnamedCodeError(ValueError):
    """A run folder names code outside of the library, and the user has not named it; `name` is FILE.py:NAME."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class UnknownName(ValueError):  # noqa: N818
    """No experiment or table of that name; the message lists the nearest ones."""
