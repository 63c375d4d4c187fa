"""`softsieve predict`: what a trained model says to new data."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO

import torch
import typer
from torch import Tensor, nn

from softsieve._files import replace_file
from softsieve.cli.errors import one_line
from softsieve.cli.progress import plain_console
from softsieve.cli.train import metrics_table
from softsieve.errors import InputError
from softsieve.tasks.examples import Examples
from softsieve.tasks.read import line_inputs, read_inputs
from softsieve.tasks.rows import Rows
from softsieve.tasks.task import Task

INPUT = {"text": "text", "multilabel": "text", "tokens": "words", "image": "file", "audio": "file"}  # column by kind


def predict(
    model: Annotated[Path, typer.Argument(help="folder of a trained model, or of the run that made it")],
    data: Annotated[
        str | None,
        typer.Option(help="file or folder as in training, with labels or without; - for a text or file name a line"),
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="a text; may be given several times")] = None,
    out: Annotated[Path | None, typer.Option(help=".csv, .tsv or .jsonl; CSV to the screen if not given")] = None,
    text_column: Annotated[str | None, typer.Option(help="column of the inputs, where its name does not tell")] = None,
    label_column: Annotated[str | None, typer.Option(help="column of labels, where its name does not tell")] = None,
    workers: Annotated[int, typer.Option(min=0, help="threads that decode images and sounds")] = 0,
    exact: Annotated[bool, typer.Option(help="read all of the head, also where the model has an index of it")] = False,
) -> None:
    """Put a trained model's answers into a table, and say how good they are where the data have labels.

    softsieve predict softsieve-run --data new.csv --out answers.csv

    softsieve predict softsieve-run --text "what a film"
    """
    with one_line():
        if out is not None and out.suffix not in WRITERS:
            raise InputError(f"{out}: expected a file {', '.join(WRITERS)}")
        if out is not None and out.is_dir():
            raise InputError(f"{out}: expected a file, found a folder")
        if (data is None) == (not text):
            raise InputError(f"data: expected --data or --text, found {'neither' if data is None else 'both'}")
        from softsieve.training.run import load_model  # needs the extra train

        device = "cuda" if torch.cuda.is_available() else "cpu"
        task, net = load_model(model, index=not exact, device=device)
        task.workers = workers
        examples = _read(task, data, text or [], text_column, label_column)
        unknown = _unknown(task, examples)
        rows = task.rows(examples._replace(labels=[]) if unknown else examples).to(device)
        decided, probability = _answers(task, net, rows)
        table = _table(task, examples, task.predictions(decided, rows), probability)
        if out is None:
            _write_csv(sys.stdout, table)
        else:
            write = WRITERS[out.suffix]
            out.parent.mkdir(parents=True, exist_ok=True)

            def fill(part: Path) -> None:
                with part.open("w", encoding="utf-8", newline="") as file:
                    write(file, table)

            replace_file(out, fill)
        console = plain_console(stderr=out is None)
        if unknown:
            console.print(f"no metrics: {unknown}")
        elif examples.labels:
            console.print(metrics_table({"data": task.metrics(*task.by_word(decided, rows))}))
        if out is not None:
            console.print(f"{len(rows)} answers: {out}")


def _read(
    task: Task, data: str | None, texts: list[str], text_column: str | None, label_column: str | None
) -> Examples:
    if data is not None and data != "-":
        return read_inputs(data, task.kind, text_column=text_column, label_column=label_column)
    for name, value in {"text_column": text_column, "label_column": label_column}.items():
        if value is not None:
            raise InputError(f"{name}: expected with a file of --data, found with plain texts")
    if data is None and INPUT[task.kind] == "file":
        raise InputError(f"text: expected --data with a model of {task.kind}, found --text")
    if data is None:
        return line_inputs([(f"text {number}", text) for number, text in enumerate(texts, 1)], task.kind)
    try:
        lines = sys.stdin.buffer.read().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: not UTF-8 (byte {error.start})") from None
    places = [(f"standard input:{number}", line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not places:
        raise InputError("standard input: no lines")
    return line_inputs(places, task.kind)


def _unknown(task: Task, examples: Examples) -> str:
    """The first label that the model does not know, "" for none."""
    known = set(task.labels)
    for labels, where in zip(examples.labels, examples.where, strict=False):  # there may be none
        for label in labels if isinstance(labels, list) else [labels]:
            if label not in known:
                return f"{where}: the model does not know the label {label!r}"
    return ""


def _answers(task: Task, model: nn.Module, rows: Rows) -> tuple[Tensor, list[float] | None]:
    """What was decided for every row and, where that is one class, its probability by the softmax of the logits."""
    from softsieve.training.serving import decide, most_probable

    if task.kind in ("multilabel", "tokens"):
        return decide(task, model, rows), None
    classes, probability = most_probable(task, model, rows)
    return classes, probability.tolist()


# The table


class _Table(NamedTuple):
    columns: dict[str, Sequence[Any]]
    between: str  # several words, tags or labels in one cell


def _table(task: Task, examples: Examples, predictions: list[Any], probability: list[float] | None) -> _Table:
    places = zip(examples.inputs, examples.where, strict=True)
    named = [str(value) if isinstance(value, Path) else where for value, where in places]
    table: dict[str, Sequence[Any]] = {
        INPUT[task.kind]: named if INPUT[task.kind] == "file" else examples.inputs,
        **({"label": examples.labels} if examples.labels else {}),
        "prediction": predictions,
        **({"probability": [round(p, 6) for p in probability]} if probability is not None else {}),
    }
    return _Table(table, " " if task.kind == "tokens" else "|")


def _lines(table: _Table) -> Iterator[list[Any]]:
    yield list(table.columns)
    for row in zip(*table.columns.values(), strict=True):
        yield [table.between.join(cell) if isinstance(cell, list) else cell for cell in row]


def _write_csv(file: TextIO, table: _Table) -> None:
    csv.writer(file, lineterminator="\n").writerows(_lines(table))


def _write_tsv(file: TextIO, table: _Table) -> None:
    """Without quoting, as such files are read; white space that would end a cell becomes a space."""
    for row in _lines(table):
        file.write("\t".join(re.sub(r"[\t\r\n]", " ", str(cell)) for cell in row) + "\n")


def _write_jsonl(file: TextIO, table: _Table) -> None:
    for row in zip(*table.columns.values(), strict=True):
        file.write(json.dumps(dict(zip(table.columns, row, strict=True)), ensure_ascii=False) + "\n")


WRITERS: dict[str, Callable[[TextIO, _Table], None]] = {".csv": _write_csv, ".tsv": _write_tsv, ".jsonl": _write_jsonl}
