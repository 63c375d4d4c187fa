"""`python -m benchmarks calibration`: its table and its record."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.commands import app


def test_a_small_head_is_measured_and_recorded(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    small = ["--shape", "3000x64", "--rank", "16", "--queries", "300", "--delta", "0.1", "--test-queries", "200"]
    done = CliRunner().invoke(app, ["calibration", *small, "--out", str(out)])
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    (row,) = record["results"]
    assert row["used"] <= row["queries"] == 300
    assert row["whole_s"] >= max(row["build_s"], row["calibrate_s"])
    assert row["right"].keys() == row["read"].keys() == {"1", "8"}
    assert min(row["right"].values()) > 0.85
    assert 0 < row["file_mb"] < 2
    assert not row["process_mb"] > 20  # not a number where no system says it
    assert record["settings"]["compile_s"] > 0


def test_a_shape_that_is_none_is_refused() -> None:
    done = CliRunner().invoke(app, ["calibration", "--shape", "3000"])
    assert done.exit_code != 0
    assert "151936x1536" in done.output
