"""Phantom gradients (Geng and others 2021)."""
