"""The trainings behind experiments on AS-Softmax: planned, each made once and kept in a file, and their figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from softsieve._files import only_one
from softsieve._progress import ProgressCallback, no_progress
from softsieve.comparisons import losses
from softsieve.comparisons.losses import Job
from softsieve.comparisons.output import beside
from softsieve.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Run = dict[str, Any]  # what `losses.run_job` says of one
Changes = Callable[[Job], Iterable[dict[str, Any]]]
LOSSES = ("softmax", "as-softmax")  # rows of `softsieve compare`, with their colours in pictures
COLOURS = dict(zip(LOSSES, ("tab:blue", "tab:orange"), strict=True))


class Asked(NamedTuple):
    """What all experiments on training are told."""

    tasks: list[str]  # presets, or files or folders of data
    seeds: int
    model: str | None  # name or folder of a pretrained encoder; None: the built-in one
    max_length: int | None  # of texts; None: as `softsieve train` has it
    data_dir: Path
    side_by_side: int
    overrides: dict[str, Any]  # settings instead of the recipe's

    def with_delta(self, delta: float | None) -> Asked:
        """The same with a margin, unless it is None."""
        return self if delta is None else self._replace(overrides={**self.overrides, "delta": delta})

    def about(self) -> dict[str, Any]:
        """For the head of a table, without folders, which mean nothing elsewhere."""
        names = {"tasks": [Path(task).name for task in self.tasks], "model": Path(self.model or "built-in").name}
        kept = ("seeds", "max_length", "side_by_side")
        return {**names, **{name: getattr(self, name) for name in kept}, **self.overrides}


def plan(asked: Asked, rows: Sequence[str], changes: Changes = lambda job: [{}]) -> list[Job]:
    """The runs of some rows of a comparison, each with all ``changes`` of its settings; none twice.

    Raises:
        InputError: when a data set has no validation data, and for what `losses.plan` refuses.
    """
    jobs = losses.plan(
        asked.tasks,
        rows,
        range(asked.seeds),
        model=asked.model,
        max_length=asked.max_length,
        data_dir=asked.data_dir,
        overrides=asked.overrides,
    )
    for task in asked.tasks:
        if losses.read_task(task, str(asked.data_dir)).validation is None:
            raise InputError(f"{task}: this experiment needs validation data, found none")
    changed = (replace(job, settings=replace(job.settings, **change)) for job in jobs for change in changes(job))
    return list(dict.fromkeys(changed))


def make(
    jobs: Sequence[Job], out: Path, *, side_by_side: int = 1, progress: ProgressCallback = no_progress
) -> tuple[list[Run], InputError | None]:
    """The runs in their order, and what to say of those that failed; what is in ``out``.runs is not made again.

    Raises:
        InputError: when all failed.
    """
    made: dict[Job, Run] = {}
    failure = None
    folder = beside(out, ".runs")
    with only_one(folder, "training"):
        try:
            for job, run in losses.run_all(jobs, folder, side_by_side=side_by_side):
                made[job] = run
                progress(f"{len(made)} of {len(jobs)} runs, {Path(job.task).name}", 1 / len(jobs))
        except InputError as error:
            failure = error
    if failure is not None and not made:
        raise failure
    return [made[job] for job in jobs if job in made], failure


def curve(run: Run, name: str = "validation_curve") -> list[dict[str, float]]:
    """What a run says of its way, in training or by validation.

    Raises:
        InputError: when it says nothing, or was made by a version that did not keep that.
    """
    which = f"{run['task']}, {run['row']}, seed {run['seed']}"
    wanted = {"training_curve": ("samples", "solved"), "validation_curve": ("loss", run["settings"]["metric"])}[name]
    lines: list[dict[str, float]] | None = run.get(name)
    if lines is None or any(key not in line for line in lines for key in ("progress", "step", *wanted)):
        raise InputError(f"{which}: expected a run with its {name}, found none: remove its file to make it again")
    if not lines:
        raise InputError(f"{which}: expected at least one line in its {name}, found none in {run['steps']} steps")
    return lines


def grouped(runs: Iterable[Run], key: Callable[[Run], Hashable]) -> dict[Any, list[Run]]:
    """Runs by a key, in the order in which keys come."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard deviation under a name; of no values, None.

    Example:
        >>> spread("test", [1.0, 3.0])
        {'test': 2.0, 'test_deviation': 1.4142135623730951}
    """
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0 if values else None
    return {name: statistics.fmean(values) if values else None, f"{name}_deviation": deviation}


def percent(metric: str) -> str:
    """A metric in words, for an axis."""
    return f"{metric.replace('_', ' ')} %"


def say_seeds(figure: Figure, lines: Iterable[dict[str, Any]]) -> None:
    """Above a picture, what its bars and bands are."""
    seeds = sorted({line["seeds"] for line in lines})
    many = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    figure.suptitle(f"means and standard deviations over {many} seeds", fontsize="small")
