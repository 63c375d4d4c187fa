"""What commands show on a terminal: a bar while they take long, and tables."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from softsieve._progress import ProgressCallback
from softsieve.cli.errors import one_line
from softsieve.comparisons.output import expect_place


def plain_console(**options: Any) -> Console:
    """A console that prints names as they are, whatever is in them."""
    return Console(soft_wrap=True, markup=False, highlight=False, **options)


def error_console() -> Console:
    """The standard error."""
    return plain_console(stderr=True)


@contextmanager
def bar(console: Console, what: str = "") -> Iterator[ProgressCallback]:
    """A progress callback that moves a bar, which goes away at the end; only a terminal shows it."""
    columns = (BarColumn(bar_width=20), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda what, share: progress.update(task, description=what, advance=share)


@contextmanager
def told(console: Console, *, after: float = 2.0) -> Iterator[ProgressCallback]:
    """A progress callback that moves a bar on a terminal; elsewhere a line says what takes longer than some seconds."""
    began: dict[str, float] = {}
    said = set[str]()

    def say(what: str, share: float) -> None:
        began.setdefault(what, time.monotonic())
        if what not in said and time.monotonic() - began[what] >= after:
            said.add(what)
            console.print(f"{what} ...")

    if console.is_terminal:
        with bar(console) as move:
            yield move
    else:
        yield say


@contextmanager
def watched(out: Path) -> Iterator[ProgressCallback]:
    """Errors in one line, a place for the results before anything is computed, and a bar of how far it is."""
    with one_line():
        expect_place(out)
        with bar(error_console()) as progress:
            yield progress


def table(
    rows: Iterable[Any],
    columns: Mapping[str, Callable[[Any], str]],
    *,
    title: str | None = None,
    left: Sequence[str] = ("", "method"),
    ends: Callable[[Any], bool] = lambda row: False,
) -> Table:
    """A line for each row, of what each column shows of it: those of words in ``left``, figures on the right.

    There is a rule below the rows for which ``ends`` is true.
    """
    made = Table(title=title)
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        made.add_row(*(show(row) for show in columns.values()), end_section=ends(row))
    return made


def quiet_hugging_face(*, bars: bool | None = None) -> None:
    """Have its libraries show errors alone, and bars of downloads on a terminal only; call it before importing them."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not (sys.stderr.isatty() if bars is None else bars):
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
