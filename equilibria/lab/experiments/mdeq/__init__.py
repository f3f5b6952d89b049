"""Multiscale DEQs (Bai, Koltun and Kolter 2020)."""
