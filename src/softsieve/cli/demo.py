"""`softsieve demo`: what AS-Softmax does, in half a minute on a laptop."""

from __future__ import annotations

import statistics
import time
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from softsieve.data import digits
from softsieve.losses import as_keep_mask
from softsieve.losses.objectives import Objective, make_objective

BATCH = 32
WIDTH = 256
HELD_OUT = 500


class Run(NamedTuple):
    """What one training run came to."""

    accuracy: float
    seconds: float
    solved: list[float]  # share of the training rows with zero gradient, by epoch


def _train(objective: Objective, *, seed: int, epochs: int) -> Run:
    """A small perceptron on the digits that come with the package, with 500 of them held out."""
    pixels, labels = digits()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(pixels), generator=generator)
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        model = nn.Sequential(*body, objective.head(WIDTH, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shares = []
    start = time.perf_counter()
    for _ in range(epochs):
        solved = 0
        for batch in torch.split(train[torch.randperm(len(train), generator=generator)], BATCH):
            outcome = objective(model(pixels[batch]), labels[batch])
            optimizer.zero_grad()
            outcome.loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            solved += 0 if outcome.solved is None else int(outcome.solved.sum())
        shares.append(solved / len(train))
    seconds = time.perf_counter() - start
    accuracy = (model(pixels[test]).argmax(-1) == labels[test]).float().mean().item()
    return Run(accuracy, seconds, shares)


def _worked_example(console: Console) -> None:
    """The two rows of the paper, class by class."""
    logits = torch.tensor([[1.2, 1.5, 1.0, -0.35], [2.5, 3.5, 0.4, 0.3]])
    target = torch.tensor([1, 2])
    keep = as_keep_mask(logits, target, delta=0.1)
    table = Table(title="Which classes still matter? (margin delta 0.1)")
    for column in ("logits", "label", "softmax", "kept classes"):
        table.add_column(column)
    for row, label, p, kept in zip(logits.tolist(), target.tolist(), logits.softmax(-1).tolist(), keep, strict=True):
        what = ", ".join(map(str, kept.nonzero().flatten().tolist()))
        table.add_row(
            " ".join(f"{x:.2f}" for x in row),
            str(label),
            " ".join(f"{x:.2f}" for x in p),
            what + (": solved" if kept.sum() == 1 else ""),
        )
    console.print(table)


def demo(
    seeds: Annotated[int, typer.Option(min=1, help="training runs of each loss")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="passes over the training rows in each run")] = 20,
) -> None:
    """Train a small classifier with softmax and with AS-Softmax and show what the latter leaves out."""
    console = Console()
    _worked_example(console)
    losses = {"softmax": make_objective("softmax"), "AS-Softmax": make_objective("as-softmax", delta=0.1)}
    runs: dict[str, list[Run]] = {name: [] for name in losses}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("training", total=seeds * len(losses))
        for seed in range(seeds):
            for name, objective in losses.items():
                progress.update(task, description=f"{name}, seed {seed}")
                runs[name].append(_train(objective, seed=seed, epochs=epochs))
                progress.advance(task)
    table = Table(title=f"1797 handwritten digits (8 x 8), {HELD_OUT} held out, {epochs} epochs, {seeds} seeds")
    for column in ("loss", "accuracy %", "seconds", "solved %, first epoch", "last epoch"):
        table.add_column(column, justify="left" if column == "loss" else "right")
    for name, results in runs.items():
        accuracies = [100 * run.accuracy for run in results]
        spread = f" ± {statistics.stdev(accuracies):.1f}" if seeds > 1 else ""
        table.add_row(
            name,
            f"{statistics.mean(accuracies):.1f}{spread}",
            f"{statistics.mean(run.seconds for run in results):.1f}",
            f"{100 * statistics.mean(run.solved[0] for run in results):.0f}",
            f"{100 * statistics.mean(run.solved[-1] for run in results):.0f}",
        )
    console.print(table)
    console.print(
        "Solved: the label beats every other class by the margin, so loss and gradient are exactly 0 and the backward "
        "pass leaves the row out. A model this small is done before that pays: its seconds show what a call costs."
    )
