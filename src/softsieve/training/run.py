"""A whole run: from data to a trained model in a folder, with its metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from softsieve import _checks
from softsieve._files import remove_folder, replace_file
from softsieve._progress import ProgressCallback, no_progress
from softsieve._records import write_record
from softsieve.errors import InputError
from softsieve.extras import loaded
from softsieve.heads import AdaptiveSoftmax
from softsieve.heads.engines import reason_against_cascade
from softsieve.losses.objectives import Objective
from softsieve.tasks.examples import Examples
from softsieve.tasks.hf import PretrainedEncoder
from softsieve.tasks.judged import JUDGED
from softsieve.tasks.labels import best_logits, fit_threshold
from softsieve.tasks.rows import IGNORED, Rows
from softsieve.tasks.task import Task
from softsieve.training.card import CARD, write_card
from softsieve.training.checkpoint import check_same, checkpoints, load_tensors, save_tensors, write_folder
from softsieve.training.frozen import freeze
from softsieve.training.loop import Result, Trainer
from softsieve.training.recipes import suited
from softsieve.training.serving import INDEX, load_index, make_index, reason_against_index
from softsieve.training.settings import Settings
from softsieve.training.weights import class_weights

MODEL = "model"  # folder of the trained model in the folder of a run
WEIGHTS, METRICS = "model.safetensors", "metrics.json"
OPTIONS = "options.json"
RECORD, LOGITS = "run.json", "logits.safetensors"  # what was run and came out, and logits for the report
FEWEST, MOST_JUDGED = 50, 20_000  # validation rows that a threshold is fitted on
SHOWN_ROWS, SHOWN_CLASSES = 200, 1000  # that logits are kept of, at most


class Splits(NamedTuple):
    """The encoded parts of a data set."""

    train: Rows
    validation: Rows | None
    test: Rows | None


class Run(NamedTuple):
    """What a run came to, and its model."""

    result: Result
    test: dict[str, float]  # metrics of the best weights on the test rows, {} without
    test_decided: Tensor | None
    model: nn.Module
    configuration: dict[str, Any]  # data, model, rows and settings, as `save_model` tells of them


def train(
    task: Task, splits: Splits, settings: Settings, *, output: str | Path | None = None,
    resume: str | Path | None = None, show: bool = False, console: Console | None = None,
    about: Mapping[str, Any] | None = None, index: bool | None = None, options: Mapping[str, Any] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Run:  # fmt: skip
    """Train a fresh model of ``task`` and judge it on the test rows; with ``output``, save it there.

    With an ``index`` of its head, by which `load_model` and `decide` answer without reading all of it; None: where
    training goes without logits, and there are rows enough to calibrate it with.

    ``show`` a progress bar or, without a terminal, a line now and then. ``stop`` is asked after every step whether to
    end here, with a checkpoint in ``output`` and a KeyboardInterrupt.

    Settings that are None are those of ``softsieve train`` for data of this kind and size (`recipes.suited`).

    Beside the model and the log, ``output`` gets the ``options`` that `softsieve train --config` repeats the run by, a
    record of it, with ``about`` (names of data and model) among its settings, and the logits of some held-out rows:
    `softsieve report` makes a page of them.
    A new run takes away the checkpoints, the log and the record of an earlier one in ``output``, once nothing can be
    wrong with its input any more; the earlier model stays until there is another.
    """
    output = None if output is None else _checks.path("output", output)
    resume = None if resume is None else _checks.path("resume", resume)
    size = task.encoder.config.hidden_size if isinstance(task.encoder, PretrainedEncoder) else None
    frozen, rows = settings.freeze_encoder, len(splits.train)
    settings = settings.filled(suited(task.kind, task.labels, rows, hidden_size=size, frozen=frozen))
    torch.manual_seed(settings.seed)
    task.least = 0  # an earlier run of this task may have found another
    objective = settings.objective(multilabel=task.multilabel)
    model = task.model(objective)
    given = splits.train
    if settings.freeze_encoder:
        splits = _freeze(model, splits, show, console)
    batches = torch.split(torch.arange(len(splits.train)), SHOWN_CLASSES)
    model.body.fit(splits.train.batch(index).inputs for index in batches)  # type: ignore[operator, union-attr]
    trainer = Trainer(
        model, objective, splits.train, task, settings,
        validation=splits.validation, output=output, show=show, console=console, stop=stop,
    )  # fmt: skip
    if settings.freeze_encoder:  # states differ in their last bits where threads do: a run is known by its texts
        trainer.fingerprint = given.fingerprint()
    if settings.class_weights is not None:
        trainer.replica.class_weight = _weigh(task, splits, settings).to(trainer.replica.device)
    _refuse_late(trainer, task, splits, index)
    if resume is None:
        _remove_earlier(trainer)
        _write_options(trainer, options)
    result = trainer.fit(resume)
    if resume is not None:  # the checkpoint is one of this run
        _write_options(trainer, options)
    if _fit_threshold(trainer, task):
        result = result._replace(best=trainer.evaluate()[0])
    test, decided = ({}, None) if splits.test is None else trainer.evaluate(splits.test)
    logits = None if output is None else _collect_logits(trainer, task, splits)
    wants_index = index or (index is None and trainer.replica.head is not None)
    model = trainer.replica.plain_model()
    weights = trainer.weights()
    configuration = {
        **(about or {}),
        "kind": task.kind,
        "classes": len(task.labels),
        "labels": task.labels[:SHOWN_CLASSES],
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "rows": {name: len(rows) for name, rows in splits._asdict().items() if rows is not None},
        **settings.asdict(),
    }
    if output is not None and trainer.replica.is_main:
        metrics = {"validation": result.best, "test": test}
        head, held_out = None, trainer.validation if wants_index else None
        if held_out is not None and reason_against_index(task, model, held_out) is None:
            if console is not None:
                console.print("making an index of the head")
            head = make_index(task, model, trainer.train, held_out)
        save_model(output / MODEL, task, objective, weights, metrics, head, configuration)
        costs = ("steps", "best_step", "trained", "screened", "solved", "seconds", "evaluation_seconds")
        row = {**metrics, **{name: getattr(result, name) for name in costs}}
        _write_record(output, configuration, row, logits)
    trainer.replica.accelerator.wait_for_everyone()
    return Run(result, test, decided, model, configuration)


def save_model(
    folder: Path, task: Task, objective: Objective, weights: Mapping[str, Tensor],
    metrics: Mapping[str, Mapping[str, float]], head: AdaptiveSoftmax | None = None,
    configuration: Mapping[str, Any] | None = None, card: bytes | None = None,
) -> None:  # fmt: skip
    """The folder of a model, all or nothing, in the place of what was there: task, weights, metrics, an index, a card.

    The card tells of the ``configuration``: data, model, rows and settings, as in the record of a run. A model that had
    a ``card`` keeps it.
    """

    def fill(part: Path) -> None:
        task.save(part, objective)
        save_tensors(part / WEIGHTS, task.pack(weights, objective))
        if head is not None:
            head.save(part / INDEX, weight=False)
        (part / METRICS).write_text(json.dumps(metrics, indent=1) + "\n")
        if card is None:
            write_card(part, task, objective, metrics, configuration or {})
        else:
            (part / CARD).write_bytes(card)

    write_folder(folder, fill)


def _freeze(model: nn.Module, splits: Splits, show: bool, console: Console | None) -> Splits:
    """The splits as the model takes them with its encoder frozen: where a text has one state, as these states."""
    make = freeze(model)
    if make is None:
        return splits
    device = PartialState(cpu=not torch.accelerator.is_available()).device  # where the replica will be
    model.to(device)
    if show and console is not None and PartialState().is_main_process:
        console.print("what the encoder says of every text is computed, once")
    train, *others = splits
    return Splits(make(train), *(None if rows is None else make(rows) for rows in others))


def _remove_earlier(trainer: Trainer) -> None:
    """Take away what an earlier run left in the folder of this one; its model stays until there is another."""
    output = trainer.output
    if output is None or not trainer.replica.is_main:
        return
    for old in (*checkpoints(output), output / "tensorboard"):
        remove_folder(old)
    for name in (RECORD, LOGITS, JUDGED):
        (output / name).unlink(missing_ok=True)


def _write_options(trainer: Trainer, options: Mapping[str, Any] | None) -> None:
    """What repeats the run; before training, so that one that was stopped can be repeated, too."""
    if options is None or trainer.output is None or not trainer.replica.is_main:
        return
    path = trainer.output / OPTIONS
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda part: part.write_text(json.dumps(dict(options), indent=1) + "\n"))
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error}") from error


def _weigh(task: Task, splits: Splits, settings: Settings) -> Tensor:
    """The weight of every class."""
    if task.multilabel:
        raise InputError("class_weights: expected data with one label a row or a word, found any number of them")
    return class_weights(settings.class_weights, task.labels, splits.train.target)  # type: ignore[arg-type]


def _fit_threshold(trainer: Trainer, task: Task) -> bool:
    """Move the bias of a multi-label head so that the logits above 0 are those that validation rows speak for.

    So every reader of the model, an index among them, has the threshold. Says whether there was anything to go by.
    """
    rows, head = trainer.validation, getattr(trainer.replica.accelerator.unwrap_model(trainer.model), "head", None)
    linear = isinstance(head, nn.Linear) and head.bias is not None and not trainer.replica.sharded
    if not task.multilabel or rows is None or len(rows) < FEWEST or not linear:
        return False
    index = torch.linspace(0, len(rows) - 1, min(len(rows), MOST_JUDGED), dtype=torch.float64).long()
    fitted = fit_threshold(
        trainer.evaluator.logits(rows, index, best_logits), rows.target[index.to(rows.target.device)].cpu()
    )
    task.least = fitted.least
    with torch.no_grad():
        head.bias -= fitted.logit  # type: ignore[union-attr]
    return True


def _refuse_late(trainer: Trainer, task: Task, splits: Splits, index: bool | None) -> None:
    """Refuse before training what would be refused after it.

    Raises:
        InputError: when test rows cannot be judged, or an index is asked for that cannot be made.
    """
    if splits.test is not None:
        trainer.check_rows(splits.test, "test data")
    if index:
        model = trainer.replica.accelerator.unwrap_model(trainer.model)
        reason = reason_against_index(task, model, splits.validation)
        if trainer.replica.sharded:
            reason = "expected a model that is not sharded, found FSDP"
        if reason is not None:
            raise InputError(f"head_index: {reason}")


def _collect_logits(trainer: Trainer, task: Task, splits: Splits) -> tuple[str, dict[str, Tensor]] | None:
    """Logits and targets of some held-out rows with one label each, spread over the part they are of, and its name."""
    part = "validation" if splits.validation is not None else "test"
    rows = splits.validation if splits.validation is not None else splits.test
    if rows is None or task.kind in ("tokens", "multilabel") or len(task.labels) > SHOWN_CLASSES:
        return None
    known = (rows.target.cpu() != IGNORED).nonzero()[:, 0]  # some may have labels that training has not seen
    if not len(known):
        return None
    index = known[torch.linspace(0, len(known) - 1, min(len(known), SHOWN_ROWS), dtype=torch.float32).long()]
    return part, {
        "logits": trainer.evaluator.logits(rows.to(trainer.replica.device), index),
        "target": rows.target[index].cpu(),
    }


def _write_record(
    output: Path, configuration: dict[str, Any], row: dict[str, Any], logits: tuple[str, dict[str, Tensor]] | None
) -> None:
    """What was run, on what, and what it came to."""
    try:
        if logits is not None:
            part, tensors = logits
            notes = {"part": part, "delta": str(configuration["delta"])}
            replace_file(output / LOGITS, lambda path: save_file(tensors, path, metadata=notes))
        write_record(output / RECORD, "train", configuration, [row])
    except (OSError, SafetensorError) as error:
        raise InputError(f"{output / RECORD}: cannot be written: {error}") from error


def load_model(folder: str | Path, *, index: bool = True, device: torch.device | str = "cpu") -> tuple[Task, nn.Module]:
    """The task and the model of a folder that `train` wrote, on a device, with the index of its head if it has one.

    Raises:
        InputError: naming a file that does not fit.
    """
    folder = _checks.path("folder", folder)
    if not (folder / WEIGHTS).exists() and (folder / MODEL / WEIGHTS).exists():
        folder = folder / MODEL
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a folder with a trained model, found none")
    task = Task.load(folder)
    weights = task.encoder.unpack(load_tensors(folder / WEIGHTS))
    complaint = f"{folder}: such a model cannot be made"
    with torch.device("meta"):  # sizes that a damaged file made up take no memory
        expected = loaded(task.empty_model, complaint).state_dict()
    check_same(folder / WEIGHTS, "model", weights, expected)
    for name, value in weights.items():
        if not bool(value.isfinite().all()):
            raise InputError(f"{folder / WEIGHTS}: {name}: expected finite numbers, found NaN or infinity")
    model: nn.Module = loaded(task.empty_model, complaint)
    model.load_state_dict(weights)
    model.to(device)
    if index and (folder / INDEX).exists() and reason_against_cascade(model.head.weight) is None:  # type: ignore[union-attr, arg-type]
        load_index(folder / INDEX, model)
    return task, model.eval()


def encode(
    task: Task, train: Examples, validation: Examples | None, test: Examples | None, *,
    progress: ProgressCallback = no_progress,
) -> Splits:  # fmt: skip
    """All parts of a data set as rows."""
    total = sum(len(part.inputs) for part in (train, validation, test) if part is not None)

    def make(part: Examples) -> Rows:
        return task.rows(part, progress=lambda what, share: progress(what, share * len(part.inputs) / total))

    others = [None if part is None else make(part) for part in (validation, test)]
    return Splits(make(train), *others)
