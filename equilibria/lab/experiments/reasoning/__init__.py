"""Equilibrium reasoners on puzzles, and attractor language models."""
