"""From examples to answers and back from disk, for every kind of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from softsieve.errors import InputError
from softsieve.losses.objectives import CosineHead, MultiLabelASSoftmax, Objective, make_objective
from softsieve.tasks.encode import ImageEncoder, text_ids
from softsieve.tasks.examples import KINDS, Data, Examples
from softsieve.tasks.labels import label_flags
from softsieve.tasks.models import PlainTextBody
from softsieve.tasks.rows import LabelRows
from softsieve.tasks.task import FILE, Task, TokenRows


def make_data(kind: str, rows: int = 24) -> Data:
    """Easy data: the label is written all over the input."""
    generator = np.random.default_rng(0)
    inputs: list[Any] = []
    labels: list[Any] = []
    for i in range(rows):
        which = i % 3
        if kind in ("text", "multilabel"):
            names = [["red"], ["green"], ["red", "blue"]][which]
            inputs.append(f"number {i} is {' and '.join(names)}")
            labels.append("-".join(names) if kind == "text" else names)
        elif kind == "tokens":
            inputs.append(["go", "to", "Paris", "now"][which:])
            labels.append(["O", "O", "B-LOC", "O"][which:])
        elif kind == "image":
            image = generator.integers(0, 60, (8, 8, 3), np.uint8)
            image[..., which] += 180
            inputs.append(image)
            labels.append(["red", "green", "blue"][which])
        else:
            time = np.arange(2000) / 8000
            inputs.append((np.sin(2 * np.pi * [300, 900, 2700][which] * time + i).astype(np.float32), 8000))
            labels.append(["low", "middle", "high"][which])
    return Data("easy", kind, Examples(inputs, labels, [f"row-{i}" for i in range(rows)]), None, None)


def objective_for(kind: str, name: str = "softmax") -> Objective:
    return make_objective(name, multilabel=kind == "multilabel")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_learnt_judged_and_put_into_words(kind: str) -> None:
    data = make_data(kind)
    task = Task.build(data, workers=2)
    assert task.labels == sorted(task.labels)
    objective = objective_for(kind)
    model = task.model(objective)
    rows = task.rows(data.train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    everything = rows.batch(torch.arange(len(rows)))
    for _ in range(25):
        target = label_flags(everything.target, 3) if kind == "multilabel" else everything.target
        loss = objective(model(**everything.inputs), target).loss
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        decided = task.decide(model.eval()(**everything.inputs))
    found = task.metrics(*task.by_word(decided, rows))
    names = {
        "multilabel": ["micro_f1", "macro_f1", "exact_match", "p@1", "p@3", "p@5", "ndcg@5", "psp@1", "psp@3", "psp@5"],
        "tokens": ["accuracy", "entity_f1"],
    }
    assert list(found) == names.get(kind, ["accuracy", "macro_f1", "micro_f1"])
    short = ("p@3", "p@5", "psp@1")  # not all rows have so many labels, nor is the first their rarest
    perfect = {name: value for name, value in found.items() if name not in short}
    assert perfect == dict.fromkeys(perfect, 1.0)
    expected = [sorted(names) for names in data.train.labels] if kind == "multilabel" else data.train.labels
    assert task.predictions(decided, rows) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_task_comes_back(kind: str, tmp_path: Path) -> None:
    data = make_data(kind)
    task = Task.build(data)
    objective = objective_for(kind, "as-softmax")
    model = task.model(objective).eval()
    task.save(tmp_path / "model", objective)
    assert [path.name for path in (tmp_path / "model").iterdir()] == [FILE]
    again = Task.load(tmp_path / "model")
    for name in ("kind", "labels", "encoder", "filler", "counts"):
        assert getattr(again, name) == getattr(task, name)
    assert (task.counts is not None) == (kind == "multilabel")
    assert again.objective == objective
    empty = again.empty_model().eval()
    empty.load_state_dict(model.state_dict())
    batch = again.rows(data.train).batch(torch.arange(5))
    torch.testing.assert_close(empty(**batch.inputs), model(**batch.inputs), atol=0, rtol=0)


def test_the_head_of_an_objective_comes_back_with_its_settings(tmp_path: Path) -> None:
    task = Task.build(make_data("text"))
    task.save(tmp_path, make_objective("am-softmax", scale=7.0, reduction="none"))
    head = Task.load(tmp_path).empty_model().head
    assert isinstance(head, CosineHead)
    assert head.scale == 7.0


def test_a_built_task_has_no_saved_model() -> None:
    with pytest.raises(ValueError, match="expected a task that was loaded"):
        Task.build(make_data("text")).empty_model()


@pytest.mark.parametrize("kind", KINDS)
def test_examples_without_labels_are_good_for_prediction(kind: str) -> None:
    data = make_data(kind)
    task = Task.build(data)
    unlabelled = task.rows(data.train._replace(labels=[]))
    labelled = task.rows(data.train)
    assert all(torch.equal(unlabelled.inputs[key], labelled.inputs[key]) for key in labelled.inputs)
    assert len(unlabelled.target) == len(labelled.target)
    decided = labelled.target.clamp_min(0) if kind == "tokens" else labelled.target
    assert task.predictions(decided, unlabelled) == task.predictions(decided, labelled)


@pytest.mark.parametrize("kind", KINDS)
def test_a_label_that_training_has_not_seen_is_wrong_and_has_no_loss(kind: str) -> None:
    data = make_data(kind, 6)
    task = Task.build(data)
    known = task.rows(data.train)
    right = torch.where(known.target < 0, ~0, known.target) if kind == "multilabel" else known.target.clamp_min(0)
    name = "exact_match" if kind == "multilabel" else "accuracy"
    assert task.metrics(*task.by_word(right, known))[name] == 1
    bad = {"tokens": ["O", "B-ORG", "O", "O"], "multilabel": ["red", "B-ORG"]}.get(kind, "B-ORG")
    rows = task.rows(data.train._replace(labels=[*data.train.labels[:3], bad, *data.train.labels[4:]]))
    figures = task.metrics(*task.by_word(right, rows))
    words = sum(map(len, data.train.inputs)) if kind == "tokens" else 6
    wrong = 2 if kind == "tokens" else 1  # of the four words, B-LOC is now O, too
    assert figures[name] == pytest.approx(1 - wrong / words)
    assert 0 < figures["entity_f1" if kind == "tokens" else "micro_f1"] < 1
    model = task.model(objective_for(kind))
    targets = rows.target[3].tolist()
    assert min(targets if isinstance(targets, list) else [targets]) < 0
    outputs = model(**rows.batch(torch.arange(6)).inputs)
    target = label_flags(rows.target, len(task.labels)) if kind == "multilabel" else rows.target
    assert torch.isfinite(objective_for(kind)(outputs, target).loss).all()


def test_labels_that_do_not_match_the_words_are_named() -> None:
    data = make_data("tokens", 6)
    labels = [data.train.labels[0][:-1], *data.train.labels[1:]]
    with pytest.raises(InputError, match=r"^row-0: expected 4 labels, one a word, found 3"):
        Task.build(data).rows(data.train._replace(labels=labels))


def test_labels_beyond_those_of_training_are_known() -> None:
    data = make_data("text")._replace(labels=["red", "green", "red-blue", "never seen"])
    task = Task.build(data)
    assert task.labels == ["green", "never seen", "red", "red-blue"]
    assert task.rows(Examples(["x"], ["never seen"], ["1"])).target.tolist() == [1]


def test_rows_without_any_label_are_multilabel_rows_too() -> None:
    task = Task.build(make_data("multilabel"))
    assert task.labels == ["blue", "green", "red"]
    rows = task.rows(Examples(["x", "y"], [[], ["red", "blue"]], ["1", "2"]))
    assert rows.target.tolist() == [[-100, -100], [2, 0]]
    assert rows.count() == 2
    assert rows.count(torch.tensor([0])) == 1
    moved = rows.to("cpu")
    assert isinstance(moved, LabelRows)


def test_logits_above_zero_are_labels() -> None:
    task = Task.build(make_data("multilabel"))
    assert task.decide(torch.tensor([[0.0, -1.0, 1e-9]])).tolist() == [[2, ~0, ~1]]
    assert task.predictions(torch.tensor([[2, 0, ~1]]), task.rows(Examples(["x"], [], ["1"]))) == [["blue", "red"]]
    assert Task.build(make_data("text")).decide(torch.tensor([[0.0, -1.0, 1e-9]])).tolist() == [2]


# Words


def test_words_beyond_max_length_count_as_outside_an_entity() -> None:
    words = Examples([["in", "Paris", "or", "in", "Rome"]], [["O", "B-LOC", "O", "O", "B-LOC"]], ["1"])
    entities = Examples([["Rome", "Paris", "in"]], [["B-LOC", "B-LOC", "O"]], ["1"])  # O is not the most frequent
    task = Task.build(Data("d", "tokens", entities, None, None), max_length=4)
    rows = task.rows(words)
    assert rows.target.shape == (1, 4)
    decided = rows.target.clone()
    assert task.predictions(decided, rows) == [["O", "B-LOC", "O", "O", "O"]]
    found = task.metrics(*task.by_word(decided, rows))
    assert found == pytest.approx({"accuracy": 4 / 5, "entity_f1": 2 / 3})


def test_without_an_outside_the_most_frequent_label_stands_for_unread_words() -> None:
    train = Examples([list("abcdef"), list("xyzxy")], [list("abbbef"), list("xyzxy")], ["1", "2"])
    task = Task.build(Data("d", "tokens", train, None, None), max_length=4)
    rows = task.rows(train)
    assert task.predictions(rows.target.clamp_min(0), rows) == [list("abbbbb"), list("xyzxb")]
    assert task.metrics(*task.by_word(rows.target, rows)) == {"accuracy": 8 / 11}


def test_rows_know_their_words_on_every_device() -> None:
    data = make_data("tokens")
    task = Task.build(data)
    rows = task.rows(data.train)
    moved = rows.to("cpu")
    assert isinstance(moved, TokenRows)
    assert task.predictions(moved.target.clamp_min(0), moved) == data.train.labels
    assert moved.batch(torch.tensor([2])).target.shape == (1, 2)  # cut to its longest row


# On disk

TEXT = {
    "format": 1,
    "kind": "text",
    "labels": ["a", "b"],
    "filler": 0,
    "model": "built-in",
    "encoder": {"max_length": 512, "features": 64, "weighted": 1},
    "objective": {"name": "softmax", "reduction": "mean", "ignore_index": -100},
}
IMAGE = {"kind": "image", "encoder": {"size": 8, "mirror": 0}}


def test_the_content_of_the_file(tmp_path: Path) -> None:
    data = Data("d", "text", Examples(["x", "y"], ["a", "b"], ["1", "2"]), None, None)
    Task.build(data).save(tmp_path, make_objective("softmax"))
    assert json.loads((tmp_path / FILE).read_text()) == TEXT
    (tmp_path / FILE).write_text(json.dumps({**TEXT, **IMAGE}))
    assert Task.load(tmp_path).encoder == ImageEncoder(size=8, mirror=0)


def test_text_models_of_earlier_versions_read_and_count_as_they_did(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({**TEXT, "encoder": {"max_length": 128, "features": 64}}))
    task = Task.load(tmp_path)
    rows = task.rows(Examples(["so so good"], [], ["1"]))
    assert rows.inputs["ids"][0].tolist() == text_ids("so so good", 128)
    body = task.model(make_objective("softmax")).body
    assert isinstance(body, PlainTextBody)
    assert list(body.state_dict()) == ["table.weight"]
    summed = body.table.weight[rows.inputs["ids"][0].long()].sum(0) / len(rows.inputs["ids"][0]) ** 0.5
    torch.testing.assert_close(body.eval()(**rows.inputs)[0], summed)


def test_files_from_before_there_were_two_multilabel_rules(tmp_path: Path) -> None:
    old = {"name": "as-softmax", "reduction": "none", "delta": 0.2}
    (tmp_path / FILE).write_text(json.dumps({**TEXT, "kind": "multilabel", "objective": old}))
    task = Task.load(tmp_path)
    assert task.objective == MultiLabelASSoftmax(delta=0.2, against="labels", reduction="none")
    task.save(tmp_path, MultiLabelASSoftmax())
    assert Task.load(tmp_path).objective == MultiLabelASSoftmax(delta=0.7, against="threshold")
    (tmp_path / FILE).write_text(json.dumps({**TEXT, "objective": {**old, "ignore_index": -100}}))
    assert Task.load(tmp_path).objective == make_objective("as-softmax", delta=0.2, reduction="none")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": 2}, "format: expected 1, found 2"),
        ({"format": True}, "format: expected 1, found True"),
        ({"kind": "video"}, "kind: expected one of text, multilabel, tokens, image, audio, found 'video'"),
        ({"kind": []}, "kind: expected one of"),
        ({"labels": None}, "labels: expected a list of names, found None"),
        ({"labels": ["a", 1]}, "labels: expected a list of names"),
        ({"labels": []}, "labels: expected 1 to 8388608 different names, found []"),
        ({"labels": ["a", "a"]}, "labels: expected 1 to 8388608 different names, found ['a', 'a']"),
        ({"least": 2}, "least: expected a whole number from 0 to 1, found 2"),
        ({"filler": 2}, "filler: expected a whole number from 0 to 1, found 2"),
        ({"model": "evil"}, "model: expected one of built-in, pretrained, found 'evil'"),
        ({"encoder": None}, "encoder: expected an object, found None"),
        ({"encoder": {}}, "encoder.max_length: expected a whole number from 4 to 1048576, found None"),
        ({"encoder": {"max_length": 10**12}}, "encoder.max_length: expected"),
        ({"encoder": {"max_length": 128.0}}, "encoder.max_length: expected"),
        ({"encoder": {"max_length": "128"}}, "encoder.max_length: expected"),
        ({"objective": []}, "objective: expected an object, found []"),
        ({"objective": {}}, "objective: "),
        ({"objective": {"name": "evil"}}, "objective: name: expected one of 'softmax'"),
        ({"objective": {"name": "softmax", "evil": 1}}, "objective: softmax: expected options among"),
        ({"objective": {"name": "am-softmax", "scale": "x"}}, "objective: scale: expected a number"),
        ({"objective": {"name": "softmax", "multilabel": True}}, "objective: "),
        ({**IMAGE, "encoder": {"size": 10**6, "mirror": 0}}, "encoder.size: expected a whole number from 8 to 64"),
        ({**IMAGE, "encoder": {"size": 8, "mirror": 2}}, "encoder.mirror: expected a whole number from 0 to 1"),
        ({**IMAGE, "model": "pretrained"}, "model: expected 'built-in' for image"),
        ({"kind": "audio", "encoder": {"samples": 10**9}}, "encoder.samples: expected a whole number from 2000"),
    ],
)
def test_a_file_that_is_not_ours_is_refused_by_field(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text(json.dumps({**TEXT, **change}))
    with pytest.raises(InputError) as caught:
        Task.load(tmp_path)
    assert str(caught.value).startswith(f"{path}: {complaint}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": ' + b"9" * 5000 + b"}"]
)
def test_a_file_that_is_no_object_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"^{path}:?[^\n]*$"):
        Task.load(tmp_path)


def test_a_folder_without_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{tmp_path / FILE}: no such file"):
        Task.load(tmp_path)


@pytest.mark.parametrize("max_length", [0, 3, 2**21])
def test_max_length_is_sane(max_length: int) -> None:
    with pytest.raises(InputError, match="max_length: expected a whole number from 4"):
        Task.build(make_data("text"), max_length=max_length)
