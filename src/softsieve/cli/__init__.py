"""The command line, one file per command."""

from typing import Annotated

import typer

from softsieve import __version__
from softsieve.cli.compare import compare
from softsieve.cli.demo import demo
from softsieve.cli.doctor import doctor
from softsieve.cli.export import export
from softsieve.cli.generate import generate
from softsieve.cli.head import head
from softsieve.cli.head_bench import head_bench
from softsieve.cli.head_index import build, calibrate, query
from softsieve.cli.options import takes_options
from softsieve.cli.predict import predict
from softsieve.cli.push import push
from softsieve.cli.report import report
from softsieve.cli.script import App
from softsieve.cli.serve import serve
from softsieve.cli.train import train

app = App(no_args_is_help=True, pretty_exceptions_show_locals=False)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"softsieve {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Say which version this is.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """A softmax without the classes that cannot matter."""


app.command()(takes_options(train))
app.command()(predict)
app.command()(serve)
app.command()(export)
app.command()(push)
app.command()(compare)
app.command()(report)
app.add_typer(head, name="head")
for command in (build, calibrate, query):
    head.command()(command)
head.command("bench")(head_bench)
app.command()(generate)
app.command()(demo)
app.command()(doctor)
