"""The embedded digits as a data set to train on: three ways to train the same small model, some seeds each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from softsieve.data import digits
from softsieve.losses import as_cross_entropy
from softsieve.tasks.examples import Data, Examples
from softsieve.tasks.rows import Rows
from softsieve.tasks.task import Task
from softsieve.training.run import Run, encode, train
from softsieve.training.settings import Settings

HELD_OUT = 400  # digits of each of the two parts that are not trained on
DELTA = 0.3  # with 0.1, which suits most data, skipping loses a point on so few rows
WAYS: dict[str, dict[str, Any]] = {
    "softmax": {"loss": "softmax"},
    "AS-Softmax": {"loss": "as-softmax", "delta": DELTA},
    "AS-Softmax, skipping": {"loss": "as-softmax", "delta": DELTA, "skip": "solved"},
}


class Outcome(NamedTuple):
    """What one training came to."""

    way: str
    seed: int
    accuracy: float
    seconds: float
    solved: float  # share of the training rows that the final model beats by DELTA, whatever it was trained with
    trained: int  # rows that went forward and backward
    folder: Path


def digits_data() -> Data:
    """The 1797 digits that come with the package, as images of 8 x 8: 997 to train on, 400 and 400 held out.

    Example:
        >>> data = digits_data()
        >>> len(data.train.inputs), len(data.validation.inputs), data.train.inputs[0].shape
        (997, 400, (8, 8))
    """
    pixels, labels = digits()
    images = (pixels.reshape(-1, 8, 8) * 255).round().to(torch.uint8).numpy()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    validation, test, training = torch.split(order, [HELD_OUT, HELD_OUT, len(order) - 2 * HELD_OUT])

    def part(index: torch.Tensor) -> Examples:
        rows = index.tolist()
        return Examples([images[i] for i in rows], [str(int(labels[i])) for i in rows], [f"digit {i}" for i in rows])

    return Data("digits", "image", part(training), part(validation), part(test))


def train_digits(
    out: Path,
    *,
    seeds: int,
    epochs: int,
    show: bool = False,
    console: Console | None = None,
    done: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """Every way once for every seed, each into a folder of its own in ``out``; taking turns, they share slow spells."""
    data = digits_data()
    task = Task.build(data)
    splits = encode(task, data.train, data.validation, data.test)
    outcomes = []
    for seed in range(seeds):
        for way, options in WAYS.items():
            settings = Settings(
                **options, epochs=epochs, batch_size=16, learning_rate=3e-3, logging_steps=20, seed=seed
            )
            folder = out / f"{way.lower().replace(', ', '-').replace(' ', '-')}-seed{seed}"
            run = train(
                task,
                splits,
                settings,
                output=folder,
                show=show,
                console=console,
                about={"data": data.name, "model": "built-in"},
            )
            outcomes.append(_outcome(way, seed, run, folder, splits.train))
            done(outcomes[-1])
    return outcomes


def _outcome(way: str, seed: int, run: Run, folder: Path, rows: Rows) -> Outcome:
    with torch.no_grad():
        logits = run.model.eval()(**rows.inputs)
    solved = as_cross_entropy(logits, rows.target, delta=DELTA, return_stats=True)[1].solved
    result = run.result
    share = float(solved.double().mean())
    return Outcome(way, seed, run.test["accuracy"], result.seconds, share, result.trained, folder)
