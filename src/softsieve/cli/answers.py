"""Answers of a model as a table: its columns, and the files it is written to, some rows at a time."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from softsieve.tasks.examples import Examples
from softsieve.tasks.task import Task

INPUT = {"text": "text", "multilabel": "text", "tokens": "words", "image": "file", "audio": "file"}  # column by kind
TOP = "top"  # the column of a .jsonl file that has the first classes


class _Top(list[dict[str, Any]]):
    """The first classes of a row: a list, and in tables of one value a cell columns of their own."""

    def columns(self) -> dict[str, Any]:
        """Of such tables, with what they hold."""
        cells: dict[str, Any] = {}
        for place, one in enumerate(self, 1):
            cells[f"label_{place}"], cells[f"probability_{place}"] = one["label"], one["probability"]
        return cells


class Answer(NamedTuple):
    """What a model says to a row."""

    prediction: Any  # a label, or a list of them
    probability: Any = None  # of it, or of each
    top: Sequence[tuple[str, float]] = ()  # the most probable classes, where they are asked for


def table_rows(task: Task, examples: Examples, answers: Iterable[Answer]) -> Iterator[dict[str, Any]]:
    """Input, label, answer and the other columns of every example; one of these whose name is taken gets another."""
    for row, answer in enumerate(answers):
        value = examples.inputs[row]
        if INPUT[task.kind] == "file":
            value = str(value) if isinstance(value, Path) else examples.where[row]
        cells = {INPUT[task.kind]: value}
        if len(examples.labels):
            cells["label"] = examples.labels[row]
        cells["prediction"] = answer.prediction
        if answer.probability is not None:
            cells["probability"] = _rounded(answer.probability)
        taken = dict(cells)
        if answer.top:
            cells[TOP] = top = _Top({"label": label, "probability": _rounded(p)} for label, p in answer.top)
            taken |= {TOP: top, **top.columns()}
        for name, column in examples.others.items():
            free = _free(name, taken)
            cells[free] = taken[free] = column[row]
        yield cells


def _rounded(probability: Any) -> Any:
    return [round(p, 6) for p in probability] if isinstance(probability, list) else round(probability, 6)


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """A name that is not taken, the same for every row.

    >>> _free("text", {"text": 1})
    'text_given'
    """
    while name in taken:
        name += "_given"
    return name


def _flat(row: Mapping[str, Any], between: str) -> dict[str, Any]:
    """A row with one value a cell."""
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, _Top):
            cells |= value.columns()
        elif isinstance(value, list) and all(isinstance(one, str | float) for one in value):
            cells[name] = between.join(map(str, value))
        else:
            cells[name] = (
                json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else value
            )
    return cells


def write_csv(file: TextIO, rows: Iterable[Mapping[str, Any]], between: str) -> None:
    """Quoted where needed, with a line of names."""
    writer = csv.writer(file, lineterminator="\n")
    for number, row in enumerate(rows):
        cells = _flat(row, between)
        if number == 0:
            writer.writerow(cells)
        writer.writerow(cells.values())


def write_tsv(file: TextIO, rows: Iterable[Mapping[str, Any]], between: str) -> None:
    """Without quoting, as such files are read; white space that would end a cell becomes a space."""
    for number, row in enumerate(rows):
        cells = _flat(row, between)
        for line in ([*cells], cells.values()) if number == 0 else (cells.values(),):
            said = ("" if cell is None else str(cell) for cell in line)
            file.write("\t".join(re.sub(r"[\t\r\n]", " ", cell) for cell in said) + "\n")


def write_jsonl(file: TextIO, rows: Iterable[Mapping[str, Any]], between: str) -> None:
    """An object a line, with lists as they are."""
    for row in rows:
        file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


WRITERS: dict[str, Callable[[TextIO, Iterable[Mapping[str, Any]], str], None]] = {
    ".csv": write_csv,
    ".tsv": write_tsv,
    ".jsonl": write_jsonl,
}
