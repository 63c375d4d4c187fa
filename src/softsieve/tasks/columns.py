"""Tables to examples: which column holds the inputs, which the labels, and what kind they are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from softsieve.errors import InputError, listed
from softsieve.tasks.cells import input_cell, label_cell
from softsieve.tasks.examples import MEDIA, Examples, Part, Wanted, media_kind
from softsieve.tasks.tables import Table

# Names by preference, in lower case.
_TEXT = ("text", "sentence", "content", "utterance", "query", "question", "review", "comment", "message", "title")
_WORDS = ("tokens", "words")
_FILES = ("file", "path", "image", "audio", "file_name", "filename", "img")
_LABEL = ("label", "labels", "intent", "category", "class", "target", "topic", "topics", "tags", "ner_tags", "pos_tags")


def table_examples(table: Table, wanted: Wanted) -> Part:
    """The examples of a table, each with its labels."""
    label = label_column(table, wanted)
    kind = wanted.kind or _find_kind(table, label, wanted.text_column)
    inputs = _inputs(table, kind, wanted.text_column, label)
    examples = Examples(inputs, [], table.where)
    for where, words, answer in zip(table.where, inputs, table.columns[label], strict=True):
        labels = label_cell(answer, kind, f"{where}: column {label!r}")
        if kind == "tokens" and len(words) != len(labels):
            raise InputError(f"{where}: expected a label a word, found {len(words)} words and {len(labels)} labels")
        examples.labels.append(labels)
    return Part(kind, examples, table.names.get(label))


def table_inputs(table: Table, kind: str, wanted: Wanted) -> Examples:
    """Examples with labels if every row has one (of multi-label rows, any), else without."""
    label = _find_labels(table, wanted)
    answers = table.columns[label] if label is not None else [None]
    blank = [value is None or not str(value).strip() for value in answers]
    if (None not in answers and not all(blank)) if kind == "multilabel" else not any(blank):
        return table_examples(table, wanted).examples
    return Examples(_inputs(table, kind, wanted.text_column, label), [], table.where)


def _inputs(table: Table, kind: str, column: str | None, label: str | None) -> list[Any]:
    column = _named(table, column) if column is not None else _find_inputs(table, kind, label)
    if column == label:
        raise InputError(f"{table.place}: column {column!r} cannot be both the input and the label")
    cells = zip(table.columns[column], table.where, strict=True)
    return [input_cell(value, kind, f"{where}: column {column!r}", table.folder) for value, where in cells]


def label_column(table: Table, wanted: Wanted) -> str:
    """The name of the column of labels; that there is none is an error."""
    found = _find_labels(table, wanted)
    if found is None:
        raise InputError(f"{table.place}: no column of labels found among {listed(table.columns)}; give label_column")
    return found


def _find_labels(table: Table, wanted: Wanted) -> str | None:
    if wanted.label_column is not None:
        return _named(table, wanted.label_column)
    found = _find(table, _LABEL, but=wanted.text_column)
    if found is None and len(table.names) == 1:
        found = next(iter(table.names))
    return found


def _find_kind(table: Table, label: str, column: str | None) -> str:
    column = None if column is None else _named(table, column)
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
    found: str | None
    if kind in MEDIA:
        found, what = _find_media(table), "file names"
    elif kind == "tokens":
        found, what = _find(table, _WORDS, but=label), "words"
    else:
        found, what = _find(table, _TEXT, but=label), "texts"
        texts = [column for column in table.columns if column != label and _is_text(table.columns[column])]
        if found is None and len(texts) == 1:
            found = texts[0]
    if found is None:
        raise InputError(f"{table.place}: no column of {what} found among {listed(table.columns)}; give text_column")
    return found


def _find_media(table: Table) -> str | None:
    return next(iter(table.media), None) or _find(table, _FILES)


def _named(table: Table, name: str) -> str:
    found = name if name in table.columns else _find(table, [name.lower()])
    if found is None:
        raise InputError(f"{table.place}: no column {name!r}, there are {listed(table.columns)}")
    return found


def _find(table: Table, names: Iterable[str], but: str | None = None) -> str | None:
    """The column whose name, in any case, comes first among `names`."""
    columns = {column.lower(): column for column in table.columns if column != but}
    return next((columns[name] for name in names if name in columns), None)


def _holds_lists(table: Table, column: str) -> bool:
    return any(isinstance(value, list) for value in table.columns[column])


def _is_text(values: list[Any]) -> bool:
    """Whether values are strings, and not all of them numbers."""
    if not all(isinstance(value, str) for value in values):
        return False
    return not all(re.fullmatch(r"\s*[-+]?[0-9.]*(e[-+]?[0-9]+)?\s*", value, re.IGNORECASE) for value in values)
