"""Figures of ways to train: their scores, scores against time, and curves over training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from softsieve.report.figures import Axis, Panel, Trace, dots, plot
from softsieve.report.groups import Curve
from softsieve.report.page import Figure, Table
from softsieve.report.words import number, sentence, short, some, spoken

_POINTS = 12  # of a curve in its table


class Score(NamedTuple):
    """A metric of one way to train, over its seeds, in the unit that is shown."""

    label: str
    mean: float
    deviation: float
    runs: int
    seconds: float

    @property
    def text(self) -> str:
        """Mean and deviation; the mean alone where there is one run."""
        return f"{self.mean:,.2f}" + (f" ± {self.deviation:,.2f}" if self.runs > 1 else "")


def scale_of(metric: str) -> tuple[float, str]:
    """Factor and unit: shares are shown in per cent."""
    return (1.0, "") if metric == "loss" else (100.0, " %")


def score_figure(data: str, what: str, unit: str, scores: Sequence[Score]) -> Figure:
    """A point for each way to train; ``what`` is the metric and the part of the data, in words."""
    ordered = sorted(scores, key=lambda score: -score.mean)
    top, low = ordered[0], ordered[-1]
    words = f"Highest: {top.label}, {top.mean:.2f}{unit}; lowest: {low.label}, {low.mean:.2f}{unit}."
    if top.mean == low.mean:
        words = f"All are alike, {top.mean:.2f}{unit}."
    labels, means, deviations = zip(*((score.label, score.mean, score.deviation) for score in scores), strict=True)
    return Figure(
        sentence(what),
        f"{words} Bars reach one standard deviation over seeds to each side; where they overlap, a difference may be "
        "chance.",
        dots(labels, means, deviations, Axis(what, suffix=unit)),
        Table(
            f"{what}{unit} on {short(data, 60)}",
            ["trained with", "mean", "deviation", "runs"],
            [[score.label, f"{score.mean:.3f}", f"{score.deviation:.3f}", f"{score.runs}"] for score in ordered],
        ),
    )


def time_figure(data: str, what: str, unit: str, scores: Sequence[Score], seconds: str, note: str = "") -> Figure:
    """Scores against ``seconds``, which says what these are."""
    traces = [Trace(s.label, [s.seconds], [s.mean], error=[s.deviation], joined=False) for s in scores]
    fastest = min(scores, key=lambda score: score.seconds)
    return Figure(
        sentence(f"{what.partition(' ')[2]} against time"),
        f"Up is better, left is faster. Least time: {fastest.label}, {fastest.seconds:.1f} s, with "
        f"{fastest.mean:.2f}{unit}.{note}",
        plot([Panel(traces)], Axis(seconds, zero=True), Axis(what, suffix=unit)),
        Table(
            f"{what}{unit} and seconds on {short(data, 60)}",
            ["trained with", "seconds", f"{what}{unit}"],
            [[score.label, f"{score.seconds:.2f}", f"{score.mean:.3f}"] for score in scores],
        ),
    )


def curve_figure(data: str, curves: Sequence[Curve], kind: str, name: str, words: str) -> Figure:
    """What the lines of a ``kind`` in the log say of ``name``, over training."""
    scale, unit = scale_of(name)
    what = {"train loss": "training loss", "train solved": "solved rows"}.get(
        f"{kind} {name}", f"{kind} {spoken(name)}"
    )
    traces = [
        Trace(c.label, [100 * x for x in c.x], [scale * y for y in c.mean], error=[scale * e for e in c.deviation])
        for c in curves
    ]
    ends = "; ".join(
        f"{c.label} from {number(scale * c.mean[0], 3)} to {number(scale * c.mean[-1], 3)}{unit}" for c in curves[:4]
    )
    more = f", and {len(curves) - 4} more" if len(curves) > 4 else ""
    band = " Bands: one standard deviation over seeds." if any(any(c.deviation) for c in curves) else ""
    rows = [
        [c.label, f"{100 * c.x[i]:.0f}", f"{scale * c.mean[i]:.4g}", f"{scale * c.deviation[i]:.2g}", f"{c.runs}"]
        for c in curves
        for i in some(len(c.x), _POINTS)
    ]
    return Figure(
        sentence(f"{what} over training"),
        f"{ends}{more}. {words}{band}",
        plot([Panel(traces)], Axis("training done", suffix=" %"), Axis(what, suffix=unit, zero=name == "solved")),
        Table(
            f"{what}{unit} over training on {short(data, 60)}",
            ["trained with", "training done %", "mean", "deviation", "runs"],
            rows,
        ),
    )
