"""`python -m experiments delta-sweep`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.commands import app
from experiments.delta_sweep import draw, summarise
from experiments.training_runs import Asked, make, plan
from softsieve.comparisons.output import read_table
from tests.experiments.conftest import MakeRun


def test_a_line_for_every_delta(make_run: MakeRun) -> None:
    scores = {1.0: [(0.5, 0.50), (0.7, 0.60)], 0.1: [(0.6, 0.54), (0.7, 0.62)], 0.5: [(0.5, 0.70), (0.5, 0.7)]}
    runs = [
        make_run("as-softmax", seed, [best], test=test, settings={"delta": delta})
        for delta, pairs in scores.items()
        for seed, (best, test) in enumerate(pairs)
    ]
    lines = summarise(runs)
    assert [line["delta"] for line in lines] == [0.1, 0.5, 1.0]
    assert [line["validation"] for line in lines] == pytest.approx([0.65, 0.5, 0.6])
    assert [line["test"] for line in lines] == pytest.approx([0.58, 0.7, 0.55])
    assert [line["chosen"] for line in lines] == [True, False, False]  # by validation, not by test
    assert [line["gain"] for line in lines] == pytest.approx([0.03, 0.15, 0])
    assert lines[0]["gain_error"] == pytest.approx(0.01)  # gains of 0.04 and 0.02
    assert len(draw(lines).axes) == 1
    assert summarise(runs[2:])[0]["gain"] is None  # nothing to compare with


def test_a_delta_of_one_is_plain_softmax(weather: Path, tmp_path: Path) -> None:
    few = ["--seeds", "2", "--epochs", "1", "--batch-size", "30"]
    deltas = ["--delta", "1", "--delta", "0.1"]
    done = CliRunner().invoke(app, ["delta-sweep", "--task", str(weather), *few, *deltas, "--out", "out"])
    assert done.exit_code == 0, done.output
    about, rows = read_table(tmp_path / "out.csv")
    assert (about["experiment"], about["deltas"]) == ("delta-sweep", "[1.0, 0.1]")
    assert [(row["delta"], row["seeds"]) for row in rows] == [("0.1", "2"), ("1", "2")]
    assert len(list((tmp_path / "out.runs").iterdir())) == 4
    asked = Asked([str(weather)], 2, None, 128, Path("data"), 1, {"epochs": 1, "batch_size": 30})
    runs, _ = make(plan(asked, ["softmax"]), Path("softmax"))
    for part in ("validation", "test"):
        assert float(rows[1][part]) == pytest.approx(sum(run[part]["accuracy"] for run in runs) / 2, rel=1e-5)
    assert (tmp_path / "out.svg").exists()
