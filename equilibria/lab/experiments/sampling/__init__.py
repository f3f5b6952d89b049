"""Experiments on sampling from a diffusion model as an equilibrium."""
