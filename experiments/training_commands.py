"""The commands of experiments on training with AS-Softmax, which have most of their options in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from experiments.command_parts import results_option, say
from softsieve.cli.progress import watched
from softsieve.cli.script import LENGTH_HELP
from softsieve.comparisons.output import beside, write_results, write_table

if TYPE_CHECKING:
    from experiments.training_runs import Asked

Margin = Annotated[float | None, typer.Option(min=0, max=1, help="margin of AS-Softmax, instead of the recipe's")]
Margins = Annotated[list[float], typer.Option(min=0, max=1, help="margin of AS-Softmax; several")]


def _asked(
    data: Annotated[list[str], typer.Option(help="a preset such as clinc150, or a file or folder of data; several")],
    seeds: Annotated[int, typer.Option(min=1, help="runs of each kind")] = 5,
    model: Annotated[str | None, typer.Option(help="name or folder of a Hugging Face encoder; else built-in")] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help=LENGTH_HELP)] = None,
    data_dir: Annotated[Path, typer.Option(help="where the presets' data are")] = Path("data"),
    epochs: Annotated[int | None, typer.Option(min=1, help="instead of the recipe's")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="instead of the recipe's")] = None,
    lr: Annotated[float | None, typer.Option(help="learning rate, instead of the recipe's")] = None,
    precision: Annotated[str, typer.Option(help="no, bf16 or fp16")] = "no",
    graphs: Annotated[bool, typer.Option(help="replay steps as CUDA graphs")] = False,
    compiled: Annotated[bool, typer.Option(help="compile an encoder's layers, once a process")] = False,
    side_by_side: Annotated[int, typer.Option(min=1, help="runs at a time, each a process; 1 for times of record")] = 1,
) -> Asked:
    """What the options in common say."""
    from experiments.training_runs import Asked

    chosen: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "learning_rate": lr}
    overrides = {name: value for name, value in chosen.items() if value is not None}
    overrides |= {"precision": precision, "graphs": graphs, "compiled": compiled}
    return Asked(data, seeds, model, max_length, data_dir, side_by_side, overrides)


def _with_common_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `_asked` before its own; its first argument is what they say."""
    parameters: dict[str, inspect.Parameter] = {}
    for function in (_asked, command):
        hints = get_type_hints(function, {**globals(), "Asked": Any}, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            parameters[name] = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
    del parameters["asked"]
    common = inspect.signature(_asked).parameters

    def call(**values: Any) -> None:
        asked = _asked(**{name: values.pop(name) for name in common})
        command(asked, **values)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    call.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return call


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row for a terminal: metrics in percent, each in a column with its deviation, or a gain with its error."""
    columns = {name: value for name, value in row.items() if name != "metric"}
    for part, error in (("validation", "validation_deviation"), ("test", "test_deviation"), ("gain", "gain_error")):
        width = columns.pop(error, None)
        if width is not None:
            columns[part] = f"{100 * row[part]:.2f} ± {100 * width:.2f}"
    return columns


@_with_common_options
def accuracy_epochs(
    asked: Asked,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="also whole trainings of so many epochs, on test rows; several")
    ] = None,
    delta: Margin = None,
    out: Annotated[Path, results_option("accuracy-epochs")] = Path("accuracy-epochs"),
) -> None:
    """Validation metric against epochs for softmax and AS-Softmax, and when AS-Softmax is as good as softmax ever is.

    Each run is written to OUT.runs when it is done; started again, the command makes only what is missing.
    """
    with watched(out) as progress:
        from experiments import accuracy_epochs as suite
        from experiments.training_runs import make

        asked = asked.with_delta(delta)
        jobs = suite.plan_runs(asked, length or [])
        runs, failure = make(jobs, out, side_by_side=asked.side_by_side, progress=progress)
        rows = suite.summarise(runs)
        reached = suite.first_reached(rows)
        about = {**asked.about(), "lengths": length or [], "reached": reached}
        write_results(out, "accuracy-epochs", about, rows, suite.draw(rows))
        if failure is not None:
            raise failure
    say(out, reached)


@_with_common_options
def loss_accuracy(
    asked: Asked,
    rate: Annotated[
        list[float], typer.Option(min=1e-6, max=1e6, help="learning rate, in multiples of the recipe's; several")
    ] = [0.3, 1.0, 3.0],  # noqa: B006
    delta: Margins = [0.05, 0.1, 0.3],  # noqa: B006
    out: Annotated[Path, results_option("loss-accuracy")] = Path("loss-accuracy"),
) -> None:
    """How validation loss and validation metric go together, over epochs and settings, for softmax and AS-Softmax.

    Each run is written to OUT.runs when it is done; started again, the command makes only what is missing. All points
    are in OUT.points.csv.
    """
    with watched(out) as progress:
        from experiments import loss_accuracy as suite
        from experiments.training_runs import make

        jobs = suite.plan_runs(asked, rate, delta)
        runs, failure = make(jobs, out, side_by_side=asked.side_by_side, progress=progress)
        points = suite.points(runs)
        rows = suite.correlations(points)
        about = {**asked.about(), "rates": rate, "deltas": delta}
        write_results(out, "loss-accuracy", about, rows, suite.draw(points, rows))
        write_table(beside(out, ".points.csv"), {"experiment": "loss-accuracy, points", **about}, points)
        if failure is not None:
            raise failure
    say(out, suite.shown(rows), more=[".points.csv"])


@_with_common_options
def delta_sweep(
    asked: Asked,
    delta: Margins = [0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0],  # noqa: B006
    out: Annotated[Path, results_option("delta-sweep")] = Path("delta-sweep"),
) -> None:
    """Metric of AS-Softmax against delta, on validation and on test rows; a delta of 1 is plain softmax.

    Each run is written to OUT.runs when it is done; started again, the command makes only what is missing.
    """
    with watched(out) as progress:
        from experiments import delta_sweep as suite
        from experiments.training_runs import make

        jobs = suite.plan_runs(asked, delta)
        runs, failure = make(jobs, out, side_by_side=asked.side_by_side, progress=progress)
        rows = suite.summarise(runs)
        write_results(out, "delta-sweep", {**asked.about(), "deltas": delta}, rows, suite.draw(rows))
        if failure is not None:
            raise failure
    say(out, [_shown(row) for row in rows])


@_with_common_options
def accumulation(
    asked: Asked,
    lam: Annotated[list[float], typer.Option(help="lambda of AS-Speed; several")] = [0.5, 1.0],  # noqa: B006
    max_steps: Annotated[list[int], typer.Option(min=2, help="batches in a step at most; several")] = [2, 4],  # noqa: B006
    every: Annotated[int, typer.Option(min=1, help="steps between two points of the curves")] = 10,
    delta: Margin = None,
    out: Annotated[Path, results_option("accumulation")] = Path("accumulation"),
) -> None:
    """AS-Speed: batches in an optimizer step and solved rows against progress, and the speed-up over doing without.

    Each run is written to OUT.runs when it is done; started again, the command makes only what is missing. The curves
    are in OUT.curves.csv.
    """
    with watched(out) as progress:
        from experiments import accumulation as suite
        from experiments.training_runs import make

        asked = asked.with_delta(delta)
        jobs = suite.plan_runs(asked, lam, max_steps, every)
        runs, failure = make(jobs, out, side_by_side=asked.side_by_side, progress=progress)
        rows, curves = suite.summarise(runs), suite.curves(runs)
        about = {**asked.about(), "lambdas": lam, "max_steps": max_steps, "every": every}
        write_results(out, "accumulation", about, rows, suite.draw(rows, curves))
        write_table(beside(out, ".curves.csv"), {"experiment": "accumulation, curves", **about}, curves)
        if failure is not None:
            raise failure
    say(out, [_shown(row) for row in rows], more=[".curves.csv"])


COMMANDS = (accuracy_epochs, loss_accuracy, delta_sweep, accumulation)
