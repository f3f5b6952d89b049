"""Optical flow by the equilibrium of a recurrent update."""
