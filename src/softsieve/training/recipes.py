"""Settings that suit data, where nobody says otherwise: what `softsieve train` and `softsieve compare` begin with."""

from __future__ import annotations

from typing import Any

from softsieve.tasks.examples import Data, label_names
from softsieve.tasks.metrics import are_bio

# Data set -> settings with a pretrained encoder, and with the built-in model. Learning rates are those of small
# encoders, such as MiniLM; one of `LARGE` features or more (the base size of BERT, MPNet and others) has half of them.
LARGE = 768
PRETRAINED: dict[str, dict[str, Any]] = {
    "clinc150": {"epochs": 8, "batch_size": 32, "learning_rate": 1e-4},
    "sst5": {"epochs": 7, "batch_size": 16, "learning_rate": 6e-5, "delta": 0.3},
    "conll2003": {"epochs": 4, "batch_size": 32, "learning_rate": 2e-4, "metric": "entity_f1"},
    "goemotions": {"epochs": 4, "batch_size": 64, "learning_rate": 1e-4, "delta": 0.7, "metric": "micro_f1"},
    "reuters": {"epochs": 8, "batch_size": 32, "learning_rate": 1e-4, "delta": 0.7, "metric": "micro_f1"},
    "eurlex57k": {"epochs": 8, "batch_size": 32, "learning_rate": 1e-4, "delta": 0.7, "metric": "micro_f1"},
}
BUILT_IN: dict[str, dict[str, Any]] = {
    "clinc150": {"epochs": 10, "batch_size": 64, "learning_rate": 3e-3},
    "sst5": {"epochs": 5, "batch_size": 64, "learning_rate": 1e-3, "delta": 0.3},
    "eurosat": {"epochs": 12, "batch_size": 64, "learning_rate": 3e-3},
    "cifar10": {"epochs": 10, "batch_size": 128, "learning_rate": 3e-3},
    "mnist": {"epochs": 3, "batch_size": 128, "learning_rate": 3e-3},
    "fsdd": {"epochs": 8, "batch_size": 64, "learning_rate": 3e-3},
    "sighan15": {"epochs": 8, "batch_size": 32, "learning_rate": 3e-3},
    "conll2003": {"epochs": 8, "batch_size": 32, "learning_rate": 3e-3, "metric": "entity_f1"},
    "goemotions": {"epochs": 4, "batch_size": 64, "learning_rate": 3e-3, "delta": 0.7, "metric": "micro_f1"},
    "reuters": {"epochs": 10, "batch_size": 64, "learning_rate": 1e-2, "delta": 0.7, "metric": "micro_f1"},
    "eurlex57k": {"epochs": 4, "batch_size": 64, "learning_rate": 1e-2, "delta": 0.7, "metric": "micro_f1"},
}


def recipe(task: str, *, hidden_size: int | None) -> dict[str, Any]:
    """Settings of a data set with an encoder of so many features, None: the built-in one; {} for one that has none.

    Example:
        >>> [recipe("sst5", hidden_size=size)["learning_rate"] for size in (384, 768)]
        [6e-05, 3e-05]
    """
    settings = dict((BUILT_IN if hidden_size is None else PRETRAINED).get(task, {}))
    if hidden_size is not None and hidden_size >= LARGE and settings:
        settings["learning_rate"] /= 2
    return settings


def usual(data: Data, *, hidden_size: int | None, frozen: bool = False) -> dict[str, Any]:
    """Settings for data of one's own, with an encoder of so many features, None: the built-in model.

    Of data that we know, its recipe; that of an encoder which is trained, not of one that is ``frozen``.

    Example:
        >>> from softsieve.tasks.examples import Examples
        >>> texts = Examples(["good", "bad"] * 2000, ["yes", "no"] * 2000, [""] * 4000)
        >>> found = usual(Data("reviews", "text", texts, None, None), hidden_size=None)
        >>> found["epochs"], found["learning_rate"], found["metric"]
        (8, 0.003, 'accuracy')
    """
    rows = len(data.train.inputs)
    settings = suited(data.kind, label_names(data), rows, hidden_size=hidden_size, frozen=frozen)
    return settings if frozen else {**settings, **recipe(data.name, hidden_size=hidden_size)}


def suited(
    kind: str, labels: list[str], rows: int, *, hidden_size: int | None, frozen: bool = False
) -> dict[str, Any]:  # fmt: skip
    """Settings for so many rows of a kind of data with these labels, and such a model.

    Example:
        >>> suited("multilabel", ["a", "b"], 90_000, hidden_size=None)["delta"]
        0.7
        >>> [suited("text", ["a", "b"], rows, hidden_size=384)["epochs"] for rows in (500, 3000, 100_000)]
        [30, 16, 3]
    """
    metric = "micro_f1" if kind == "multilabel" else "accuracy"
    if kind == "tokens" and are_bio(labels):
        metric = "entity_f1"
    settings = {"metric": metric, "delta": 0.7 if kind == "multilabel" else 0.1}
    if hidden_size is not None and not frozen:
        steps = {"learning_rate": 1e-4 if hidden_size < LARGE else 5e-5, "epochs": _epochs(rows, 32, 3, 1500, 30)}
        return {**settings, **steps, "batch_size": 32, "eval_batch_size": 128}
    batch_size = 16 if rows < 1000 else 64
    if hidden_size is not None:  # a linear layer on states that are there: steps cost nothing
        steps = {"learning_rate": 1e-2, "epochs": _epochs(rows, batch_size, 10, 2000, 100)}
    else:  # seconds, for the few rows of a first try
        rate = 1e-2 if kind == "multilabel" else 3e-3
        steps = {"learning_rate": rate, "epochs": _epochs(rows, batch_size, 8 if rows < 50_000 else 3, 300, 60)}
    return {**settings, **steps, "batch_size": batch_size, "eval_batch_size": 512}


def _epochs(rows: int, batch_size: int, least: int, steps: int, most: int) -> int:
    """At least ``least``, and as many as come to so many steps, up to ``most``."""
    return max(least, min(most, -(-steps * batch_size // rows)))
