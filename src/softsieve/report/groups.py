"""Runs that differ in the seed alone, as one line of a table with a name that says what sets it apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from softsieve.report.read import Run
from softsieve.report.words import Row, cell, deviation, grouped, is_number, spoken

# What a loss without a margin does not look at.
_OF_THE_MARGIN = ("delta", "initial_delta", "delta_ratio", "delta_shape", "speed_steps", "speed_lambda")
_RIVALS = {"infobatch": "InfoBatch", "selective-backprop": "Selective-Backprop", "seta": "SeTa"}
_UNSAID = ("seed", "labels", "parameters", "save_steps", "save_total_limit", "logging_steps", "eval_batch_size")


class Line(NamedTuple):
    """Runs of equal settings, the seed apart."""

    label: str
    runs: Sequence[Run]

    @property
    def settings(self) -> Row:
        """Of the first."""
        return self.runs[0].settings

    @property
    def seeds(self) -> str:
        """How many; where a seed was run more than once, that too."""
        different = len({run.settings["seed"] for run in self.runs})
        return f"{different}" if different == len(self.runs) else f"{different} ({len(self.runs)} runs)"

    def values(self, part: str, metric: str) -> list[float]:
        """A metric on a part of the data, of the runs that have it."""
        scores = [run.result.get(part) or {} for run in self.runs]
        return [score[metric] for score in scores if metric in score]

    def figures(self, name: str) -> list[float]:
        """A figure of the result, of the runs that have it."""
        return [run.result[name] for run in self.runs if is_number(run.result.get(name))]


def data_sets(runs: Sequence[Run]) -> Iterator[tuple[str, list[Line]]]:
    """Runs by what they were trained on, and there in lines: plain softmax first, others in the order given."""
    for data, own in grouped(runs, lambda run: str(run.settings["data"])).items():
        yield data, sorted(lines_of(own), key=lambda line: line.label != "softmax")


def lines_of(runs: Sequence[Run]) -> list[Line]:
    """Runs of equal settings together; lines of one name are told apart by the settings in which they differ."""
    groups = list(grouped(runs, lambda run: json.dumps(_telling(run.settings), sort_keys=True)).values())
    namesakes = grouped((_telling(group[0].settings) for group in groups), name_of)
    lines = []
    for group in groups:
        settings = _telling(group[0].settings)
        name = name_of(settings)
        lines.append(Line(", ".join([name, *_differences(settings, namesakes[name])]), group))
    return lines


def _telling(settings: Row) -> Row:
    """The settings that make a line what it is."""
    unsaid = _UNSAID if settings["loss"] == "as-softmax" else (*_UNSAID, *_OF_THE_MARGIN)
    return {name: value for name, value in settings.items() if name not in unsaid}


def _differences(settings: Row, others: Sequence[Row]) -> Iterator[str]:
    for name in sorted({name for other in others for name in other}):
        values = {json.dumps(other.get(name), sort_keys=True) for other in others}
        if len(values) > 1:
            yield f"{spoken(name)} {cell(settings.get(name)) or 'none'}"


def name_of(settings: Row) -> str:
    """What was trained with, in a few words.

    Example:
        >>> name_of({"loss": "as-softmax", "delta": 0.1, "skip": "solved"})
        'AS-Softmax, delta 0.1, solved rows skipped'
        >>> name_of({"loss": "softmax", "skip": "infobatch"})
        'softmax with InfoBatch'
    """
    name = str(settings["loss"])
    if name == "as-softmax":
        steps = settings.get("speed_steps")
        fast = isinstance(steps, int) and steps > 1
        name = "AS-Speed" if fast else f"AS-Softmax, delta {cell(settings.get('delta'))}"
    skip = str(settings.get("skip"))
    if skip in _RIVALS:
        name += f" with {_RIVALS[skip]}"
    if skip == "solved":
        name += ", solved rows skipped"
    return name + (", stopped early" if settings.get("patience") else "")


# -- curves ------------------------------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """A figure of the log over training, mean and deviation over the runs of a line."""

    label: str
    x: list[float]  # share of training that is done
    mean: list[float]
    deviation: list[float]
    runs: int


def curve(line: Line, kind: str, name: str) -> Curve | None:
    """Over the share of training that all runs of the line cover; None where the log has none of it."""
    logged = [_points(run.log, kind, name) for run in line.runs]
    return average(line.label, [points for points in logged if points])


def average(label: str, logged: Sequence[Sequence[tuple[float, float]]]) -> Curve | None:
    """Mean and deviation of several curves, at their own places where these agree, else between them.

    Example:
        >>> average("a", [[(0.0, 1.0), (1.0, 3.0)], [(0.0, 3.0), (1.0, 5.0)]]).mean
        [2.0, 4.0]
    """
    if not logged:
        return None
    places = [[x for x, _ in points] for points in logged]
    grid = places[0]
    if any(place != grid for place in places):
        first, last = max(place[0] for place in places), min(place[-1] for place in places)
        if last < first:
            return None
        size = min(200, max(map(len, places)))
        grid = np.linspace(first, last, size if last > first else 1).tolist()
    values = [np.interp(grid, xs, [y for _, y in points]).tolist() for xs, points in zip(places, logged, strict=True)]
    columns = list(zip(*values, strict=True))
    return Curve(label, grid, [fmean(c) for c in columns], [deviation(c) for c in columns], len(logged))


def _points(log: Sequence[Row], kind: str, name: str) -> list[tuple[float, float]]:
    """Progress and value, of increasing progress: a resumed run may have said things twice."""
    lines = [line for line in log if line["kind"] == kind and name in line]
    last = max((line["step"] for line in lines), default=0) or 1
    return sorted({line.get("progress", line["step"] / last): line[name] for line in lines}.items())
