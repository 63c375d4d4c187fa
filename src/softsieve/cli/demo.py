"""`softsieve demo`: both halves of the library at work, in under three minutes and with nothing to download."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softsieve.cli.progress import bar, plain_console, table

if TYPE_CHECKING:  # what takes long to import is imported when the command runs
    from rich.console import Console

    from softsieve.comparisons.heads import Result
    from softsieve.demo import Outcome

N, D, RANK = 32_768, 512, 32  # of the made-up head
EPS, DELTA, K = 0.3, 0.01, 8
CALIBRATION, QUERIES = 1500, 300
BF16 = "bf16 products on the CPU"  # a few machines end the process at one


def demo(
    seeds: Annotated[int, typer.Option(min=1, help="trainings of each kind")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="passes over the training rows in each")] = 15,
    out: Annotated[Path, typer.Option(help="folder for the runs and the page about them")] = Path("softsieve-demo"),
) -> None:
    """Train with softmax and AS-Softmax, ask an adaptive head, and write a page about both."""
    from softsieve.cli.errors import one_line

    with one_line():
        from softsieve.extras import package

        for name, what in (("accelerate", "training"), ("PIL", "images"), ("sklearn", "measuring F1")):
            package(name, what)
        package("plotly", "the report")
        from softsieve.demo import DELTA as MARGIN

        console = plain_console()
        outcomes = _train(console, out / "runs", seeds, epochs)
        results = _ask_a_head(console, out / "head.json")
        console.print(_training_table(outcomes))
        console.print(
            f"Solved: rows to train on whose label beats every other class by the margin, {MARGIN}, in the end. Under "
            "AS-Softmax their loss and gradient are exactly 0; skipping leaves out what screening finds solved.\n"
        )
        console.print(_head_table(results))
        console.print(
            f"Right: the {K} largest, each probability within {EPS:.0%}; promised for {1 - DELTA:.0%} of queries like "
            "those it was calibrated with. A product in bfloat16 rounds, and close classes change places. This head is "
            "made up: random numbers with the spectrum and the spread of probabilities that language models have; for "
            "real ones see docs/results. The first time, building includes half a minute of compiling.\n"
        )
        from softsieve.report import write_report

        page = out / "report.html"
        folders = [outcome.folder for outcome in outcomes]
        write_report([*folders, out / "head.json"], page, title="The softsieve demo")
        console.print(f"A page about all of it: {page}")


# Training


def _train(console: Console, out: Path, seeds: int, epochs: int) -> list[Outcome]:
    from softsieve.demo import train_digits

    console.print(f"Training on 1,797 handwritten digits, a small ResNet, {epochs} epochs; 400 of them are the test.")

    def say(outcome: Outcome) -> None:
        console.print(
            f"  {outcome.way}, seed {outcome.seed}: {outcome.accuracy:.1%} in {outcome.seconds:.1f} s, "
            f"{outcome.trained:,} rows trained"
        )

    return train_digits(out, seeds=seeds, epochs=epochs, show=console.is_terminal, console=console, done=say)


def _training_table(outcomes: Sequence[Outcome]) -> Any:
    seeds = len({outcome.seed for outcome in outcomes})
    ways: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        ways.setdefault(outcome.way, []).append(outcome)

    def accuracy(runs: list[Outcome]) -> str:
        values = [100 * run.accuracy for run in runs]
        spread = f" ± {statistics.stdev(values):.1f}" if seeds > 1 else ""
        return f"{statistics.mean(values):.1f}{spread}"

    columns: dict[str, Callable[[list[Outcome]], str]] = {
        "": lambda runs: runs[0].way,
        "accuracy %": accuracy,
        "seconds": lambda runs: f"{statistics.median(run.seconds for run in runs):.1f}",
        "solved": lambda runs: f"{statistics.mean(run.solved for run in runs):.0%}",
        "rows trained": lambda runs: f"{statistics.mean(run.trained for run in runs):,.0f}",
    }
    title = f"Training, mean of {seeds} seeds" if seeds > 1 else "Training, one seed"
    return table(ways.values(), columns, title=title)


# A head


def _ask_a_head(console: Console, out: Path) -> list[Result]:
    from softsieve._records import write_record
    from softsieve.comparisons.head_methods import EXACT
    from softsieve.comparisons.heads import measure
    from softsieve.data.synthetic_heads import make_head
    from softsieve.doctor import tried
    from softsieve.integrations.hidden_states import Corpus, Head

    console.print(f"Building, calibrating and asking a head of {N:,} classes x {D}, made up.")
    weight, *queries = make_head(N, D, rank=RANK, calibration=CALIBRATION, test=QUERIES)
    bf16 = tried([BF16])[BF16].state == "works"
    chosen: dict[str, Any] = {
        "methods": ["cascade"],
        "exact": EXACT if bf16 else EXACT[:1],
        "ks": [K],
        "eps": EPS,
        "deltas": [DELTA],
        "calibration": CALIBRATION,
        "test_queries": QUERIES,
    }
    name = "made up"
    with bar(console) as progress:
        head = Head(weight if bf16 else weight.float(), None, 1.0, None, {"made-up queries": Corpus(*queries)})
        results = measure(head, name=name, **chosen, progress=progress)
    about = {"head": name, "n": N, "d": D, "rank": RANK, **chosen, "note": "weight and queries are random numbers"}
    write_record(out, "head-bench", about, [result._asdict() for result in results])
    return results


def _head_table(results: Sequence[Result]) -> Any:
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
