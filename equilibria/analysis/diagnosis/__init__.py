"""Diagnosis: examine every equilibrium layer of a model, and report problems with advice."""
