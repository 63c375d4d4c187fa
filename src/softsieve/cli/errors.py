"""What went wrong, in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import typer

from softsieve.extras import missing

_EXPECTED = (ValueError, TypeError, ImportError, OSError, MemoryError)


def is_main_process() -> bool:
    """Whether this is the process that speaks, of those that ``torchrun`` or ``accelerate launch`` started."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def one_line() -> Iterator[None]:
    """Turn an error into one line on stderr and exit code 1 (130 for Ctrl-C, which may say how to go on).

    SOFTSIEVE_DEBUG=1 shows the traceback instead.
    """
    try:
        yield
    except KeyboardInterrupt as stopped:
        typer.echo(f"softsieve: interrupted{f'; {stopped}' if str(stopped) else ''}", err=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:  # who reads has enough, as `head` does: Typer ends without a word
        raise
    except (*_EXPECTED, RuntimeError) as error:
        if os.environ.get("SOFTSIEVE_DEBUG") or not (isinstance(error, _EXPECTED) or _out_of_memory(error)):
            raise
        # What every process finds wrong with its input is said once.
        if is_main_process() or not isinstance(error, ValueError | TypeError):
            typer.echo(f"softsieve: {_words(error)}", err=True)
        raise typer.Exit(1) from error


def _out_of_memory(error: BaseException) -> bool:
    """Also of a CPU, where torch has no type for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _words(error: Exception) -> str:
    if _out_of_memory(error):
        return "out of memory: try smaller batches or a smaller max_length"
    if isinstance(error, ModuleNotFoundError):
        return f"this needs {missing(error.name)}"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
