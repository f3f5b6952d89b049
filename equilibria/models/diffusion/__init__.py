"""A small diffusion model, and its sampling chain as an equilibrium."""
