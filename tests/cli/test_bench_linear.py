"""`softsieve bench linear` and `softsieve experiment linear-training`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from softsieve.cli import app

SMALL = ["bench", "linear", "--shape", "20x8x100", "--device", "cpu", "--dtype", "fp32", "--repeats", "1"]
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
        (["--shape", "20x8"], "--shape: expected three numbers such as 8192x2304x256000, found '20x8'"),
        (["--shape", "20x0x5"], "--shape: expected at least one of each"),
        (["--rival", "nobody"], "--rival: expected one of"),
        (["--dtype", "int8"], "--dtype: expected one of"),
        (["--device", "tpu"], "--device: expected one of"),
    ],
)
def test_bad_options(options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*SMALL, *RIVAL, *options])
    assert result.exit_code == 1
    assert says in result.output
    assert not list(tmp_path.iterdir())


def test_training_with_and_without_logits(tmp_path: Path) -> None:
    """The same seed gives the same curve; another one does not."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 40)
    options = ["--steps", "40", "--size", "16", "--layers", "1", "--length", "8", "--batch", "4"]
    result = CliRunner().invoke(
        app, ["experiment", "linear-training", str(text), *options, "--out", str(tmp_path / "curve")]
    )
    assert result.exit_code == 0, result.output
    lines = [line.split(",") for line in (tmp_path / "curve.csv").read_text().splitlines() if not line.startswith("#")]
    names = lines[0]
    apart = {line[0]: float(line[names.index("apart_most") - len(names)]) for line in lines[1:]}
    same, other = apart["without"], max(apart.values())
    assert same < 1e-4 < other
    assert (tmp_path / "curve.png").exists()


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("too short")
    result = CliRunner().invoke(app, ["experiment", "linear-training", str(text), "--out", str(tmp_path / "x")])
    assert result.exit_code == 1
    assert "text: expected 256 words at least, found 2" in result.output
