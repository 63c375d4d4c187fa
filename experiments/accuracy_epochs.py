"""Does AS-Softmax get there sooner? The metric against epochs, within a training and of shorter and longer ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.training_runs import COLOURS, LOSSES, Asked, Run, curve, grouped, percent, plan, say_seeds, spread
from softsieve.comparisons.losses import Job
from softsieve.comparisons.output import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = dict[str, Any]


def plan_runs(asked: Asked, lengths: Sequence[int]) -> list[Job]:
    """Both losses with every seed, for the recipe's epochs and for all ``lengths`` of training."""
    return plan(asked, LOSSES, lambda job: [{}, *({"epochs": length} for length in lengths)])


def summarise(runs: Sequence[Run]) -> list[Line]:
    """A line for every epoch of every length of training: the validation metric then, over seeds.

    The last epoch also has the test metric of the whole training, at each run's best epoch by validation.
    """
    lines = []
    groups = grouped(runs, lambda run: (run["task"], run["row"], run["settings"]["epochs"]))
    for (task, loss, epochs), own in groups.items():
        metric, curves = own[0]["settings"]["metric"], [curve(run) for run in own]
        for epoch, judged in enumerate(zip(*curves, strict=True), 1):
            test = [run["test"][metric] for run in own] if epoch == epochs else []
            lines.append(
                {
                    "task": task,
                    "loss": loss,
                    "epochs": epochs,
                    "epoch": epoch,
                    "trained_rows": epoch * own[0]["rows"]["train"],
                    "seeds": len(own),
                    "metric": metric,
                    **spread("validation", [line[metric] for line in judged]),
                    **spread("test", test),
                }
            )
    return lines


def first_reached(lines: Sequence[Line]) -> list[Line]:
    """Where AS-Softmax is first as good as softmax ever is, by the means over seeds.

    For every data set: within each length of training by validation, and among the lengths, if there are several, by
    the test metric of whole trainings.
    """
    found = []
    for task in dict.fromkeys(line["task"] for line in lines):
        own = [line for line in lines if line["task"] == task]
        lengths = list(dict.fromkeys(line["epochs"] for line in own))
        for length in lengths:
            found += _reached(f"{length} epochs", [line for line in own if line["epochs"] == length], "validation")
        if len(lengths) > 1:
            found += _reached("any length", [line for line in own if line["test"] is not None], "test")
    return found


def _reached(training: str, lines: Sequence[Line], part: str) -> list[Line]:
    theirs, ours = ([line for line in lines if line["loss"] == loss] for loss in LOSSES)
    if not theirs or not ours:  # all runs of one loss failed
        return []
    best = max(theirs, key=lambda line: (line[part], -line["epoch"]))
    first = min((line for line in ours if line[part] >= best[part]), key=lambda line: line["epoch"], default=None)
    return [
        {
            "task": best["task"],
            "training": training,
            "part": part,
            "best": best[part],
            "at_epoch": best["epoch"],
            "as_epoch": None if first is None else first["epoch"],
            "as_rows": None if first is None else first["trained_rows"],
            "share": None if first is None else first["epoch"] / best["epoch"],
        }
    ]


def draw(lines: Sequence[Line]) -> Figure:
    """The longest training's curve by validation; and, where there are several lengths, the test metric of each."""
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    several = len({(line["task"], line["epochs"]) for line in lines}) > len(tasks)
    figure = new_figure(11 if several else 5.5, 4 * len(tasks))
    panels = figure.subplots(len(tasks), 2 if several else 1, squeeze=False)
    for row, task in zip(panels, tasks, strict=True):
        own = [line for line in lines if line["task"] == task]
        _draw_curve(row[0], [line for line in own if line["epochs"] == max(one["epochs"] for one in own)])
        if several:
            _draw_lengths(row[1], [line for line in own if line["test"] is not None])
    say_seeds(figure, lines)
    return figure


def _draw_curve(panel: Any, lines: Sequence[Line]) -> None:
    first = lines[0]
    for loss in LOSSES:
        own = [line for line in lines if line["loss"] == loss]
        epochs, means = [line["epoch"] for line in own], [100 * line["validation"] for line in own]
        bars = [100 * line["validation_deviation"] for line in own]
        panel.plot(epochs, means, "o-", ms=3, color=COLOURS[loss], label=loss)
        low, high = ([mean + sign * bar for mean, bar in zip(means, bars, strict=True)] for sign in (-1, 1))
        panel.fill_between(epochs, low, high, color=COLOURS[loss], alpha=0.15, lw=0)
    for found in _reached("", lines, "validation"):
        panel.axhline(100 * found["best"], color="black", ls=":", lw=0.8, label="softmax at its best")
        if found["as_epoch"] is not None:
            style: dict[str, Any] = {"color": COLOURS["as-softmax"], "ls": ":", "lw": 0.8}
            panel.axvline(found["as_epoch"], **style, label="as-softmax is as good")
    size = first["trained_rows"] / first["epoch"]
    above = panel.secondary_xaxis("top", functions=(lambda epoch: epoch * size / 1000, lambda rows: rows * 1000 / size))
    above.set_xlabel("thousands of rows trained")
    panel.set_xlabel(f"epoch of {first['epochs']}")
    panel.set_ylabel(f"validation {percent(first['metric'])}")
    panel.set_title(f"{first['task']}, one training")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.legend(fontsize="small")


def _draw_lengths(panel: Any, lines: Sequence[Line]) -> None:
    for loss in LOSSES:
        own = sorted((line for line in lines if line["loss"] == loss), key=lambda line: line["epochs"])
        means, bars = ([100 * line[name] for line in own] for name in ("test", "test_deviation"))
        panel.errorbar([line["epochs"] for line in own], means, bars, fmt="o-", ms=3, capsize=2, color=COLOURS[loss])
    lengths = sorted({line["epochs"] for line in lines})
    panel.set(xscale="log", xlabel="epochs of a whole training", ylabel=f"test {percent(lines[0]['metric'])}")
    panel.set_xticks(lengths, [str(length) for length in lengths])
    panel.minorticks_off()
    panel.set_title(f"{lines[0]['task']}, whole trainings")
