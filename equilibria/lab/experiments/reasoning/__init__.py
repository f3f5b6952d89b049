"""Experiments on equilibrium reasoners."""
