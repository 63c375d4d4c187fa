"""The comparison: complete, resumable, and with figures that follow from its runs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from softsieve.cli import app
from softsieve.comparisons import losses as compare
from softsieve.comparisons.output import beside
from softsieve.comparisons.recipes import ROWS
from softsieve.errors import InputError
from softsieve.tasks.presets import PRESETS
from softsieve.tasks.read import read_data
from softsieve.training.recipes import BUILT_IN, PRETRAINED, recipe, usual
from softsieve.training.settings import Settings

ONCE = ("--epochs", "1")  # where nothing has to be learnt


def command(data: Path, out: Path, *more: str) -> list[str]:
    rows = [word for row in ("softmax", "as-softmax", "as-skip") for word in ("--row", row)]
    few = ["--epochs", "4", "--batch-size", "8", "--learning-rate", "1e-2", "--skip-after", "0"]
    return ["compare", "--task", str(data), *rows, "--seeds", "2", "--out", str(out), *few, *more]


def test_compare_writes_every_run_a_record_and_a_table(weather: Path, tmp_path: Path) -> None:
    out = tmp_path / "results" / "weather"
    done = CliRunner().invoke(app, command(weather, out))
    assert done.exit_code == 0, done.output
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["provenance"]["versions"]["torch"]
    lines, runs = record["results"][:3], record["results"][3:]
    assert [line["row"] for line in lines] == ["softmax", "as-softmax", "as-skip"]
    assert len(runs) == 6
    assert all(run["provenance"]["versions"] and run["settings"]["epochs"] == 4 for run in runs)
    for line in lines:
        scores = [run["test"]["accuracy"] for run in runs if run["row"] == line["row"]]
        assert line["mean"] == pytest.approx(sum(scores) / 2)
    assert min(line["mean"] for line in lines) > 0.9
    assert lines[2]["trained_rows"] < lines[1]["trained_rows"] == 4 * 90
    assert lines[2]["screened_rows"] > 0 == lines[1]["screened_rows"]
    for run in runs:
        curve = run["validation_curve"]
        assert [line["progress"] for line in curve] == [0.25, 0.5, 0.75, 1.0]
        assert max(line["accuracy"] for line in curve) == run["validation"]["accuracy"]
        assert run["validation"]["loss"] in [line["loss"] for line in curve if line["step"] == run["best_step"]]
    table = out.with_suffix(".md").read_text()
    assert "| as-skip |" in table
    assert "2 seeds" in table


def test_compare_makes_only_what_is_missing(weather: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "weather"
    assert CliRunner().invoke(app, command(weather, out, *ONCE)).exit_code == 0
    files = sorted(out.with_suffix(".runs").iterdir())
    assert len(files) == 6
    before = [file.read_bytes() for file in files]
    files[0].unlink()
    made: list[str] = []
    real = compare.run_job

    def counted(job: compare.Job) -> dict[str, Any]:
        made.append(job.row)
        return real(job)

    monkeypatch.setattr(compare, "run_job", counted)
    assert CliRunner().invoke(app, command(weather, out, *ONCE)).exit_code == 0
    assert len(made) == 1
    again = [json.loads(file.read_text()) for file in sorted(out.with_suffix(".runs").iterdir())]
    assert again[0]["test"] == json.loads(before[0])["test"]  # the same seed, the same answer
    made.clear()
    assert CliRunner().invoke(app, command(weather, out, *ONCE, "--delta", "0.2")).exit_code == 0
    assert len(made) == 6  # other settings are other runs


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which records graphs")
def test_graphs_without_a_gpu_are_a_notice(weather: Path, tmp_path: Path) -> None:
    out = tmp_path / "found"
    options = ("--row", "softmax", "--seeds", "1", "--epochs", "1", "--graphs", "--search", "1", "--out", str(out))
    with pytest.warns(UserWarning, match="graphs: runs without"):
        done = CliRunner().invoke(app, ["compare", "--data", str(weather), *options])
    assert done.exit_code == 0, done.output
    assert "CUDA graphs" not in out.with_suffix(".md").read_text()


def test_runs_of_earlier_versions_have_no_curves(weather: Path, tmp_path: Path) -> None:
    out, one = tmp_path / "weather", [*ONCE, "--seeds", "1"]
    assert CliRunner().invoke(app, command(weather, out, *one)).exit_code == 0
    files = sorted(out.with_suffix(".runs").iterdir())
    runs = {file: json.loads(file.read_text()) for file in files}
    for file, run in runs.items():
        file.write_text(json.dumps({name: value for name, value in run.items() if name not in compare.CURVES}))
    assert CliRunner().invoke(app, command(weather, out, *one)).exit_code == 0
    runs[files[0]]["validation_curve"][0]["loss"] = "low"
    files[0].write_text(json.dumps(runs[files[0]]))
    done = CliRunner().invoke(app, command(weather, out, *one))
    assert (done.exit_code, "damaged (loss: expected a number, found str)" in done.stderr) == (1, True)


def test_an_error_is_one_line_and_keeps_the_runs(weather: Path, tmp_path: Path) -> None:
    out = tmp_path / "weather"
    assert CliRunner().invoke(app, command(weather, out, *ONCE)).exit_code == 0
    done = CliRunner().invoke(app, command(weather / "nowhere.csv", out))
    assert done.exit_code == 1
    assert done.stderr.startswith("softsieve: ")
    assert done.stderr.count("\n") == 1
    assert len(list(out.with_suffix(".runs").iterdir())) == 6
    unknown = CliRunner().invoke(app, [*command(weather, out), "--row", "as-nothing"])
    assert unknown.exit_code == 1
    assert "as-nothing" in unknown.stderr


def test_the_table_is_made_of_the_runs_that_did_not_fail(
    weather: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = compare.run_job

    def failing(job: compare.Job) -> dict[str, Any]:
        if job.row == "as-skip":
            raise RuntimeError("no luck")
        return real(job)

    monkeypatch.setattr(compare, "run_job", failing)
    done = CliRunner().invoke(app, command(weather, tmp_path / "v1.2", *ONCE))
    assert done.exit_code == 1
    assert "2 of 6 runs failed" in done.stderr
    assert sorted(path.name for path in tmp_path.glob("v1.2*")) == ["v1.2.json", "v1.2.md", "v1.2.runs"]
    assert "| softmax |" in (tmp_path / "v1.2.md").read_text()


def test_suffixes_of_results() -> None:
    for out in ("a/b", "a/b.json", "a/b.runs"):
        assert beside(Path(out), ".md") == Path("a/b.md")
    assert beside(Path("v1.2"), ".md") == Path("v1.2.md")


def test_a_place_that_cannot_be_written_is_refused_before_the_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written to"):
        list(compare.run_all([], tmp_path / "file" / "out.runs"))


def kill_oneself(job: compare.Job) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_fails_its_runs_and_hangs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = compare.plan(["sst5"], ["softmax"], [0, 1], model=None, max_length=8, data_dir=tmp_path, overrides={})
    monkeypatch.setattr(compare, "_worker", kill_oneself)
    with pytest.raises(InputError, match=r"2 of 2 runs failed, the first: .*: a process was killed"):
        list(compare.run_all(jobs, tmp_path / "runs", side_by_side=2))


def run(row: str, seed: int, accuracy: float, seconds: float) -> dict[str, Any]:
    costs = {"seconds": seconds, "side_by_side": 1, "steps": 10, "trained_rows": 100, "screened_rows": 0}
    what = {"task": "t", "row": row, "seed": seed, "settings": {"metric": "accuracy"}}
    made = {"gpu": None, "machine": {"processor": "a", "threads": 1}}
    return {**what, "test": {"accuracy": accuracy}, **costs, "provenance": made}


def test_summary_pairs_by_seed() -> None:
    runs = [run("softmax", s, a, 8.0) for s, a in enumerate((0.5, 0.6, 0.7))]
    runs += [run("as-skip", s, a, 2.0) for s, a in ((2, 0.72), (0, 0.51), (1, 0.63))]  # in another order
    base, ours = compare.summarise(runs)
    assert (base["p"], base["speed"]) == (None, None)
    assert ours["mean"] == pytest.approx(0.62)
    assert ours["speed"] == pytest.approx(4.0)
    assert ours["p"] == pytest.approx(0.0742, abs=1e-3)  # differences 0.01, 0.03, 0.02: t = 3.464 with 2 degrees


def test_times_of_a_busy_and_an_idle_machine_do_not_compare() -> None:
    runs = [run("softmax", 0, 0.5, 8.0), {**run("as-skip", 0, 0.6, 2.0), "side_by_side": 4}]
    assert compare.summarise(runs)[1]["speed"] is None
    runs[1] |= {"side_by_side": 1, "provenance": {"gpu": "b", "machine": {"processor": "a", "threads": 1}}}
    assert compare.summarise(runs)[1]["speed"] is None  # nor those of two machines


def test_recipes_are_settings_of_presets() -> None:
    for recipes in (PRETRAINED, BUILT_IN):
        assert recipes.keys() <= PRESETS.keys()
        for task in recipes:
            for row in ROWS.values():
                Settings(**{**recipe(task, hidden_size=384 if recipes is PRETRAINED else None), **row})


def test_files_of_one_name(tmp_path: Path) -> None:
    def jobs(*tasks: str, rows: tuple[str, ...] = ("softmax",)) -> list[compare.Job]:
        return compare.plan(tasks, rows, [0], model=None, max_length=8, data_dir=tmp_path, overrides={})

    folders = [own_data(tmp_path / name) for name in ("a/x", "b/x", "a/y")]
    names = {job.name for folder in folders for job in jobs(folder)}
    assert len(names) == 3
    with pytest.raises(InputError, match=r"task: expected different names, found 'x' more than once"):
        jobs(*folders[:2])
    with pytest.raises(InputError, match="row: expected different names, found 'softmax' more than once"):
        jobs(folders[0], rows=("softmax", "softmax"))


def own_data(folder: Path, rows: int = 6) -> str:
    """A folder with training and test rows of two labels."""
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        (folder / f"{part}.csv").write_text("text,label\n" + "good,yes\nbad,no\n" * (rows // 2))
    return str(folder)


def test_data_of_ones_own_have_the_settings_of_train(tmp_path: Path) -> None:
    folder = own_data(tmp_path / "reviews", rows=40)
    (job,) = compare.plan([folder], ["softmax"], [3], model=None, max_length=8, data_dir=tmp_path, overrides={})
    assert job.settings == Settings(**usual(read_data(folder), hidden_size=None), loss="softmax", seed=3)
    assert job.settings.learning_rate == 3e-3  # that of a built-in model
    assert compare.run_job(job)["test"]["accuracy"] == 1


def test_plan_refuses_unknown_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="row: expected one of softmax"):
        compare.plan(["sst5"], ["hardmax"], [0], model=None, max_length=8, data_dir=tmp_path, overrides={})


def test_plan_refuses_rows_whose_loss_is_not_one_for_the_labels(tmp_path: Path) -> None:
    folder = own_data(tmp_path / "reviews", rows=40)
    options: dict[str, Any] = {"model": None, "max_length": 8, "data_dir": tmp_path, "overrides": {}}
    for tasks, row in (([folder], "bce"), (["sst5", "reuters"], "label-smoothing")):
        words = f"row: expected one of softmax, .* for the labels of {Path(tasks[-1]).name}, found '{row}'"
        with pytest.raises(InputError, match=words):
            compare.plan(tasks, ["softmax", row], [0], **options)
