"""Jacobian regularization (Bai, Koltun and Kolter 2021)."""
