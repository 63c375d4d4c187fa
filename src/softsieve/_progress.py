"""Progress callbacks: what long work calls."""

from __future__ import annotations

from collections.abc import Callable

# Called with what was just done, and the share of the whole that it was.
ProgressCallback = Callable[[str, float], object]


def no_progress(what: str, share: float) -> None:
    """The progress callback of a caller who does not watch."""
