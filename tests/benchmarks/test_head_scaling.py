"""`python -m benchmarks head-scaling`: a row for every shape and method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks import head_scaling as suite
from benchmarks.commands import app
from softsieve.comparisons import heads
from softsieve.comparisons.output import read_table

SCALING = [
    *("head-scaling", "--n", "60", "--d", "8", "--d", "16", "--rank", "4", "--method", "coordinates"),
    *("--calibration", "40", "--test-queries", "10", "--delta", "0.1"),
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})


def test_scaling_goes_over_all_shapes() -> None:
    options: dict[str, Any] = {"methods": [], "ks": [1], "calibration": 10, "test_queries": 5}
    shares: list[float] = []
    rows = suite.scaling([50, 60], [8, 16], rank=4, progress=lambda what, share: shares.append(share), **options)
    assert [(row["n"], row["d"], row["rank"]) for row in rows[::2]] == [(n, d, 4) for n in (50, 60) for d in (8, 16)]
    assert sum(shares) == pytest.approx(1)


def test_scaling_writes_a_row_for_every_shape_and_method(tmp_path: Path) -> None:
    done = run(*SCALING, "--out", str(tmp_path / "scaling.json"))
    assert done.exit_code == 0, done.output
    about, rows = read_table(tmp_path / "scaling.csv")
    assert ",".join(rows[0]) == ",".join(("n", "d", "rank", *heads.Result._fields))
    assert [(row["d"], row["method"]) for row in rows] == [
        (d, method) for d in ("8", "16") for method in ("exact fp32", "exact bf16", "coordinates")
    ]
    assert about["rank"] == "4"
    assert json.loads((tmp_path / "scaling.json").read_text())["suite"] == "head-scaling"
    assert (tmp_path / "scaling.svg").exists()


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*SCALING, "--rank", "9")
    assert done.exit_code == 1, done.output
    assert "rank: expected 1 to d = 8, found 9" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
