"""What is to be learnt: which labels, from which inputs, with which model, judged how."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softsieve._files import replace_file
from softsieve.errors import InputError, first_line
from softsieve.losses.objectives import MULTI_LABEL, SINGLE_LABEL, Objective, make_objective
from softsieve.tasks.encode import BUILT_IN, LENGTH, Encoded, Encoder, built_in
from softsieve.tasks.examples import KINDS, Data, Examples, as_list, label_names
from softsieve.tasks.files import read_text
from softsieve.tasks.hf import PretrainedEncoder
from softsieve.tasks.metrics import IGNORED, class_metrics, multilabel_metrics, token_metrics
from softsieve.tasks.models import Classifier
from softsieve.training.rows import Rows

FORMAT = 1
FILE = "task.json"
MOST_LABELS = 2**20


class TokenRows(Rows):
    """Rows of tokens that know where their words are.

    Args:
        words: (rows, words) the position of every word, -1 for one that was not read.
        labels: (rows, words) the label of every word, -100 where there is none.
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
    """

    def __init__(
        self,
        kind: str,
        labels: list[str],
        encoder: Encoder,
        *,
        filler: int = 0,
        objective: Objective | None = None,
        workers: int = 0,
    ) -> None:
        self.kind, self.labels, self.encoder = kind, labels, encoder
        self.filler, self.objective, self.workers = filler, objective, workers

    @classmethod
    def build(cls, data: Data, *, model: str | None = None, max_length: int = 128, workers: int = 0) -> Task:
        """The task of learning this data.

        Args:
            data: what to learn; the label set and sizes come from its training part.
            model: name or folder of a Hugging Face encoder; None for the small built-in model.
            max_length: how many words of a text the model sees, or tokens if it is a Hugging Face one.
            workers: threads that decode images and sounds.

        Raises:
            InputError: if the model cannot be loaded or does not go with this kind of data, or an input is unreadable.
        """
        low, high = LENGTH["max_length"]
        if not low <= max_length <= high:
            raise InputError(f"max_length: expected a whole number from {low} to {high}, found {max_length}")
        if model is None:
            encoder = built_in(data.kind, data.train, max_length)
        elif data.kind in ("image", "audio"):
            raise InputError(f"model {model}: for {data.kind} there is only the built-in model")
        else:
            encoder = PretrainedEncoder.named(model, max_length=max_length, per_word=data.kind == "tokens")
        labels = label_names(data)
        filler = 0
        if data.kind == "tokens":
            counts = Counter(label for row in data.train.labels for label in row)
            filler = labels.index("O") if "O" in labels else labels.index(counts.most_common(1)[0][0])
        return cls(data.kind, labels, encoder, filler=filler, workers=workers)

    @property
    def multilabel(self) -> bool:
        """Whether a row has any number of labels."""
        return self.kind == "multilabel"

    def rows(self, examples: Examples) -> Rows:
        """The examples as tensors. Without labels (an empty list) they are good for prediction only.

        Raises:
            InputError: naming the place of an unknown label or an unreadable input.
        """
        encoded = self.encoder.encode(examples, workers=self.workers)
        if encoded.words is not None:
            return self._token_rows(encoded, encoded.words.long(), examples)
        classes = self._classes(examples)
        if self.multilabel:
            target = torch.zeros(len(examples.inputs), len(self.labels), dtype=torch.bool)
            for row, found in enumerate(classes):
                target[row, found] = True
        else:
            target = torch.tensor([found[0] for found in classes])
        return Rows(encoded.inputs, target, lengths=encoded.lengths, sequences=encoded.sequences)

    def _token_rows(self, encoded: Encoded, words: Tensor, examples: Examples) -> TokenRows:
        labels = torch.full(words.shape, IGNORED)
        for row, found in enumerate(self._classes(examples)):
            count = len(examples.inputs[row])
            if len(found) != count:
                raise InputError(f"{examples.where[row]}: expected {count} labels, one a word, found {len(found)}")
            labels[row, :count] = torch.tensor(found, dtype=torch.long)
        positions = encoded.inputs[encoded.sequences[0]].shape[1]
        target = torch.full((len(words), positions), IGNORED)
        read = (words >= 0).nonzero(as_tuple=True)
        target[read[0], words[read]] = labels[read]
        cut = {"lengths": encoded.lengths, "sequences": encoded.sequences}
        return TokenRows(encoded.inputs, target, words=words, labels=labels, **cut)

    def _classes(self, examples: Examples) -> list[list[int]]:
        """Class numbers of every example."""
        if not examples.labels:
            return [[0] * (len(value) if self.kind == "tokens" else 1) for value in examples.inputs]
        number = {label: i for i, label in enumerate(self.labels)}
        classes = []
        for labels, where in zip(examples.labels, examples.where, strict=True):
            try:
                classes.append([number[label] for label in as_list(labels)])
            except KeyError as error:
                raise InputError(f"{where}: unknown label {error}, the model knows {len(number)} others") from None
        return classes

    def model(self, objective: Objective) -> nn.Module:
        """A fresh model with the head that the objective wants; a Hugging Face one with its pretrained weights."""
        body = self.encoder.body()
        return Classifier(body, objective.head(body.features, len(self.labels)))

    def empty_model(self) -> nn.Module:
        """The model of a loaded task, for `load_state_dict`."""
        if self.objective is None:
            raise ValueError("empty_model: expected a task that was loaded, found one that was built")
        return self.model(self.objective)

    # What a model says

    def decide(self, logits: Tensor) -> Tensor:
        """Classes (...) of logits (..., classes), flags (..., classes) for multi-label; of a batch, where it is."""
        return logits > 0 if self.multilabel else logits.argmax(-1)

    def by_word(self, decided: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """What was decided for all rows, and their targets: for tokens one a word, read or not; on the CPU."""
        if not isinstance(rows, TokenRows):
            return decided.cpu(), rows.target.cpu()
        read = decided.cpu().gather(1, rows.words.clamp_min(0))
        return torch.where(rows.words >= 0, read, self.filler), rows.labels

    def metrics(self, decided: Tensor, target: Tensor) -> dict[str, float]:
        """How good decisions are, from 0 to 1, both as of `by_word` (or by position, ignored targets being -100)."""
        if self.multilabel:
            return multilabel_metrics(decided, target)
        if self.kind == "tokens":
            return token_metrics(decided, target, self.labels)
        return class_metrics(decided, target)

    def predictions(self, decided: Tensor, rows: Rows) -> list[Any]:
        """The label of every row, a list of them for multi-label, one for every word for tokens."""
        decided, target = self.by_word(decided, rows)
        if self.multilabel:
            return [[self.labels[i] for i in row.nonzero().flatten().tolist()] for row in decided]
        if self.kind == "tokens":
            counted = target != IGNORED
            return [
                [self.labels[i] for i in row[is_word].tolist()] for row, is_word in zip(decided, counted, strict=True)
            ]
        return [self.labels[i] for i in decided.tolist()]

    # On disk

    def save(self, folder: Path, objective: Objective) -> None:
        """Write task.json, and the tokenizer where there is one; no weights."""
        folder.mkdir(parents=True, exist_ok=True)
        pretrained = isinstance(self.encoder, PretrainedEncoder)
        if isinstance(self.encoder, PretrainedEncoder):
            self.encoder.save(folder)
        registry = MULTI_LABEL if self.multilabel else SINGLE_LABEL
        names = {kind: name for name, kind in registry.items()}
        content = {
            "format": FORMAT,
            "kind": self.kind,
            "labels": self.labels,
            "filler": self.filler,
            "model": "pretrained" if pretrained else "built-in",
            "encoder": {name: getattr(self.encoder, name) for name in self.encoder.settings},
            "objective": {"name": names[type(objective)], **asdict(objective)},
        }
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        replace_file(folder / FILE, lambda part: part.write_text(text, encoding="utf-8"))

    @classmethod
    def load(cls, folder: Path) -> Task:
        """The task of a folder that `save` wrote.

        Raises:
            InputError: naming the file and the field that is not as expected.
        """
        saved = _Saved.read(folder / FILE)
        saved.number("format", FORMAT, FORMAT)
        kind = saved.choice("kind", KINDS)
        labels = saved.labels()
        filler = saved.number("filler", 0, len(labels) - 1)
        pretrained = saved.choice("model", ("built-in", "pretrained")) == "pretrained"
        if pretrained and kind in ("image", "audio"):
            raise InputError(f"{saved.path}: model: expected 'built-in' for {kind}, found 'pretrained'")
        encoder_type = PretrainedEncoder if pretrained else BUILT_IN[kind]
        settings = saved.part("encoder")
        chosen = {name: settings.number(name, *span) for name, span in encoder_type.settings.items()}
        if pretrained:
            encoder: Encoder = PretrainedEncoder.load(folder, per_word=kind == "tokens", **chosen)
        else:
            encoder = encoder_type(**chosen)
        options = saved.part("objective")
        try:
            objective = make_objective(multilabel=kind == "multilabel", **options.content)
        except (TypeError, ValueError, ImportError) as error:
            raise InputError(f"{saved.path}: objective: {first_line(error)}") from None
        return cls(kind, labels, encoder, filler=filler, objective=objective)


class _Saved:
    """A JSON object of a file, read with suspicion."""

    def __init__(self, path: Path, content: Any, prefix: str = "") -> None:
        self.path, self.prefix = path, prefix
        if not isinstance(content, dict):
            raise self._error("", "an object", content)
        self.content: dict[str, Any] = content

    @classmethod
    def read(cls, path: Path) -> _Saved:
        text = read_text(path)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: not JSON ({error})") from None
        return cls(path, content)

    def _error(self, name: str, expected: str, found: object) -> InputError:
        shown = repr(found)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        field = f"{self.prefix}{name}".strip(".")
        return InputError(f"{self.path}: {field + ': ' if field else ''}expected {expected}, found {shown}")

    def part(self, name: str) -> _Saved:
        return _Saved(self.path, self.content.get(name), f"{self.prefix}{name}.")

    def number(self, name: str, low: int, high: int) -> int:
        value = self.content.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._error(name, f"{low}" if low == high else f"a whole number from {low} to {high}", value)
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self.content.get(name)
        if not isinstance(value, str) or value not in allowed:
            raise self._error(name, f"one of {', '.join(allowed)}", value)
        return value

    def labels(self) -> list[str]:
        value = self.content.get("labels")
        if not isinstance(value, list) or not all(isinstance(label, str) for label in value):
            raise self._error("labels", "a list of names", value)
        if not 1 <= len(value) <= MOST_LABELS or len(set(value)) < len(value):
            raise self._error("labels", f"1 to {MOST_LABELS} different names", value)
        return value
