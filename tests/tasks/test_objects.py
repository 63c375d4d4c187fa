"""Lists, arrays, frames and data sets as examples, and what is said of those that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from softsieve.errors import InputError
from softsieve.tasks.examples import Wanted
from softsieve.tasks.objects import object_examples, object_inputs, parts_of

pandas = pytest.importorskip("pandas")

NOTHING = Wanted(None, None, None)
TEXTS, LABELS = ["a film", "a book", "a play"], ["yes", "no", "yes"]


@pytest.mark.parametrize("make", [list, tuple, np.array, pandas.Series, lambda x: np.array(x, object)[:, None]])
def test_texts_of_any_container(make: Any) -> None:
    given = object_examples(make(TEXTS), make(LABELS), NOTHING)
    assert given.part.kind == "text"
    assert given.part.examples.inputs == TEXTS
    assert given.part.examples.labels == LABELS
    assert given.part.examples.where == ["X[0]", "X[1]", "X[2]"]
    assert not given.whole
    assert object_inputs(make(TEXTS), "text", NOTHING).inputs == TEXTS


@pytest.mark.parametrize(
    "labels", [[1, 0, 2], np.array([1, 0, 2]), pandas.Series([1.0, 0.0, 2.0]), torch.tensor([1, 0, 2])]
)
def test_whole_numbers(labels: Any) -> None:
    labels = labels.numpy() if isinstance(labels, torch.Tensor) else labels
    given = object_examples(TEXTS, labels, NOTHING)
    assert (given.part.examples.labels, given.whole) == (["1", "0", "2"], True)


def test_columns_of_frames() -> None:
    frame = pandas.DataFrame({"text": TEXTS, "label": LABELS, "other": ["x", "y", "z"]}, index=[7, 7, 9])
    for inputs, labels, wanted in [
        (frame, None, NOTHING),
        (frame, "label", NOTHING),
        (frame, frame["label"], NOTHING),
        (frame.rename(columns={"label": "says"}), "says", NOTHING),
        (frame.rename(columns={"label": "says", "text": "read"}), None, Wanted(None, "read", "says")),
        (frame.to_dict("list"), None, NOTHING),
    ]:
        given = object_examples(inputs, labels, wanted)
        assert (given.part.examples.inputs, given.part.examples.labels) == (TEXTS, LABELS)
    for table in (frame, frame.drop(columns="label"), frame[["text"]]):
        found = object_inputs(table, "text", NOTHING)
        assert (found.inputs, found.labels) == (TEXTS, [])
    assert object_inputs(frame.drop(columns="label"), "text", Wanted(None, None, "label")).inputs == TEXTS
    with pytest.raises(InputError, match="X: no column 'says', there are 'text', 'label', 'other'"):
        object_examples(frame, "says", NOTHING)


def test_lists_flags_and_tags() -> None:
    given = object_examples(TEXTS, [["a", "b"], [], {"a"}], NOTHING)
    assert (given.part.kind, given.part.examples.labels) == ("multilabel", [["a", "b"], [], ["a"]])
    flags = np.array([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    given = object_examples(TEXTS, flags, NOTHING)
    assert (given.part.examples.labels, given.part.labels) == ([["0", "1"], [], ["0"]], ["0", "1", "2"])
    assert (given.whole, given.columns) == (True, ["0", "1", "2"])
    given = object_examples(TEXTS, pandas.DataFrame(flags, columns=["a", "b", "c"]), NOTHING)
    assert (given.part.examples.labels, given.part.labels) == ([["a", "b"], [], ["a"]], ["a", "b", "c"])
    words = [np.array(text.split()) for text in TEXTS]
    given = object_examples(words, [("O", "B")] * 3, NOTHING)
    assert given.part.kind == "tokens"
    assert given.part.examples.inputs == [text.split() for text in TEXTS]


def test_flags_keep_the_order_of_their_columns() -> None:
    flags = pandas.DataFrame({"tech": [1, 0, 0], " food": [1, 1, 0], "sport": [0, 0, 1]})
    given = object_examples(TEXTS, flags, NOTHING)
    assert given.columns == ["tech", "food", "sport"]
    assert given.part.examples.labels == [["tech", "food"], ["food"], ["sport"]]
    assert not given.whole
    named = object_examples(TEXTS, flags.to_numpy(), NOTHING, columns=given.columns)
    assert named == given
    again = object_examples(TEXTS, flags[["sport", "tech", " food"]], NOTHING, columns=given.columns)
    assert [sorted(row) for row in again.part.examples.labels] == [["food", "tech"], ["food"], ["sport"]]
    with pytest.raises(InputError, match="y: expected 3 columns, one a label, found 2"):
        object_examples(TEXTS, flags.to_numpy()[:, :2], NOTHING, columns=given.columns)
    with pytest.raises(InputError, match="y: expected every column name once, found 'a', 'a', 'b'"):
        object_examples(TEXTS, flags.set_axis(["a", "a ", "b"], axis=1), NOTHING)
    with pytest.raises(InputError, match="y: expected labels that are strings or whole numbers, found both"):
        object_examples(TEXTS, flags.set_axis(["a", 1, 2], axis=1), NOTHING)


@pytest.mark.parametrize("row", [list, tuple, np.array, lambda row: [one == 1 for one in row]])
def test_lists_of_flags(row: Any) -> None:
    rows = [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    expected = object_examples(TEXTS, np.array(rows), NOTHING)
    given = object_examples(TEXTS, [row(one) for one in rows], NOTHING)
    assert given == expected
    frame = pandas.DataFrame({"text": TEXTS, "label": [row(one) for one in rows]})
    assert object_examples(frame, None, NOTHING) == object_examples(frame, "label", NOTHING) == expected
    assert object_examples(TEXTS, [row(one) for one in rows], NOTHING, flags=False).columns is None


def test_lists_that_may_be_flags() -> None:
    either = [[0, 1], [1, 0], [0, 1]]
    with pytest.raises(InputError, match=r"y: .* an array of 0 and 1 .* may be either, such as \[0, 1\]; give numpy"):
        object_examples(TEXTS, either, NOTHING)
    given = object_examples(TEXTS, either, NOTHING, flags=True)
    assert (given.columns, given.part.examples.labels) == (["0", "1"], [["1"], ["0"], ["1"]])
    given = object_examples(TEXTS, either, NOTHING, flags=False)
    assert (given.columns, given.part.examples.labels) == (None, [["0", "1"], ["1", "0"], ["0", "1"]])
    assert object_examples(TEXTS, [[0, 0], *either[1:]], NOTHING).columns == ["0", "1"]
    for labels in ([[0, 1], [0], [1]], [[0, 1, 2], [0, 1, 1], [1, 1, 1]], [["0", "1", "1"]] * 3, [[0], [1], [0]]):
        assert object_examples(TEXTS, labels, NOTHING).columns is None
    words = [["a", "film"]] * 3
    given = object_examples(words, [[0, 0], [0, 1], [1, 1]], NOTHING)  # a tag a word
    assert (given.part.kind, given.columns, given.part.examples.labels[0]) == ("tokens", None, ["0", "0"])


@pytest.mark.parametrize("make", [list, np.array, pandas.Series, lambda x: pandas.array(x, dtype="boolean")])
def test_booleans(make: Any) -> None:
    given = object_examples(TEXTS, make([True, False, True]), NOTHING)
    assert (given.part.examples.labels, given.whole, given.truth) == (["True", "False", "True"], False, True)
    frame = pandas.DataFrame({"text": TEXTS, "label": make([True, False, True])})
    assert object_examples(frame, None, NOTHING) == given


def test_columns_of_any_name() -> None:
    frame = pandas.DataFrame({"X": TEXTS, "y": LABELS})
    for labels in ("y", LABELS, frame["y"]):
        given = object_examples(frame, labels, NOTHING)
        assert (given.part.examples.inputs, given.part.examples.labels) == (TEXTS, LABELS)
    assert object_examples(frame, None, Wanted(None, "X", "y")) == given
    assert object_inputs(frame, "text", Wanted(None, None, "y")).inputs == TEXTS
    texts = pandas.DataFrame({"y": TEXTS, "y'": [1, 2, 3]})  # under the name of the argument
    for wanted in (NOTHING, Wanted(None, "y", None)):
        given = object_examples(texts, LABELS, wanted)
        assert (given.part.examples.inputs, given.part.examples.labels) == (TEXTS, LABELS)
    with pytest.raises(InputError, match="X: no column of labels found among 'X', 'y'; give label_column"):
        object_examples(frame, None, NOTHING)
    twice = pandas.DataFrame([["a", "b", 1]] * 3, columns=["text", "text", "label"])
    for call in (lambda: object_examples(twice, None, NOTHING), lambda: object_inputs(twice, "text", NOTHING)):
        with pytest.raises(InputError, match="X: expected every column name once, found 'text', 'text', 'label'"):
            call()
    with pytest.raises(InputError, match="X: expected every column name once, found '1', '1'"):
        object_examples({"1": TEXTS, 1: LABELS}, None, NOTHING)


def test_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    path = tmp_path / "one.png"
    image.fromarray(pixels).save(path)
    for values in ([path, path], [str(path)] * 2):
        given = object_examples(values, [0, 1], NOTHING)
        assert (given.part.kind, given.part.examples.inputs) == ("image", [path, path])
    for one in (pixels, torch.from_numpy(pixels), image.fromarray(pixels), image.fromarray(pixels).convert("1")):
        given = object_examples([one, one], [0, 1], NOTHING)
        assert given.part.kind == "image"
        assert given.part.examples.inputs[0].shape == (8, 8)
    given = object_examples([path.read_bytes()] * 2, [0, 1], Wanted("image", None, None))
    assert given.part.examples.inputs[0] == path.read_bytes()
    with pytest.raises(InputError, match=r"X\[0\]: expected pixels of type uint8, .* found float64 \(8, 8\)"):
        object_examples([pixels / 255] * 2, [0, 1], NOTHING)
    with pytest.raises(InputError, match=r"X\[0\]: expected pixels .* found float64 \(64,\)"):
        object_examples(np.random.default_rng(0).random((2, 64)), [0, 1], NOTHING)
    with pytest.raises(InputError, match="no such file"):
        object_examples([tmp_path / "none.png"] * 2, [0, 1], NOTHING)


def test_sounds() -> None:
    samples = np.zeros(50)
    given = object_examples([(samples, 8000), (samples.tolist(), 8000)], [0, 1], NOTHING)
    assert given.part.kind == "audio"
    assert [(one.dtype.name, len(one), rate) for one, rate in given.part.examples.inputs] == [("float32", 50, 8000)] * 2
    for wrong, words in [
        (samples, r"X\[0\]: expected \(samples, rate\)"),
        ((np.zeros((50, 2)), 8000), r"expected samples of one channel, found an array of shape \(50, 2\)"),
        ({"array": samples, "sampling_rate": None}, r"expected \(samples, rate\)"),
        ((["a"], 8000), r"expected \(samples, rate\)"),
    ]:
        with pytest.raises(InputError, match=words):
            object_inputs([wrong], "audio", NOTHING)


@pytest.mark.parametrize(
    ("inputs", "labels", "error", "words"),
    [
        ("a film", LABELS, TypeError, "X: expected a list, an array, a Series or a table, found str"),
        (3, LABELS, TypeError, "X: expected a list, .* found int"),
        (np.array("a"), LABELS, TypeError, "X: expected a list, .* found a single value"),
        ([], [], InputError, "X: no rows"),
        (pandas.DataFrame({"text": []}), None, InputError, "X: no rows"),
        ({"text": TEXTS, "label": ["yes"]}, None, InputError, "X: expected columns of one length, found 1, 3"),
        (TEXTS, None, InputError, "y: expected a label for each of 3 rows, found none"),
        (TEXTS, "label", InputError, "y: expected labels, or the name of a column of a table, found 'label'"),
        (TEXTS, LABELS[:2], InputError, "y: expected 3 labels, one a row, found 2"),
        (TEXTS, 3, TypeError, "y: expected a list, .* found int"),
        (TEXTS, ["yes", 1, "no"], InputError, "y: expected labels that are strings or whole numbers, found both"),
        (TEXTS, [True, 1, False], InputError, "y: expected labels that are True and False or whole numbers, found"),
        (TEXTS, ["yes", None, "no"], InputError, r"X\[1\]: column 'y': empty label"),
        (TEXTS, pandas.Series(["yes", pandas.NA, "no"]), InputError, r"X\[1\]: column 'y': empty label"),
        (TEXTS, np.array([0.5, 1, 2]), InputError, r"X\[0\]: column 'y': expected a label, found 0.5"),
        (TEXTS, np.ones((3, 2)) * 0.3, InputError, "y: expected labels, or 0 and 1 in a column a label, found an"),
        (["a", float("nan"), "b"], LABELS, InputError, r"X\[1\]: column 'X': empty text"),
        (["a", 5, "b"], LABELS, InputError, r"X\[1\]: column 'X': expected text, found 5"),
        ([["a"], ["b"], ["c", "d"]], [["O"]] * 3, InputError, r"X\[2\]: expected a label a word, found 2 words and 1"),
    ],
)
def test_what_cannot_be_used(inputs: Any, labels: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        object_examples(inputs, labels, NOTHING)


def test_parts_of_data_sets() -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"text": TEXTS, "label": LABELS})
    assert parts_of(TEXTS) == (TEXTS, None)
    assert parts_of(datasets.DatasetDict({"train": one, "dev": one})) == (one, one)
    with pytest.raises(InputError, match="X: expected a part 'train', found 'test'"):
        parts_of(datasets.DatasetDict({"test": one}))
    with pytest.raises(TypeError, match="X: expected one data set, found a DatasetDict of 'test'"):
        object_inputs(datasets.DatasetDict({"test": one}), "text", NOTHING)
