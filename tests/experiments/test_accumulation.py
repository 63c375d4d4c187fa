"""`python -m experiments accumulation`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.accumulation import PARTS, curves, draw, summarise
from experiments.commands import app
from softsieve.comparisons.output import read_table
from tests.experiments.conftest import MakeRun


def made(make_run: MakeRun) -> list[dict[str, Any]]:
    """A run without AS-Speed, and one that is half of the time at one batch and half of it at two."""
    base: list[dict[str, float]] = [{"step": 20, "progress": 1.0, "samples": 200, "solved": 0.5}]
    half: list[dict[str, float]] = [
        {"step": 10, "progress": 0.5, "samples": 100, "solved": 0.2},
        {"step": 15, "progress": 1.0, "samples": 200, "solved": 0.6},
    ]
    speed = {"speed_steps": 2, "speed_lambda": 0.5}
    return [
        make_run("as-softmax", 0, [0.5, 0.6], training_curve=base, seconds=7.0),
        make_run("as-speed", 0, [0.5, 0.6], training_curve=half, seconds=4.0, steps=15, settings=speed),
    ]


def test_batches_and_solved_rows_on_the_way(make_run: MakeRun) -> None:
    ways = curves(made(make_run))
    assert len(ways) == 2 * PARTS
    plain, speed = ways[:PARTS], ways[PARTS:]
    assert [way["micro_batches"] for way in plain] == pytest.approx([1] * PARTS)
    assert [way["micro_batches"] for way in speed] == pytest.approx([1] * (PARTS // 2) + [2] * (PARTS // 2))
    assert [speed[0]["solved"], speed[-1]["solved"]] == pytest.approx([0.2, 0.6])
    assert (speed[0]["max_steps"], speed[0]["lam"], speed[0]["progress"]) == (2, 0.5, 0.5 / PARTS)


def test_curves_are_means_over_seeds(make_run: MakeRun) -> None:
    base, speed = made(make_run)
    twice = [{"step": 10, "progress": 1.0, "samples": 200, "solved": 1.0}]  # two batches in every step
    ways = curves([base, speed, {**speed, "seed": 1, "steps": 10, "training_curve": twice}])[PARTS:]
    assert len(ways) == PARTS
    assert [ways[0]["micro_batches"], ways[-1]["micro_batches"]] == pytest.approx([1.5, 2])
    assert [ways[0]["solved"], ways[-1]["solved"]] == pytest.approx([0.6, 0.8])


def test_speed_is_said_where_times_compare(make_run: MakeRun) -> None:
    runs = made(make_run)
    base, speed = summarise(runs)
    assert (base["max_steps"], base["lam"], base["speed"]) == (1, None, 1)
    assert (speed["speed"], speed["training_speed"]) == (7 / 4, 6 / 3)  # one second each is that of evaluations
    assert len(draw(summarise(runs), curves(runs)).axes) == 3
    runs[0]["side_by_side"] = 2
    assert [line["speed"] for line in summarise(runs)] == [1, None]
    assert summarise(runs[1:])[0]["training_speed"] is None


def test_the_command(weather: Path, tmp_path: Path) -> None:
    few = ["--seeds", "1", "--epochs", "4", "--batch-size", "10", "--learning-rate", "1e-2", "--every", "2"]
    values = ["--lam", "1", "--lam", "2", "--max-steps", "2"]
    done = CliRunner().invoke(app, ["accumulation", "--task", str(weather), *few, *values, "--out", "out"])
    assert done.exit_code == 0, done.output
    _, rows = read_table(tmp_path / "out.csv")
    assert [(row["max_steps"], row["lam"]) for row in rows] == [("1", ""), ("2", "1"), ("2", "2")]
    assert [float(row["steps"]) for row in rows[::2]] == [
        36,
        pytest.approx(20, abs=3),
    ]  # lambda 2: from the second step on
    _, ways = read_table(tmp_path / "out.curves.csv")
    assert max(float(way["micro_batches"]) for way in ways if way["lam"] == "2") == pytest.approx(2)
    assert (tmp_path / "out.png").exists()


def test_a_training_that_is_over_before_its_first_log_line(weather: Path) -> None:
    few = ["--seeds", "1", "--epochs", "1", "--batch-size", "30", "--lam", "1", "--max-steps", "2"]
    done = CliRunner().invoke(app, ["accumulation", "--task", str(weather), *few, "--out", "out"])
    assert done.exit_code == 1
    assert "expected at least one line in its training_curve, found none in 3 steps" in done.stderr
