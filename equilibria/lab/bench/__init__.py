"""Compare training steps with those of other libraries at equal accuracy: `python -m equilibria.lab.bench.command`."""
