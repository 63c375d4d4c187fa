"""Small data, small models and a judge for them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softsieve.tasks.rows import Rows
from softsieve.training.loop import Trainer
from softsieve.training.settings import Settings

FEATURES, CLASSES = 6, 4


class Net(nn.Module):
    """Two layers over the last dimension, so that it serves rows and positions alike."""

    def __init__(self, *, classes: int = CLASSES, hidden: int = 16, dropout: float = 0.0, seed: int = 1) -> None:
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        self.body = nn.Linear(FEATURES, hidden)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, classes)
        torch.set_rng_state(state)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(self.body(features).relu()))
        return logits


class Judge:
    """Counts what is right. Flags are answered for targets that are flags."""

    def __init__(self, *, multilabel: bool = False) -> None:
        self.multilabel = multilabel

    def decide(self, logits: Tensor) -> Tensor:
        return logits > 0 if self.multilabel else logits.argmax(-1)

    def by_word(self, decided: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        return decided.cpu(), rows.target.cpu()

    def metrics(self, decided: Tensor, target: Tensor) -> dict[str, float]:
        counted = torch.ones_like(target, dtype=torch.bool) if self.multilabel else target >= 0
        return {"accuracy": float((decided == target)[counted].double().mean())}


def points(rows: int, *, noise: float = 0.0, seed: int = 0) -> Rows:
    """Clusters, a class each, with a share of labels at random."""
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(100))
    target = torch.randint(CLASSES, (rows,), generator=generator)
    features = centres[target] + 0.5 * torch.randn(rows, FEATURES, generator=generator)
    wrong = torch.rand(rows, generator=generator) < noise
    target[wrong] = torch.randint(CLASSES, (rows,), generator=generator)[wrong]
    return Rows({"features": features}, target)


def tokens(rows: int, *, longest: int = 5, seed: int = 0) -> Rows:
    """Sequences of 1 to ``longest`` points, padded at the end; one position in five does not count."""
    generator = torch.Generator().manual_seed(seed)
    flat = points(rows * longest, seed=seed)
    lengths = torch.randint(1, longest + 1, (rows,), generator=generator)
    target = flat.target.view(rows, longest).clone()
    target[torch.rand(rows, longest, generator=generator) < 0.2] = -100
    target[torch.arange(longest) >= lengths[:, None]] = -100
    features = flat.inputs["features"].view(rows, longest, FEATURES)
    return Rows({"features": features}, target, lengths=lengths, sequences=("features", "target"))


def flags(rows: int, *, seed: int = 0) -> Rows:
    """Any number of the classes a row."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, FEATURES, generator=generator)
    planes = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(100))
    return Rows({"features": features}, features @ planes > 0.5)


def trainer(
    train: Rows,
    *,
    model: nn.Module | None = None,
    validation: Rows | None = None,
    output: Path | None = None,
    **settings: Any,
) -> Trainer:
    """A trainer of a `Net` with settings that learn `points` in a few dozen steps."""
    chosen: dict[str, Any] = {"batch_size": 8, "epochs": 2, "learning_rate": 0.01, "logging_steps": 1, "skip_after": 0}
    chosen |= settings
    made = Settings(**chosen)
    multilabel = train.target.dtype == torch.bool
    return Trainer(
        Net() if model is None else model,
        made.objective(multilabel=multilabel),
        train,
        Judge(multilabel=multilabel),
        made,
        validation=validation,
        output=output,
    )


def equal_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether they have the same names and bits."""
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def _alone(function: Callable[..., None], *args: Any) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    function(*args)


def in_process(function: Callable[..., None], *args: Any) -> multiprocessing.process.BaseProcess:
    """A process of its own for a call, started from a clean one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["softsieve.training.loop", "torch.utils.tensorboard"])
    process = context.Process(target=_alone, args=(function, *args))
    process.start()
    return process
