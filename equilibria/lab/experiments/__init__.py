"""Experiments with all settings of a run, and the tables that report them beside published figures."""

from equilibria.lab.errors import SettingError, UnknownName
from equilibria.lab.experiments.catalogue import experiment, experiments, table, tables
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
