"""`python -m benchmarks losses`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.commands import app
from benchmarks.losses import METHODS

run = CliRunner().invoke
SMALL = ["losses", "--shape", "64x30", "--repeats", "2"]


def test_help_lists_the_suites() -> None:
    result = run(app, ["--help"])
    assert result.exit_code == 0
    for suite in ("losses", "linear", "head", "head-scaling"):
        assert suite in result.output


def test_bench_losses_writes_results_with_their_provenance(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "losses.json"
    result = run(app, [*SMALL, "--solved", "0.5", "--dtype", "bf16", "--out", str(out)])
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert record["settings"] == {"delta": 0.1, "dtype": "bf16", "device": "cpu", "repeats": 2}
    assert record["provenance"]["versions"]["torch"]
    assert [r["method"] for r in record["results"]] == list(METHODS)
    base, ours, plain = record["results"]
    assert base["time_ratio"] == base["memory_ratio"] == 1
    assert all(r["ms_p20"] <= r["ms"] <= r["ms_p80"] for r in record["results"])
    assert ours["solved"] == pytest.approx(0.5)
    assert ours["loss"] == pytest.approx(plain["loss"], rel=0.05)
    assert not [p for p in out.parent.iterdir() if p != out]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "64"], "expected two numbers"),
        (["--shape", "0x5"], "at least one of each"),
        (["--dtype", "int8"], "expected one of fp32"),
        (["--delta", "1.5"], "--delta"),
        (["--solved", "-1"], "--solved"),
        (["--repeats", "0"], "--repeats"),
        (["--device", "tpu"], "expected cpu"),
        (["--out", "."], "is a directory"),
    ],
)
def test_bench_refuses_bad_options(arguments: list[str], message: str) -> None:
    result = run(app, [*SMALL, *arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert message in result.output
