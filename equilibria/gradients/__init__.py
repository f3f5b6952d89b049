"""Gradients: methods to differentiate an equilibrium."""

from equilibria.gradients.base import Gradient, Problem, quarantine

__all__ = ["Gradient", "Problem", "quarantine"]
