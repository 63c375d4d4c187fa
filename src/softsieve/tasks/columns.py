"""Tables to examples: which column holds the inputs, which the labels, what kind they are, and what a cell says."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from softsieve.errors import InputError, listed, shown
from softsieve.tasks.examples import MEDIA, Examples, Part, Wanted, media_kind
from softsieve.tasks.reading import Reading
from softsieve.tasks.tables import Table
from softsieve.tasks.texts import Texts, pick_cells

# Names by preference, in lower case.
_TEXT = ("text", "sentence", "content", "utterance", "query", "question", "review", "comment", "message", "title")
_WORDS = ("tokens", "words")
_FILES = ("file", "path", "image", "audio", "file_name", "filename", "img")
_LABEL = ("label", "labels", "intent", "category", "class", "target", "topic", "topics", "tags", "ner_tags", "pos_tags")


def table_examples(table: Table, wanted: Wanted) -> Part:
    """The examples of a table, each with its labels."""
    label = find_label_column(table, wanted)
    kind = wanted.kind or _find_kind(table, label, wanted.text_column)
    examples = _read_rows(table, kind, _input_column(table, kind, wanted.text_column, label), label, wanted.how)
    return Part(kind, examples, table.names.get(label))


def table_inputs(table: Table, kind: str, wanted: Wanted) -> Examples:
    """Examples with labels if every row has one (of multi-label rows, any), else without; and the other columns.

    A column of labels with gaps is one of the others.
    """
    label = find_labels(table, wanted)
    column = _input_column(table, kind, wanted.text_column, label)
    if label is not None and not _are_labels(table.columns[label], kind):
        skips = wanted.how.on_error == "skip"  # rows with gaps may be among those
        kept = _read_rows(table, kind, column, None, Reading("skip"), others=True).others if skips else table.columns
        label = label if skips and _are_labels(kept[label], kind) else None
    return _read_rows(table, kind, column, label, wanted.how, others=True)


def _are_labels(cells: Iterable[Any], kind: str) -> bool:
    """Whether every row has a label; of multi-label rows, a cell, and any of them a label."""
    cells = list(cells)
    blank = [value is None or not str(value).strip() for value in cells]
    return None not in cells and not all(blank) if kind == "multilabel" else not any(blank)


def _read_rows(
    table: Table, kind: str, column: str, label: str | None, how: Reading, *, others: bool = False
) -> Examples:
    """The rows of a table whose input, and label if there is a column of them, can be used."""
    cells = table.columns[column]
    answers: Iterable[Any] = repeat(None) if label is None else table.columns[label]
    as_it_is = isinstance(cells, Texts) and kind in ("text", "multilabel")
    inputs, labels, good, read = list[Any](), list[Any](), array("q"), Labels(kind)
    for row, (cell, answer) in enumerate(zip(cells, answers, strict=label is not None)):
        try:
            if not (as_it_is and cell and not cell.isspace()):
                place = f"{table.where[row]}: column {column!r}"
                value = read_input(cell, kind, place, table.folder)
                if not as_it_is:
                    inputs.append(value)
            if label is not None:
                labels.append(read(answer, table.where, row, label, cell))
        except InputError as error:
            del inputs[len(good) :]
            how.refuse(error)
        else:
            good.append(row)
    how.say_left_out(table.place, len(good))
    unused = {name: values for name, values in table.columns.items() if name not in (column, label)} if others else {}
    where: Sequence[str] = table.where
    if len(good) < len(cells):
        where, unused = pick_cells(where, good), {name: pick_cells(values, good) for name, values in unused.items()}
        cells = pick_cells(cells, good)
    return Examples(cells if as_it_is else inputs, labels, where, unused)


class Labels:
    """Reads cells of labels; a label that comes often is read and kept once."""

    def __init__(self, kind: str) -> None:
        self.kind, self._names, self._cells = kind, dict[str, str](), dict[str, str]()

    def __call__(self, cell: Any, where: Sequence[str], row: int, column: str, words: Any) -> Any:
        """The label, or the list of labels, of a row."""
        if isinstance(cell, str) and cell in self._cells:
            return self._cells[cell]
        labels = read_label(cell, self.kind, f"{where[row]}: column {column!r}")
        if self.kind == "tokens" and len(words) != len(labels):
            found = f"expected a label a word, found {len(words)} words and {len(labels)} labels"
            raise InputError(f"{where[row]}: {found}")
        if isinstance(labels, list):
            return [self._names.setdefault(label, label) for label in labels]
        label = self._names.setdefault(labels, labels)
        if isinstance(cell, str):
            self._cells[cell] = label
        return label


def _input_column(table: Table, kind: str, column: str | None, label: str | None) -> str:
    """The name of the column of inputs; that there is none is an error."""
    column = _find_named(table, column) if column is not None else _find_inputs(table, kind, label)
    if column == label:
        raise InputError(f"{table.place}: column {column!r} cannot be both the input and the label")
    return column


def find_label_column(table: Table, wanted: Wanted) -> str:
    """The name of the column of labels; that there is none is an error."""
    column = find_labels(table, wanted)
    if column is None:
        raise InputError(f"{table.place}: no column of labels found among {listed(table.columns)}; give label_column")
    return column


def find_labels(table: Table, wanted: Wanted) -> str | None:
    """The name of the column of labels, if there is one."""
    if wanted.label_column is not None:
        return _find_named(table, wanted.label_column)
    only = next(iter(table.names)) if len(table.names) == 1 else None
    return _find(table, _LABEL, but=wanted.text_column) or only


def _find_kind(table: Table, label: str, column: str | None) -> str:
    column = None if column is None else _find_named(table, column)
    if _holds_lists(table, label):
        words = column or _find(table, _WORDS, but=label)
        return "tokens" if words is not None and _holds_lists(table, words) else "multilabel"
    media = _find_media(table) if column is None else column
    if media is None:
        return "text"
    if media in table.media:
        return table.media[media]
    if media.lower() in MEDIA and any(isinstance(value, dict) for value in table.columns[media]):
        return media.lower()  # as Hugging Face stores them, in a file that does not declare it
    kinds = {media_kind(value) for value in table.columns[media]}
    return "text" if len(kinds) > 1 else kinds.pop() or "text"


def _find_inputs(table: Table, kind: str, label: str | None) -> str:
    """The column of the inputs by its name; of texts also the only column that can be one."""
    if kind in MEDIA:
        column, what = _find_media(table), "file names"
    elif kind == "tokens":
        column, what = _find(table, _WORDS, but=label), "words"
    else:
        column, what = _find(table, _TEXT, but=label), "texts"
        texts = [name for name in table.columns if name != label and _are_texts(table.columns[name])]
        if column is None and len(texts) == 1:
            column = texts[0]
    if column is None:
        raise InputError(f"{table.place}: no column of {what} found among {listed(table.columns)}; give text_column")
    return column


def _find_media(table: Table) -> str | None:
    return next(iter(table.media), None) or _find(table, _FILES)


def _find_named(table: Table, name: str) -> str:
    column = name if name in table.columns else _find(table, [name.lower()])
    if column is None:
        raise InputError(f"{table.place}: no column {name!r}, there are {listed(table.columns)}")
    return column


def _find(table: Table, names: Iterable[str], but: str | None = None) -> str | None:
    """The column whose name, in any case, comes first among `names`."""
    columns = {column.lower(): column for column in table.columns if column != but}
    return next((columns[name] for name in names if name in columns), None)


def _holds_lists(table: Table, column: str) -> bool:
    cells = table.columns[column]
    return not isinstance(cells, Texts) and any(isinstance(value, list) for value in cells)


def _are_texts(values: Sequence[Any]) -> bool:
    """Whether values are strings, and not all of them numbers."""
    if not (values.complete if isinstance(values, Texts) else all(isinstance(value, str) for value in values)):
        return False
    return not all(re.fullmatch(r"\s*[-+]?[0-9.]*(e[-+]?[0-9]+)?\s*", value, re.IGNORECASE) for value in values)


def read_input(value: Any, kind: str, where: str, folder: Path) -> Any:
    """An input of that kind, as `Examples` has it; file names are those of files in the folder."""
    if kind in MEDIA:
        return _find_file(value, where, folder)
    if kind == "tokens":
        if not isinstance(value, list) or not value:
            raise InputError(f"{where}: expected a list of words, found {shown(value)}")
        return [_check_string(word, where) for word in value]
    if not _check_string("" if value is None else value, where).strip():
        raise InputError(f"{where}: empty text")
    return value


def read_label(value: Any, kind: str, where: str) -> Any:
    """The label, or the list of labels, of an example of that kind."""
    if kind not in ("multilabel", "tokens"):
        return _check_label(value, where)
    if kind == "multilabel" and isinstance(value, str):
        value = [label for label in re.split(r"[|,]", value) if label.strip()]
    if not isinstance(value, list):
        raise InputError(f"{where}: expected a list of labels, found {shown(value)}")
    labels = [_check_label(label, where) for label in value]
    return list(dict.fromkeys(labels)) if kind == "multilabel" else labels


def _check_label(value: Any, where: str) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise InputError(f"{where}: empty label")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of integers turns into floats where one of them is missing
    if not isinstance(value, str | int):
        number = "; a number to estimate is not a class" if isinstance(value, float) else ""
        raise InputError(f"{where}: expected a label, found {shown(value)}{number}")
    return _check_string(str(value).strip(), where)


def _check_string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: expected text, found {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:  # half a character, as "\ud83d" in JSON
        raise InputError(f"{where}: text is not valid Unicode") from None
    return value


def _find_file(value: Any, where: str, folder: Path) -> Any:
    """A file in the folder; or, of what Hugging Face stores as ``{"bytes", "path"}``, the bytes if there are any.

    What is an image or a sound itself, as `Examples` has it, stays as it is.
    """
    if isinstance(value, bytes | tuple | np.ndarray):
        return value
    if isinstance(value, dict):
        content, value = value.get("bytes"), value.get("path")
        if content and isinstance(content, bytes):
            return content
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: expected a file name, found {shown(value)}")
    path = folder / value
    if not path.is_file():
        raise InputError(f"{where}: no such file {path}")
    return path
