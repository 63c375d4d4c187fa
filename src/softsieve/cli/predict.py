"""`softsieve predict`: what a trained model says to new data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from softsieve._files import replace_file
from softsieve.cli.answers import INPUT, WRITERS, Answer, table_rows, write_csv
from softsieve.cli.devices import DEVICE_HELP, choose_device
from softsieve.cli.errors import one_line
from softsieve.cli.progress import error_console, plain_console, told
from softsieve.cli.script import CONFIG_HELP
from softsieve.cli.train import metrics_table
from softsieve.errors import InputError
from softsieve.tasks.examples import Examples, media_kind
from softsieve.tasks.read import read_inputs, read_lines
from softsieve.tasks.reading import unseen_note
from softsieve.tasks.rows import Rows
from softsieve.tasks.task import Task

AT_ONCE = 4096  # rows that are encoded, answered and written before the next


def predict(
    model: Annotated[Path, typer.Argument(help="folder of a trained model, or of the run that made it")],
    data: Annotated[
        str | None,
        typer.Option(
            help="file or folder as in training, with labels or without; one image or sound; - for a text or file name "
            "a line"
        ),
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="a text; may be given several times")] = None,
    out: Annotated[Path | None, typer.Option(help=".csv, .tsv or .jsonl; CSV to the screen if not given")] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="also the most probable classes, so many, with their probabilities")
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="column of the inputs, where its name does not tell")] = None,
    label_column: Annotated[str | None, typer.Option(help="column of labels, where its name does not tell")] = None,
    on_error: Annotated[
        str, typer.Option(help="stop at a bad row, image or sound, or skip it and say how many there were")
    ] = "stop",
    delimiter: Annotated[
        str | None, typer.Option(help="between the cells of .csv and .tsv; found if not given")
    ] = None,
    encoding: Annotated[str | None, typer.Option(help="of text files, such as cp1252; found if not given")] = None,
    workers: Annotated[int, typer.Option(min=0, help="threads that decode images and sounds")] = 0,
    exact: Annotated[bool, typer.Option(help="read all of the head, also where the model has an index of it")] = False,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    config: Annotated[Path | None, typer.Option(help=CONFIG_HELP)] = None,
) -> None:
    """Put a trained model's answers into a table, and say how good they are where the data have labels.

    The other columns of a table stay, behind the answers. Columns label_1, probability_1 and so on have the --top_k
    classes, "top" in a .jsonl file.

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

        place = choose_device(device)
        task, net = load_model(model, index=not exact, device=place)
        task.workers = workers
        _check_top(task, top_k)
        columns = {"text_column": text_column, "label_column": label_column}
        with told(error_console()) as progress:
            how = {"on_error": on_error, "delimiter": delimiter, "encoding": encoding, "workers": workers}
            examples = _read(task, data, text or [], columns, {**how, "progress": progress})
        answering = _Answering(task, net, examples, place, top_k)
        between = " " if task.kind == "tokens" else "|"
        if out is None:
            write_csv(sys.stdout, answering.rows(), between)
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            write = WRITERS[out.suffix]

            def fill(part: Path) -> None:
                with part.open("w", encoding="utf-8", newline="") as file:
                    write(file, answering.rows(), between)

            replace_file(out, fill)
        console = plain_console(stderr=out is None)
        unseen = unseen_note("labels", examples.labels, examples.where, set(task.labels))
        for note in (*examples.notes, *([] if unseen is None else [unseen])):
            console.print(note)
        if len(examples.labels):
            console.print(metrics_table({"data": answering.metrics()}))
        if out is not None:
            console.print(f"{len(examples.inputs)} answers: {out}")


def _check_top(task: Task, top_k: int | None) -> None:
    if top_k is None:
        return
    if task.kind == "tokens":
        raise InputError("top_k: expected with one answer a row, found a model of tokens")
    if top_k > len(task.labels):
        raise InputError(f"top_k: expected at most {len(task.labels)}, the classes of the model, found {top_k}")


def _read(task: Task, data: str | None, texts: list[str], columns: dict[str, Any], how: dict[str, Any]) -> Examples:
    single = data is not None and INPUT[task.kind] == "file" and media_kind(data) is not None
    if data is not None and data != "-" and not single:
        return read_inputs(data, task.kind, **columns, **how)
    each = {name: how[name] for name in ("on_error", "workers", "progress")}
    for name, value in columns.items():
        if value is not None:
            raise InputError(
                f"{name}: expected with a table of --data, found with plain texts or a file of {task.kind}"
            )
    if data is None and INPUT[task.kind] == "file":
        raise InputError(f"text: expected --data with a model of {task.kind}, found --text")
    if data is None:
        return read_lines([(f"text {number}", text) for number, text in enumerate(texts, 1)], task.kind, **each)
    if single:
        return read_lines([(data, data)], task.kind, **each)
    try:
        lines = sys.stdin.buffer.read().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: not UTF-8 (byte {error.start})") from None
    places = [(f"standard input:{number}", line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not places:
        raise InputError("standard input: no lines")
    return read_lines(places, task.kind, **each)


class _Answering:
    """Answers some rows at a time, so that memory does not grow with what is encoded; keeps what metrics need."""

    def __init__(
        self, task: Task, model: nn.Module, examples: Examples, device: torch.device, top_k: int | None
    ) -> None:
        self.task, self.model, self.examples, self.device, self.top_k = task, model, examples, device, top_k
        self.decided: list[Tensor] = []
        self.target: list[Tensor] = []

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of the table."""
        count = len(self.examples.inputs)
        for start in range(0, count, AT_ONCE):
            some = self.examples.pick(range(start, min(count, start + AT_ONCE)))
            rows = self.task.rows(some).to(self.device)
            yield from table_rows(self.task, some, self._answers(rows))

    def _answers(self, rows: Rows) -> Iterator[Answer]:
        from softsieve.training.serving import answer

        decided, classes, probabilities = answer(self.task, self.model, rows, k=self.top_k or 1)
        if len(self.examples.labels):
            for kept, part in zip((self.decided, self.target), self.task.by_word(decided, rows), strict=True):
                kept.append(part)
        labels = self.task.labels
        predictions = self.task.predictions(decided, rows)
        if not classes.shape[1]:
            yield from map(Answer, predictions)
            return
        for prediction, numbers, p in zip(predictions, classes.tolist(), probabilities.tolist(), strict=True):
            names = [labels[number] for number in numbers]
            top = list(zip(names, p, strict=True))[: self.top_k] if self.top_k else []
            each = dict(zip(reversed(names), reversed(p), strict=True))  # behind the last stands what fills a batch up
            found = [each[one] for one in prediction] if isinstance(prediction, list) else p[0]
            yield Answer(prediction, found, top)

    def metrics(self) -> dict[str, float]:
        """How good the answers are, once all are written."""
        fills = ~0 if self.task.multilabel else -100, -100
        return self.task.metrics(*map(_together, (self.decided, self.target), fills))


def _together(parts: list[Tensor], fill: int) -> Tensor:
    """Rows of all parts, as wide as the widest."""
    if parts[0].ndim > 1:
        width = max(part.shape[1] for part in parts)
        parts = [nn.functional.pad(part, (0, width - part.shape[1]), value=fill) for part in parts]
    return torch.cat(parts)
