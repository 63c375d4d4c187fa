"""`softsieve train`: from data to a model in a folder, with one command."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from torch import Tensor, nn

from softsieve import _checks
from softsieve._files import only_one, replace_file
from softsieve._progress import ProgressCallback
from softsieve.cli.devices import choose_device
from softsieve.cli.errors import is_main_process, one_line
from softsieve.cli.interrupts import stopping
from softsieve.cli.options import Options, make_settings, repeating
from softsieve.cli.progress import plain_console, quiet_hugging_face, table, told
from softsieve.errors import InputError
from softsieve.losses.objectives import MULTI_LABEL, SINGLE_LABEL
from softsieve.tasks.examples import Data, Examples, label_names
from softsieve.tasks.hf import read_hidden_size
from softsieve.tasks.judged import JUDGED, judged
from softsieve.tasks.metrics import confusion_matrix_png
from softsieve.tasks.presets import PRESETS, load_preset
from softsieve.tasks.read import read_data
from softsieve.tasks.rows import Rows
from softsieve.tasks.task import Task
from softsieve.training.checkpoint import checkpoints
from softsieve.training.recipes import usual
from softsieve.training.settings import Settings

if TYPE_CHECKING:  # needs the extra train
    from softsieve.training.run import Run

CONFUSION = "confusion.png"


def train(options: Options) -> None:
    """Train a classifier of texts, words, images or sounds, and say how good it is.

    Underscores do as well as dashes, a flag may be followed by True or False, and options may have the names of Hugging
    Face's scripts, such as --learning_rate for --lr.

    softsieve train --data reviews.csv

    softsieve train --data sst5 --model bert-base-uncased --epochs 7 --precision fp16
    """
    with one_line():
        if options.cache_dir is not None:  # read when the libraries of Hugging Face are imported, which is later
            os.environ["HF_HUB_CACHE"] = os.environ["HF_DATASETS_CACHE"] = str(options.cache_dir)
        shown = options.show_progress and not options.quiet and is_main_process()
        quiet_hugging_face(bars=shown and sys.stderr.isatty())
        console = plain_console(quiet=options.quiet or not is_main_process())
        if options.trains:
            with only_one(options.out, "training") if is_main_process() else nullcontext():
                _train(options, console)
        else:
            _judge(options, console)


def _train(options: Options, console: Console) -> None:
    from softsieve.training.run import MODEL, encode
    from softsieve.training.run import train as train_task

    resume, device = _checkpoint(options), choose_device(options.device)
    with told(console) as progress:
        data, model = _read(options, progress), options.model
    settings = make_settings(
        options,
        usual(data, hidden_size=None if model is None else read_hidden_size(model), frozen=options.freeze_encoder),
        rows=len(data.train.inputs),
        validation=data.validation is not None,
        processes=int(os.environ.get("WORLD_SIZE", "1")),
        gpu=device.type == "cuda",
    )
    multilabel = data.kind == "multilabel"
    _checks.choice("loss", settings.loss, MULTI_LABEL if multilabel else SINGLE_LABEL)
    settings.objective(multilabel=multilabel)  # says now which package it lacks
    workers = options.workers
    task = Task.build(data, model=model, max_length=options.max_length, workers=workers, pooling=options.pooling)
    with told(console) as progress:
        splits = encode(task, data.train, data.validation, data.test, progress=progress)
    _say_data(console, data, len(task.labels))
    _say_settings(console, options, settings, splits.validation is not None)
    with stopping(console, options.out) as stop:
        run = train_task(
            task,
            splits,
            settings,
            output=options.out,
            resume=resume,
            show=options.show_progress and not options.quiet,
            console=console,
            about={"data": data.name, "model": model or "built-in"},
            options=repeating(options, settings),
            index=options.head_index,
            stop=stop,
        )
    if run.result.best or run.test:
        console.print(metrics_table({"validation": run.result.best, "test": run.test}))
    _say_cost(console, run, len(splits.train))
    console.print(f"model: {options.out / MODEL}; a page about the run: softsieve report {options.out}")
    for name in ("test", "validation"):  # the first that there is
        rows, examples = getattr(splits, name), getattr(data, name)
        if rows is not None:
            rows = rows.to(next(run.model.parameters()).device)
            decided = _leave_judged(options.out, task, run.model.eval(), name, examples, rows)
            _draw(console, options.out, task, rows, decided)
            break


def _leave_judged(output: Path, task: Task, model: nn.Module, part: str, examples: Examples, rows: Rows) -> Tensor:
    """Write what a report says of classes and mistakes; returns the answers."""
    from softsieve.training.serving import answer

    found = answer(task, model, rows)
    one_label = task.kind not in ("multilabel", "tokens")
    probability = found.probabilities[:, 0].cpu() if one_label else None
    if not is_main_process():
        return found.decided
    said = {"part": part, **judged(task, examples, *task.by_word(found.decided, rows), probability)}
    replace_file(output / JUDGED, lambda file: file.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8"))
    return found.decided


def _judge(options: Options, console: Console) -> None:
    """Evaluate the model in the output folder."""
    from softsieve.training.run import load_model
    from softsieve.training.serving import decide

    device = choose_device(options.device)
    task, model = load_model(options.out, index=False, device=device)  # judged by what it is, not by its index
    task.workers = options.workers
    with told(console) as progress:
        data = _read(options, progress, kind=task.kind)
    if data.kind != task.kind:
        raise InputError(f"{data.name}: expected {task.kind} as the model in {options.out}, found {data.kind}")
    _say_data(console, data, len(task.labels))
    metrics: dict[str, dict[str, float]] = {}
    for name, examples in (("validation", data.validation), ("test", data.test)):
        if examples is not None:
            part = task.rows(examples).to(device)
            decided = decide(task, model, part, batch_size=options.eval_batch_size or 128)
            metrics[name] = task.metrics(*task.by_word(decided, part))
    console.print(metrics_table(metrics))
    _draw(console, options.out, task, part, decided)


# The folder


def _checkpoint(options: Options) -> Path | None:
    """Where to go on from; the output folder is refused if it holds a run that is neither resumed nor given up."""
    from softsieve.training.run import MODEL

    output, asked = options.out, options.resume
    if asked is None or asked.lower() == "false":
        holds = [name for name in (MODEL, "log.jsonl") if (output / name).exists()] or checkpoints(output)
        if holds and not options.overwrite:
            raise InputError(f"{output}: holds a run; give --overwrite, --resume or another --out")
        return None
    if asked.lower() != "true":
        return Path(asked)
    saved = checkpoints(output)
    if not saved:
        raise InputError(f"{output}: expected a checkpoint to resume from, found none")
    return saved[-1]


# Data


def _read(options: Options, progress: ProgressCallback, kind: str | None = None) -> Data:
    """The data, without the parts that are not asked for."""
    if (options.data is None) == (options.task_name is None):
        raise InputError(f"data: expected --data or --task_name, found {'neither' if options.data is None else 'both'}")
    known = options.task_name or (options.data if not Path(str(options.data)).exists() else None)
    if options.task_name is not None or known in PRESETS:
        for name in ("validation_data", "test_data", "kind", "text_column", "label_column", "validation_share"):
            if getattr(options, name) is not None:
                raise InputError(f"{name}: expected with data of your own, found with {known}, which has its own")
        data = load_preset(str(known), options.data_dir or Path("data"))
    else:
        if options.data_dir is not None:
            raise InputError(f"data_dir: expected with one of {', '.join(PRESETS)}, found with {options.data}")
        share = 0.1 if options.validation_share is None else options.validation_share
        data = read_data(
            str(options.data),
            validation=options.validation_data,
            test=options.test_data,
            kind=options.kind or kind,
            text_column=options.text_column,
            label_column=options.label_column,
            validation_share=share if options.evaluates else 0.0,
            on_error=options.on_error,
            delimiter=options.delimiter,
            encoding=options.encoding,
            workers=options.workers,
            progress=progress,
        )
    for asked, name, part in (
        (options.asks_evaluation, "validation", data.validation),
        (options.do_predict, "test", data.test),
    ):
        if asked and part is None:
            raise InputError(f"{data.name}: expected {name} data, found none; give --{name}_data")
    data = data._replace(
        validation=data.validation if options.evaluates else None, test=data.test if options.predicts else None
    )
    return _fewer(data, options)


def _fewer(data: Data, options: Options) -> Data:
    """So many rows of each part, drawn at random; the classes stay those of all rows."""

    def draw(part: Examples, most: int | None) -> Examples:
        if most is None or most >= len(part.inputs):
            return part
        return part.pick(sorted(random.Random(options.seed).sample(range(len(part.inputs)), most)))

    most = options.max_eval_samples
    return data._replace(
        train=draw(data.train, options.max_train_samples),
        validation=data.validation and draw(data.validation, most),
        test=data.test and draw(data.test, most),
        labels=data.labels if options.max_train_samples is None else label_names(data),
    )


# What is said


def _say_data(console: Console, data: Data, classes: int) -> None:
    parts: dict[str, Examples | None] = {"training": data.train, "validation": data.validation, "test": data.test}
    rows = ", ".join(f"{len(part.inputs)} {name}" for name, part in parts.items() if part is not None)
    console.print(f"data: {data.name}, {data.kind}; rows: {rows}; {classes} classes")
    for note in data.notes:
        console.print(note)


def _say_settings(console: Console, options: Options, settings: Settings, validation: bool) -> None:
    s = settings
    margin = ""
    if s.adaptive:
        margin = f" with delta {s.delta:g}"
        if s.delta_ratio:
            margin += f" (from {s.initial_delta:g} over {s.delta_ratio:.0%} of training)"
        if s.speed_steps > 1:
            margin += f", AS-Speed up to {s.speed_steps} batches a step"
        if s.skip == "solved":
            margin += ", solved rows skipped"
    weights = f"; class weights: {options.class_weights}" if s.class_weights is not None else ""
    precision = "" if s.precision == "no" else f", {s.precision}"
    if options.asked_precision == "fp16" and s.precision == "no":
        precision = ", float32 (fp16 needs a GPU)"
    console.print(f"model: {options.model or 'built-in'}; loss: {s.loss}{margin}{weights}")
    console.print(
        f"epochs: {s.epochs}, rows in a batch: {s.batch_size}, learning rate: {s.learning_rate:g}, seed: {s.seed}"
        f"{f', best by: {s.metric}' if validation else ''}{precision}"
    )


def _say_cost(console: Console, run: Run, rows: int) -> None:
    result = run.result
    parameters = sum(p.numel() for p in run.model.parameters())
    solved = "" if result.solved is None else f"; {result.solved:.1%} of the {rows:,} rows solved when last seen"
    console.print(
        f"{parameters:,} parameters; {result.steps} steps, the best after {result.best_step or result.steps}; "
        f"{result.seconds:.1f} s"
    )
    console.print(
        f"rows trained: {result.trained:,} ({result.trained / rows:.1f} times the data), screened: "
        f"{result.screened:,}{solved}"
    )


def metrics_table(metrics: Mapping[str, Mapping[str, float]]) -> Any:
    """A table of metrics, a column for each part of the data; empty parts are left out."""

    def column(values: Mapping[str, float]) -> Callable[[str], str]:
        def cell(name: str) -> str:
            value = values.get(name)
            return "" if value is None else f"{value:.4f}" if name == "loss" else f"{100 * value:.2f}"

        return cell

    names = list(dict.fromkeys(name for values in metrics.values() for name in values))
    columns = {part: column(values) for part, values in metrics.items() if values}
    return table(names, {"": lambda name: name if name == "loss" else f"{name} %", **columns})


def _draw(console: Console, output: Path, task: Task, rows: Rows | None, decided: Tensor | None) -> None:
    """The confusion matrix, where a row has one label."""
    if task.kind in ("multilabel", "tokens") or rows is None or decided is None or not is_main_process():
        return
    drawn = confusion_matrix_png(output / CONFUSION, rows.target.cpu(), decided.cpu(), task.labels)
    some = f" (the {drawn} of {len(task.labels):,} that are mistaken most)" if drawn < len(task.labels) else ""
    console.print(f"which classes are mistaken{some}: {output / CONFUSION}")
