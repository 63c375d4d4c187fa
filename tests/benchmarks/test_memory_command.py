"""`python -m benchmarks memory`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import memory as suite
from benchmarks.commands import app
from softsieve.errors import InputError


def test_peaks_of_both_cases(tmp_path: Path) -> None:
    sizes = ["--megabytes", "1", "--classes", "20", "--rows", "400"]
    out = tmp_path / "memory.json"
    done = CliRunner().invoke(app, ["memory", *sizes, "--folder", str(tmp_path / "files"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    large, many = json.loads(out.read_text())["results"]
    assert (large["case"], large["rows"], large["classes"]) == ("large file", 4050, 4)
    assert (many["case"], many["rows"], many["classes"]) == ("many classes", 400, 20)
    assert large["file_mb"] == pytest.approx(1, rel=0.05)
    for one in (large, many):
        assert 100 < one["peak_mb"] < 3000  # a process with torch in it
    assert not list((tmp_path / "files").glob("*.csv"))


def test_a_training_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "CODE", "raise SystemExit('no room')")
    with pytest.raises(InputError, match="case: training failed: no room"):
        suite.measure("case", tmp_path, rows=20, classes=2, words=3, epochs=1)
