"""What the commands of experiments have in common: where results go, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from softsieve.cli.progress import plain_console, table
from softsieve.comparisons.output import SUFFIXES, beside


def results_option(default: str) -> Any:
    """``--out`` of a command whose results have this name unless another is given."""
    return typer.Option(help=f"results: {default}.csv, .png and .svg", dir_okay=False)


def say(out: Path, rows: Sequence[Mapping[str, Any]] = (), *, more: Sequence[str] = ()) -> None:
    """The rows as a table, and where the results are; ``more`` are suffixes of further files."""
    console = plain_console()
    if rows:
        console.print(table(rows, {name: _column(name) for name in rows[0]}, left=()))
    console.print(f"written: {', '.join(str(beside(out, suffix)) for suffix in (*SUFFIXES, *more))}")


def _column(name: str) -> Callable[[Mapping[str, Any]], str]:
    def show(row: Mapping[str, Any]) -> str:
        value = row[name]
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    return show
