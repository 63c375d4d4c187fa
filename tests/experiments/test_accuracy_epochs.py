"""`python -m experiments accuracy-epochs`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.accuracy_epochs import draw, first_reached, summarise
from experiments.commands import app
from softsieve.comparisons.output import read_table
from tests.experiments.conftest import MakeRun


def test_when_as_softmax_is_as_good(make_run: MakeRun) -> None:
    runs = [make_run("softmax", 0, [0.4, 0.6, 0.8, 0.7]), make_run("softmax", 1, [0.2, 0.6, 0.6, 0.7])]
    runs += [make_run("as-softmax", 0, [0.6, 0.8, 0.7, 0.7]), make_run("as-softmax", 1, [0.4, 0.8, 0.7, 0.7])]
    lines = summarise(runs)
    assert [line["validation"] for line in lines] == pytest.approx([0.3, 0.6, 0.7, 0.7, 0.5, 0.8, 0.7, 0.7])
    assert [line["trained_rows"] for line in lines] == [100, 200, 300, 400] * 2
    assert lines[0]["validation_deviation"] == pytest.approx(0.02**0.5)
    assert [line["test"] for line in lines[:4]] == [None, None, None, pytest.approx(0.75)]
    (found,) = first_reached(lines)
    assert (found["best"], found["at_epoch"]) == (pytest.approx(0.7), 3)
    assert (found["as_epoch"], found["as_rows"], found["share"]) == (2, 200, pytest.approx(2 / 3))
    assert len(draw(lines).axes) == 1


def test_trainings_of_several_lengths_are_judged_on_test_rows(make_run: MakeRun) -> None:
    runs = [make_run("softmax", 0, [0.5] * n, test=0.1 * n) for n in (1, 2, 4)]
    runs += [make_run("as-softmax", 0, [0.4] * n, test=0.2 * n) for n in (1, 2, 4)]
    lines = summarise(runs)
    *within, whole = first_reached(lines)
    assert [found["as_epoch"] for found in within] == [None, None, None]  # 0.4 is below 0.5
    assert (whole["part"], whole["best"], whole["at_epoch"], whole["as_epoch"]) == ("test", 0.4, 4, 2)
    assert len(draw(lines).axes) == 2


def test_the_command_goes_on_where_it_was(weather: Path, tmp_path: Path) -> None:
    few = ["--seeds", "1", "--epochs", "2", "--batch-size", "30", "--learning-rate", "1e-2", "--delta", "0.2"]
    arguments = ["accuracy-epochs", "--task", str(weather), *few, "--length", "1", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    about, rows = read_table(tmp_path / "out.csv")
    assert (about["experiment"], about["tasks"], about["delta"]) == ("accuracy-epochs", '["weather"]', "0.2")
    assert [found["training"] for found in json.loads(about["reached"])] == ["2 epochs", "1 epochs", "any length"]
    assert [(row["loss"], row["epochs"], row["epoch"], row["seeds"]) for row in rows] == [
        (loss, *numbers, "1") for loss in ("softmax", "as-softmax") for numbers in (("2", "1"), ("2", "2"), ("1", "1"))
    ]
    files = sorted((tmp_path / "out.runs").iterdir())
    times = [file.stat().st_mtime_ns for file in files]
    assert len(files) == 2 * 2
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert [file.stat().st_mtime_ns for file in files] == times
    assert (tmp_path / "out.png").exists()
