"""Experiments: functions that return everything a run takes, and the tables they make up."""

from equilibria.lab.experiments.base import Claim, Column, Experiment, Figure, Profile, Row, Scale, Table
from equilibria.lab.experiments.catalogue import UnknownName, experiment, experiments, table, tables
from equilibria.lab.experiments.settings import SettingError

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
