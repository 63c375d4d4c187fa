"""What the demo does: three ways to train a small model on digits, some seeds each, and a head that is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from softsieve._records import write_record
from softsieve.cli.progress import bar, plain_console, table
from softsieve.comparisons.head_methods import EXACT
from softsieve.comparisons.heads import Result, measure
from softsieve.data import digits
from softsieve.data.synthetic_heads import make_head
from softsieve.doctor import tried
from softsieve.integrations.hidden_states import Corpus, Head
from softsieve.losses import as_cross_entropy
from softsieve.report import write_report
from softsieve.tasks.examples import Data, Examples
from softsieve.tasks.task import Task
from softsieve.training.run import encode, train
from softsieve.training.settings import PLAIN, Settings

HELD_OUT = 400  # digits of each of the two parts that are not trained on
MARGIN = PLAIN["delta"]
WAYS: dict[str, dict[str, Any]] = {
    "softmax": {"loss": "softmax"},
    "AS-Softmax": {"loss": "as-softmax"},
    "AS-Softmax, skipping": {"loss": "as-softmax", "skip": "solved"},
}

N, D, RANK = 32_768, 512, 32  # of the made-up head
EPS, DELTA, K = 0.3, 0.01, 8
CALIBRATION, QUERIES = 1500, 300
BF16 = "bf16 products on the CPU"  # a few machines end the process at one


def show_demo(out: Path, *, seeds: int, epochs: int) -> None:
    """Train, ask a head, say what came of both and write a page about it."""
    console = plain_console()
    outcomes = _train(console, out / "runs", seeds, epochs)
    results = _ask_head(console, out / "head.json")
    console.print(_training_table(outcomes))
    console.print(
        f"Solved: rows to train on whose label beats every other class by the margin, {MARGIN}, in the end. Under "
        "AS-Softmax their loss and gradient are exactly 0; skipping leaves out those that lead by more than dropout "
        "takes away.\n"
    )
    console.print(_head_table(results))
    console.print(
        f"Right: the {K} largest, each probability within {EPS:.0%}; promised for {1 - DELTA:.0%} of queries like "
        "those it was calibrated with. A product in bfloat16 rounds, and close classes change places. This head is "
        "made up: random numbers with the spectrum and the spread of probabilities that language models have; for "
        "real ones see docs/results. The first time, building includes some 15 seconds of compiling.\n"
    )
    page = out / "report.html"
    write_report([*(outcome.folder for outcome in outcomes), out / "head.json"], page, title="The softsieve demo")
    console.print(f"A page about all of it: {page}")


# Training


class Outcome(NamedTuple):
    """What one training came to."""

    way: str
    seed: int
    accuracy: float
    seconds: float
    solved: float  # share of the training rows that the final model beats by MARGIN, whatever it was trained with
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


def _train(console: Console, out: Path, seeds: int, epochs: int) -> list[Outcome]:
    """Every way once for every seed, each into a folder of its own; taking turns, they share slow spells."""
    console.print(f"Training on 1,797 handwritten digits, a small ResNet, {epochs} epochs; 400 of them are the test.")
    data = digits_data()
    task = Task.build(data)
    splits = encode(task, data.train, data.validation, data.test)
    about = {"data": data.name, "model": "built-in"}
    outcomes = []
    for seed in range(seeds):
        for way, options in WAYS.items():
            settings = Settings(
                **options, epochs=epochs, batch_size=16, learning_rate=3e-3, delta=MARGIN, logging_steps=20, seed=seed
            )
            folder = out / f"{way.lower().replace(', ', '-').replace(' ', '-')}-seed{seed}"
            show = console.is_terminal
            run = train(task, splits, settings, output=folder, show=show, console=console, about=about)
            with torch.no_grad():
                logits = run.model.eval()(**splits.train.inputs)
            stats = as_cross_entropy(logits, splits.train.target, delta=MARGIN, return_stats=True)[1]
            solved, accuracy, result = float(stats.solved.double().mean()), run.test["accuracy"], run.result
            outcomes.append(Outcome(way, seed, accuracy, result.seconds, solved, result.trained, folder))
            console.print(
                f"  {way}, seed {seed}: {accuracy:.1%} in {result.seconds:.1f} s, {result.trained:,} rows trained"
            )
    return outcomes


def _training_table(outcomes: Sequence[Outcome]) -> Table:
    seeds = len({outcome.seed for outcome in outcomes})

    def accuracy(runs: list[Outcome]) -> str:
        values = [100 * run.accuracy for run in runs]
        return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if seeds > 1 else "")

    columns: dict[str, Callable[[list[Outcome]], str]] = {
        "": lambda runs: runs[0].way,
        "accuracy %": accuracy,
        "seconds": lambda runs: f"{median(run.seconds for run in runs):.1f}",
        "solved": lambda runs: f"{fmean(run.solved for run in runs):.0%}",
        "rows trained": lambda runs: f"{fmean(run.trained for run in runs):,.0f}",
    }
    title = f"Training, mean of {seeds} seeds" if seeds > 1 else "Training, one seed"
    return table([[one for one in outcomes if one.way == way] for way in WAYS], columns, title=title)


# A head


def _ask_head(console: Console, out: Path) -> list[Result]:
    console.print(f"Building, calibrating and asking a head of {N:,} classes x {D}, made up.")
    weight, *queries = make_head(N, D, rank=RANK, calibration=CALIBRATION, test=QUERIES)
    bf16 = tried([BF16])[BF16].state == "works"
    options: dict[str, Any] = {
        "methods": ["cascade"],
        "exact": EXACT if bf16 else EXACT[:1],
        "ks": [K],
        "eps": EPS,
        "deltas": [DELTA],
        "calibration": CALIBRATION,
        "test_queries": QUERIES,
    }
    head = Head(weight if bf16 else weight.float(), None, 1.0, None, {"made-up queries": Corpus(*queries)})
    with bar(console) as progress:
        results = measure(head, name="made up", **options, progress=progress)
    facts = {"head": "made up", "n": N, "d": D, "rank": RANK, "note": "weight and queries are random numbers"}
    write_record(out, "head-bench", {**facts, **options}, [result._asdict() for result in results])
    return results


def _head_table(results: Sequence[Result]) -> Table:
    names = {"exact fp32": "torch, float32", "exact bf16": "torch, bfloat16", "cascade": "softsieve"}
    columns: dict[str, Callable[[Result], str]] = {
        "": lambda result: names[result.method],
        "right": lambda result: f"{result.success:.1%}",
        "MB read": lambda result: f"{result.bytes_mean / 1e6:.1f}",
        "ms": lambda result: f"{result.ms:.2f}",
        "built in s": lambda result: f"{result.build_s:.0f}" if result.build_s else "",
    }
    title = f"The {K} largest probabilities of {N:,}, one query at a time, {QUERIES} queries"
    return table(results, columns, title=title)
