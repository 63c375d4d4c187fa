"""A model with many classes is served by an index of its head, which answers as the head does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from softsieve import AdaptiveSoftmax
from softsieve.cli import app
from softsieve.errors import InputError
from softsieve.heads.cascade import crossover
from softsieve.layers.linear import SieveLinear
from softsieve.tasks.examples import Data, Examples
from softsieve.tasks.labels import RANKED, label_metrics, rank_labels
from softsieve.tasks.task import Task
from softsieve.training import serving
from softsieve.training.run import MODEL, Splits, load_model, train
from softsieve.training.serving import INDEX, answer, decide, rank_served, served
from softsieve.training.settings import Settings

CLASSES = 400


@pytest.fixture(autouse=True, scope="module")
def always_faster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossover, "measured_batch", lambda *_: 64)  # a matter of the machine
        patch.setattr(serving, "DELTA", 0.1)  # for which few rows suffice
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Splits]]:
    """A folder with a finished run of each kind, and its data."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("text", "multilabel")}
    return {kind: (folder, run(kind, folder)) for kind, folder in folders.items()}


def examples(kind: str, rows: int, seed: int) -> Examples:
    """Texts that name their items, one or two of so many."""
    drawn = torch.randint(CLASSES, (rows, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    if seed == 0:
        drawn[:CLASSES] = [[number, number] for number in range(CLASSES)]  # all of them
    names = [sorted({f"item{first}", f"item{second}"}) for first, second in drawn]
    if kind == "text":
        names = [some[:1] for some in names]
    labels: list[Any] = names if kind == "multilabel" else [some[0] for some in names]
    return Examples([f"buys {' '.join(some)}" for some in names], labels, [f"row {i}" for i in range(rows)])


def run(kind: str, folder: Path, **options: Any) -> Splits:
    first, second, third = (examples(kind, rows, seed) for seed, rows in enumerate((1200, 300, 200)))
    task = Task.build(Data("items", kind, first, second, third))
    splits = Splits(*map(task.rows, (first, second, third)))
    metric = "micro_f1" if kind == "multilabel" else "accuracy"
    settings = Settings(epochs=4, batch_size=32, learning_rate=2e-2, metric=metric, many_classes=CLASSES)
    train(task, splits, settings, output=folder, **options)
    return splits


@pytest.mark.parametrize("kind", ["text", "multilabel"])
def test_a_run_leaves_an_index_that_answers_as_the_head(kind: str, runs: dict[str, tuple[Path, Splits]]) -> None:
    folder, splits = runs[kind]
    task, model = load_model(folder)
    _, plain = load_model(folder, index=False)
    assert served(model) is not None
    assert served(plain) is None
    rows = splits.test
    assert rows is not None
    ours, exact = decide(task, model, rows), decide(task, plain, rows)
    found, expected = (
        # One rare label of the hundred rows is much of those that are weighted by propensities.
        {name: value for name, value in task.metrics(decided, rows.target).items() if not name.startswith("psp")}
        for decided in (ours, exact)
    )
    assert found == pytest.approx(expected, abs=0.02)
    if kind == "multilabel":
        same = [set(o[o >= 0].tolist()) == set(e[e >= 0].tolist()) for o, e in zip(ours, exact, strict=True)]
        assert sum(same) >= 0.9 * len(same)
        assert (exact >= 0).any()
    else:
        (classes, _, probs), (others, _, right) = (answer(task, net, rows) for net in (model, plain))
        assert (ours == classes).all()
        agree = classes == others
        assert agree.double().mean() >= 0.9
        assert (probs / right - 1)[agree].abs().quantile(0.9) <= 0.3


@pytest.mark.parametrize("kind", ["text", "multilabel"])
def test_a_server_answers_by_the_index(kind: str, runs: dict[str, tuple[Path, Splits]]) -> None:
    pytest.importorskip("fastapi")
    from softsieve.integrations.server import ServedModel

    folder, _ = runs[kind]
    server = ServedModel(folder)
    assert served(server.model) is not None
    texts = ["buys item7 item11" if kind == "multilabel" else "buys item7", "buys item3"]
    first, second = server.answer(texts, top=3)
    assert second["prediction"] == (["item3"] if kind == "multilabel" else "item3")
    wanted = {"item7", "item11"} if kind == "multilabel" else {"item7"}
    assert {one["label"] for one in first["top"][: len(wanted)]} == wanted
    for one in (first, second):
        named = [each["label"] for each in one["top"]]
        assert len(set(named)) == 3
        chances = [each["probability"] for each in one["top"]]
        assert chances == sorted(chances, reverse=True)
    assert first["top"][0]["label"] in first["prediction"]


def test_ranks_of_an_index_are_those_of_the_logits() -> None:
    torch.manual_seed(0)
    layer = SieveLinear(16, 300)
    layer.serve(torch.randn(10, 16), method="exact")
    hidden = 4 * torch.randn(50, 16)
    ranked, expected = rank_served(layer, hidden), rank_labels(layer(hidden))
    target = torch.stack([torch.randperm(300)[:3] for _ in range(50)])
    assert label_metrics(ranked, target, 300) == pytest.approx(label_metrics(expected, target, 300), rel=1e-12)
    for ours, theirs in zip(ranked, expected, strict=True):
        width = min(int((theirs >= 0).sum()), RANKED)
        assert ours[: max(5, width)].tolist() == theirs[: max(5, width)].tolist()
        assert (ours[max(5, width) :] == ~0).all()


def test_predict_takes_the_index_or_all(tmp_path: Path, runs: dict[str, tuple[Path, Splits]]) -> None:
    asked: list[tuple[int, ...]] = []
    original = AdaptiveSoftmax.above

    def watched(self: AdaptiveSoftmax, x: torch.Tensor, threshold: float = 0.0) -> Any:
        asked.append(tuple(x.shape))
        return original(self, x, threshold)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdaptiveSoftmax, "above", watched)
        for extra in ([], ["--exact"]):
            out = tmp_path / f"answers{len(extra)}.jsonl"
            command = ["predict", str(runs["multilabel"][0]), "--text", "buys item7", "--out", str(out), *extra]
            result = CliRunner().invoke(app, command)
            assert result.exit_code == 0, result.output
            assert json.loads(out.read_text())["prediction"] == ["item7"]
            assert asked == [(1, 256)]  # the first time alone


def test_an_index_is_made_where_it_is_asked_for(tmp_path: Path) -> None:
    run("text", tmp_path / "none", index=False)
    assert not (tmp_path / "none" / MODEL / INDEX).exists()
    few = examples("text", 30, 1)
    task = Task.build(Data("items", "text", examples("text", 450, 0), few, None))
    splits = Splits(task.rows(examples("text", 450, 0)), task.rows(few), None)
    settings = Settings(epochs=1, learning_rate=1e-2, many_classes=CLASSES)
    train(task, splits, settings, output=tmp_path / "few")  # too few for a promise: nothing is said, nothing is made
    assert not (tmp_path / "few" / MODEL / INDEX).exists()
    with pytest.raises(InputError, match=r"head_index: expected \d+ validation rows or more, found 30"):
        train(task, splits, settings, output=tmp_path / "asked", index=True)
    assert not (tmp_path / "asked").exists()  # refused before anything was done


def test_what_would_be_refused_in_the_end_is_refused_at_the_beginning(tmp_path: Path) -> None:
    first = examples("multilabel", 450, 0)
    task = Task.build(Data("items", "multilabel", first, None, None))
    test = task.rows(Examples(["a", "b"], [["item1"], []], ["1", "2"]))
    settings = Settings(epochs=1, metric="micro_f1", many_classes=CLASSES)
    with pytest.raises(InputError, match=r"test data: .* found none in 1 of 2"):
        train(task, Splits(task.rows(first), None, test), settings, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_few_classes_can_have_an_index(tmp_path: Path) -> None:
    def some(rows: int) -> Examples:
        return Examples(["a", "b"] * (rows // 2), ["x", "y"] * (rows // 2), ["row"] * rows)

    task = Task.build(Data("letters", "text", some(100), some(100), None))
    splits = Splits(task.rows(some(100)), task.rows(some(100)), None)
    train(task, splits, Settings(epochs=1), output=tmp_path, index=True)
    assert (tmp_path / MODEL / INDEX).exists()
    assert len(decide(task, load_model(tmp_path)[1], splits.train)) == 100


def test_an_index_of_another_weight_is_refused(tmp_path: Path, runs: dict[str, tuple[Path, Splits]]) -> None:
    shutil.copytree(runs["text"][0] / MODEL, tmp_path / MODEL)
    (tmp_path / MODEL / INDEX).write_bytes((runs["multilabel"][0] / MODEL / INDEX).read_bytes())
    with pytest.raises(InputError, match=INDEX):
        load_model(tmp_path)
    load_model(tmp_path, index=False)
