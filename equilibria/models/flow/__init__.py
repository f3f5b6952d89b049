"""Optical flow as the equilibrium of a recurrent update."""
