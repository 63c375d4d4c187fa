"""With many classes the head and its loss go without logits: the same training, the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from softsieve.errors import InputError
from softsieve.tasks.examples import Data, Examples
from softsieve.tasks.models import Net
from softsieve.tasks.rows import LabelRows
from softsieve.tasks.task import Task
from softsieve.training import replica as module
from softsieve.training.run import Run, Splits, load_model, train
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


def test_a_run_does_not_know_the_threshold_of_another() -> None:
    first, second = (examples("multilabel", rows, seed) for seed, rows in enumerate((60, 60)))
    task = Task.build(Data("colours", "multilabel", first, second, None))
    splits = Splits(task.rows(first), task.rows(second), None)
    settings = Settings(epochs=2, batch_size=8, learning_rate=1e-3, metric="micro_f1")
    logs = []
    for least in (0, 1):
        task.least = least  # as a run before this one leaves it
        logs.append(train(task, splits, settings).result.log)
    assert logs[0] == logs[1]


def test_skipping_knows_what_leads() -> None:
    fused, *_ = run("multilabel", many_classes=4, epochs=10, skip="solved", learning_rate=0.02)
    assert fused.result.trained < 1200
    assert fused.result.screened > 0
    assert fused.test["micro_f1"] > 0.95


def test_the_model_comes_back_with_its_head() -> None:
    fused, splits = run("multilabel", many_classes=4)
    assert splits.test is not None
    assert isinstance(fused.model, Net)
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
    with pytest.raises(InputError, match=r"test data: .* found none in 2 of 3"):
        train(task, Splits(good, None, rows), settings)


@pytest.mark.parametrize("value", [0, -1, 2.5, "many", True])
def test_bad_numbers_of_classes_are_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="many_classes"):
        Settings(many_classes=value)


# -- the step of the head in its backward pass -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "multilabel"])
def test_stepping_in_backward_is_the_same_training(kind: str) -> None:
    options: dict[str, Any] = {"many_classes": 4, "max_grad_norm": 0.0}
    plain, *_ = run(kind, **options)
    stepped, *_ = run(kind, **options, head_step="adamw")
    assert stepped.test == pytest.approx(plain.test, abs=1e-3)
    for ours, theirs in zip(stepped.result.log, plain.result.log, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
    for (name, ours), theirs in zip(stepped.model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", ["sgd", "adamw"])
def test_a_head_that_steps_learns(step: str, dtype: str) -> None:
    rate = 100.0 if step == "sgd" else 1.0
    options: dict[str, Any] = {"many_classes": 4, "epochs": 8, "learning_rate": 0.01}
    found, splits = run("multilabel", **options, head_step=step, head_dtype=dtype, head_rate=rate)
    assert found.test["micro_f1"] > 0.95
    assert splits.test is not None
    assert found.model(**splits.test.inputs).dtype == torch.float32  # a model as any other


def test_the_head_has_no_gradient_and_no_place_in_the_optimizer() -> None:
    first = examples("text", 40, 0)
    task = Task.build(Data("colours", "text", first, None, None))
    settings = Settings(many_classes=4, head_step="sgd", head_rate=2.0, learning_rate=0.5)
    objective = settings.objective(multilabel=False)
    replica = module.Replica(task.model(objective), objective, settings)
    assert replica.head is not None
    inside = {p for group in replica.optimizer.param_groups for p in group["params"]}
    assert not inside & set(replica.head.parameters())
    assert len(inside) == len(list(replica.model.parameters())) - 2
    rows = task.rows(first)
    before = replica.head.weight.detach().clone()
    replica.set_learning_rate(0.25)
    replica.row_losses(rows.batch(torch.arange(8)))[1].loss.mean().backward()  # type: ignore[no-untyped-call]
    assert replica.head.weight.grad is None
    assert not torch.equal(replica.head.weight, before)
    assert replica.head.optimizer.lr == 0.5  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("step", ["sgd", "adamw"])
def test_a_head_that_steps_resumes_to_the_last_bit(step: str, dtype: str | None, tmp_path: Path) -> None:
    first, second = (examples("multilabel", rows, seed) for seed, rows in enumerate((60, 20)))
    task = Task.build(Data("colours", "multilabel", first, second, None))
    splits = Splits(task.rows(first), task.rows(second), None)
    settings = Settings(
        many_classes=4, head_step=step, head_dtype=dtype, epochs=3, batch_size=8, learning_rate=3e-3, save_steps=10,
        metric="micro_f1",
    )  # fmt: skip
    whole = train(task, splits, settings, output=tmp_path / "run")
    again = train(task, splits, settings, output=tmp_path / "other", resume=tmp_path / "run" / "checkpoint-20")
    assert again.result.steps == whole.result.steps == 24
    for ours, theirs in zip(again.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    _, model = load_model(tmp_path / "run")
    for ours, theirs in zip(model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_where_a_head_cannot_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="head_step: expected a linear head of so many classes"):
        run("multilabel", head_step="sgd")
    with pytest.raises(InputError, match="head_step: expected a linear head"):
        run("multilabel", head_step="sgd", many_classes=4, loss="bce")
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda self: 2))
    with pytest.raises(InputError, match="head_step: expected one process, found 2"):
        run("multilabel", head_step="sgd", many_classes=4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"head_step": "adam"}, "head_step: expected one of 'sgd', 'adamw', found 'adam'"),
        ({"head_step": "sgd", "head_dtype": "float16"}, "head_dtype: expected one of"),
        ({"head_step": "sgd", "head_rate": 0}, "head_rate: expected a finite number above 0"),
        ({"head_rate": 2.0}, "head_rate: expected with head_step alone"),
        ({"head_dtype": "bfloat16"}, "head_dtype: expected with head_step alone"),
        ({"head_step": "sgd", "precision": "fp16"}, "head_step: .* fp16"),
        ({"head_step": "sgd", "graphs": True}, "head_step: .* graphs"),
        ({"head_step": "sgd", "speed_steps": 2, "merge": False}, "head_step: .* merge"),
    ],
)
def test_settings_that_do_not_go_together(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**wrong)


@pytest.mark.parametrize("head_step", [None, "adamw"])
def test_tokens_go_without_logits_too(head_step: str | None) -> None:
    words = [[COLOURS[(i + j) % 4] for j in range(1 + i % 3)] for i in range(40)]
    some = Examples(words, [list(one) for one in words], [f"row {i}" for i in range(40)])
    task = Task.build(Data("colours", "tokens", some, some, None))
    splits = Splits(task.rows(some), task.rows(some), None)
    settings: dict[str, Any] = {"epochs": 4, "batch_size": 8, "learning_rate": 1e-2, "delta": 0.5}
    plain = train(task, splits, Settings(**settings))
    fused = train(task, splits, Settings(**settings, many_classes=4, head_step=head_step))
    assert fused.result.best["accuracy"] == pytest.approx(plain.result.best["accuracy"], abs=0.05)
    if head_step is None:
        assert fused.result.best["loss"] == pytest.approx(plain.result.best["loss"], rel=1e-2)
