"""Classes that weigh more: the same loss and gradient as torch's, and what a run is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

from softsieve.cli import app
from softsieve.errors import InputError
from softsieve.tasks.rows import IGNORED, Batch, Rows
from softsieve.training.replica import Replica
from softsieve.training.settings import Settings
from softsieve.training.weights import class_weights

pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


class Flat(nn.Module):
    """The logits themselves."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self) -> Tensor:
        return self.logits


@pytest.mark.parametrize("loss", ["softmax", "as-softmax", "label-smoothing"])
@pytest.mark.parametrize("shape", [(7,), (3, 5)])
def test_rows_weigh_as_torch_weighs_them(loss: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    target = torch.randint(4, shape)
    target.view(-1)[0] = IGNORED
    settings = Settings(loss=loss, delta=1.0).filled()
    replica = Replica(Flat(torch.randn(*shape, 4)), settings.objective(multilabel=False), settings)
    weight = class_weights((("b", 3.0), ("c", 0.0)), list("abcd"), target)
    replica.class_weight = weight
    logits, rows = replica.row_losses(Batch({}, target))
    smoothing = 0.1 if loss == "label-smoothing" else 0.0
    plain = F.cross_entropy(
        logits.flatten(0, -2), target.flatten(), reduction="none", label_smoothing=smoothing, ignore_index=IGNORED
    )
    expected = (plain * weight[target.flatten().clamp_min(0)]).view(shape)
    torch.testing.assert_close(rows.loss, expected if len(shape) == 1 else expected.sum(-1))
    if not smoothing:  # which torch weighs by all classes
        mean = F.cross_entropy(logits.flatten(0, -2), target.flatten(), weight, ignore_index=IGNORED)
        count = Rows({}, target).count()
        torch.testing.assert_close(rows.loss.sum() / count, mean)  # the labels weigh 1 on average
    rows.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert (replica.model.logits.grad[target == 2] == 0).all()


def test_weights_of_classes() -> None:
    sklearn = pytest.importorskip("sklearn.utils.class_weight")
    target = torch.tensor([0] * 6 + [1] * 3 + [2])
    expected = sklearn.compute_class_weight("balanced", classes=np.arange(3), y=target.numpy())
    weight = class_weights("balanced", list("abc"), target)
    torch.testing.assert_close(weight.double(), torch.as_tensor(expected), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        class_weights((("a", 4.0),), list("abc"), target)[[0, 1]], torch.tensor([10 / 7, 2.5 / 7])
    )
    with pytest.raises(InputError, match="found 'd', which is none"):
        class_weights((("d", 1.0),), list("abc"), target)
    with pytest.raises(InputError, match="weigh more than 0"):
        class_weights((("a", 0.0), ("b", 0.0), ("c", 0.0)), list("abc"), target)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("even", "'balanced' or weights by label"),
        ({1: 2.0}, "labels as str"),
        ({"a": -1.0}, "'a'"),
        ([1.0], "by label"),
    ],
)
def test_settings_refuse(weights: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Settings(class_weights=weights)


def test_settings_say_them() -> None:
    assert "class_weights" not in Settings().asdict()
    settings = Settings(class_weights={"b": 2, "a": 1})
    assert settings.asdict()["class_weights"] == {"a": 1.0, "b": 2.0}
    assert hash(settings) == hash(Settings(class_weights={"a": 1, "b": 2}))


def train(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["train", *map(str, arguments), "--epochs", "4", "--overwrite"])


def test_a_rare_class_is_found_more_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    noise = [("thing", "often")] * 90 + [("thing", "seldom")] * 10 + [("other", "often")] * 20
    Path("data.csv").write_text(
        "text,label\n" + "".join(f"{text} {i},{label}\n" for i, (text, label) in enumerate(noise))
    )
    Path("weights.json").write_text(json.dumps({"seldom": 12}))

    def share(*more: str) -> float:
        result = train("--data", "data.csv", "--validation_share", 0, *more)
        assert result.exit_code == 0, result.output
        answers = ["predict", "softsieve-run", "--data", "data.csv", "--out", "answers.jsonl"]
        assert CliRunner().invoke(app, answers).exit_code == 0
        rows = list(map(json.loads, Path("answers.jsonl").read_text().splitlines()))
        return float(np.mean([row["prediction"] == "seldom" for row in rows]))

    plain = share()
    assert share("--class_weights", "weights.json") > plain
    assert share("--class_weights", "balanced") > plain
    assert '"class_weights": "balanced"' in Path("softsieve-run/run.json").read_text()


@pytest.mark.parametrize(
    ("weights", "content", "message"),
    [
        ("even", "", "class_weights: expected balanced or a file .json, found 'even'"),
        ("w.json", "[1]", "w.json: expected weights by label, found [1]"),
        ("w.json", '{"none": 1}', "class_weights: expected labels of the data, found 'none'"),
        ("w.json", '{"a": "x"}', "class_weights: 'a'"),
        ("none.json", "", "none.json: no such file"),
    ],
)
def test_files_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, content: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.csv").write_text("text,label\n" + "good,a\nbad,b\n" * 10)
    Path("w.json").write_text(content)
    result = train("--data", "data.csv", "--class_weights", weights)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.output
    assert message in result.stderr
    assert not Path("softsieve-run").exists()


def test_any_number_of_labels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text('{"text": "a", "labels": ["x"]}\n{"text": "b", "labels": ["y"]}\n' * 10)
    assert "one label a row or a word" in train("--data", "d.jsonl", "--class_weights", "balanced").stderr
