"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str, float], object]  # called with what was just done, and the share of the whole that it was


def in_silence(what: str, share: float) -> None:
    """The `Report` of who does not watch."""
