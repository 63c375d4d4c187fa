"""`softsieve report`: a page of runs and records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from softsieve.cli.errors import one_line
from softsieve.report import write_report


def report(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs, records (.json), or folders of either; several")],
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="its title")] = "softsieve report",
) -> None:
    """Make one HTML page of runs and records: tables, curves and an explorer of the margin. It works offline."""
    with one_line():
        write_report(runs, out, title)
        typer.echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB, opens in any browser")
