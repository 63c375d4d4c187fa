"""What is to be learnt: which labels, from which inputs, with which model, judged how."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softsieve import _checks
from softsieve._files import replace_file
from softsieve._progress import ProgressCallback, no_progress
from softsieve.errors import InputError, first_line, shown
from softsieve.losses.objectives import MULTI_LABEL, SINGLE_LABEL, Objective, make_objective
from softsieve.tasks.encode import BUILT_IN, LENGTH, LONG, SHORT, Encoded, Encoder, built_in, padded
from softsieve.tasks.examples import KINDS, MEDIA, Data, Examples, as_list, label_names
from softsieve.tasks.files import parse_json, read_text
from softsieve.tasks.hf import PretrainedEncoder
from softsieve.tasks.labels import label_metrics, propensities, rank_labels
from softsieve.tasks.metrics import class_metrics, token_metrics
from softsieve.tasks.models import Net
from softsieve.tasks.rows import IGNORED, UNSEEN, LabelRows, Rows

FORMAT = 1
FILE = "task.json"
MOST_LABELS = 2**23
POOLINGS = ("mean", "model")


class TokenRows(Rows):
    """Rows of tokens that know the position of every word, -1 for one that was not read, and its label, -100 for none.

    Both are (rows, words).
    """

    def __init__(self, inputs: Mapping[str, Tensor], target: Tensor, *, words: Tensor, labels: Tensor, **more: Any):
        super().__init__(inputs, target, **more)
        self.words, self.labels = words, labels

    def to(self, device: torch.device | str) -> TokenRows:
        rows = super().to(device)
        cut = {"lengths": self.lengths, "sequences": self.sequences}
        return TokenRows(rows.inputs, rows.target, words=self.words, labels=self.labels, **cut)


class Task:
    """Turns examples into rows, makes a model for them, judges its answers and puts them into words.

    Args:
        kind: one of `KINDS`.
        labels: the name of every class.
        encoder: how inputs become tensors.
        filler: class of words that the model did not get to see.
        objective: that of a saved model.
        workers: threads that decode images and sounds.
        counts: of multi-label data, how many training rows have each label, and last how many there are; where it is
            known, figures of merit are also told with labels weighted by their propensities.
        whole_labels: whether labels were given as whole numbers, not as strings of their digits.
        bool_labels: whether labels were given as True and False.
        columns: of multi-label data that were given as flags, the class of every column of theirs.
        least: of multi-label data, labels that every row is given, 0 or 1; the threshold is in the bias of the head.
    """

    def __init__(
        self, kind: str, labels: list[str], encoder: Encoder, *, filler: int = 0, objective: Objective | None = None,
        workers: int = 0, counts: list[int] | None = None, whole_labels: bool = False, least: int = 0,
        bool_labels: bool = False, columns: list[int] | None = None,
    ) -> None:  # fmt: skip
        self.kind, self.labels, self.encoder, self.counts = kind, labels, encoder, counts
        self.whole_labels, self.least = whole_labels, least
        self.bool_labels, self.columns = bool_labels, columns
        self.filler, self.objective, self.workers = filler, objective, workers

    @classmethod
    def build(
        cls, data: Data, *, model: str | None = None, max_length: int | None = None, workers: int = 0,
        pooling: str | None = None,
    ) -> Task:  # fmt: skip
        """The task of learning this data; the label set and sizes come from its training part.

        Args:
            data: what to learn.
            model: name or folder of a Hugging Face encoder; None for the small built-in model.
            max_length: how many words of a text the model sees, or tokens if it is a Hugging Face one; None: 512 words
                of a text for the built-in model, else 128.
            workers: threads that decode images and sounds.
            pooling: what a Hugging Face encoder's states become: "mean", or "model" for what its own classifier makes
                of them, which is then the class of transformers; None: the mean, and its own for words.
        """
        if pooling is not None:
            _checks.choice("pooling", pooling, POOLINGS)
            if model is None or data.kind == "tokens":
                raise InputError(f"pooling: expected with texts and a Hugging Face encoder, found with {data.kind}")
        if max_length is None:
            max_length = LONG if model is None and data.kind in ("text", "multilabel") else SHORT
        low, high = LENGTH["max_length"]
        if not low <= max_length <= high:
            raise InputError(f"max_length: expected a whole number from {low} to {high}, found {max_length}")
        labels = label_names(data)
        if model is None:
            encoder = built_in(data.kind, data.train, max_length, len(labels))
        elif data.kind in MEDIA:
            raise InputError(f"model {model}: for {data.kind} there is only the built-in model")
        else:
            own_head = None if pooling is None else int(pooling == "model")
            words = data.kind == "tokens"
            encoder = PretrainedEncoder.load(model, max_length=max_length, per_word=words, own_head=own_head)
        filler, counts = 0, None
        often = Counter(label for row in data.train.labels for label in as_list(row))
        if data.kind == "tokens":
            filler = labels.index("O") if "O" in labels else labels.index(often.most_common(1)[0][0])
        elif data.kind == "multilabel":
            counts = [*(often[label] for label in labels), len(data.train.inputs)]
        return cls(data.kind, labels, encoder, filler=filler, workers=workers, counts=counts)

    @property
    def max_length(self) -> int | None:
        """Words or tokens of a text that the model reads; None of images and sounds."""
        return getattr(self.encoder, "max_length", None)

    @property
    def multilabel(self) -> bool:
        """Whether a row has any number of labels."""
        return self.kind == "multilabel"

    @cached_property
    def _propensity(self) -> Tensor | None:
        return None if self.counts is None else propensities(torch.tensor(self.counts[:-1]), self.counts[-1])

    def rows(self, examples: Examples, *, progress: ProgressCallback = no_progress) -> Rows:
        """The examples as tensors. Without labels (an empty list) they are good for prediction only.

        Labels that are none of the classes have no part in the loss, and count as wrong in the metrics.
        """
        encoded = self.encoder.encode(examples, workers=self.workers, progress=progress)
        if encoded.words is not None:
            return self._token_rows(encoded, encoded.words.long(), examples)
        cut: dict[str, Any] = {"lengths": encoded.lengths, "sequences": encoded.sequences, "texts": encoded.texts}
        if not self.multilabel:
            numbers = np.fromiter((number for (number,) in self._classes(examples)), np.int64)
            target = torch.from_numpy(numbers)
            return Rows(encoded.inputs, torch.where(target == UNSEEN, IGNORED, target), **cut)
        target, _ = padded(list(self._classes(examples)), fill=IGNORED)
        return LabelRows(encoded.inputs, target, **cut)

    def _token_rows(self, encoded: Encoded, words: Tensor, examples: Examples) -> TokenRows:
        labels = torch.full(words.shape, IGNORED)
        for row, numbers in enumerate(self._classes(examples)):
            count = len(examples.inputs[row])
            if len(numbers) != count:
                raise InputError(f"{examples.where[row]}: expected {count} labels, one a word, found {len(numbers)}")
            labels[row, :count] = torch.tensor(numbers, dtype=torch.long)
        positions = encoded.inputs[encoded.sequences[0]].shape[1]
        target = torch.full((len(words), positions), IGNORED)
        read = (words >= 0).nonzero(as_tuple=True)
        target[read[0], words[read]] = torch.where(labels[read] == UNSEEN, IGNORED, labels[read])
        cut = {"lengths": encoded.lengths, "sequences": encoded.sequences}
        return TokenRows(encoded.inputs, target, words=words, labels=labels, **cut)

    def _classes(self, examples: Examples) -> Iterator[list[int]]:
        """Class numbers of every example, `UNSEEN` for a label that is none of the classes."""
        if not len(examples.labels):
            for value in examples.inputs:
                yield [0] * (len(value) if self.kind == "tokens" else 1)
            return
        number = {label: i for i, label in enumerate(self.labels)}
        for labels in examples.labels:
            yield [number.get(label, UNSEEN) for label in as_list(labels)]

    def model(self, objective: Objective) -> nn.Module:
        """A fresh model with the head that the objective wants; a Hugging Face one with its pretrained weights."""
        body = self.encoder.body()
        return Net(body, objective.head(body.features, len(self.labels)))

    def empty_model(self) -> nn.Module:
        """The model of a loaded task, for `load_state_dict`."""
        if self.objective is None:
            raise ValueError("empty_model: expected a task that was loaded, found one that was built")
        return self.model(self.objective)

    def decide(self, logits: Tensor) -> Tensor:
        """Classes (...) of logits (..., classes), for multi-label as of `rank_labels`; of a batch, where it is."""
        return rank_labels(logits, least=self.least) if self.multilabel else logits.argmax(-1)

    def by_word(self, decided: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """What was decided for all rows, and their targets: for tokens one a word, read or not; on the CPU."""
        if not isinstance(rows, TokenRows):
            return decided.cpu(), rows.target.cpu()
        read = decided.cpu().gather(1, rows.words.clamp_min(0))
        return torch.where(rows.words >= 0, read, self.filler), rows.labels

    def metrics(self, decided: Tensor, target: Tensor) -> dict[str, float]:
        """How good decisions are, from 0 to 1, both as of `by_word` (or by position, ignored targets being -100)."""
        if self.multilabel:
            return label_metrics(decided, target, len(self.labels), propensity=self._propensity)
        if self.kind == "tokens":
            return token_metrics(decided, target, self.labels)
        return class_metrics(decided, target)

    def predictions(self, decided: Tensor, rows: Rows) -> list[Any]:
        """The label of every row, a list of them for multi-label, one for every word for tokens."""
        decided, target = self.by_word(decided, rows)
        if self.multilabel:
            return [[self.labels[i] for i in sorted(row) if i >= 0] for row in decided.tolist()]
        if self.kind == "tokens":
            counted = target != IGNORED
            words = (row[is_word].tolist() for row, is_word in zip(decided, counted, strict=True))
            return [[self.labels[i] for i in numbers] for numbers in words]
        return [self.labels[i] for i in decided.tolist()]

    def reason_against_transformers(self, objective: Objective) -> str | None:
        """Why no class of transformers is this model, trained with an objective; None if one is."""
        if not isinstance(self.encoder, PretrainedEncoder):
            return "the built-in models are softsieve's own"
        if self.encoder.output is None:
            return f"its {'head' if self.encoder.per_word else 'mean of hidden states'} is softsieve's own"
        if not isinstance(objective.head(1, 1), nn.Linear):
            return f"a {type(objective.head(1, 1)).__name__} is no linear layer, which its classifier ends in"
        return None

    def pack(self, weights: Mapping[str, Tensor], objective: Objective) -> Mapping[str, Tensor]:
        """The weights of a model by the names that they have in its file: those of transformers where it has the class.

        `Encoder.unpack` undoes it.
        """
        if isinstance(self.encoder, PretrainedEncoder) and self.reason_against_transformers(objective) is None:
            return self.encoder.pack(weights)
        return weights

    def save(self, folder: Path, objective: Objective) -> None:
        """Write task.json, and the tokenizer where there is one; no weights."""
        folder.mkdir(parents=True, exist_ok=True)
        if pretrained := isinstance(self.encoder, PretrainedEncoder):
            whole = self.reason_against_transformers(objective) is None
            self.encoder.save(folder, self.labels, multilabel=self.multilabel, whole=whole)
        registry = MULTI_LABEL if self.multilabel else SINGLE_LABEL
        names = {kind: name for name, kind in registry.items()}
        content = {
            "format": FORMAT,
            "kind": self.kind,
            "labels": self.labels,
            "filler": self.filler,
            **({} if self.counts is None else {"counts": self.counts}),
            **({"whole_labels": True} if self.whole_labels else {}),
            **({"bool_labels": True} if self.bool_labels else {}),
            **({} if self.columns is None else {"columns": self.columns}),
            **({"least": self.least} if self.multilabel else {}),
            "model": "pretrained" if pretrained else "built-in",
            "encoder": {name: getattr(self.encoder, name) for name in self.encoder.settings},
            "objective": {"name": names[type(objective)], **asdict(objective)},
        }
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        replace_file(folder / FILE, lambda part: part.write_text(text, encoding="utf-8"))

    @classmethod
    def load(cls, folder: Path) -> Task:
        """The task of a folder that `save` wrote; an `InputError` names the field that is not as expected."""
        path = folder / FILE
        content = parse_json(read_text(path), path)

        def field(name: str, expected: str, fits: Callable[[Any], bool]) -> Any:
            value = content
            for part in name.split(".") if name else ():
                value = value.get(part)
            if not fits(value):
                raise InputError(f"{path}: {name + ': ' if name else ''}expected {expected}, found {shown(value)}")
            return value

        def whole(name: str, low: int, high: int) -> int:
            expected = f"{low}" if low == high else f"a whole number from {low} to {high}"
            return field(name, expected, lambda value: type(value) is int and low <= value <= high)  # type: ignore[no-any-return]

        def choice(name: str, allowed: tuple[str, ...]) -> str:
            return field(name, f"one of {', '.join(allowed)}", lambda value: value in allowed)  # type: ignore[no-any-return]

        for name in ("", "encoder", "objective"):
            field(name, "an object", lambda value: isinstance(value, dict))
        whole("format", FORMAT, FORMAT)
        kind = choice("kind", KINDS)
        field("labels", "a list of names", lambda value: type(value) is list and all(type(one) is str for one in value))
        several = f"1 to {MOST_LABELS} different names"
        labels = field("labels", several, lambda value: 1 <= len(value) <= MOST_LABELS and len({*value}) == len(value))
        filler = whole("filler", 0, len(labels) - 1)
        counts = field("counts", f"{len(labels) + 1} whole numbers, of rows", lambda value: _fit_counts(value, labels))
        whole_labels = field(
            "whole_labels",
            "true with labels that are whole numbers, or nothing",
            lambda value: value is None or (value is True and _whole(labels)),
        )
        bool_labels = field(
            "bool_labels",
            "true with the labels False and True, or nothing",
            lambda value: value is None or (value is True and {*labels} <= {"False", "True"}),
        )
        columns = field(
            "columns",
            f"the numbers from 0 to {len(labels) - 1} in any order with any number of labels a row, or nothing",
            lambda value: value is None or (kind == "multilabel" and _fit_columns(value, labels)),
        )
        content.setdefault("least", 0)  # what earlier versions gave
        least = whole("least", 0, 1)
        pretrained = choice("model", ("built-in", "pretrained")) == "pretrained"
        if pretrained and kind in MEDIA:
            raise InputError(f"{path}: model: expected 'built-in' for {kind}, found 'pretrained'")
        encoder_type = PretrainedEncoder if pretrained else BUILT_IN[kind]
        content["encoder"] = {**encoder_type.newer, **content["encoder"]}
        settings = {name: whole(f"encoder.{name}", *span) for name, span in encoder_type.settings.items()}
        if pretrained:
            encoder: Encoder = PretrainedEncoder.load(folder, per_word=kind == "tokens", **settings)
        else:
            encoder = encoder_type(**settings)
        options = dict(content["objective"])
        if kind == "multilabel" and options.get("name") == "as-softmax":
            options.setdefault("against", "labels")  # the only rule of version 0.2, which did not say it
        try:
            objective = make_objective(multilabel=kind == "multilabel", **options)
        except (TypeError, ValueError, ImportError) as error:
            raise InputError(f"{path}: objective: {first_line(error)}") from None
        known = {"counts": counts, "whole_labels": bool(whole_labels), "least": least}
        given = {"bool_labels": bool(bool_labels), "columns": columns}
        return cls(kind, labels, encoder, filler=filler, objective=objective, **known, **given)


def _whole(labels: list[str]) -> bool:
    """Whether labels are whole numbers, written as Python does."""
    return all(len(label) < 20 and re.fullmatch(r"0|-?[1-9][0-9]*", label, re.ASCII) for label in labels)


def _fit_columns(value: Any, labels: list[str]) -> bool:
    """Whether they are all classes, in some order."""
    numbers = type(value) is list and all(type(one) is int for one in value)
    return numbers and sorted(value) == list(range(len(labels)))


def _fit_counts(value: Any, labels: list[str]) -> bool:
    """Whether they are as many as labels, and one more that none exceeds; earlier versions wrote none."""
    if value is None:
        return True
    whole = type(value) is list and all(type(one) is int and 0 <= one <= 2**40 for one in value)
    return whole and len(value) == len(labels) + 1 and max(value) == value[-1]
