"""Looped models that reason by iterating one small block."""
