"""Training steps next to other libraries', at equal achieved accuracy: `python -m equilibria.lab.bench.command`."""
