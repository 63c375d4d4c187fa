"""`python -m benchmarks linear`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import linear as suite
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


def test_a_run_that_is_cut_off_leaves_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, layers = suite.measure, []

    def cut_off(*args: Any, **options: Any) -> list[suite.Result]:
        layers.append(options["dense"])
        if len(layers) == 2:
            raise KeyboardInterrupt
        return measure(*args, **options)

    monkeypatch.setattr(suite, "measure", cut_off)
    out = tmp_path / "linear.json"
    result = CliRunner().invoke(app, [*SMALL, *RIVAL, "--dense", "0.3", "--dense", "1", "--out", str(out)])
    assert result.exit_code != 0
    assert len(json.loads(out.read_text())["results"]) == 3
