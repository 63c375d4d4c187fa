"""Does a lower loss mean a better model? Validation loss beside the validation metric, for softmax and AS-Softmax."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from experiments.training_runs import LOSSES, Asked, Run, curve, grouped, percent, plan
from softsieve.comparisons.losses import Job
from softsieve.comparisons.output import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = dict[str, Any]
Array = NDArray[np.float64]
WITHIN, EVERY, LAST = "within runs", "all epochs", "last epochs"  # the mean over runs, all together, one of each run
RESAMPLES = 1000  # of the runs, for intervals
MARKERS = "osD^v*"


def plan_runs(asked: Asked, rates: Sequence[float], deltas: Sequence[float]) -> list[Job]:
    """Both losses with every seed and multiple of the recipe's learning rate, AS-Softmax also with every delta."""

    def changes(job: Job) -> list[dict[str, Any]]:
        learning_rates = [float(f"{job.settings.learning_rate * rate:.3g}") for rate in rates]
        margins = [{"delta": float(delta)} for delta in deltas] if job.settings.adaptive else [{}]
        return [{"learning_rate": rate, **margin} for rate in learning_rates for margin in margins]

    return plan(asked, LOSSES, changes)


def points(runs: Sequence[Run]) -> list[Point]:
    """A point for every epoch of every run: validation loss, in the run's own loss, and validation metric."""
    found = []
    for number, run in enumerate(runs):
        settings, lines = run["settings"], curve(run)
        for epoch, line in enumerate(lines, 1):
            found.append(
                {
                    "task": run["task"],
                    "run": number,
                    "loss": run["row"],
                    "delta": settings["delta"] if run["row"] == "as-softmax" else None,
                    "learning_rate": settings["learning_rate"],
                    "seed": run["seed"],
                    "epoch": epoch,
                    "last": epoch == len(lines),
                    "validation_loss": line["loss"],
                    "metric": settings["metric"],
                    "validation": line[settings["metric"]],
                }
            )
    return found


def correlations(found: Sequence[Point], *, seed: int = 0) -> list[dict[str, Any]]:
    """How loss and metric go together: -1 is best, as a low loss should mean a high metric.

    Deltas are different losses, so those of AS-Softmax are also judged one by one. Intervals hold 95 % of the values
    for runs that are drawn anew from all runs, with replacement.
    """
    lines = []
    for (task, loss), own in grouped(found, lambda point: (point["task"], point["loss"])).items():
        deltas = sorted({point["delta"] for point in own} - {None})
        for delta in [*deltas, "all"] if len(deltas) > 1 else deltas or [None]:
            some = [point for point in own if delta in ("all", point["delta"])]
            for over in (WITHIN, EVERY, LAST):
                lines.append({"task": task, "loss": loss, "delta": delta, "over": over, **_judge(some, over, seed)})
    return lines


def _judge(some: Sequence[Point], over: str, seed: int) -> dict[str, Any]:
    runs = grouped([point for point in some if over != LAST or point["last"]], lambda point: point["run"]).values()
    losses, metrics = (np.array([[p[name] for p in own] for own in runs]) for name in ("validation_loss", "validation"))
    judged: dict[str, Any] = {"runs": len(losses), "points": losses.size}
    for name, correlate in {"pearson": pearson, "spearman": spearman}.items():
        value, low, high = _interval(losses, metrics, correlate, within=over == WITHIN, seed=seed)
        judged |= {name: value, f"{name}_low": low, f"{name}_high": high}
    return judged


def _interval(
    losses: Array, metrics: Array, correlate: Callable[[Array, Array], Array], *, within: bool, seed: int
) -> tuple[float | None, float | None, float | None]:
    """A correlation over runs (runs, epochs), and the ends of its interval; None where it is not defined."""
    count = len(losses)
    draws = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    draws = np.concatenate([np.arange(count)[None], draws])
    if within:
        own = correlate(losses, metrics)
        known = np.isfinite(own)[draws]
        total = np.where(known, own[draws], 0).sum(1)
        values = np.where(known.any(1), total / np.maximum(known.sum(1), 1), np.nan)
    else:
        values = correlate(losses[draws].reshape(len(draws), -1), metrics[draws].reshape(len(draws), -1))
    if not np.isfinite(values[0]):
        return None, None, None
    low, high = np.nanquantile(values, (0.025, 0.975))
    return float(values[0]), float(low), float(high)


def pearson(x: Array, y: Array) -> Array:
    """Pearson's correlation (...) of points (..., n); NaN of fewer than three, or where one of the two does not vary.

    Example:
        >>> pearson(np.array([1.0, 2.0, 3.0]), np.array([[3.0, 2.0, 0.0], [1.0, 1.0, 1.0]])).round(4)
        array([-0.982,    nan])
    """
    known = (np.ptp(x, -1) > 0) & (np.ptp(y, -1) > 0) & (x.shape[-1] > 2)
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    scale = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    return np.where(known, (x * y).sum(-1) / np.where(known, scale, 1), np.nan)


def spearman(x: Array, y: Array) -> Array:
    """Spearman's correlation, that of ranks, where equal values share theirs."""
    from scipy.stats import rankdata

    return pearson(rankdata(x, axis=-1), rankdata(y, axis=-1))


def shown(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The correlations with their intervals in a column each, for a terminal."""
    named = ("task", "loss", "delta", "over", "points")
    return [
        {name: line[name] for name in named} | {name: _words(line, name) for name in ("pearson", "spearman")}
        for line in lines
    ]


def _words(line: dict[str, Any], name: str) -> str:
    if line[name] is None:
        return "none"
    return f"{line[name]:.3f} ({line[f'{name}_low']:.3f} to {line[f'{name}_high']:.3f})"


def draw(found: Sequence[Point], lines: Sequence[dict[str, Any]]) -> Figure:
    """Every epoch of every run, a panel for each loss of each data set."""
    from matplotlib.ticker import MaxNLocator

    tasks = list(dict.fromkeys(point["task"] for point in found))
    figure = new_figure(11, 4.5 * len(tasks))
    panels = figure.subplots(len(tasks), len(LOSSES), squeeze=False, sharey="row")
    for row, task in zip(panels, tasks, strict=True):
        for panel, loss in zip(row, LOSSES, strict=True):
            own = [point for point in found if (point["task"], point["loss"]) == (task, loss)]
            said = [line for line in lines if (line["task"], line["loss"], line["over"]) == (task, loss, EVERY)]
            if own:  # not all of its runs failed
                dots = _draw_points(panel, own, {line["delta"]: _short(line) for line in said})
                row[0].set_ylabel(f"validation {percent(own[0]['metric'])}")
                panel.set_title(f"{task}, {loss}, {_short(said[-1])}")
        figure.colorbar(dots, ax=list(row), label="epoch", ticks=MaxNLocator(integer=True))
    figure.suptitle(
        "a point for every epoch, a line for every run; Pearson / Spearman correlations over all points",
        fontsize="small",
    )
    return figure


def _draw_points(panel: Any, own: Sequence[Point], words: Mapping[Any, str]) -> Any:
    by_delta = grouped(own, lambda point: point["delta"])
    for (delta, some), marker in zip(sorted(by_delta.items()), cycle(MARKERS), strict=False):
        x, y = [point["validation_loss"] for point in some], [100 * point["validation"] for point in some]
        colours = {"c": [point["epoch"] for point in some], "vmin": 1, "vmax": max(p["epoch"] for p in own)}
        dots = panel.scatter(x, y, 14, **colours, marker=marker, alpha=0.7, lw=0, label=words[delta])
        for run in grouped(some, lambda point: point["run"]).values():
            way = [(point["validation_loss"], 100 * point["validation"]) for point in run]
            panel.plot(*zip(*way, strict=True), color="grey", alpha=0.4, lw=0.5, zorder=0)
    if len(by_delta) > 1:
        panel.legend(fontsize="small")
    panel.set_xlabel(f"validation loss of {own[0]['loss']}, nats")
    return dots


def _short(line: dict[str, Any]) -> str:
    which = "" if line["delta"] is None else "all deltas: " if line["delta"] == "all" else f"delta {line['delta']:g}: "
    both = ["none" if line[name] is None else f"{line[name]:.3f}" for name in ("pearson", "spearman")]
    return which + " / ".join(both)
