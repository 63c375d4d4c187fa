"""`softsieve train`: from data to a model in a folder, with one command."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softsieve import _checks
from softsieve._files import only_one
from softsieve.cli.errors import is_main_process, one_line
from softsieve.cli.options import Options, make_settings
from softsieve.errors import InputError
from softsieve.losses.objectives import MULTI_LABEL, SINGLE_LABEL

if TYPE_CHECKING:  # what takes long to import is imported when the command runs
    from rich.console import Console
    from torch import Tensor

    from softsieve.tasks.examples import Data, Examples
    from softsieve.tasks.rows import Rows
    from softsieve.tasks.task import Task
    from softsieve.training.run import Run
    from softsieve.training.settings import Settings

CONFUSION = "confusion.png"
PRETRAINED = {"learning_rate": 5e-5, "epochs": 3, "batch_size": 32, "eval_batch_size": 128}


def train(options: Options) -> None:
    """Train a classifier of texts, words, images or sounds, and say how good it is.

    The options have the names of Hugging Face's scripts; underscores do as well as dashes, and a flag may be followed
    by True or False.

    softsieve train --data reviews.csv

    softsieve train --task_name sst5 --model_name_or_path bert-base-uncased --fp16 --num_train_epochs 7
    """
    with one_line():
        _set_up_hugging_face(options)
        from rich.console import Console

        console = Console(
            quiet=options.quiet or not is_main_process(), soft_wrap=True, markup=False, highlight=False
        )  # names are printed as they are, whatever is in them
        if options.trains:
            with only_one(options.output_dir, "training") if is_main_process() else nullcontext():
                _train(options, console)
        else:
            _judge(options, console)


def _set_up_hugging_face(options: Options) -> None:
    """Its libraries read these when they are imported, which is later."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if options.cache_dir is not None:
        os.environ["HF_HUB_CACHE"] = os.environ["HF_DATASETS_CACHE"] = str(options.cache_dir)
    if options.quiet or not (options.show_progress and is_main_process() and sys.stderr.isatty()):
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"


def _train(options: Options, console: Console) -> None:
    import torch

    from softsieve.tasks.task import Task
    from softsieve.training.run import MODEL, decide, encode
    from softsieve.training.run import train as train_task

    resume = _checkpoint(options)
    data = _read(options)
    defaults = _defaults(data, options.model_name_or_path)
    settings = make_settings(
        options,
        defaults,
        rows=len(data.train.inputs),
        validation=data.validation is not None,
        processes=int(os.environ.get("WORLD_SIZE", "1")),
        gpu=torch.cuda.is_available(),
    )
    multilabel = data.kind == "multilabel"
    _checks.choice("loss", settings.loss, MULTI_LABEL if multilabel else SINGLE_LABEL)
    settings.objective(multilabel=multilabel)  # says now which package it lacks
    task = Task.build(
        data,
        model=options.model_name_or_path,
        max_length=options.max_seq_length,
        workers=options.dataloader_num_workers,
    )
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
        about={"data": data.name, "model": options.model_name_or_path or "built-in"},
    )

    if run.result.best or run.test:
        console.print(metrics_table({"validation": run.result.best, "test": run.test}))
    _say_cost(console, run, len(splits.train))
    console.print(f"model: {options.output_dir / MODEL}; a page about the run: softsieve report {options.output_dir}")
    part, decided = splits.test, run.test_decided
    if part is None and splits.validation is not None:
        device = next(run.model.parameters()).device
        part = splits.validation.to(device)
        decided = decide(task, run.model.eval(), part)
    _draw(console, options.output_dir, task, part, decided)


def _judge(options: Options, console: Console) -> None:
    """Evaluate the model in the output folder."""
    import torch

    from softsieve.training.run import decide, load_model

    task, model = load_model(options.output_dir)
    task.workers = options.dataloader_num_workers
    data = _read(options, kind=task.kind)
    if data.kind != task.kind:
        raise InputError(f"{data.name}: expected {task.kind} as the model in {options.output_dir}, found {data.kind}")
    _say_data(console, data, len(task.labels))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, dict[str, float]] = {}
    for name, examples in (("validation", data.validation), ("test", data.test)):
        if examples is None:
            continue
        part = task.rows(examples).to(device)
        size = options.per_device_eval_batch_size or 128
        decided = decide(task, model.to(device), part, batch_size=size)
        found[name] = task.metrics(*task.by_word(decided, part))
    console.print(metrics_table(found))
    _draw(console, options.output_dir, task, part, decided)


# The folder


def _checkpoint(options: Options) -> Path | None:
    """Where to go on from; the output folder is refused if it holds a run that is neither resumed nor given up."""
    from softsieve.training.checkpoint import checkpoints
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
    found = checkpoints(output)
    if not found:
        raise InputError(f"{output}: expected a checkpoint to resume from, found none")
    return found[-1]


# Data and defaults


def _read(options: Options, kind: str | None = None) -> Data:
    """The data, without the parts that are not asked for."""
    from softsieve.tasks.presets import PRESETS, load_preset
    from softsieve.tasks.read import read_data

    if (options.data is None) == (options.task_name is None):
        found = "neither" if options.data is None else "both"
        raise InputError(f"data: expected --data or --task_name, found {found}")
    own = {
        "validation_data": options.validation_data,
        "test_data": options.test_data,
        "task": options.task,
        "text_column": options.text_column,
        "label_column": options.label_column,
        "validation_share": options.validation_share,
    }
    known = options.task_name or (options.data if not Path(str(options.data)).exists() else None)
    if options.task_name is not None or known in PRESETS:
        for name, value in own.items():
            if value is not None:
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


def _defaults(data: Data, model: str | None) -> dict[str, Any]:
    """Settings that suit the data, for what is not asked for."""
    from softsieve.comparisons.recipes import recipe
    from softsieve.tasks.examples import label_names
    from softsieve.tasks.metrics import are_bio

    metric = "micro_f1" if data.kind == "multilabel" else "accuracy"
    if data.kind == "tokens" and are_bio(label_names(data)):
        metric = "entity_f1"
    usual = {"metric": metric, "delta": 0.1}
    if model is not None:
        return {**usual, **PRETRAINED}
    return {**usual, **_built_in(len(data.train.inputs)), **recipe(data.name, pretrained=False)}


def _built_in(rows: int) -> dict[str, Any]:
    """At least some 300 steps, which take seconds, for the few rows of a first try; few epochs for very many rows."""
    batch_size = 16 if rows < 1000 else 64
    epochs = max(8 if rows < 50_000 else 3, min(60, -(-300 * batch_size // rows)))
    return {"learning_rate": 3e-3, "epochs": epochs, "batch_size": batch_size, "eval_batch_size": 512}


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


def metrics_table(found: Mapping[str, Mapping[str, float]]) -> Any:
    """A table of metrics by part of the data; empty parts are left out."""
    from rich.table import Table

    found = {name: metrics for name, metrics in found.items() if metrics}
    names = list(dict.fromkeys(name for metrics in found.values() for name in metrics))
    table = Table()
    table.add_column("")
    for name in names:
        table.add_column(name if name == "loss" else f"{name} %", justify="right")
    for part, metrics in found.items():
        cells = [f"{metrics[name]:.4f}" if name == "loss" else f"{100 * metrics[name]:.2f}" for name in names]
        table.add_row(part, *cells)
    return table


def _draw(console: Console, output: Path, task: Task, rows: Rows | None, decided: Tensor | None) -> None:
    """The confusion matrix, where a row has one label."""
    from softsieve.tasks.metrics import confusion_matrix_png

    if task.kind in ("multilabel", "tokens") or rows is None or decided is None or not is_main_process():
        return
    confusion_matrix_png(output / CONFUSION, rows.target.cpu(), decided.cpu(), task.labels)
    console.print(f"which classes are mistaken: {output / CONFUSION}")
