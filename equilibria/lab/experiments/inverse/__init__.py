"""Experiments on inverse problems."""
