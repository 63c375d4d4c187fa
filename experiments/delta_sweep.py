"""How much depends on delta: the metric of whole trainings with AS-Softmax against its margin."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.training_runs import Asked, Run, grouped, percent, plan, say_seeds, spread
from softsieve.comparisons.losses import Job
from softsieve.comparisons.output import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = dict[str, Any]
PLAIN = 1.0  # the delta that is plain softmax


def plan_runs(asked: Asked, deltas: Sequence[float]) -> list[Job]:
    """AS-Softmax with every delta and seed."""
    return plan(asked, ["as-softmax"], lambda job: [{"delta": float(delta)} for delta in sorted(deltas)])


def summarise(runs: Sequence[Run]) -> list[Line]:
    """A line for every delta: both metrics over seeds, and how far the test metric is above that of plain softmax.

    Of each run the best epoch by validation counts. ``gain_error`` is the standard error of the difference, paired by
    seed; ``chosen`` says which delta the validation metric would choose.
    """
    lines = []
    for task, own in grouped(runs, lambda run: run["task"]).items():
        metric = own[0]["settings"]["metric"]
        by_delta = grouped(own, lambda run: run["settings"]["delta"])
        plain = {run["seed"]: run["test"][metric] for run in by_delta.get(PLAIN, [])}
        means = {delta: statistics.fmean(r["validation"][metric] for r in some) for delta, some in by_delta.items()}
        for delta, some in sorted(by_delta.items()):
            gains = [run["test"][metric] - plain[run["seed"]] for run in some if run["seed"] in plain]
            gain = spread("gain", gains)
            lines.append(
                {
                    "task": task,
                    "delta": delta,
                    "seeds": len(some),
                    "metric": metric,
                    **{
                        k: v for p in ("validation", "test") for k, v in spread(p, [r[p][metric] for r in some]).items()
                    },
                    "gain": gain["gain"],
                    "gain_error": (gain["gain_deviation"] or 0.0) / len(gains) ** 0.5 if len(gains) > 1 else None,
                    "chosen": means[delta] == max(means.values()),
                }
            )
    return lines


def draw(lines: Sequence[Line]) -> Figure:
    """Both metrics against delta, with plain softmax as a line across."""
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    figure = new_figure(5.5 * len(tasks), 4)
    for panel, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        own = [line for line in lines if line["task"] == task]
        for part, colour in (("validation", "tab:green"), ("test", "tab:purple")):
            means, bars = ([100 * line[name] for line in own] for name in (part, f"{part}_deviation"))
            style: dict[str, Any] = {"fmt": "o-", "ms": 3, "capsize": 2, "color": colour, "label": part}
            panel.errorbar([line["delta"] for line in own], means, bars, **style)
            for line in own:
                if line["delta"] == PLAIN:
                    panel.axhline(100 * line[part], color=colour, ls=":", lw=0.8, label=f"{part}, plain softmax")
        scale = "log" if own[0]["delta"] > 0 else "linear"
        panel.set(xscale=scale, xlabel="delta (1: plain softmax)", title=task)
        panel.set_ylabel(percent(own[0]["metric"]))
        panel.set_xticks([line["delta"] for line in own], [f"{line['delta']:g}" for line in own])
        panel.minorticks_off()
        panel.legend(fontsize="small")
    say_seeds(figure, lines)
    return figure
