"""A small diffusion model, and a sampler that solves all states of its chain as one equilibrium."""
