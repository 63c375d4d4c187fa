"""``python -m experiments``."""

from experiments.commands import app

app(prog_name="python -m experiments")
