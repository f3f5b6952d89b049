"""Jacobian-free backpropagation (Fung and others 2022)."""
