"""What a run leaves for `softsieve report`: its record, and logits of held-out rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from softsieve.tasks.examples import Data, Examples
from softsieve.tasks.task import Task
from softsieve.training.recipes import usual
from softsieve.training.run import Splits, encode, load_model, train
from softsieve.training.settings import PLAIN, Settings
from tests.training.helpers import equal_weights

WORDS = ["good", "fine", "lovely", "great"], ["bad", "poor", "awful", "dull"]


def texts(rows: int) -> Examples:
    inputs = [f"a {WORDS[i % 2][i // 2 % 4]} film number {i}" for i in range(rows)]
    return Examples(inputs, ["neg" if i % 2 else "pos" for i in range(rows)], [f"line {i}" for i in range(rows)])


def tagged(rows: int) -> Examples:
    return Examples([["a", "film"]] * rows, [["O", "B"]] * rows, [f"line {i}" for i in range(rows)])


def trained(output: Path, *, data: Data | None = None, resume: Path | None = None, **settings: Any) -> Splits:
    data = data or Data("reviews", "text", texts(60), texts(250), texts(20))
    task = Task.build(data)
    splits = encode(task, data.train, data.validation, data.test)
    about = {"data": data.name, "model": "built-in"}
    chosen: dict[str, Any] = {"epochs": 2, "batch_size": 8, "learning_rate": 0.01, "logging_steps": 4, **settings}
    train(task, splits, Settings(**chosen), output=output, about=about, resume=resume)
    return splits


def record(output: Path) -> dict[str, Any]:
    return dict(json.loads((output / "run.json").read_text()))


def test_the_record_says_what_was_run_on_what_and_what_came_out(tmp_path: Path) -> None:
    trained(tmp_path, seed=3, skip="solved")
    found = record(tmp_path)
    assert found["suite"] == "train"
    told = found["settings"]
    assert (told["data"], told["model"], told["kind"], told["labels"]) == (
        "reviews",
        "built-in",
        "text",
        ["neg", "pos"],
    )
    assert (told["classes"], told["rows"]) == (2, {"train": 60, "validation": 250, "test": 20})
    assert (told["loss"], told["delta"], told["skip"], told["seed"]) == ("as-softmax", 0.1, "solved", 3)
    _, model = load_model(tmp_path)
    assert told["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert found["provenance"]["versions"]["torch"] == torch.__version__
    (result,) = found["results"]
    metrics = json.loads((tmp_path / "model" / "metrics.json").read_text())
    assert {name: result[name] for name in ("validation", "test")} == metrics
    assert 0 < result["trained"] <= 120
    assert 0 < result["solved"] <= 1
    assert result["seconds"] >= result["evaluation_seconds"] > 0


def test_logits_are_those_of_the_saved_model_spread_over_the_held_out_rows(tmp_path: Path) -> None:
    splits = trained(tmp_path)
    _, model = load_model(tmp_path)
    assert splits.validation is not None
    index = torch.linspace(0, 249, 200).long()
    with safe_open(tmp_path / "logits.safetensors", "pt") as file:
        assert file.metadata() == {"part": "validation", "delta": "0.1"}
        logits, target = file.get_tensor("logits"), file.get_tensor("target")
    with torch.no_grad():
        torch.testing.assert_close(logits, model(**splits.validation.batch(index).inputs), rtol=1e-5, atol=1e-6)
    assert torch.equal(target, splits.validation.target[index])


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (Data("reviews", "text", texts(60), None, texts(20)), "test"),
        (Data("reviews", "text", texts(60), None, None), None),
        (Data("tags", "tokens", tagged(20), tagged(8), None), None),
    ],
)
def test_logits_of_the_test_part_or_none(tmp_path: Path, data: Data, part: str | None) -> None:
    trained(tmp_path, data=data)
    assert record(tmp_path)["settings"]["data"] == data.name
    path = tmp_path / "logits.safetensors"
    assert path.exists() == (part is not None)
    if part is not None:
        with safe_open(path, "pt") as file:
            assert file.metadata()["part"] == part


def test_a_new_run_takes_the_record_of_the_old_one_away_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path)

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("softsieve.training.loop.Trainer.fit", stop)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path)
    assert not (tmp_path / "run.json").exists()
    assert not (tmp_path / "logits.safetensors").exists()
    assert (tmp_path / "model").is_dir()


def test_a_resumed_run_has_the_record_of_the_whole(tmp_path: Path) -> None:
    trained(tmp_path / "a", save_steps=5)
    trained(tmp_path / "b", save_steps=5, save_total_limit=3)
    trained(tmp_path / "b", save_steps=5, resume=tmp_path / "b" / "checkpoint-10")
    ours, theirs = (record(tmp_path / name)["results"][0] for name in "ab")
    same = ("validation", "test", "steps", "best_step", "trained", "screened")
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    files = [load_file(tmp_path / name / "logits.safetensors") for name in "ab"]
    assert torch.equal(files[0]["logits"], files[1]["logits"])


def test_settings_that_say_nothing_are_the_recipe_of_the_built_in_model_and_paths_are_strings(tmp_path: Path) -> None:
    data = Data("reviews", "text", texts(64), texts(40), None)
    task = Task.build(data)
    splits = encode(task, data.train, data.validation, None)
    run = train(task, splits, Settings(), output=str(tmp_path / "run"))
    assert run.result.best["accuracy"] > 0.95  # with the settings of an encoder, chance
    told = record(tmp_path / "run")["settings"]
    assert {name: told[name] for name in PLAIN} == usual(data, hidden_size=None)
    _, model = load_model(str(tmp_path / "run"))
    assert equal_weights(model.state_dict(), run.model.state_dict())
    with pytest.raises(TypeError, match="output: expected a path, found int"):
        train(task, splits, Settings(), output=3)  # type: ignore[arg-type]
