"""Results files say how they were made, and answers are judged by what was promised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from softsieve.errors import InputError
from softsieve.experiments.output import (
    beside,
    expect_place,
    is_right,
    new_figure,
    read_table,
    save_figure,
    write_table,
)

LOGITS = torch.tensor([[2.0, 1.0, 0.0, 1.0], [0.0, 0.0, 3.0, -1.0]], dtype=torch.float64)
P = LOGITS.softmax(-1)


def test_a_table_comes_back_with_how_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.csv"
    rows = [{"name": "a, b", "share": 1 / 3, "count": 10**8, "none": None}, {"name": "c", "share": 0.5, "count": 1}]
    write_table(path, {"trials": 7, "eps": 0.3, "note": "x: y"}, rows)
    about, found = read_table(path)
    assert about.keys() >= {"date", "commit", "modified", "gpu", "python", "torch", "softsieve", "processor", "threads"}
    assert (about["trials"], about["eps"], about["note"], about["torch"]) == ("7", "0.3", "x: y", torch.__version__)
    assert found[0] == {"name": "a, b", "share": "0.333333", "count": "100000000", "none": ""}
    assert found[1] == {"name": "c", "share": "0.5", "count": "1", "none": ""}
    assert list(path.parent.iterdir()) == [path]


def test_a_figure_is_saved_twice_and_always_the_same(tmp_path: Path) -> None:
    for name in ("one", "two"):
        figure = new_figure(3, 2)
        figure.subplots().plot([1, 2], [3, 4], label="line")
        save_figure(tmp_path / "deep" / name, figure)
    files = {path.name: path.read_bytes() for path in (tmp_path / "deep").iterdir()}
    assert files.keys() == {"one.png", "one.svg", "two.png", "two.svg"}
    assert files["one.png"].startswith(b"\x89PNG")
    assert b"<svg" in files["one.svg"]
    assert files["one.svg"] == files["two.svg"]
    assert files["one.png"] == files["two.png"]


def test_names_keep_their_dots() -> None:
    assert beside(Path("a/b"), ".csv") == beside(Path("a/b.png"), ".csv") == Path("a/b.csv")
    assert beside(Path("head-0.5"), ".csv") == Path("head-0.5.csv")


def test_a_place_that_cannot_be_written_to_is_refused_at_once(tmp_path: Path) -> None:
    expect_place(tmp_path / "new" / "deep" / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written to"):
        expect_place(tmp_path / "file" / "out")
    (tmp_path / "out.svg").mkdir()
    with pytest.raises(InputError, match=r"out\.svg: expected a file"):
        expect_place(tmp_path / "out")


@pytest.mark.parametrize(
    ("indices", "factor", "expected"),
    [
        ([[0], [2]], 1.0, [True, True]),
        ([[0], [2]], 1.29, [True, True]),
        ([[0], [2]], 1.31, [False, False]),
        ([[0], [2]], 0.69, [False, False]),
        ([[1], [2]], 1.0, [False, True]),
        ([[0, 1], [2, 0]], 1.0, [True, True]),
        ([[0, 3], [2, 1]], 1.0, [True, True]),  # tied with the ones above
        ([[0, 2], [2, 3]], 1.0, [False, False]),
        ([[1, 3], [0, 1]], 1.0, [False, False]),  # without the best
        ([[0, 0], [2, 2]], 1.0, [False, False]),
        ([[0, 1, 3], [2, 0, 0]], 1.0, [True, False]),  # the value is right, the row is there twice
    ],
)
def test_an_answer_is_right_when_values_and_probabilities_are(
    indices: list[list[int]], factor: float, expected: list[bool]
) -> None:
    chosen = torch.tensor(indices)
    probs = (factor * P.gather(-1, chosen)).float()
    assert is_right(chosen, probs, LOGITS, eps=0.3).tolist() == expected


def test_every_probability_of_an_answer_counts() -> None:
    chosen = torch.tensor([0, 1])
    probs = P[0, :2] * torch.tensor([1.0, 1.5])
    assert not is_right(chosen, probs, LOGITS[0], eps=0.3)
    assert not is_right(chosen, torch.full((2,), torch.nan), LOGITS[0], eps=0.3)
