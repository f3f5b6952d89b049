"""`python -m equilibria`, the command line."""

from equilibria.cli import app

app()
