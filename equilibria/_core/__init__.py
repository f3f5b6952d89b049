"""Machinery behind the public names: private, free to change."""
