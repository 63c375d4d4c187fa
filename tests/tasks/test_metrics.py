"""Figures of merit against values worked out by hand, and the picture of mistaken classes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from softsieve._files import replace_file
from softsieve.errors import InputError
from softsieve.tasks.metrics import (
    MOST_CLASSES,
    are_bio,
    class_metrics,
    confusion_matrix_png,
    most_mistaken,
    token_metrics,
)


def test_classes() -> None:
    target, decided = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 1, 1])
    found = class_metrics(decided, target)
    # F1 of class 0: precision 1, recall 1/2; of 1: precision 1/3, recall 1; of 2: nothing.
    assert found == pytest.approx({"accuracy": 0.5, "macro_f1": (2 / 3 + 1 / 2 + 0) / 3, "micro_f1": 0.5})
    assert all(type(value) is float for value in found.values())


def test_entities_are_judged_whole() -> None:
    labels = ["B-LOC", "B-PER", "I-PER", "O"]
    target = torch.tensor([[1, 2, 3, -100], [0, 3, -100, -100]])
    decided = torch.tensor([[1, 3, 3, 0], [0, 3, 1, 1]])  # half of the person, all of the place, junk in the padding
    found = token_metrics(decided, target, labels)
    assert found == pytest.approx({"accuracy": 4 / 5, "entity_f1": 0.5})


def test_other_tags_have_an_accuracy_only() -> None:
    assert token_metrics(torch.tensor([[0, 1]]), torch.tensor([[0, 0]]), ["NOUN", "VERB"]) == {"accuracy": 0.5}


@pytest.mark.filterwarnings("error")
def test_no_entity_at_all_is_zero_without_a_warning() -> None:
    labels = ["B-X", "I-X", "O"]
    assert token_metrics(torch.tensor([[2]]), torch.tensor([[2]]), labels) == {"accuracy": 1.0, "entity_f1": 0.0}
    assert token_metrics(torch.tensor([[2]]), torch.tensor([[-100]]), labels) == {"accuracy": 0.0, "entity_f1": 0.0}


def test_what_is_bio() -> None:
    assert are_bio(["O", "B-a", "I-a"])
    assert are_bio(["B-a"])
    assert not are_bio(["O"])
    assert not are_bio(["O", "B"])
    assert not are_bio(["B-a", "E-a", "O"])


def test_a_missing_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(InputError, match="needs the package sklearn"):
        class_metrics(torch.tensor([0]), torch.tensor([0]))


# The picture


def pixels(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB"))


@pytest.mark.parametrize("classes", [2, 10, 40, 151])
@pytest.mark.filterwarnings("error")
def test_the_picture_is_drawn_for_few_and_many_classes(classes: int, tmp_path: Path) -> None:
    target = torch.arange(classes).repeat(3)
    labels = [f"class number {i} of all classes" for i in range(classes)]
    confusion_matrix_png(tmp_path / "c.png", target, target, labels)
    height, width = pixels(tmp_path / "c.png").shape[:2]
    assert 400 < height < width < 1500
    assert [path.name for path in tmp_path.iterdir()] == ["c.png"]


def test_the_picture_shows_shares_of_the_true_class(tmp_path: Path) -> None:
    labels = [str(i) for i in range(50)]
    one, many = torch.arange(50), torch.arange(50).repeat_interleave(1 + torch.arange(50) % 9)
    confusion_matrix_png(tmp_path / "one.png", one, one, labels)
    confusion_matrix_png(tmp_path / "many.png", many, many, labels)
    confusion_matrix_png(tmp_path / "first.png", one, one * 0, labels)
    inside = np.s_[200:700, 200:600]
    first, second, third = (pixels(tmp_path / f"{name}.png")[inside] for name in ("one", "many", "first"))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, third)


@pytest.mark.filterwarnings("error")
def test_labels_are_no_formulas_and_may_be_in_any_script(tmp_path: Path) -> None:
    ids = torch.tensor([0, 1, 2])
    confusion_matrix_png(tmp_path / "c.png", ids, ids, ["$x_{$", "天气", "a" * 300])


def test_ignored_targets_are_left_out(tmp_path: Path) -> None:
    labels = [str(i) for i in range(50)]
    confusion_matrix_png(tmp_path / "a.png", torch.tensor([[3, -100]]), torch.tensor([[3, 7]]), labels)
    confusion_matrix_png(tmp_path / "b.png", torch.tensor([3]), torch.tensor([3]), labels)
    assert np.array_equal(pixels(tmp_path / "a.png"), pixels(tmp_path / "b.png"))


def test_of_very_many_classes_those_that_are_mistaken_most_are_drawn(tmp_path: Path) -> None:
    labels = [str(i) for i in range(50_000)]  # all pairs of them would take 20 GB
    target = torch.arange(50_000)
    decided = target.clone()
    decided[40_000:40_060] = torch.arange(7, 67)
    assert confusion_matrix_png(tmp_path / "c.png", target, decided, labels) == MOST_CLASSES
    drawn = set(most_mistaken(target, decided, 50_000).tolist())
    assert len(drawn) == MOST_CLASSES
    assert drawn <= {*range(7, 67), *range(40_000, 40_060)}
    assert confusion_matrix_png(tmp_path / "d.png", target[:3], target[:3], labels[:3]) == 3


def test_pyplot_is_left_alone(tmp_path: Path) -> None:
    loaded = "matplotlib.pyplot" in sys.modules
    confusion_matrix_png(tmp_path / "c.png", torch.tensor([0, 1]), torch.tensor([0, 1]), ["a", "b"])
    assert ("matplotlib.pyplot" in sys.modules) == loaded


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def broken(part: Path) -> None:
        part.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, broken)
    assert path.read_text() == "before"
    replace_file(path, lambda part: part.write_text("after"))
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]
