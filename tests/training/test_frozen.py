"""A frozen encoder: its weights stay as they are, its states are computed once, and the head learns from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from softsieve.errors import InputError
from softsieve.tasks.examples import Examples
from softsieve.tasks.hf import PretrainedBody
from softsieve.tasks.read import read_data
from softsieve.tasks.task import Task
from softsieve.training.checkpoint import checkpoints
from softsieve.training.frozen import freeze
from softsieve.training.run import encode, load_model, train
from softsieve.training.settings import Settings
from tests.tasks.test_transformers_folder import make_data, make_encoder

pytest.importorskip("transformers")


def build(folder: Path, kind: str, **options: Any) -> tuple[Task, Any]:
    data = read_data(str(make_data(folder, kind)), validation_share=0.2)
    task = Task.build(data, model=str(make_encoder(folder / "encoder", "bert")), **options)
    return task, encode(task, data.train, data.validation, None)


@pytest.mark.parametrize("kind", ["text", "multilabel", "tokens"])
def test_only_the_head_learns(tmp_path: Path, kind: str) -> None:
    task, splits = build(tmp_path, kind)
    torch.manual_seed(42)
    settings = Settings(freeze_encoder=True, epochs=20, learning_rate=0.05)
    before = task.model(settings.objective(multilabel=kind == "multilabel")).state_dict()
    run = train(task, splits, settings, output=tmp_path / "run")
    after = run.model.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {"head.weight", "head.bias"}
    assert run.result.best["micro_f1" if kind == "multilabel" else "accuracy"] == 1
    # What was saved is a model of texts like any other.
    loaded, model = load_model(tmp_path / "run")
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
    inputs: list[Any] = [["in", "oslo"]] if kind == "tokens" else ["a good film", "a bad film"]
    rows = loaded.rows(Examples(inputs, [], [""] * len(inputs)))
    logits = model(**rows.batch(torch.arange(len(inputs))).inputs)
    if kind == "text":
        assert [loaded.labels[int(one.argmax())] for one in logits] == ["good", "bad"]
    elif kind == "multilabel":
        said = [{label for label, one in zip(loaded.labels, row, strict=True) if one > 0} for row in logits]
        assert said == [{"good", "film"}, {"bad", "film"}]
    else:
        assert [loaded.labels[int(one.argmax())] for one in logits[0, 1:3]] == ["O", "B-LOC"]


def test_states_are_what_the_encoder_says(tmp_path: Path) -> None:
    task, splits = build(tmp_path, "text")
    model = task.model(Settings().objective(multilabel=False))
    make = freeze(model)
    assert make is not None
    rows = make(splits.train)
    assert list(rows.inputs) == ["states"]
    assert torch.equal(rows.target, splits.train.target)
    assert model.training
    model.eval()
    index = torch.arange(len(rows))
    torch.testing.assert_close(model(**rows.batch(index).inputs), model(**splits.train.batch(index).inputs))
    body = model.body
    assert isinstance(body, PretrainedBody)
    assert not any(weight.requires_grad for weight in body.parameters())


def test_the_encoder_is_asked_once_for_every_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, splits = build(tmp_path, "text")
    asked = 0
    forward = PretrainedBody.forward

    def counted(body: PretrainedBody, **inputs: torch.Tensor) -> torch.Tensor:
        nonlocal asked
        asked += len(inputs["input_ids"]) if "input_ids" in inputs else 0
        return forward(body, **inputs)

    monkeypatch.setattr(PretrainedBody, "forward", counted)
    train(task, splits, Settings(freeze_encoder=True, epochs=5))
    assert asked == len(splits.train) + len(splits.validation)


def test_what_cannot_be_frozen_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    task, splits = build(tmp_path / "own", "text", pooling="model")
    with pytest.raises(InputError, match=r"freeze_encoder: expected an encoder .* found its own classifier"):
        train(task, splits, Settings(freeze_encoder=True))
    data = read_data(str(make_data(tmp_path, "text")))
    built_in = Task.build(data)
    with pytest.raises(InputError, match=r"freeze_encoder: expected an encoder .* found the built-in model"):
        train(
            built_in, encode(built_in, data.train, None, None), Settings(freeze_encoder=True), output=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()
    with pytest.raises(TypeError, match="freeze_encoder: expected True or False, found str"):
        Settings(freeze_encoder="yes")  # type: ignore[arg-type]


def test_a_frozen_run_goes_on_though_states_differ_in_their_last_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, splits = build(tmp_path, "text")
    train(task, splits, Settings(freeze_encoder=True, epochs=2), output=tmp_path / "run")
    forward = PretrainedBody.forward
    monkeypatch.setattr(PretrainedBody, "forward", lambda body, **inputs: forward(body, **inputs) * (1 + 1e-6))
    [checkpoint] = checkpoints(tmp_path / "run")
    longer = train(task, splits, Settings(freeze_encoder=True, epochs=4), output=tmp_path / "run", resume=checkpoint)
    assert longer.result.trained == 4 * len(splits.train)
