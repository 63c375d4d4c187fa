"""The log: a line at a time, whole after a crash, going on after a resume."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from softsieve.errors import InputError
from softsieve.training.journal import Journal


def read(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def test_lines_are_there_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new" / "run", show=False)
    journal.write(1, "train", loss=0.5)
    assert read(tmp_path / "new" / "run") == [{"step": 1, "kind": "train", "loss": 0.5}]
    journal.write(2, "validation", accuracy=1.0)
    assert read(tmp_path / "new" / "run") == journal.lines
    journal.close()


def test_without_output_lines_are_kept_in_memory(tmp_path: Path) -> None:
    journal = Journal(None, show=False)
    journal.write(1, "train", loss=0.5)
    journal.advance(0.5, 10, loss="0.5")
    journal.close()
    assert journal.lines == [{"step": 1, "kind": "train", "loss": 0.5}]
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_starts_a_new_log(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        journal = Journal(tmp_path, show=False)
        journal.write(1, "train", loss=loss)
        journal.close()
    assert read(tmp_path) == [{"step": 1, "kind": "train", "loss": 2.0}]


def test_bar_shows_progress_and_speed(tmp_path: Path) -> None:
    screen = io.StringIO()
    journal = Journal(None, show=True, console=Console(file=screen, force_terminal=True, width=100))
    journal.advance(0.5, 10, loss="0.123")
    journal.advance(0.75, 10)
    journal.bar.refresh()
    journal.close()
    shown = screen.getvalue()
    assert "75%" in shown
    assert "loss 0.123" in shown
    assert "samples/s" in shown


def test_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match="run: cannot be written: "):
        Journal(tmp_path / "run", show=False)
