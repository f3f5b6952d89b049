"""Errors of the laboratory, in a module that imports nothing: the command line catches them without loading the rooms."""

from __future__ import annotations


class DataError(RuntimeError):
    """A data file is missing, damaged or not of the expected kind; the message names it."""


class TrainingError(RuntimeError):
    """Training was stopped by its own rules: too many bad steps, or a failed solve where none is allowed."""


class CorruptCheckpointError(RuntimeError):
    """A checkpoint is not what was written."""


class SettingError(ValueError):
    """A setting that does not exist, or a value of the wrong type; the message lists the choices."""


class UnknownName(ValueError):  # noqa: N818
    """No experiment or table of that name; the message lists the nearest ones."""
