"""Looped models: random starts, several starts per sample, states carried over training steps, and halting."""

from equilibria.looped.breadth import Breadth, BreadthSolution, breadth
from equilibria.looped.carry import Carry
from equilibria.looped.halting import Halted, Halting
from equilibria.looped.random_start import RandomStart

__all__ = ["Breadth", "BreadthSolution", "Carry", "Halted", "Halting", "RandomStart", "breadth"]
