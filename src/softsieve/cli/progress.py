"""The bar of commands that take long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what takes long to import is imported when the command runs
    from rich.console import Console

    from softsieve._progress import Progress


def error_console() -> Console:
    """The standard error as a console that prints names as they are, whatever is in them."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True, markup=False, highlight=False)


@contextmanager
def bar(console: Console, what: str = "") -> Iterator[Progress]:
    """A progress callback that moves a bar, which goes away at the end; only a terminal shows it."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=20), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda what, share: progress.update(task, description=what, advance=share)


@contextmanager
def watched(out: Path) -> Iterator[Progress]:
    """Errors in one line, a place for the results before anything is computed, and a bar of how far it is."""
    from softsieve.cli.errors import one_line
    from softsieve.comparisons.output import expect_place

    with one_line():
        expect_place(out)
        with bar(error_console()) as progress:
            yield progress
