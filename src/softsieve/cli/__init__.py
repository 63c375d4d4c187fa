"""The command line, one file per command."""

import typer

from softsieve.cli.bench import bench
from softsieve.cli.compare import compare
from softsieve.cli.demo import demo

app = typer.Typer(
    help="A softmax without the classes that cannot matter.", no_args_is_help=True, pretty_exceptions_show_locals=False
)
app.add_typer(bench, name="bench")
app.command()(compare)
app.command()(demo)
