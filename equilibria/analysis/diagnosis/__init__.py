"""The doctor: examine every equilibrium layer of a model, say what is wrong with it and what to try."""
