"""Data that comparisons are made on here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import write_weather


@pytest.fixture
def weather(tmp_path: Path) -> Path:
    """Train, validation and test files of a data set that is easily learnt."""
    return write_weather(tmp_path)
