"""Cells: the maps f(z, x) whose equilibria are models. They import torch alone."""
