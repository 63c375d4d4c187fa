"""Errors of our own, and words of their messages."""

from collections.abc import Iterable


class InputError(ValueError):
    """What the user gave cannot be used: data, a folder, a checkpoint. One line that says what and where.

    The command line prints it without a traceback and exits with 1.
    """


class DivergedError(InputError):
    """Training that came to a loss which is not finite."""


def listed(names: Iterable[str]) -> str:
    """Names in quotes, the first 20 of them, each cut after 60 characters."""
    names = [shown(name) for name in names]
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") if names else "none"


def shown(value: object) -> str:
    """A value as code would write it, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def first_line(error: Exception) -> str:
    """What an error of a library says first."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
