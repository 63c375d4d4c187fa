"""AS-Speed on its way: batches of an optimizer step and solved rows against progress, and what that saves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.training_runs import Asked, Run, curve, grouped, percent, plan, say_seeds, spread
from softsieve.comparisons.losses import Job, machine_of
from softsieve.comparisons.output import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = dict[str, Any]
PARTS = 20  # of training, that curves are the means of


def plan_runs(asked: Asked, lambdas: Sequence[float], steps: Sequence[int], every: int) -> list[Job]:
    """AS-Softmax without AS-Speed, and with every lambda and number of batches; a log line ``every`` so many steps."""

    def changes(job: Job) -> list[dict[str, Any]]:
        if job.row == "as-softmax":
            return [{"logging_steps": every}]
        pairs = product(lambdas, sorted(steps))
        return [{"speed_lambda": float(lam), "speed_steps": most, "logging_steps": every} for lam, most in pairs]

    return plan(asked, ["as-softmax", "as-speed"], changes)


def _setting(run: Run) -> tuple[str, int, float | None]:
    """Of AS-Speed: data set, batches in a step at most, and lambda, which means nothing for one batch."""
    settings = run["settings"]
    return run["task"], settings["speed_steps"], settings["speed_lambda"] if run["row"] == "as-speed" else None


def summarise(runs: Sequence[Run]) -> list[Line]:
    """A line for every setting: the test metric over seeds beside medians of time, and the speed-up.

    ``speed`` is the time of a run without AS-Speed over this one's; ``training_speed`` the same without evaluations.
    Both are left out where not all runs were made on one machine that as many shared.
    """
    groups = grouped(runs, _setting)
    lines = []
    for (task, most, lam), own in groups.items():
        base = groups.get((task, 1, None), [])
        comparable = len({machine_of(run) for run in (*base, *own)}) == 1 and bool(base)
        metric = own[0]["settings"]["metric"]
        whole, training = _median(own, evaluating=True), _median(own, evaluating=False)
        lines.append(
            {
                "task": task,
                "max_steps": most,
                "lam": lam,
                "seeds": len(own),
                "metric": metric,
                **spread("test", [run["test"][metric] for run in own]),
                "steps": statistics.fmean(run["steps"] for run in own),
                "seconds": whole,
                "training_seconds": training,
                "speed": _median(base, evaluating=True) / whole if comparable else None,
                "training_speed": _median(base, evaluating=False) / training if comparable else None,
            }
        )
    return lines


def _median(runs: Sequence[Run], *, evaluating: bool) -> float:
    return float(statistics.median(run["seconds"] - (0 if evaluating else run["evaluation_seconds"]) for run in runs))


def curves(runs: Sequence[Run]) -> list[Line]:
    """For every setting and part of training, means over seeds: batches in a step, and the share of solved rows."""
    lines = []
    for (task, most, lam), own in grouped(runs, _setting).items():
        ways = [_way(run) for run in own]
        for part, figures in enumerate(zip(*ways, strict=True), 1):
            batches, solved = (statistics.fmean(values) for values in zip(*figures, strict=True))
            place = {"task": task, "max_steps": most, "lam": lam, "progress": (part - 0.5) / PARTS}
            lines.append({**place, "micro_batches": batches, "solved": solved})
    return lines


def _way(run: Run) -> list[tuple[float, float]]:
    """For every part of training the batches in a step and the share of solved rows, interpolated between log lines."""
    lines = curve(run, "training_curve")
    start = {"progress": 0.0, "step": 0, "samples": 0}
    end: dict[str, float] = {"progress": 1.0, "step": run["steps"], "samples": run["trained_rows"]}
    marks = [start, *lines, end]
    ends = np.linspace(0, 1, PARTS + 1)
    progress = [mark["progress"] for mark in marks]
    taken, rows = (np.diff(np.interp(ends, progress, [mark[what] for mark in marks])) for what in ("step", "samples"))
    middles = [
        (one + two) / 2 for one, two in pairwise(progress[:-1])
    ]  # a line's share is of the rows since the last one
    solved = np.interp((ends[:-1] + ends[1:]) / 2, middles, [line["solved"] for line in lines])
    batches = rows / taken / run["settings"]["batch_size"]
    return list(zip(batches.tolist(), solved.tolist(), strict=True))


def draw(lines: Sequence[Line], ways: Sequence[Line]) -> Figure:
    """Batches in a step and solved rows on the way; and what came of it: the test metric against seconds."""
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    figure = new_figure(14, 4 * len(tasks))
    for row, task in zip(figure.subplots(len(tasks), 3, squeeze=False), tasks, strict=True):
        own = [line for line in lines if line["task"] == task]
        for line in own:
            key = task, line["max_steps"], line["lam"]
            way = [one for one in ways if (one["task"], one["max_steps"], one["lam"]) == key]
            done = [100 * one["progress"] for one in way]
            row[0].plot(done, [one["micro_batches"] for one in way], label=_name(line))
            row[1].plot(done, [100 * one["solved"] for one in way])
            row[2].errorbar(
                line["training_seconds"], 100 * line["test"], 100 * line["test_deviation"], fmt="o", ms=4, capsize=2
            )
        row[0].set(xlabel="% of training", ylabel="batches in an optimizer step", title=task)
        row[1].set(xlabel="% of training", ylabel="solved rows %", title=task)
        row[2].set(xlabel="seconds of training, median", ylabel=f"test {percent(own[0]['metric'])}", title=task)
        row[2].set_xlim(0, 1.1 * max(line["training_seconds"] for line in own))
        row[0].legend(fontsize="small")
    say_seeds(figure, lines)
    return figure


def _name(line: Line) -> str:
    speed = "" if line["training_speed"] is None else f", {line['training_speed']:.2f}x as fast"
    if line["max_steps"] == 1:
        return "without AS-Speed"
    return f"at most {line['max_steps']}, lambda {line['lam']:g}{speed}"
