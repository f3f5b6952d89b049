"""Gradients: how derivatives flow through an equilibrium."""

from equilibria.gradients.base import Gradient, Problem, quarantine

__all__ = ["Gradient", "Problem", "quarantine"]
