"""`python -m benchmarks linear`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.commands import app

SMALL = ["linear", "--shape", "20x8x100", "--device", "cpu", "--dtype", "fp32", "--repeats", "1"]
RIVAL = ["--rival", "torch eager"]


def test_a_table_and_a_record(tmp_path: Path) -> None:
    out = tmp_path / "linear.json"
    result = CliRunner().invoke(app, [*SMALL, *RIVAL, "--dense", "0.3", "--out", str(out)])
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert [row["method"] for row in record["results"]] == ["torch eager", "AS-Softmax in eager torch", "softsieve"]
    assert "AS-Softmax" in result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--shape", "20x8"], "expected three numbers such as 8192x2304x256000, found '20x8'"),
        (["--shape", "20x0x5"], "expected at least one of each"),
        (["--rival", "nobody"], "expected one of torch eager"),
        (["--dtype", "int8"], "expected one of fp32"),
        (["--device", "tpu"], "expected cpu"),
    ],
)
def test_bad_options(options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*SMALL, *RIVAL, *options], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert says in result.output
    assert not list(tmp_path.iterdir())
