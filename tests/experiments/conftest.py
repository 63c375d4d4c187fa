"""Commands start in a new folder; trainings and their records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from softsieve.training.settings import Settings
from tests.helpers import write_weather

MakeRun = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def weather(tmp_path: Path) -> Path:
    """A folder of data that is easily learnt."""
    (tmp_path / "weather").mkdir()
    return write_weather(tmp_path / "weather")


@pytest.fixture
def make_run() -> MakeRun:
    """Makes the record of a run with these validation scores, epoch by epoch, without making the run."""

    def make(row: str, seed: int, scores: list[float], **more: Any) -> dict[str, Any]:
        settings = Settings(
            loss="softmax" if row == "softmax" else "as-softmax", epochs=len(scores), batch_size=10
        ).filled()
        losses = more.pop("losses", [1 - score for score in scores])
        lines = [
            {"step": 10 * epoch, "progress": epoch / len(scores), "accuracy": score, "loss": loss}
            for epoch, (score, loss) in enumerate(zip(scores, losses, strict=True), 1)
        ]
        return {
            "task": "weather",
            "row": row,
            "seed": seed,
            "rows": {"train": 100},
            "steps": 10 * len(scores),
            "trained_rows": 100 * len(scores),
            "validation": {"accuracy": max(scores)},
            "test": {"accuracy": more.pop("test", max(scores))},
            "seconds": more.pop("seconds", 3.0),
            "evaluation_seconds": 1.0,
            "settings": {**settings.asdict(), **more.pop("settings", {})},
            "validation_curve": lines,
            "side_by_side": 1,
            "provenance": {"gpu": None, "machine": {"processor": "a", "threads": 1}},
            **more,
        }

    return make
