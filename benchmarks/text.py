"""The built-in text model as `softsieve train` trains it, against linear models and neighbours of scikit-learn.

Every method is given the same rows. Thresholds of multi-label rivals are fitted on the validation rows, as ours is, and
nothing is ever chosen by the test rows.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from softsieve.errors import InputError
from softsieve.extras import package
from softsieve.tasks.examples import Data, Examples, label_names
from softsieve.tasks.presets import PRESETS, load_preset
from softsieve.tasks.read import hold_out, read_data
from softsieve.tasks.task import Task
from softsieve.training.recipes import usual
from softsieve.training.run import encode, train
from softsieve.training.settings import Settings

OURS = "softsieve, built-in"
WORDS, PIECES, NEIGHBOURS = "TF-IDF + LogisticRegression", "LinearSVC on character n-grams", "10 neighbours on TF-IDF"
DEV = "eurlex57k-dev"  # its validation part as training data: on all of it the rivals take hours

Array = Any  # numpy's or scipy's


class Result(NamedTuple):
    """One method on one data set: accuracy, or micro F1 of multi-label data, from 0 to 1; seconds from text to test."""

    data: str
    method: str
    seed: int
    rows: int
    classes: int
    metric: str
    validation: float
    test: float
    seconds: float


def read(name: str, data_dir: Path, test: Path | None) -> Data:
    """A preset, the small part of EURLEX57K, or a file with another for the test; always with validation rows."""
    if name == DEV:
        whole = load_preset("eurlex57k", data_dir)
        if whole.validation is None:
            raise InputError(f"{name}: expected a validation part, found none")
        small = whole._replace(name=name, train=whole.validation, validation=None)
        kept, held_out = hold_out(small, len(small.train.inputs) // 10, seed=42)
        return small._replace(train=kept, validation=held_out)
    data = load_preset(name, data_dir) if name in PRESETS else read_data(name, test=test)
    if data.kind not in ("text", "multilabel"):
        raise InputError(f"{name}: expected texts, found {data.kind}")
    if data.test is None:
        raise InputError(f"{name}: expected test rows, found none; give --test_data")
    return data


def measure(data: Data, method: str, seed: int) -> Result:
    """Train one method and judge it."""
    started = time.perf_counter()
    validation, test = RIVALS[method](data) if method in RIVALS else _ours(data, seed)
    seconds = time.perf_counter() - started
    metric = "micro_f1" if data.kind == "multilabel" else "accuracy"
    sizes = len(data.train.inputs), len(label_names(data))
    return Result(data.name, method, seed, *sizes, metric, validation, test, seconds)


def _ours(data: Data, seed: int) -> tuple[float, float]:
    task = Task.build(data)
    run = train(
        task, encode(task, data.train, data.validation, data.test), Settings(**usual(data, hidden_size=None), seed=seed)
    )
    metric = "micro_f1" if task.multilabel else "accuracy"
    return run.result.best[metric], run.test[metric]


def _fit_words(data: Data) -> tuple[float, float]:
    models = package("sklearn.linear_model", "a rival")
    many = {"solver": "liblinear", "dual": True} if data.kind == "multilabel" else {}  # one class at a time, quickly
    return _fit_linear(data, models.LogisticRegression(C=10, max_iter=200, **many), ngram_range=(1, 2))


def _fit_pieces(data: Data) -> tuple[float, float]:
    return _fit_linear(data, package("sklearn.svm", "a rival").LinearSVC(), analyzer="char_wb", ngram_range=(2, 5))


def _vectors(data: Data, **options: Any) -> list[Array]:
    """Training, validation and test rows; fitted on the first."""
    made = package("sklearn.feature_extraction.text", "a rival").TfidfVectorizer(sublinear_tf=True, **options)
    parts = _parts(data)
    return [made.fit_transform(parts[0].inputs), *(made.transform(part.inputs) for part in parts[1:])]


def _fit_linear(data: Data, model: Any, **options: Any) -> tuple[float, float]:
    train_rows, *others = _vectors(data, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a label that no row has, and more iterations that it would like
        if data.kind == "text":
            model.fit(train_rows, data.train.labels)
            validation, test = (model.score(x, p.labels) for x, p in zip(others, _parts(data)[1:], strict=True))
            return float(validation), float(test)
        model = package("sklearn.multiclass", "a rival").OneVsRestClassifier(model)
        model.fit(train_rows, _flags(data, data.train))
        return _judge(data, *(model.decision_function(some) for some in others))


def _ask_neighbours(data: Data) -> tuple[float, float]:
    train_rows, *others = _vectors(data)
    parts = _parts(data)
    own = _flags(data, data.train).astype(np.float32)

    def votes(some: Array) -> Array:
        scores = np.zeros((some.shape[0], own.shape[1]), np.float32)
        for start in range(0, some.shape[0], 500):
            near = (some[start : start + 500] @ train_rows.T).toarray()
            best = np.argpartition(-near, min(9, near.shape[1] - 1), 1)[:, :10]
            for row, numbers in enumerate(best):
                scores[start + row] = near[row, numbers] @ own[numbers]
        return scores

    scores = [votes(some) for some in others]
    if data.kind == "multilabel":
        return _judge(data, *scores)
    right = (_flags(data, p)[np.arange(len(s)), s.argmax(1)].mean() for p, s in zip(parts[1:], scores, strict=True))
    validation, test = map(float, right)
    return validation, test


def _judge(data: Data, validation: Array, test: Array) -> tuple[float, float]:
    """Micro F1 of scores above the threshold that is best on validation rows."""
    _, held_out, unseen = _parts(data)
    flags = _flags(data, held_out)
    edges = np.unique(np.quantile(validation[flags], np.linspace(0, 1, 101)))
    best = max(edges, key=lambda edge: _micro_f1(validation >= edge, flags))
    return _micro_f1(validation >= best, flags), _micro_f1(test >= best, _flags(data, unseen))


def _micro_f1(decided: Array, flags: Array) -> float:
    return float(2 * (decided & flags).sum() / max(1, decided.sum() + flags.sum()))


def _parts(data: Data) -> list[Examples]:
    if data.validation is None or data.test is None:
        raise InputError(f"{data.name}: expected validation and test rows")
    return [data.train, data.validation, data.test]


def _flags(data: Data, part: Examples) -> Array:
    number = {label: i for i, label in enumerate(label_names(data))}
    flags = np.zeros((len(part.inputs), len(number)), bool)
    for row, labels in enumerate(part.labels):
        for label in [labels] if isinstance(labels, str) else labels:
            if label in number:
                flags[row, number[label]] = True
    return flags


RIVALS: dict[str, Callable[[Data], tuple[float, float]]] = {
    WORDS: _fit_words,
    PIECES: _fit_pieces,
    NEIGHBOURS: _ask_neighbours,
}
