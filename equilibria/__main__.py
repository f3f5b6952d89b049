"""`python -m equilibria`, the command line."""

from equilibria.lab.cli.main import app

app()
