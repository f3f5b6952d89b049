"""Experiments on signals as functions of their coordinates."""
