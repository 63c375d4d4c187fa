"""The log: a line at a time, whole after a crash, going on after a resume."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
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


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("softsieve.training.journal.time", SimpleNamespace(perf_counter=lambda: now[0]))
    screen = io.StringIO()
    journal = Journal(None, show=True, console=Console(file=screen, width=200))
    for step in range(1, 41):  # 3 seconds each; then 20, and a quarter of a percent of training
        now[0] = 3.0 * step if step <= 20 else 60 + 20.0 * (step - 20)
        journal.advance(step / 100 if step <= 20 else 0.2 + (step - 20) / 390, 10, loss=f"{step}")
    journal.close()
    lines = screen.getvalue().splitlines()
    assert [int(line.split()[2]) for line in lines] == [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
    assert lines[0] == "  4%  loss 4  3 samples/s, 12 s"
    assert "\r" not in screen.getvalue()
    quiet = io.StringIO()
    Journal(None, show=False, console=Console(file=quiet)).advance(1.0, 10)
    assert quiet.getvalue() == ""


def test_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match="run: cannot be written: "):
        Journal(tmp_path / "run", show=False)


def test_a_resumed_run_goes_on_where_the_checkpoint_was_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path, show=False)
    for step in range(1, 6):
        journal.write(step, "train", loss=step)
    journal.close()
    (tmp_path / "log.jsonl").open("a").write('{"step": 6, "ki')  # the crash
    journal = Journal(tmp_path, show=False, after=(3, 3))
    assert journal.lines == read(tmp_path) == [{"step": s, "kind": "train", "loss": s} for s in (1, 2, 3)]
    journal.write(4, "train", loss=0.25)
    journal.close()
    assert read(tmp_path)[3:] == [{"step": 4, "kind": "train", "loss": 0.25}]


def test_a_line_cut_short_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2, "ki')
    journal = Journal(tmp_path, show=False, after=(9, 9))
    journal.write(10, "train")
    journal.close()
    assert [line["step"] for line in read(tmp_path)] == [1, 10]


def test_a_resumed_run_without_the_log_of_the_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "elsewhere", show=False, after=(3, 3))
    journal.write(4, "train", loss=1.0)
    journal.close()
    assert [line["step"] for line in read(tmp_path / "elsewhere")] == [4]
