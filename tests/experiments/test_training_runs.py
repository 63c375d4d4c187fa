"""Trainings of experiments: made once, some of them may fail, and their curves are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.training_runs import Asked, curve, make, plan
from softsieve.comparisons import losses
from softsieve.errors import InputError
from tests.experiments.conftest import MakeRun


def asked(task: Path, **overrides: Any) -> Asked:
    return Asked([str(task)], 2, None, 16, Path("data"), 1, {"epochs": 1, "batch_size": 30, **overrides})


def test_changes_are_made_to_every_run_and_no_run_is_planned_twice(weather: Path) -> None:
    jobs = plan(asked(weather), ["softmax", "as-softmax"], lambda job: [{}, {"epochs": 1}, {"epochs": 2}])
    found = [(job.settings.seed, job.row, job.settings.epochs) for job in jobs]
    assert found == [(s, row, e) for s in (0, 1) for row in ("softmax", "as-softmax") for e in (1, 2)]


def test_data_without_validation_rows_are_refused(weather: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = losses.read_task
    monkeypatch.setattr(losses, "read_task", lambda *which: real(*which)._replace(validation=None))
    with pytest.raises(InputError, match="weather: this experiment needs validation data, found none"):
        plan(asked(weather), ["softmax"])


def test_runs_that_fail_are_told_and_the_others_kept(
    weather: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, made, real = plan(asked(weather), ["softmax"]), [], losses.run_job

    def failing(job: losses.Job) -> dict[str, Any]:
        made.append(job.settings.seed)
        if job.settings.seed == 0:
            raise RuntimeError("no luck")
        return real(job)

    monkeypatch.setattr(losses, "run_job", failing)
    runs, failure = make(jobs, tmp_path / "out")
    assert [run["seed"] for run in runs] == [1]
    assert "1 of 2 runs failed" in str(failure)
    monkeypatch.setattr(losses, "run_job", lambda job: made.append(job.settings.seed) or real(job))  # type: ignore[func-returns-value]
    runs, failure = make(jobs, tmp_path / "out.csv")
    assert ([run["seed"] for run in runs], failure) == ([0, 1], None)
    assert made == [0, 1, 0]
    monkeypatch.setattr(losses, "run_job", failing)
    with pytest.raises(InputError, match="1 of 1 runs failed"):
        make(jobs[:1], tmp_path / "other")


def test_a_run_without_a_curve(make_run: MakeRun) -> None:
    run = make_run("softmax", 3, [0.5])
    assert curve(run) == run["validation_curve"]
    with pytest.raises(
        InputError, match="weather, softmax, seed 3: expected a run with its training_curve, found none"
    ):
        curve(run, "training_curve")
    with pytest.raises(InputError, match="expected a run with its validation_curve"):
        curve({**run, "settings": {"metric": "macro_f1"}})
    with pytest.raises(InputError, match="expected at least one line in its training_curve, found none in 10 steps"):
        curve({**run, "training_curve": []}, "training_curve")
