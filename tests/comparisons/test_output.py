"""Results files say how they were made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from softsieve.comparisons.output import (
    beside,
    expect_place,
    new_figure,
    read_table,
    save_figure,
    write_table,
)
from softsieve.errors import InputError


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
