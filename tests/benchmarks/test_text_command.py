"""`python -m benchmarks text`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import text as suite
from benchmarks.commands import app
from softsieve.tasks.examples import Data, Examples


def write(path: Path, *, multilabel: bool, rows: int = 120) -> None:
    lines = []
    for row in range(rows):
        kinds = ["warm"] if row % 2 else ["cold"]
        if multilabel and row % 3 == 0:
            kinds.append("wet")
        words = " ".join(f"{kind} {kind}er {kind}ish" for kind in kinds)
        lines.append(json.dumps({"text": f"{words} {row % 7}", "label": kinds if multilabel else kinds[0]}))
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("multilabel", [False, True])
def test_a_table_and_a_record(tmp_path: Path, multilabel: bool) -> None:
    source, out = tmp_path / "train.jsonl", tmp_path / "text.json"
    write(source, multilabel=multilabel)
    given = ["text", "--data", str(source), "--test-data", str(source), "--seeds", "1", "--out", str(out)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["results"]
    assert [row["method"] for row in rows] == [suite.OURS, *suite.RIVALS]
    assert {row["metric"] for row in rows} == {"micro_f1" if multilabel else "accuracy"}
    assert all(row["test"] > 0.95 for row in rows), rows


def test_an_unknown_method_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["text", "--method", "magic"], env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exit_code == 2
    assert "found 'magic'" in result.output


def test_a_threshold_comes_from_validation_rows() -> None:
    def part(*labels: list[str]) -> Examples:
        return Examples([""] * len(labels), list(labels), [""] * len(labels))

    data = Data("d", "multilabel", part(["a"], ["b"]), part(["a"], ["a", "b"]), part(["b"], ["a"]))
    validation = np.array([[0.9, 0.2], [0.8, 0.4]])
    test = np.array([[0.5, 0.5], [0.5, 0.3]])
    assert suite._judge(data, validation, test) == pytest.approx((1.0, 4 / 5))
