"""`softsieve train`: from data to a model in a folder, with one command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from softsieve import _checks
from softsieve._files import only_one
from softsieve.cli.errors import is_main_process, one_line
from softsieve.cli.options import Options, make_settings
from softsieve.cli.progress import plain_console, quiet_hugging_face, table
from softsieve.errors import InputError
from softsieve.losses.objectives import MULTI_LABEL, SINGLE_LABEL
from softsieve.tasks.examples import Data, Examples
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

    The options have the names of Hugging Face's scripts; underscores do as well as dashes, and a flag may be followed
    by True or False.

    softsieve train --data reviews.csv

    softsieve train --task_name sst5 --model_name_or_path bert-base-uncased --fp16 --num_train_epochs 7
    """
    with one_line():
        if options.cache_dir is not None:  # read when the libraries of Hugging Face are imported, which is later
            os.environ["HF_HUB_CACHE"] = os.environ["HF_DATASETS_CACHE"] = str(options.cache_dir)
        shown = options.show_progress and not options.quiet and is_main_process()
        quiet_hugging_face(bars=shown and sys.stderr.isatty())
        console = plain_console(quiet=options.quiet or not is_main_process())
        if options.trains:
            with only_one(options.output_dir, "training") if is_main_process() else nullcontext():
                _train(options, console)
        else:
            _judge(options, console)


def _train(options: Options, console: Console) -> None:
    from softsieve.training.run import MODEL, encode
    from softsieve.training.run import train as train_task
    from softsieve.training.serving import decide

    resume = _checkpoint(options)
    data, model = _read(options), options.model_name_or_path
    settings = make_settings(
        options,
        usual(data, pretrained=model is not None),
        rows=len(data.train.inputs),
        validation=data.validation is not None,
        processes=int(os.environ.get("WORLD_SIZE", "1")),
        gpu=torch.cuda.is_available(),
    )
    multilabel = data.kind == "multilabel"
    _checks.choice("loss", settings.loss, MULTI_LABEL if multilabel else SINGLE_LABEL)
    settings.objective(multilabel=multilabel)  # says now which package it lacks
    workers = options.dataloader_num_workers
    task = Task.build(data, model=model, max_length=options.max_seq_length, workers=workers)
    splits = encode(task, data.train, data.validation, data.test)
    _say_data(console, data, len(task.labels))
    _say_settings(console, options, settings, splits.validation is not None)
    show = options.show_progress and not options.quiet and console.is_terminal
    run = train_task(
        task,
        splits,
        settings,
        output=options.output_dir,
        resume=resume,
        show=show,
        console=console,
        about={"data": data.name, "model": model or "built-in"},
        index=options.head_index,
    )
    if run.result.best or run.test:
        console.print(metrics_table({"validation": run.result.best, "test": run.test}))
    _say_cost(console, run, len(splits.train))
    console.print(f"model: {options.output_dir / MODEL}; a page about the run: softsieve report {options.output_dir}")
    part, decided = splits.test, run.test_decided
    if part is None and splits.validation is not None:
        part = splits.validation.to(next(run.model.parameters()).device)
        decided = decide(task, run.model.eval(), part)
    _draw(console, options.output_dir, task, part, decided)


def _judge(options: Options, console: Console) -> None:
    """Evaluate the model in the output folder."""
    from softsieve.training.run import load_model
    from softsieve.training.serving import decide

    device = "cuda" if torch.cuda.is_available() else "cpu"
    task, model = load_model(options.output_dir, index=False, device=device)  # judged by what it is, not by its index
    task.workers = options.dataloader_num_workers
    data = _read(options, kind=task.kind)
    if data.kind != task.kind:
        raise InputError(f"{data.name}: expected {task.kind} as the model in {options.output_dir}, found {data.kind}")
    _say_data(console, data, len(task.labels))
    metrics: dict[str, dict[str, float]] = {}
    for name, examples in (("validation", data.validation), ("test", data.test)):
        if examples is not None:
            part = task.rows(examples).to(device)
            decided = decide(task, model, part, batch_size=options.per_device_eval_batch_size or 128)
            metrics[name] = task.metrics(*task.by_word(decided, part))
    console.print(metrics_table(metrics))
    _draw(console, options.output_dir, task, part, decided)


# The folder


def _checkpoint(options: Options) -> Path | None:
    """Where to go on from; the output folder is refused if it holds a run that is neither resumed nor given up."""
    from softsieve.training.run import MODEL

    output, asked = options.output_dir, options.resume_from_checkpoint
    if asked is None or asked.lower() == "false":
        holds = [name for name in (MODEL, "log.jsonl") if (output / name).exists()] or checkpoints(output)
        if holds and not options.overwrite_output_dir:
            raise InputError(
                f"{output}: holds a run; give --overwrite_output_dir, --resume_from_checkpoint or another --output_dir"
            )
        return None
    if asked.lower() != "true":
        return Path(asked)
    saved = checkpoints(output)
    if not saved:
        raise InputError(f"{output}: expected a checkpoint to resume from, found none")
    return saved[-1]


# Data


def _read(options: Options, kind: str | None = None) -> Data:
    """The data, without the parts that are not asked for."""
    if (options.data is None) == (options.task_name is None):
        raise InputError(f"data: expected --data or --task_name, found {'neither' if options.data is None else 'both'}")
    known = options.task_name or (options.data if not Path(str(options.data)).exists() else None)
    if options.task_name is not None or known in PRESETS:
        for name in ("validation_data", "test_data", "task", "text_column", "label_column", "validation_share"):
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
            kind=options.task or kind,
            text_column=options.text_column,
            label_column=options.label_column,
            validation_share=share if options.evaluates else 0.0,
        )
    for asked, name, part in (
        (options.asks_evaluation, "validation", data.validation),
        (options.do_predict, "test", data.test),
    ):
        if asked and part is None:
            raise InputError(f"{data.name}: expected {name} data, found none; give --{name}_data")
    return data._replace(
        validation=data.validation if options.evaluates else None, test=data.test if options.predicts else None
    )


# What is said


def _say_data(console: Console, data: Data, classes: int) -> None:
    parts: dict[str, Examples | None] = {"training": data.train, "validation": data.validation, "test": data.test}
    rows = ", ".join(f"{len(part.inputs)} {name}" for name, part in parts.items() if part is not None)
    console.print(f"data: {data.name}, {data.kind}; rows: {rows}; {classes} classes")


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
    precision = "" if s.precision == "no" else f", {s.precision}"
    if options.fp16 and s.precision == "no":
        precision = ", float32 (fp16 needs a GPU)"
    console.print(f"model: {options.model_name_or_path or 'built-in'}; loss: {s.loss}{margin}")
    console.print(
        f"epochs: {s.epochs}, rows in a batch: {s.batch_size}, learning rate: {s.learning_rate:g}, seed: {s.seed}"
        f"{f', best by: {s.metric}' if validation else ''}{precision}"
    )


def _say_cost(console: Console, run: Run, rows: int) -> None:
    result = run.result
    parameters = sum(p.numel() for p in run.model.parameters())
    shares = [line["solved"] for line in result.log if "solved" in line]
    solved = f"{shares[-1]:.0%} of the rows solved at the end, " if shares else ""
    console.print(
        f"{parameters:,} parameters; {result.steps} steps, the best after {result.best_step or result.steps}; trained "
        f"{result.trained / rows:.1f} times the data, {solved}{result.seconds:.1f} s"
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
    confusion_matrix_png(output / CONFUSION, rows.target.cpu(), decided.cpu(), task.labels)
    console.print(f"which classes are mistaken: {output / CONFUSION}")
