"""`softsieve compare`: losses x seeds x data sets in one go."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from softsieve._files import only_one
from softsieve.cli.devices import DEVICE_HELP, choose_device
from softsieve.cli.errors import one_line
from softsieve.cli.script import CONFIG_HELP, LENGTH_HELP
from softsieve.comparisons.output import beside
from softsieve.errors import InputError
from softsieve.tasks.presets import PRESETS

if TYPE_CHECKING:
    from softsieve.comparisons.losses import Job, Outcome
    from softsieve.comparisons.search import Search


def compare(
    data: Annotated[list[str], typer.Option(help="a preset such as clinc150, or a file or folder of data; several")],
    row: Annotated[
        list[str] | None, typer.Option(help="a row of the table, such as as-skip; several; all that fit the labels")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each row")] = 5,
    first_seed: Annotated[int, typer.Option(min=0, help="seed of the first of them")] = 0,
    model: Annotated[str | None, typer.Option(help="name or folder of a Hugging Face encoder; else built-in")] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help=LENGTH_HELP)] = None,
    data_dir: Annotated[Path, typer.Option(help="where the presets' data are")] = Path("data"),
    out: Annotated[Path, typer.Option(help="results: OUT.json, OUT.md and a folder OUT.runs")] = Path("compare"),
    epochs: Annotated[int | None, typer.Option(min=1, help="instead of the recipe's")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="instead of the recipe's")] = None,
    lr: Annotated[float | None, typer.Option(help="learning rate, instead of the recipe's")] = None,
    delta: Annotated[float | None, typer.Option(min=0, max=1, help="instead of the recipe's")] = None,
    skip_margin: Annotated[float | None, typer.Option(help="of rows that skip, instead of a measured one")] = None,
    skip_after: Annotated[int | None, typer.Option(min=0, help="steps before rows skip, instead of 256")] = None,
    precision: Annotated[str, typer.Option(help="no, bf16 or fp16")] = "no",
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    search: Annotated[
        int | None, typer.Option(min=1, help="trials of each row, on validation rows, to choose its settings by")
    ] = None,
    graphs: Annotated[bool, typer.Option(help="replay steps as CUDA graphs")] = False,
    compiled: Annotated[bool, typer.Option(help="compile an encoder's layers, once a process")] = False,
    side_by_side: Annotated[int, typer.Option(min=1, help="runs at a time, each a process; 1 for times of record")] = 1,
    config: Annotated[Path | None, typer.Option(help=CONFIG_HELP)] = None,
) -> None:
    """Train every loss with every seed on every data set, and say which is better and what it costs.

    Each run is written to OUT.runs when it is done; started again, the command makes only what is missing.
    With --search every row is tuned first: as many trials each over learning rate, epochs and its own parameter,
    around the recipe's, judged on validation rows alone.
    """
    console = Console()
    asked = {
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": lr,
        "delta": delta,
        "skip_margin": skip_margin,
        "skip_after": skip_after,
    }
    overrides = {name: value for name, value in asked.items() if value is not None}
    with one_line():
        if choose_device(device).index is not None and side_by_side > 1:
            raise InputError(
                f"device: expected cpu or cuda with --side_by_side {side_by_side}, found {device!r}; "
                "CUDA_VISIBLE_DEVICES says which GPU that is"
            )
        from softsieve.comparisons import losses as suite  # needs the extra train
        from softsieve.comparisons import search as tuning

        jobs = suite.plan(
            data,
            row or None,
            range(first_seed, first_seed + seeds),
            model=model,
            max_length=max_length,
            data_dir=data_dir,
            overrides={**overrides, "precision": precision, "graphs": graphs, "compiled": compiled},
        )
        for name in dict.fromkeys(job.task for job in jobs if job.task not in PRESETS):
            for note in suite.read_task(name, str(data_dir)).notes:
                console.print(note, highlight=False, markup=False)
        with only_one(beside(out, ".runs"), "comparing"):
            found = tuning.Search(jobs, [], [])
            if search is not None:
                found = _search(console, jobs, search, out, side_by_side)
            runs, failure = _run(console, found.jobs, out, side_by_side)
            if failure is not None and not (runs or found.trials):
                raise failure
            command = shlex.join(["softsieve", *sys.argv[1:]])
            suite.write_results(out, runs, command, trials=found.trials, more=tuning.markdown(found.trials))
            console.print(Markdown(beside(out, ".md").read_text()))
            if found.failed:
                count = len({(trial["task"], trial["row"]) for trial in found.trials})
                raise InputError(f"{len(found.failed)} of {count} rows were left out, the first: {found.failed[0]}")
            if failure is not None:
                raise failure


def _search(console: Console, jobs: Sequence[Job], count: int, out: Path, side_by_side: int) -> Search:
    """The trials that are missing, then what all of them say."""
    from softsieve.comparisons import losses, search

    trials = search.plan_trials(jobs, count)
    outcomes: dict[Job, Outcome] = {}
    for job, outcome in losses.run_each(trials, beside(out, ".runs"), side_by_side=side_by_side):
        outcomes[job] = outcome
        score = f"failed: {outcome}"
        if isinstance(outcome, dict):
            score = f"{outcome['validation'][job.settings.metric]:.4f} in {outcome['seconds']:.1f} s"
        settings = losses.say_settings(losses.tuned(job.settings.asdict()))
        text = f"trial {len(outcomes)}/{len(trials)} {job.task} {job.row}, {settings}: {score}"
        console.print(text, highlight=False, markup=False)
    return search.conclude(jobs, trials, outcomes)


def _run(
    console: Console, jobs: Sequence[Job], out: Path, side_by_side: int
) -> tuple[list[dict[str, Any]], InputError | None]:
    """The runs of the table in its order, and what to say of those that failed."""
    from softsieve.comparisons import losses

    made: dict[Job, dict[str, Any]] = {}
    failure = None
    try:
        for job, run in losses.run_all(jobs, beside(out, ".runs"), side_by_side=side_by_side):
            made[job] = run
            score = f"{run['test'][run['settings']['metric']]:.4f} in {run['seconds']:.1f} s"
            text = f"{len(made)}/{len(jobs)} {job.task} {job.row} seed {job.settings.seed}: {score}"
            console.print(text, highlight=False, markup=False)
    except InputError as error:
        failure = error  # said below the table of the others
    return [made[job] for job in jobs if job in made], failure
