"""Implicit graph neural networks (Gu and others 2020)."""
