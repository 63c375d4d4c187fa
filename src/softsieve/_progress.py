"""ProgressCallback callbacks: what long work calls."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[
    [str, float], object
]  # called with what was just done, and the share of the whole that it was


def no_progress(what: str, share: float) -> None:
    """The progress callback of a caller who does not watch."""
