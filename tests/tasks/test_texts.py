"""Columns that take little more than the bytes of their texts, and places that are made when asked for."""

from __future__ import annotations

import pickle
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from softsieve.errors import InputError
from softsieve.tasks import texts as module
from softsieve.tasks.examples import Examples
from softsieve.tasks.texts import Column, Places, Texts, make_column

CELLS = ["one", "", None, "zwölf 日本 \U0001f600", "x" * 300, None, "last"]


@pytest.mark.parametrize("in_memory", [2**24, 8], ids=["in memory", "in a file"])
def test_texts_are_what_went_in(monkeypatch: pytest.MonkeyPatch, in_memory: int) -> None:
    monkeypatch.setattr(module, "IN_MEMORY", in_memory)
    column = make_column(CELLS)
    assert isinstance(column, Texts)
    assert list(column) == CELLS == [column[i] for i in range(len(CELLS))]
    assert column == CELLS
    assert column != CELLS[:-1]
    assert column != [*CELLS[:-1], "first"]
    assert column != "text"
    assert column[-1] == "last"
    assert list(column[1:4]) == CELLS[1:4]
    assert list(column.pick([6, 0, 2])) == ["last", "one", None]
    assert not column.complete
    assert column.pick([0, 1]).complete
    assert pickle.loads(pickle.dumps(column)) == CELLS
    with pytest.raises(IndexError):
        column[len(CELLS)]


@pytest.mark.parametrize("odd", [7, ["a"], {"a": 1}, "half a character: \ud83d", 2.5, True])
def test_other_cells_make_a_list(odd: Any) -> None:
    column = make_column([*CELLS, odd, "after"])
    assert isinstance(column, list)
    assert column == [*CELLS, odd, "after"]


def test_missing_cells_are_filled_up() -> None:
    column = Column()
    column.append("a")
    column.extend_to(3)
    column.append("b")
    assert list(column.finish()) == ["a", None, None, "b"]


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "IN_MEMORY", 8)
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(InputError, match=r"texts cannot be kept there \(.*No space left.*\); set TMPDIR"):
        make_column(["a long text"])


def test_large_columns_are_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IN_MEMORY", 2**16)
    tracemalloc.start()
    try:
        column = Column()
        for row in range(20_000):
            column.append(f"{row} " * 50)
        texts = column.finish()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert texts[19_999].startswith("19999 ")
    assert peak < 2e6 < 20_000 * 250  # 16 bytes a row and a buffer, of 5 MB of text


def test_places_and_picked_examples() -> None:
    places = Places("a.csv", [2, 3, 7])
    assert places == ["a.csv:2", "a.csv:3", "a.csv:7"]
    assert places[1:] == ["a.csv:3", "a.csv:7"]
    assert places != ["a.csv:2"]
    texts = make_column(["a", "b", "c"])
    examples = Examples(texts, ["x", "y", "z"], places, {"id": [1, 2, 3]}, ("said",))
    assert examples.pick([2, 0]) == Examples(["c", "a"], ["z", "x"], ["a.csv:7", "a.csv:2"], {"id": [3, 1]}, ("said",))
    assert Path(places[0]).name == "a.csv:2"


def test_texts_of_a_file_where_bytes_cannot_be_read_at_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IN_MEMORY", 8)
    monkeypatch.delattr("os.pread")  # as on Windows
    column = make_column(CELLS)
    assert list(column) == CELLS
    assert column[4] == CELLS[4]
