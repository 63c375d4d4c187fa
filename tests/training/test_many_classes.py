"""With many classes the head and its loss go without logits: the same training, the same answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from softsieve.errors import InputError
from softsieve.tasks.examples import Data, Examples
from softsieve.tasks.models import Classifier
from softsieve.tasks.rows import LabelRows
from softsieve.tasks.task import Task
from softsieve.training import replica as module
from softsieve.training.run import Run, Splits, train
from softsieve.training.settings import Settings

COLOURS = ("red", "green", "blue", "white")


def examples(kind: str, rows: int, seed: int) -> Examples:
    """Texts that name their labels, one or more."""
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = [], []
    for _ in range(rows):
        some = torch.randperm(4, generator=generator)[: 1 + int(torch.rand((), generator=generator) > 0.5)].tolist()
        names = [COLOURS[i] for i in (some if kind == "multilabel" else some[:1])]
        inputs.append(" ".join([*names, "thing"]))
        labels.append(names if kind == "multilabel" else names[0])
    return Examples(inputs, labels, [f"row {i}" for i in range(rows)])


def run(kind: str, **options: Any) -> tuple[Run, Splits]:
    first, second, third = (examples(kind, rows, seed) for seed, rows in enumerate((120, 40, 40)))
    task = Task.build(Data("colours", kind, first, second, third))
    splits = Splits(*map(task.rows, (first, second, third)))
    chosen: dict[str, Any] = {"epochs": 3, "batch_size": 8, "learning_rate": 3e-3, "delta": 0.5, "skip_after": 0}
    metric = "micro_f1" if kind == "multilabel" else "accuracy"
    return train(task, splits, Settings(**{**chosen, "metric": metric, **options})), splits


@pytest.mark.parametrize("loss", ["as-softmax", "softmax"])
@pytest.mark.parametrize("kind", ["text", "multilabel"])
def test_the_same_training(kind: str, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEW_LOGITS", 30)  # 7 rows at a time
    plain, *_ = run(kind, loss=loss)
    fused, *_ = run(kind, loss=loss, many_classes=4)
    assert fused.test == pytest.approx(plain.test, abs=1e-3)
    assert fused.result.best == pytest.approx(plain.result.best, abs=1e-3)
    for ours, theirs in zip(fused.result.log, plain.result.log, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
    assert plain.test_decided is not None
    assert fused.test_decided is not None
    assert (fused.test_decided == plain.test_decided).double().mean() > 0.97
    for (name, ours), theirs in zip(fused.model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3, msg=name)


def test_skipping_knows_what_leads() -> None:
    fused, *_ = run("multilabel", many_classes=4, epochs=10, skip="solved", learning_rate=0.02)
    assert fused.result.trained < 1200
    assert fused.result.screened > 0
    assert fused.test["micro_f1"] > 0.95


def test_the_model_comes_back_with_its_head() -> None:
    fused, splits = run("multilabel", many_classes=4)
    assert splits.test is not None
    assert isinstance(fused.model, Classifier)
    logits = fused.model(**splits.test.inputs)
    assert logits.shape == (40, 4)


def test_few_classes_and_other_heads_have_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = nn.Linear.forward

    def watched(self: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        calls.append(self.out_features)
        return forward(self, hidden)

    monkeypatch.setattr(nn.Linear, "forward", watched)
    run("multilabel", many_classes=5, epochs=1)
    assert len(calls) == 15 + 1 + 1  # steps, validation and test
    calls.clear()
    run("multilabel", many_classes=4, epochs=1)
    assert len(calls) == 2  # answers alone
    run("multilabel", many_classes=4, epochs=1, loss="bce")  # which has no form without logits
    run("text", many_classes=4, epochs=1, loss="am-softmax")  # whose head is not linear


def test_a_row_without_labels_is_refused() -> None:
    task = Task.build(Data("colours", "multilabel", examples("multilabel", 20, 0), None, None))
    rows = task.rows(Examples(["a", "b", "c"], [["red"], [], []], ["1", "2", "3"]))
    assert isinstance(rows, LabelRows)
    settings = Settings(many_classes=2, metric="micro_f1", epochs=1)
    with pytest.raises(InputError, match=r"training data: .* found none in 2 of 3, the first being row 1"):
        train(task, Splits(rows, None, None), settings)
    good = task.rows(examples("multilabel", 20, 0))
    with pytest.raises(InputError, match=r"validation data: .* found none in 2 of 3"):
        train(task, Splits(good, rows, None), settings)
    with pytest.raises(InputError, match=r"evaluation: .* found none in 2 of 3"):
        train(task, Splits(good, None, rows), settings)


@pytest.mark.parametrize("value", [0, -1, 2.5, "many", True])
def test_bad_numbers_of_classes_are_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="many_classes"):
        Settings(many_classes=value)
