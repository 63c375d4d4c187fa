"""Colours of the page, for light and dark: text reads at 4.5 to 1 or more, lines of figures at 3 to 1.

The lines' colours differ in lightness as well as hue, and dashes and symbols differ too.
"""

from __future__ import annotations

from typing import Any


def _heat(*colours: str) -> list[list[Any]]:
    """Colours of probabilities from 0 to 1, most of them for the small ones."""
    return [[p, colour] for p, colour in zip((0, 0.03, 0.15, 0.4, 0.7, 1), colours, strict=True)]


SCHEMES: dict[str, dict[str, Any]] = {
    "light": {
        "paper": "#faf9f6",
        "card": "#ffffff",
        "ink": "#1d2731",
        "soft": "#51606e",
        "rule": "#dedbd3",
        "accent": "#0b5fa5",
        "tint": "#e8f0f8",
        "masked": "#c6cad0",
        "solved": "#0f7a5a",
        "lines": ["#0b5fa5", "#c2410c", "#0f7a5a", "#8e3b8f", "#8a6100", "#1d2731", "#b3245c", "#0e7480"],
        "heat": _heat("#fffbe9", "#fdeaa8", "#f6b95a", "#d9682f", "#8f2a4d", "#3b0f4e"),
    },
    "dark": {
        "paper": "#10151b",
        "card": "#171e26",
        "ink": "#e7ebf0",
        "soft": "#a8b4c1",
        "rule": "#2c3743",
        "accent": "#7fc1ff",
        "tint": "#1b2b3c",
        "masked": "#434b55",
        "solved": "#55d3a6",
        "lines": ["#7fc1ff", "#ff9d66", "#55d3a6", "#dba5ea", "#e6c25c", "#e7ebf0", "#ff8fb3", "#62d2de"],
        "heat": _heat("#12101f", "#33204f", "#7a2a6b", "#d1495b", "#f9a03f", "#fff3b0"),
    },
}
