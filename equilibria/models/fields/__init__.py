"""Implicit representations: networks from coordinates to values, as equilibria and as explicit layers."""
