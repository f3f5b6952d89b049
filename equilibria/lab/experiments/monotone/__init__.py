"""Monotone operator networks (Winston and Kolter 2020)."""
