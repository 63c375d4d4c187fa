"""Fair tuning: as many trials for every row of a table, judged on validation rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from softsieve import _checks
from softsieve.comparisons.losses import Job, Outcome, read_task, say_settings, tuned
from softsieve.comparisons.recipes import draw
from softsieve.errors import InputError

SEED = 1_000_000  # of all trials, and of no run that is judged on test rows


class Search(NamedTuple):
    """What a search came to."""

    jobs: list[Job]  # of the comparison, with the settings of each row's best trial
    trials: list[dict[str, Any]]  # every trial, as the record has it
    failed: list[str]  # rows of which no trial came to an end, and why the first did not


def plan_trials(jobs: Sequence[Job], count: int) -> list[Job]:
    """The trials of a comparison's rows, ``count`` for each on every data set, the recipe first.

    Raises:
        InputError: when there is nothing to search, nothing to judge by, or a run has the seed of the trials.
        TypeError, ValueError: when the count is no whole number of at least 1.
    """
    _checks.whole_number("search", count, 1, 10_000)
    if not jobs:
        raise InputError("search: expected rows to search for, found none")
    if any(job.settings.seed == SEED for job in jobs):
        raise InputError(f"seeds: expected others than {SEED}, which is that of the trials")
    for task, data_dir in dict.fromkeys((job.task, job.data_dir) for job in jobs):
        if read_task(task, data_dir).validation is None:
            raise InputError(f"{task}: a search needs validation data, found none")
    return [_trial(job, number) for job in _rows(jobs) for number in range(1, count + 1)]


def _rows(jobs: Sequence[Job]) -> list[Job]:
    """The first job of every row on every data set."""
    first: dict[tuple[str, str], Job] = {}
    for job in jobs:
        first.setdefault((job.task, job.row), job)
    return list(first.values())


def _trial(job: Job, number: int) -> Job:
    settings = job.settings
    changes = draw(job.row, number, epochs=settings.epochs, learning_rate=settings.learning_rate)
    return replace(job, settings=replace(settings, seed=SEED, **changes), trial=True)


def conclude(jobs: Sequence[Job], trials: Sequence[Job], outcomes: Mapping[Job, Outcome]) -> Search:
    """What the trials say: for every row the settings that were best, of equal ones the first."""
    found = Search([], [], [])
    best: dict[tuple[str, str], Job] = {}
    for row in _rows(jobs):
        own = [trial for trial in trials if (trial.task, trial.row) == (row.task, row.row)]
        ended = [trial for trial in own if isinstance(outcomes[trial], dict)]
        if ended:
            best[row.task, row.row] = max(ended, key=lambda trial: _merit(trial, outcomes[trial]))
        else:
            name = f"{Path(row.task).name} {row.row}"
            found.failed.append(f"{name}: all trials failed, the first: {outcomes[own[0]]}")
        chosen = best.get((row.task, row.row))
        numbered = enumerate(own, 1)
        found.trials.extend(_record(number, trial, outcomes[trial], trial == chosen) for number, trial in numbered)
    for job in jobs:
        if (chosen := best.get((job.task, job.row))) is not None:
            found.jobs.append(replace(chosen, settings=replace(chosen.settings, seed=job.settings.seed), trial=False))
    return found


def _merit(trial: Job, run: Any) -> tuple[float, float]:
    """More is better: the metric of the settings; of equal ones the one of the smaller loss."""
    sign = 1 if trial.settings.greater_is_better else -1
    return sign * run["validation"][trial.settings.metric], -run["validation"]["loss"]


def _record(number: int, trial: Job, outcome: Outcome, chosen: bool) -> dict[str, Any]:
    ended = {} if isinstance(outcome, str) else outcome
    return {
        "task": Path(trial.task).name,
        "row": trial.row,
        "trial": number,
        "metric": trial.settings.metric,
        "validation": ended.get("validation", {}),
        "seconds": ended.get("seconds"),
        "failed": outcome if isinstance(outcome, str) else None,
        "chosen": chosen,
        "settings": trial.settings.asdict(),
    }


def markdown(trials: Sequence[dict[str, Any]]) -> str:
    """The table of what was chosen, for people."""
    if not trials:
        return ""
    rows = list(dict.fromkeys((trial["task"], trial["row"]) for trial in trials))
    count = max(trial["trial"] for trial in trials)
    text = [
        "\n## Settings found by search\n",
        f"{count} trials of every row, each one run with the seed {SEED}, judged on the validation rows at its best",
        "epoch; no test row was seen. The first trial is the recipe; the others have learning rates, epochs and, where",
        "the loss has one, its parameter from a fixed sequence: all rows have the same learning rates and epochs.\n",
        "| | | trials | failed | chosen | validation % |",
        "|---|---|---|---|---|---|",
    ]
    for task, row in rows:
        own = [trial for trial in trials if (trial["task"], trial["row"]) == (task, row)]
        failed = [trial["failed"] for trial in own if trial["failed"] is not None]
        said, score = f"none: {failed[0].replace('|', '/')}" if failed else "", ""
        for trial in own:
            if trial["chosen"]:
                said = f"trial {trial['trial']}: {say_settings(tuned(trial['settings']))}"
                score = f"{100 * trial['validation'][trial['metric']]:.2f}"
        text.append(f"| {task} | {row} | {len(own)} | {len(failed)} | {said} | {score} |")
    return "\n".join(text) + "\n"
