"""A classifier with the conventions of scikit-learn: what `softsieve train` and `softsieve predict` do, in Python."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import NotFittedError
from torch import nn

from softsieve import _checks
from softsieve.errors import InputError
from softsieve.losses.objectives import MULTI_LABEL, SINGLE_LABEL, Objective
from softsieve.tasks.examples import KINDS, Data, Examples, Wanted
from softsieve.tasks.files import parse_json, read_text
from softsieve.tasks.hf import read_hidden_size
from softsieve.tasks.objects import object_examples, object_inputs, parts_of
from softsieve.tasks.read import with_validation
from softsieve.tasks.reading import unseen_note
from softsieve.tasks.rows import Rows
from softsieve.tasks.task import POOLINGS, Task
from softsieve.training.card import CARD
from softsieve.training.recipes import suited, usual
from softsieve.training.run import METRICS, MODEL, WEIGHTS, encode, load_model, save_model, train
from softsieve.training.serving import decide, probabilities
from softsieve.training.settings import Settings


class Classifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier of texts, words, images or sounds, with the conventions of scikit-learn.

    `fit` does what ``softsieve train`` does, and comes to the same model with the same data, settings and seed. What is
    not said is the recipe of that command. Needs the extra ``train``.

    Args:
        model: name or folder of a Hugging Face encoder of texts; None: a small built-in model.
        kind: ``"text"``, ``"multilabel"`` (texts with any number of labels), ``"tokens"`` (a label a word),
            ``"image"`` or ``"audio"``; None: found from the data.
        loss: name of the objective, as of ``softsieve train --loss``.
        delta: margin of AS-Softmax; None: 0.1, with any number of labels 0.7.
        epochs, learning_rate, batch_size: None: what suits data and model.
        pooling: what becomes of an encoder's states of a text: ``"mean"``, or ``"model"``, what its own classifier
            makes of them, for a folder that transformers loads as it is; None: the mean, and of words the states.
        freeze_encoder: leave an encoder as it is and train the head alone, on what it says of every text.
        class_weights: what rows weigh in the loss: ``"balanced"``, the more the rarer their class is, or a dict by
            label, where only ratios count and a label that is not named has 1; None: all alike.
        skip: ``"solved"`` leaves out rows that lead safely; see `softsieve.training.settings.Settings`.
        patience: evaluations without a better one before training stops; 0: never.
        validation_share: share of the rows that are held out, to keep the weights of the best epoch, where `fit` is
            given no validation data; 0: none, and the last weights.
        max_length: words of a text that the model reads, or tokens with an encoder; None: 512, with an encoder 128.
        text_column, label_column: columns of a table, where their names do not tell.
        precision: of the matrix products in training: ``"no"``, ``"bf16"`` or ``"fp16"``.
        seed: of weights, order and dropout.
        device: as torch names it; None: a GPU where there is one.
        verbose: show a progress bar.

    Attributes:
        classes_: the labels, sorted: strings, whole numbers or booleans; fitted with columns of 0 and 1, in the order
            of the columns.
        task_, model_: the `softsieve.tasks.task.Task` and the network.
        metrics_: of the best weights on the validation rows, {} without any.
        result_: what training cost (`softsieve.training.loop.Result`); not of a loaded model.

    Example:
        >>> texts = ["a fine film", "a good book", "a dull film", "a bad book"] * 8
        >>> labels = ["good", "good", "poor", "poor"] * 8
        >>> classifier = Classifier(epochs=8, validation_share=0).fit(texts, labels)
        >>> classifier.predict(["a fine book", "a dull book"]).tolist()
        ['good', 'poor']
        >>> classifier.predict_proba(["a fine book"]).shape
        (1, 2)
    """

    def __init__(
        self, model: str | None = None, *, kind: str | None = None, loss: str = "as-softmax",
        delta: float | None = None, epochs: int | None = None, learning_rate: float | None = None,
        batch_size: int | None = None, pooling: str | None = None, freeze_encoder: bool = False,
        class_weights: str | Mapping[Any, float] | None = None, skip: str = "no", patience: int = 0,
        validation_share: float = 0.1,
        max_length: int | None = None, text_column: str | None = None, label_column: str | None = None,
        precision: str = "no", seed: int = 42, device: str | None = None, verbose: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.kind, self.loss, self.delta = model, kind, loss, delta
        self.epochs, self.learning_rate, self.batch_size = epochs, learning_rate, batch_size
        self.pooling, self.freeze_encoder, self.class_weights = pooling, freeze_encoder, class_weights
        self.skip, self.patience, self.validation_share = skip, patience, validation_share
        self.max_length, self.text_column, self.label_column = max_length, text_column, label_column
        self.precision, self.seed, self.device, self.verbose = precision, seed, device, verbose

    def fit(self, X: Any, y: Any = None, *, validation: Any = None) -> Classifier:  # noqa: N803
        """Train a fresh model.

        Args:
            X: the inputs: a list, an array or a Series of texts; of lists of words; of images (file names,
                PIL images, arrays of uint8) or sounds (file names, pairs of samples and rate). Or a table with inputs
                and labels: a DataFrame, a `datasets.Dataset` or `DatasetDict`, a dict of lists.
            y: the labels, strings, whole numbers or booleans: one for each input; with any number of them a list for
                each, or an array, a DataFrame or lists of 0 and 1 with a column a label; for words a list of tags for
                each. Or the name of a column of X; None: a column of X whose name tells.
            validation: rows to choose the best epoch by, a table or a pair (X, y).

        Raises:
            InputError: for data that cannot be used, naming the row.
            TypeError, ValueError: naming the argument, what was expected and what was found.
        """
        settings = self._check()
        X, own = parts_of(X)  # noqa: N806
        given = object_examples(X, y, self._wanted(self.kind))
        column = y if isinstance(y, str) else None
        validation = own if validation is None else validation
        held_out = None
        try:
            if validation is not None:
                held_out = self._read_labelled(validation, given.part.kind, column, given.columns)
        except (InputError, TypeError) as error:
            raise type(error)(f"validation: {error}") from None
        data = Data("", given.part.kind, given.part.examples, held_out, None, given.part.labels)
        hint = "give label_column" if y is None or column is not None else "give as y the class of each row"
        data = with_validation(data, "y", self.validation_share, hint=hint)
        multilabel = data.kind == "multilabel"
        _checks.choice("loss", self.loss, MULTI_LABEL if multilabel else SINGLE_LABEL)
        if data.validation is None and self.patience:
            raise ValueError(f"patience: expected 0 without validation rows, found {self.patience}")
        size = None if self.model is None else read_hidden_size(self.model)
        settings = settings.filled(usual(data, hidden_size=size, frozen=self.freeze_encoder))
        with _on(self.device, self.precision), torch.random.fork_rng():
            task = Task.build(data, model=self.model, max_length=self.max_length, pooling=self.pooling)
            task.whole_labels, task.bool_labels = given.whole, given.truth
            if given.columns is not None:
                number = {label: i for i, label in enumerate(task.labels)}
                task.columns = [number[label] for label in given.columns]
            about = {"data": f"data in memory ({type(X).__name__})", "model": self.model or "built-in"}
            rows = encode(task, data.train, data.validation, None)
            run = train(task, rows, settings, show=self.verbose, about=about)
        task.objective = settings.objective(multilabel=multilabel)
        self.result_, self._label_column = run.result, column
        self._configuration: dict[str, Any] = run.configuration
        self._card: bytes | None = None
        self._test: dict[str, float] = {}
        return self._take(task, run.model, run.result.best)

    def predict(self, X: Any) -> Any:  # noqa: N803
        """The label of every input, an array; with any number of labels, or one a word, a list of them for each input.

        Fitted with columns of 0 and 1, an array of them, with the columns in the order of those of y.
        """
        rows = self._rows(X)
        answers = [
            self._as_given(answer) for answer in self.task_.predictions(decide(self.task_, self.model_, rows), rows)
        ]
        if self.task_.kind == "tokens":
            return answers
        if self.task_.multilabel:
            flags = [[one in answer for one in self.classes_.tolist()] for answer in answers]
            return np.array(flags, dtype=np.int64) if self.task_.columns is not None else answers
        return np.array(answers, dtype=self.classes_.dtype)

    def predict_proba(self, X: Any) -> Any:  # noqa: N803
        """The probability of every class, in the order of `classes_`: (rows, classes); for words, a list of arrays.

        With any number of labels a row, that of each: labels of one half and more are given.
        """
        rows = self._rows(X)
        found = [row[..., self._columns].numpy() for row in probabilities(self.task_, self.model_, rows)]
        return found if self.task_.kind == "tokens" else np.stack(found)

    def score(self, X: Any, y: Any = None) -> float:  # noqa: N803
        """How right the answers are, from 0 to 1, by what training chose the best epoch by.

        Accuracy; with any number of labels micro F1; for words entity F1 if the tags are BIO, else accuracy. Labels
        that training has not seen count as wrong, and a UserWarning says in how many rows there are some. An array of 0
        and 1 has its columns in the order of `classes_`, a DataFrame by their names.

        Raises:
            InputError: for what `fit` refuses.
        """
        self._expect_fitted()
        data = X if y is None else (X, y)
        names, flags = [self.task_.labels[column] for column in self._columns], self.task_.columns is not None
        examples = self._read_labelled(data, self.task_.kind, self._label_column, names, flags=flags)
        note = unseen_note("score", examples.labels, examples.where, {*names})
        if note is not None:
            warnings.warn(note, UserWarning, stacklevel=2)
        rows = self._encode(examples)
        found = self.task_.metrics(*self.task_.by_word(decide(self.task_, self.model_, rows), rows))
        metric = suited(self.task_.kind, self.task_.labels, len(rows), hidden_size=None)["metric"]
        return found[metric]

    def save(self, folder: str | Path) -> None:
        """Write the folder of a model, as ``softsieve train`` does: ``softsieve predict`` and `load` take it.

        Raises:
            InputError: when the folder holds something else, or cannot be written.
        """
        self._expect_fitted()
        place = _checks.path("folder", folder)
        if place.exists() and not (place / WEIGHTS).exists() and not (place.is_dir() and not any(place.iterdir())):
            raise InputError(f"{place}: expected a new folder or one with a model, found something else")
        metrics = {"validation": self.metrics_, "test": self._test}
        about: dict[str, Any] = {"configuration": self._configuration, "card": self._card}
        save_model(place, self.task_, self._objective, self.model_.state_dict(), metrics, **about)

    @classmethod
    def load(cls, folder: str | Path, *, device: str | None = None) -> Classifier:
        """The classifier of a folder that `save` or ``softsieve train`` wrote; its parameters are the defaults.

        Raises:
            InputError: naming a file that does not fit.
        """
        made = cls(device=device)
        place = _checks.path("folder", folder)
        task, model = load_model(place, index=False, device=_checks.device(device))
        made.kind, made._label_column = task.kind, None
        place = place if (place / WEIGHTS).exists() else place / MODEL
        metrics = parse_json(read_text(place / METRICS), place / METRICS) if (place / METRICS).exists() else {}
        parts = metrics if isinstance(metrics, Mapping) else {}
        best, test = (
            {**part} if isinstance(part := parts.get(name), Mapping) else {} for name in ("validation", "test")
        )
        made._test, made._configuration = test, {}
        made._card = (place / CARD).read_bytes() if (place / CARD).is_file() else None  # the model stays what it was
        return made._take(task, model, best)

    # Parameters and labels

    def _check(self) -> Settings:
        """The settings as far as they are given; refuses parameters that cannot be."""
        for name in ("model", "kind", "pooling", "text_column", "label_column", "device"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name}: expected a string, found {type(value).__name__}")
        if self.kind is not None:
            _checks.choice("kind", self.kind, KINDS)
        if self.pooling is not None:
            _checks.choice("pooling", self.pooling, POOLINGS)
        _checks.number("validation_share", self.validation_share, 0, 0.999)
        if self.max_length is not None:
            _checks.whole_number("max_length", self.max_length, 4, 2**20)
        _checks.device(self.device)
        of_data = ("delta", "epochs", "learning_rate", "batch_size")
        names = ("loss", *of_data, "freeze_encoder", "skip", "patience", "precision", "seed")
        weights = self.class_weights
        if isinstance(weights, Mapping):  # by labels as they were given
            weights = {str(key) if isinstance(key, int | np.generic) else key: value for key, value in weights.items()}
        return Settings(**{name: getattr(self, name) for name in names}, class_weights=weights)

    def _wanted(self, kind: str | None) -> Wanted:
        return Wanted(kind, self.text_column, self.label_column)

    def _read_labelled(
        self, data: Any, kind: str, column: str | None, columns: list[str] | None, *, flags: bool | None = None
    ) -> Examples:
        """Rows with labels: a table, whose labels are in ``column`` if that is one, or a pair.

        Their flags, if labels are such, have these ``columns``.
        """
        inputs, answers = data, column
        if isinstance(data, tuple):
            if len(data) != 2:
                raise TypeError(f"expected a table or a pair (X, y), found a tuple of {len(data)}")
            inputs, answers = data
        flags = columns is not None if flags is None else flags
        return object_examples(inputs, answers, self._wanted(kind), columns=columns, flags=flags).part.examples

    def _take(self, task: Task, model: nn.Module, metrics: dict[str, float]) -> Classifier:
        self.task_, self.model_, self.metrics_ = task, model.eval(), metrics
        labels = [self._as_given(label) for label in task.labels]
        in_order = sorted(range(len(labels)), key=lambda column: labels[column])
        self._columns = in_order if task.columns is None else task.columns
        self.classes_ = np.array([labels[column] for column in self._columns])
        return self

    def _as_given(self, label: Any) -> Any:
        """A label, or a list of them, of the type that training had."""
        if isinstance(label, list):
            return [self._as_given(one) for one in label]
        if self.task_.bool_labels:
            return label == "True"
        return int(label) if self.task_.whole_labels else label

    # Rows

    def _expect_fitted(self) -> None:
        if not hasattr(self, "task_"):
            raise NotFittedError("Classifier: expected one that was fitted or loaded, found neither")

    @property
    def _objective(self) -> Objective:
        objective = self.task_.objective
        if objective is None:
            raise NotFittedError("Classifier: expected one that was fitted or loaded, found neither")
        return objective

    def _rows(self, inputs: Any) -> Rows:
        self._expect_fitted()
        wanted = self._wanted(None)._replace(label_column=self.label_column or self._label_column)
        return self._encode(object_inputs(inputs, self.task_.kind, wanted))

    def _encode(self, examples: Examples) -> Rows:
        return self.task_.rows(examples).to(next(self.model_.parameters()).device)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.two_d_array = True, False
        tags.classifier_tags.multi_label = True
        return tags


@contextmanager
def _on(device: str | None, precision: str) -> Iterator[None]:
    """Have Accelerate train there: it remembers what the first training of a process was told, and refuses others."""
    if AcceleratorState._shared_state:
        state = AcceleratorState()
        other = state.mixed_precision != precision or state.device.type != _checks.device(device).type
        if other and state.num_processes == 1:
            AcceleratorState._reset_state(reset_partial_state=True)
    if device is None:
        yield
        return
    names = {"ACCELERATE_TORCH_DEVICE": str(_checks.device(device)), "ACCELERATE_USE_CPU": str(device == "cpu").lower()}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
