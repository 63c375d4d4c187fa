"""The card of a model, as a hub reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from softsieve.losses.objectives import make_objective
from softsieve.tasks.encode import TextEncoder
from softsieve.tasks.task import Task
from softsieve.training.card import write_card

hub = pytest.importorskip("huggingface_hub")

CONFIGURATION = {
    "data": "/home/someone/reviews",
    "model": "someone/bert",
    "parameters": 1234,
    "rows": {"train": 1000, "test": 50},
    "learning_rate": 0.003,
    "loss_options": "a | b",
}


def test_a_hub_reads_it(tmp_path: Path) -> None:
    labels = ['with "quotes" and `ticks`', *(f"label {i}" for i in range(200))]
    objective = make_objective("softmax")
    metrics = {"validation": {"accuracy": 0.8}, "test": {"accuracy": 0.75, "macro_f1": 0.7}}
    write_card(tmp_path, Task("text", labels, TextEncoder(16)), objective, metrics, CONFIGURATION)
    card = hub.ModelCard.load(tmp_path / "README.md")
    card.data.to_yaml()
    assert (card.data.library_name, card.data.pipeline_tag) == ("softsieve", "text-classification")
    assert card.data.base_model == "someone/bert"
    [accuracy, macro] = card.data.eval_results
    assert (accuracy.metric_type, accuracy.metric_value, accuracy.dataset_split) == ("accuracy", 0.75, "test")
    assert macro.metric_value == 0.7
    text = card.text
    assert "reviews (rows: 1,000 train, 50 test)" in text
    assert "/home" not in text
    assert "| accuracy | 0.8000 | 0.7500 |" in text
    assert "201: `with \"quotes\" and 'ticks'`, `label 0`" in text
    assert "and 101 more" in text
    assert "| loss_options | a \\| b |" in text
    assert "softsieve predict FOLDER" in text


def test_little_is_known(tmp_path: Path) -> None:
    objective = make_objective("as-softmax", multilabel=True)
    write_card(tmp_path, Task("multilabel", ["a"], TextEncoder(16)), objective, {"validation": {}, "test": {}}, {})
    card = hub.ModelCard.load(tmp_path / "README.md")
    assert card.data.eval_results is None
    assert "Not measured" in card.text
    assert "sigmoid above 0.5" in card.text
