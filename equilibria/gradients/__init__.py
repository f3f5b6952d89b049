"""Gradients: methods to differentiate an equilibrium."""

from equilibria._core.problem import Problem
from equilibria._core.quarantine import quarantine
from equilibria.gradients.base import Gradient

__all__ = ["Gradient", "Problem", "quarantine"]
