"""Inverse problems: measurement operators with adjoints, and equilibria that reconstruct images from measurements."""
