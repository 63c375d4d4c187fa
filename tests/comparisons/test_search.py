"""A search: the same draws for all rows, judged on validation rows alone, resumable, and with every trial on record."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from softsieve.cli import app
from softsieve.comparisons import losses as compare
from softsieve.comparisons import search
from softsieve.comparisons.recipes import EPOCHS, PARAMETERS, RATES, ROWS, draw
from softsieve.errors import DivergedError, InputError
from softsieve.losses.objectives import MULTI_LABEL, SINGLE_LABEL
from softsieve.tasks.read import read_data
from softsieve.training.recipes import PRETRAINED, recipe
from softsieve.training.run import train
from softsieve.training.settings import Settings

RECIPE: dict[str, Any] = {"epochs": 8, "learning_rate": 1e-4}


# -- what is drawn -----------------------------------------------------------------------------------------------------


def test_the_first_trial_is_the_recipe_and_all_rows_have_the_same_draws() -> None:
    assert all(draw(row, 1, **RECIPE) == {} for row in ROWS)
    for trial in range(2, 40):
        shared = [{name: draw(row, trial, **RECIPE)[name] for name in RECIPE} for row in ROWS]
        assert all(one == shared[0] for one in shared)


def test_draws_fill_their_ranges() -> None:
    drawn = [draw("softmax", trial, **RECIPE) for trial in range(2, 102)]
    places = [math.log(one["learning_rate"] / 1e-4, RATES) for one in drawn]
    assert max(map(abs, places)) <= 1.01
    assert [sum(low <= place < low + 0.5 for place in places) for low in (-1, -0.5, 0, 0.5)] == pytest.approx(
        [25] * 4, abs=3
    )
    assert {one["epochs"] for one in drawn} == {round(8 * share) for share in EPOCHS}
    assert {draw("softmax", trial, epochs=1, learning_rate=1.0)["epochs"] for trial in range(2, 9)} == {1, 2}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_draws_the_parameter_of_its_loss(row: str) -> None:
    loss = ROWS[row]["loss"]
    settings = [Settings(**{**ROWS[row], **draw(row, trial, **RECIPE)}).filled() for trial in range(2, 52)]
    if loss not in PARAMETERS:
        assert {one.loss_options for one in settings} == {None}
        assert {one.delta for one in settings} == {0.1}
        return
    name, low, high = PARAMETERS[loss]
    values = [one.delta if name == "delta" else dict(one.loss_options or ())[name] for one in settings]
    assert low <= min(values) < 1.3 * low
    assert high / 1.3 < max(values) <= high
    assert {type(value) for value in values} == {int if name == "k" else float}
    assert getattr(settings[0].objective(multilabel=loss not in SINGLE_LABEL), name) == values[0]


def test_every_parameter_is_one_of_its_loss() -> None:
    assert PARAMETERS.keys() <= SINGLE_LABEL.keys() | MULTI_LABEL.keys()
    assert {name for name in MULTI_LABEL if name in PARAMETERS} == {"as-softmax", "focal-bce", "asymmetric"}


def test_large_encoders_have_half_the_learning_rate(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    rates = {}
    for size in (384, 768):
        config = transformers.BertConfig(hidden_size=size, num_attention_heads=12)
        config.save_pretrained(str(tmp_path / str(size)))
        (job,) = compare.plan(
            ["clinc150"], ["softmax"], [0], model=str(tmp_path / str(size)), max_length=8, data_dir=tmp_path,
            overrides={},
        )  # fmt: skip
        rates[size] = job.settings.learning_rate
    assert rates == {384: 1e-4, 768: 5e-5}
    assert recipe("clinc150", hidden_size=None)["learning_rate"] == 3e-3
    assert recipe("unheard of", hidden_size=768) == {}
    assert PRETRAINED["clinc150"]["learning_rate"] == 1e-4  # left as it is


# -- planning ----------------------------------------------------------------------------------------------------------


def jobs_of(data: Path, *rows: str, seeds: int = 2, **settings: Any) -> list[compare.Job]:
    return compare.plan(
        [str(data)], rows or ["softmax", "am-softmax"], range(seeds), model=None, max_length=8, data_dir=data,
        overrides={"epochs": 2, "learning_rate": 1e-2, "batch_size": 8, **settings},
    )  # fmt: skip


def test_trials_have_a_seed_of_their_own(weather: Path) -> None:
    jobs = jobs_of(weather, "softmax", "as-skip", "label-smoothing")
    trials = search.plan_trials(jobs, 4)
    assert [trial.row for trial in trials] == ["softmax"] * 4 + ["as-skip"] * 4 + ["label-smoothing"] * 4
    assert {trial.settings.seed for trial in trials} == {search.SEED}
    assert all(trial.trial for trial in trials)
    assert trials[0].settings == replace(jobs[0].settings, seed=search.SEED)
    assert len({trial.name for trial in trials}) == 12
    assert not {trial.name for trial in trials} & {job.name for job in jobs}
    assert {trial.settings.batch_size for trial in trials} == {8}


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)])
def test_a_search_over_nothing_is_refused(weather: Path, count: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="search: expected an int"):
        search.plan_trials(jobs_of(weather), count)
    with pytest.raises(InputError, match="search: expected rows to search for, found none"):
        search.plan_trials([], 3)


def test_a_search_needs_validation_data(weather: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "read_data", lambda task: read_data(task)._replace(validation=None))
    compare.read_task.cache_clear()
    with pytest.raises(InputError, match=f"{weather}: a search needs validation data, found none"):
        search.plan_trials(jobs_of(weather), 3)
    compare.read_task.cache_clear()


def test_without_test_rows_some_are_held_out(weather: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare.read_task.cache_clear()
    whole = read_data(weather)
    monkeypatch.setattr(compare, "read_data", lambda task: read_data(task)._replace(test=None))
    data = compare.read_task(str(weather), "")
    compare.read_task.cache_clear()
    again = compare.read_task(str(weather), "")
    compare.read_task.cache_clear()
    assert data.test is not None
    assert again.test is not None
    assert list(data.test.where) == list(again.test.where)
    assert len(data.test.inputs) == len(whole.train.inputs) // 5
    assert sorted([*data.train.where, *data.test.where]) == sorted(whole.train.where)
    assert data.notes[-1].endswith("rows are held out for the test")


def test_plans_of_nothing_are_refused(tmp_path: Path) -> None:
    plan: Callable[..., Any] = compare.plan
    options: dict[str, Any] = {"model": None, "max_length": 8, "data_dir": tmp_path, "overrides": {}}
    for name, given in {
        "task": ([], ["softmax"], [0]),
        "row": (["sst5"], [], [0]),
        "seeds": (["sst5"], ["seta"], []),
    }.items():
        with pytest.raises(InputError, match=f"{name}: expected at least one, found none"):
            plan(*given, **options)
    with pytest.raises(InputError, match=f"seeds: expected others than {search.SEED}"):
        search.plan_trials(plan(["sst5"], ["softmax"], [search.SEED], **options), 1)


# -- judging -----------------------------------------------------------------------------------------------------------


def outcome(trial: compare.Job, accuracy: float, loss: float = 1.0) -> dict[str, Any]:
    return {"settings": trial.settings.asdict(), "validation": {"accuracy": accuracy, "loss": loss}, "seconds": 2.0}


def test_the_best_trial_of_every_row_goes_on_with_all_seeds(weather: Path) -> None:
    jobs = jobs_of(weather, seeds=3)
    trials = search.plan_trials(jobs, 3)
    scores = [(0.5, 1.0), (0.7, 1.0), (0.6, 0.1), (0.8, 1.0), (0.8, 0.9), (0.8, 0.9)]  # the first of equal ones
    outcomes = {trial: outcome(trial, *score) for trial, score in zip(trials, scores, strict=True)}
    found = search.conclude(jobs, trials, outcomes)
    assert [one["chosen"] for one in found.trials] == [False, True, False, False, True, False]
    assert [one["trial"] for one in found.trials] == [1, 2, 3, 1, 2, 3]
    assert found.failed == []
    assert [(job.row, job.settings.seed, job.trial) for job in found.jobs] == [
        (job.row, job.settings.seed, False) for job in jobs
    ]
    for job in found.jobs:
        best = trials[1] if job.row == "softmax" else trials[4]
        assert replace(job.settings, seed=search.SEED) == best.settings
    assert "trial 2: epochs 1, learning rate 0.00672, margin 0.0561 | 80.00 |" in search.markdown(found.trials)


def test_less_may_be_better(weather: Path) -> None:
    jobs = jobs_of(weather, "softmax", metric="loss")
    trials = search.plan_trials(jobs, 2)
    losses = {trial: outcome(trial, 0.5, loss) for trial, loss in zip(trials, (0.3, 0.2), strict=True)}
    assert [one["chosen"] for one in search.conclude(jobs, trials, losses).trials] == [False, True]


def test_a_row_whose_trials_all_fail_is_left_out(weather: Path) -> None:
    jobs = jobs_of(weather)
    trials = search.plan_trials(jobs, 2)
    outcomes: dict[compare.Job, compare.Outcome] = dict.fromkeys(trials, "OSError: a | b")
    outcomes[trials[1]] = outcome(trials[1], 0.1)
    found = search.conclude(jobs, trials, outcomes)
    assert {job.row for job in found.jobs} == {"softmax"}
    assert found.failed == [f"{weather.name} am-softmax: all trials failed, the first: OSError: a | b"]
    assert [one["failed"] for one in found.trials] == ["OSError: a | b", None, "OSError: a | b", "OSError: a | b"]
    table = search.markdown(found.trials)
    assert f"| {weather.name} | softmax | 2 | 1 | trial 2: epochs 1, learning rate 0.00672 | 10.00 |" in table
    assert f"| {weather.name} | am-softmax | 2 | 2 | none: OSError: a / b |  |" in table


# -- the command -------------------------------------------------------------------------------------------------------


def command(data: Path, out: Path, *more: str, rows: tuple[str, ...] = ("softmax", "am-softmax")) -> list[str]:
    told = [word for row in rows for word in ("--row", row)]
    few = ["--epochs", "2", "--batch-size", "16", "--learning-rate", "1e-2", "--seeds", "2", "--search", "3"]
    return ["compare", "--task", str(data), *told, "--out", str(out), *few, *more]


def test_search_chooses_settings_by_validation_and_writes_every_trial(
    weather: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = []

    def watched(task: Any, splits: Any, settings: Settings) -> Any:
        judged.append((settings.seed, splits.test is not None))
        return train(task, splits, settings)

    monkeypatch.setattr(compare, "train", watched)
    out = tmp_path / "found"
    done = CliRunner().invoke(app, command(weather, out))
    assert done.exit_code == 0, done.output
    assert judged == [(search.SEED, False)] * 6 + [(seed, True) for seed in (0, 0, 1, 1)]
    results = json.loads(out.with_suffix(".json").read_text())["results"]
    lines, runs, trials = results[:2], results[2:6], results[6:]
    assert [line["row"] for line in lines] == ["softmax", "am-softmax"]
    assert [(trial["row"], trial["trial"]) for trial in trials] == [(row, n) for row in ROWS if row in
            ("softmax", "am-softmax") for n in (1, 2, 3)]  # fmt: skip
    assert all(trial["seconds"] > 0 and trial["failed"] is None and "test" not in trial for trial in trials)
    for line in lines:
        own = [trial for trial in trials if trial["row"] == line["row"]]
        (chosen,) = [trial for trial in own if trial["chosen"]]
        assert chosen["validation"]["accuracy"] == max(trial["validation"]["accuracy"] for trial in own)
        assert line["settings"] == compare.tuned(chosen["settings"])
        for run in runs:
            if run["row"] == line["row"]:
                assert compare.tuned(run["settings"]) == line["settings"]
    table = out.with_suffix(".md").read_text()
    assert "2 seeds.\n\n## Settings found by search\n\n3 trials of every row" in table
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(out.with_suffix(".json")), "--out", str(page)])
    assert done.exit_code == 0, done.output
    assert "trials on validation rows; what was chosen in bold" in page.read_text()

    judged.clear()
    files = {path: path.read_bytes() for path in out.with_suffix(".runs").iterdir()}
    assert len(files) == 10
    gone = next(path for path in files if "-trial-" in path.name)
    gone.unlink()
    assert CliRunner().invoke(app, command(weather, out)).exit_code == 0
    assert judged == [(search.SEED, False)]  # only what was missing
    again = json.loads(out.with_suffix(".json").read_text())["results"]
    for key in ("row", "trial", "settings", "validation", "chosen"):
        assert [one[key] for one in again[6:]] == [one[key] for one in trials]


def test_a_trial_that_diverges_is_recorded_and_not_tried_again(
    weather: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = compare.run_job, []

    def failing(job: compare.Job) -> dict[str, Any]:
        made.append(job)
        if job.trial and job.row == "am-softmax":
            raise DivergedError("the loss is nan at step 3")
        if job.trial and job.settings.learning_rate != 1e-2:
            raise RuntimeError("out of luck")
        return real(job)

    monkeypatch.setattr(compare, "run_job", failing)
    out = tmp_path / "found"
    for tried in (6, 2):  # the two that failed for another reason may work the next time
        done = CliRunner().invoke(app, command(weather, out))
        assert done.exit_code == 1
        words = (
            f"1 of 2 rows were left out, the first: {weather.name} am-softmax: all trials failed, the first: Diverged"
        )
        assert words in done.stderr
        assert sum(job.trial for job in made) == tried
        made.clear()
    results = json.loads(out.with_suffix(".json").read_text())["results"]
    assert [one["row"] for one in results] == ["softmax"] * 6 + ["am-softmax"] * 3
    failed = [one["failed"] for one in results[3:]]
    assert failed == [None] + ["RuntimeError: out of luck"] * 2 + ["DivergedError: the loss is nan at step 3"] * 3
    assert results[3]["chosen"] is True
    assert "| am-softmax | 3 | 3 | none: DivergedError" in out.with_suffix(".md").read_text()


def test_a_search_without_any_result_says_why(weather: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(job: compare.Job) -> dict[str, Any]:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(compare, "run_job", failing)
    done = CliRunner().invoke(app, command(weather, tmp_path / "found"))
    assert done.exit_code == 1
    assert "2 of 2 rows were left out" in done.stderr
    assert len(json.loads((tmp_path / "found.json").read_text())["results"]) == 6
    assert (tmp_path / "found.md").read_text().startswith("Made with\n\n```\nsoftsieve")


def test_trials_are_on_record_when_all_runs_fail(
    weather: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(job: compare.Job) -> dict[str, Any]:
        if not job.trial:
            raise RuntimeError("out of luck")
        return {"validation": {"accuracy": 0.5, "loss": 1.0}, "seconds": 1.0}

    monkeypatch.setattr(compare, "run_job", failing)
    done = CliRunner().invoke(app, command(weather, tmp_path / "found"))
    assert done.exit_code == 1
    assert "4 of 4 runs failed" in done.stderr
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [one["chosen"] for one in results] == [True, False, False] * 2


def test_a_larger_number_keeps_the_trials_that_were_made(weather: Path) -> None:
    jobs = jobs_of(weather)
    few, many = ({trial.name for trial in search.plan_trials(jobs, count)} for count in (3, 7))
    assert few < many
    assert len(many) == 14


def test_trials_run_side_by_side(weather: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def results(jobs: list[compare.Job], side_by_side: int) -> Any:
        asked.append(side_by_side)
        return [(job, "OSError: no") for job in jobs]

    monkeypatch.setattr(compare, "_results", results)
    CliRunner().invoke(app, command(weather, tmp_path / "found", "--side-by-side", "3"))
    assert asked[0] == 3


def test_settings_that_differ_stand_in_the_table() -> None:
    def run(row: str, rate: float, **more: Any) -> dict[str, Any]:
        settings = Settings(**ROWS[row], learning_rate=rate, **more).filled().asdict()
        made = {"gpu": None, "machine": {"processor": "a"}, "commit": "c", "versions": {"torch": "2"}}
        costs = {"seconds": 1.0, "side_by_side": 1, "steps": 1, "trained_rows": 1, "screened_rows": 0}
        about = {"task": "t", "row": row, "seed": 0, "model": "m", "classes": 2, "rows": {"train": 1}}
        return {**about, **costs, "settings": settings, "test": {"accuracy": 0.5}, "provenance": made}

    same = compare.markdown([run("softmax", 1e-3), run("as-softmax", 1e-3)], "")
    assert "settings |" not in same
    assert "epochs 3, batch_size 32, learning_rate 0.001, delta 0.1, fp32" in same
    other = compare.markdown([run("softmax", 1e-3), run("as-softmax", 2e-3, delta=0.3)], "")
    assert "; epochs 3, batch_size 32, fp32." in other
    assert "| screened | settings |\n|---|---|---|---|---|---|---|---|---|" in other
    assert "| 0 | epochs 3, learning rate 0.001 |" in other
    assert "| 0 | epochs 3, learning rate 0.002, delta 0.3 |" in other
    own = compare.markdown([run("am-softmax", 1e-3, loss_options={"margin": 0.25})], "")
    assert "| 0 | epochs 3, learning rate 0.001, margin 0.25 |" in own
    assert own.endswith("\n1 seeds.\n")
    again = {**run("softmax", 1e-3, compiled=True), "seed": 1}
    several = compare.markdown([run("softmax", 1e-3, compiled=True), again, run("as-softmax", 1e-3, compiled=True)], "")
    assert "fp32, compiled layers." in several
    assert several.endswith("\n2 seeds, as-softmax 1.\n")


@pytest.mark.parametrize("count", ["0", "-2", "many"])
def test_bad_counts_are_refused(weather: Path, tmp_path: Path, count: str) -> None:
    done = CliRunner().invoke(app, [*command(weather, tmp_path / "found"), "--search", count])
    assert done.exit_code == 2
    assert not (tmp_path / "found.runs").exists()
