"""Looped models that solve puzzles by iterating one small block."""
