"""Training steps compared with other libraries at equal accuracy: `python -m equilibria.lab.bench.command`."""
