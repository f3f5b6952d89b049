"""Experiments: functions that return everything a run takes, and the tables they make up."""

from equilibria.lab.experiments.assignments import SettingError
from equilibria.lab.experiments.catalogue import UnknownName, experiment, experiments, table, tables
from equilibria.lab.experiments.claims import Claim
from equilibria.lab.experiments.definitions import Column, Experiment, Figure, Profile, Scale, Table, TableRow

__all__ = [
    "Claim",
    "Column",
    "Experiment",
    "Figure",
    "Profile",
    "Scale",
    "SettingError",
    "Table",
    "TableRow",
    "UnknownName",
    "experiment",
    "experiments",
    "table",
    "tables",
]
