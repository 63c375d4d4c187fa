"""The command line, one file per command."""

import typer

from softsieve.cli.compare import compare
from softsieve.cli.demo import demo
from softsieve.cli.doctor import doctor
from softsieve.cli.generate import generate
from softsieve.cli.head import head
from softsieve.cli.head_bench import head_bench
from softsieve.cli.head_index import build, calibrate, query
from softsieve.cli.options import ScriptCommand, takes_options
from softsieve.cli.predict import predict
from softsieve.cli.report import report
from softsieve.cli.train import train

app = typer.Typer(
    help="A softmax without the classes that cannot matter.", no_args_is_help=True, pretty_exceptions_show_locals=False
)
app.command(cls=ScriptCommand)(takes_options(train))
app.command(cls=ScriptCommand)(predict)
app.command()(compare)
app.command()(report)
app.add_typer(head, name="head")
for command in (build, calibrate, query):
    head.command()(command)
head.command("bench")(head_bench)
app.command()(generate)
app.command()(demo)
app.command()(doctor)
