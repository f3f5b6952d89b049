"""Solvers: which iterate comes next."""
