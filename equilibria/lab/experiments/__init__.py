"""Experiments: functions that return everything a run takes, and the tables they make up."""

from equilibria.lab.experiments.assignments import SettingError
from equilibria.lab.experiments.catalogue import UnknownName, experiment, experiments, table, tables
from equilibria.lab.experiments.definitions import Claim, Column, Experiment, Figure, Profile, Row, Scale, Table

__all__ = [
    "Claim",
    "Column",
    "Experiment",
    "Figure",
    "Profile",
    "Row",
    "Scale",
    "SettingError",
    "Table",
    "UnknownName",
    "experiment",
    "experiments",
    "table",
    "tables",
]
