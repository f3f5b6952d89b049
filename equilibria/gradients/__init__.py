"""Gradients: how derivatives flow through an equilibrium."""
