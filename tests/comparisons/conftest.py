"""Data that comparisons are made on here."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

WORDS = {"sun": ["bright", "warm", "sky"], "rain": ["wet", "cloud", "grey"], "snow": ["white", "cold", "ice"]}


@pytest.fixture
def weather(tmp_path: Path) -> Path:
    """Train, validation and test files of a data set that is easily learnt."""
    draw = random.Random(0)
    for split, rows in (("train", 90), ("validation", 30), ("test", 30)):
        lines = ["text,label"]
        for row in range(rows):
            label = sorted(WORDS)[row % 3]
            lines.append(f"{' '.join(draw.choices(WORDS[label], k=4))},{label}")
        (tmp_path / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return tmp_path
