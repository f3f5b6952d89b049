"""Reports: what was published beside what we measured, and whether the claims held."""
