"""`python -m experiments loss-accuracy`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from typer.testing import CliRunner

from experiments.commands import app
from experiments.loss_accuracy import EVERY, LAST, WITHIN, correlations, draw, pearson, points, spearman
from softsieve.comparisons.output import read_table
from tests.experiments.conftest import MakeRun


def test_correlations_are_those_of_scipy() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 30)).round(1)  # with ties
    assert pearson(x, y) == pytest.approx(pearsonr(x, y).statistic)
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic)
    assert np.isnan(pearson(x, np.ones(30)))
    assert np.isnan(pearson(x[:2], y[:2]))


def test_what_is_correlated(make_run: MakeRun) -> None:
    """Within runs the loss rises with the metric, among runs it falls."""
    runs = [
        make_run(
            "softmax", seed, [0.1 * seed + part for part in (0.0, 0.01, 0.02)], losses=[3 - seed + p for p in late]
        )
        for seed, late in enumerate([(0, 0.1, 0.2)] * 3)
    ]
    runs += [make_run("as-softmax", s, [0.5, 0.6, 0.7], settings={"delta": d}) for s, d in enumerate((0.1, 0.3))]
    found = points(runs)
    assert len(found) == 15
    assert [point["last"] for point in found[:3]] == [False, False, True]
    lines = {(line["loss"], line["delta"], line["over"]): line for line in correlations(found)}
    assert len(lines) == 3 * (1 + 3)
    assert lines["softmax", None, WITHIN]["pearson"] == pytest.approx(1)
    assert lines["softmax", None, LAST]["spearman"] == pytest.approx(-1)
    every = lines["softmax", None, EVERY]
    assert (every["runs"], every["points"]) == (3, 9)
    flat = [[point[name] for point in found[:9]] for name in ("validation_loss", "validation")]
    assert every["pearson"] == pytest.approx(pearsonr(*flat).statistic)
    assert every["pearson_low"] <= every["pearson"] < every["pearson_high"]  # one run drawn thrice has 1
    assert lines["as-softmax", 0.3, EVERY]["points"] == 3
    assert lines["as-softmax", "all", EVERY]["points"] == 6
    assert lines["as-softmax", "all", LAST]["pearson"] is None  # of two points
    assert len(draw(found, correlations(found)).axes) == 3  # and a bar of colours


def test_the_command(weather: Path, tmp_path: Path) -> None:
    few = ["--seeds", "1", "--epochs", "3", "--batch-size", "30", "--learning-rate", "2e-3"]
    settings = ["--rate", "1", "--rate", "2", "--delta", "0.1", "--delta", "0.5"]
    done = CliRunner().invoke(app, ["loss-accuracy", "--task", str(weather), *few, *settings, "--out", "out"])
    assert done.exit_code == 0, done.output
    about, rows = read_table(tmp_path / "out.csv")
    assert about["rates"] == "[1.0, 2.0]"
    assert {(row["loss"], row["delta"]) for row in rows} == {
        ("softmax", ""),
        ("as-softmax", "0.1"),
        ("as-softmax", "0.5"),
        ("as-softmax", "all"),
    }
    _, found = read_table(tmp_path / "out.points.csv")
    assert len(found) == 3 * 2 * 3  # epochs, rates, losses
    assert {float(point["learning_rate"]) for point in found} == {2e-3, 4e-3}
