"""What a run leaves about classes and mistakes, against scikit-learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from softsieve.cli import app
from softsieve.tasks.encode import built_in
from softsieve.tasks.examples import Examples
from softsieve.tasks.judged import LONGEST, MOST_MISTAKES, judged
from softsieve.tasks.labels import rank_labels
from softsieve.tasks.task import Task

sklearn = pytest.importorskip("sklearn.metrics")
LABELS = list("abcde")


def task(kind: str = "text") -> Task:
    return Task(kind, LABELS, built_in(kind, Examples(["x"], ["a"], ["1"]), 8, 5))


def expected(target: Any, decided: Any) -> dict[str, list[float]]:
    scores = sklearn.precision_recall_fscore_support(target, decided, labels=range(5), zero_division=0)
    return {label: [round(float(one[i]), 4) for one in scores] for i, label in enumerate(LABELS)}


def rows_of(classes: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {one["label"]: [one[name] for name in ("precision", "recall", "f1", "support")] for one in classes}


def test_one_label_a_row() -> None:
    torch.manual_seed(0)
    target, decided, p = torch.randint(5, (400,)), torch.randint(5, (400,)), torch.rand(400)
    p[(decided != target).nonzero()[0]] = 2.0
    texts = [f"{'text ' * 200}{i}" if i % 2 else f"text\n{i}" for i in range(400)]
    found = judged(task(), Examples(texts, ["a"] * 400, list(map(str, range(400)))), decided, target, p)
    assert rows_of(found["classes"]) == expected(target, decided)
    f1 = [one["f1"] for one in found["classes"]]
    assert f1 == sorted(f1)
    assert found["rows"] == 400
    confusion = sklearn.confusion_matrix(target, decided)
    for pair in found["pairs"]:
        true, taken = LABELS.index(pair["label"]), LABELS.index(pair["prediction"])
        assert pair["rows"] == confusion[true, taken]
        assert pair["share"] == pytest.approx(confusion[true, taken] / confusion[true].sum(), abs=1e-4)
        assert true != taken
    assert sum(pair["rows"] for pair in found["pairs"]) == (decided != target).sum()
    mistakes = found["mistakes"]
    assert len(mistakes) == MOST_MISTAKES
    assert mistakes[0]["probability"] == 2.0
    assert all(one["label"] != one["prediction"] and len(one["input"]) <= LONGEST for one in mistakes)
    assert [one["probability"] for one in mistakes] == sorted((m["probability"] for m in mistakes), reverse=True)


def test_rows_without_a_label_do_not_count() -> None:
    target, decided = torch.tensor([0, -100, 1]), torch.tensor([0, 1, 0])
    found = judged(task(), Examples(list("xyz"), [], list("123")), decided, target, torch.tensor([0.1, 0.2, 0.3]))
    assert rows_of(found["classes"])["a"] == [0.5, 1.0, 0.6667, 1]
    assert [one["input"] for one in found["mistakes"]] == ["z"]


def test_any_number_of_labels() -> None:
    torch.manual_seed(0)
    logits, flags = torch.randn(60, 5), torch.rand(60, 5) < 0.4
    target = torch.where(flags, torch.arange(5), -100)
    examples = Examples(["x"] * 60, [[]] * 60, ["1"] * 60)
    found = judged(task("multilabel"), examples, rank_labels(logits), target, None)
    assert rows_of(found["classes"]) == expected(flags.int(), (logits > 0).int())
    assert (found["pairs"], found["mistakes"]) == ([], [])


def test_a_run_leaves_a_small_file_and_a_page_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    lines = [f"a {('good', 'bad', 'odd')[i % 3]} film {i},{('pos', 'neg')[i * 7 % 11 % 2]}\n" for i in range(90)]
    Path("d.csv").write_text("text,label\n" + "".join(lines))
    result = CliRunner().invoke(app, ["train", "--data", "d.csv", "--epochs", "2", "--validation_share", "0.4"])
    assert result.exit_code == 0, result.output
    found = json.loads(Path("softsieve-run/judged.json").read_text())
    assert (found["part"], found["rows"]) == ("validation", 36)
    assert found["mistakes"]
    assert found["mistakes"][0]["input"].startswith("a ")
    assert CliRunner().invoke(app, ["report", "softsieve-run"]).exit_code == 0
    assert found["mistakes"][0]["input"] in Path("report.html").read_text()
    result = CliRunner().invoke(app, ["train", "--data", "d.csv", "--do_train", "--epochs", "1", "--overwrite"])
    assert result.exit_code == 0, result.output
    assert not Path("softsieve-run/judged.json").exists()
