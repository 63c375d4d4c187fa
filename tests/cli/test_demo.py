"""`softsieve demo`, in small."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from softsieve.cli import app, demo_parts
from softsieve.doctor import Finding

WAYS = ("softmax", "as-softmax", "as-softmax-skipping")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"N": 600, "D": 32, "RANK": 8, "CALIBRATION": 1400, "QUERIES": 60}.items():
        monkeypatch.setattr(demo_parts, name, value)


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["demo", "--epochs", "2", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return str(result.output)


def found_on(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.setattr(
        demo_parts,
        "tried",
        lambda names: {name: Finding(name, state, "") for name in names},
    )


def test_two_tables_a_folder_of_runs_and_a_page_and_all_of_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found_on(monkeypatch, "works")
    said = run("--seeds", "2")
    for word in ("accuracy %", "seconds", "solved", "AS-Softmax, skipping", "±", "right", "MB read", "ms", "made up"):
        assert word in said
    out = Path("softsieve-demo")
    assert sorted(path.name for path in (out / "runs").iterdir()) == sorted(
        f"{w}-seed{s}" for w in WAYS for s in (0, 1)
    )
    record = json.loads((out / "head.json").read_text())
    assert record["suite"] == "head-bench"
    assert [row["method"] for row in record["results"]] == ["exact fp32", "exact bf16", "cascade"]
    assert record["results"][2]["success"] >= 0.9
    page = (out / "report.html").read_text()
    assert "<title>The softsieve demo</title>" in page
    assert "random numbers" in page  # what is made up is said there too

    found_on(monkeypatch, "broken")  # again in the same folder, without bf16
    said = run("--seeds", "1")
    assert "torch, float32" in said
    assert "torch, bfloat16" not in said
    assert (out / "report.html").read_text() != page


def test_what_is_missing_is_said_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "pip install 'softsieve[report]'" in result.stderr
    assert not Path("softsieve-demo").exists()
