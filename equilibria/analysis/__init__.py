"""Looking at equilibrium models: spectra, gradients, memory, plots, tuning, diagnosis."""
