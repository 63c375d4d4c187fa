"""Trained models: a table of each data set, and how loss, metric and solved share went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from softsieve.report.figures import MOST
from softsieve.report.groups import Line, curve, data_sets
from softsieve.report.page import Block, Column, Part, Section, Table, Words
from softsieve.report.read import Run
from softsieve.report.scores import Score, curve_figure, scale_of, score_figure, time_figure
from softsieve.report.words import Best, cell, count, deviation, list_of, machine, sentence, short, spoken, spread

PARTS = ("test", "validation")
COSTS = (  # title, name in the record, factor, digits
    ("seconds", "seconds", 1, 1),
    ("rows trained", "trained", 1, 0),
    ("rows only screened", "screened", 1, 0),
    ("solved when last seen %", "solved", 100, 1),
    ("steps", "steps", 1, 0),
)


def section(runs: Sequence[Run]) -> Section:
    """Of all training runs."""
    parts: list[Part] = []
    glance: list[str] = []
    for data, lines in data_sets(runs):
        judged = _judge(lines)
        parts.append(Part(short(data, 80), list(_blocks(data, lines, judged)), _about(lines)))
        glance += _gist(data, lines, judged)
    return Section(
        title="Trained models",
        how="Each line of a table is one way to train; mean ± standard deviation over runs that differ in the seed "
        "alone. Solved: rows whose label beats every other class by the margin delta, so that they no longer teach "
        "the model anything and get no gradient.",
        parts=parts,
        glance=glance,
    )


def _about(lines: Sequence[Line]) -> str:
    """The data and the model in a sentence."""
    settings = lines[0].settings
    said = [f"{settings['kind']} data" if settings.get("kind") else ""]
    if isinstance(settings.get("classes"), int):
        said.append(count(settings["classes"], "class", "classes"))
    if isinstance(settings.get("rows"), dict):
        said.append("rows: " + cell(settings["rows"]))
    models = dict.fromkeys(cell(line.settings.get("model")) for line in lines)
    sizes = dict.fromkeys(cell(line.settings.get("parameters")) for line in lines)
    said.append(f"model: {list_of([m for m in models if m])} ({list_of([s for s in sizes if s])} parameters)")
    for name in ("epochs", "batch_size", "learning_rate"):
        values = dict.fromkeys(cell(line.settings.get(name)) for line in lines)
        if len(values) == 1 and next(iter(values)):
            said.append(f"{spoken(name)} {next(iter(values))}")
    return sentence("; ".join(filter(None, said))) + "."


# -- the table ---------------------------------------------------------------------------------------------------------


class _Judged(NamedTuple):
    """What lines are compared by, and how they do: the metric on test rows, where all lines have those."""

    part: str  # of the data
    metric: str
    sign: int  # 1 where more of the metric is better, else -1
    scores: list[Score]  # of the lines that have one

    @property
    def what(self) -> str:
        """The part and the metric in words."""
        return f"{self.part} {spoken(self.metric)}"


def _judge(lines: Sequence[Line]) -> _Judged:
    settings = lines[0].settings
    metric, more = settings["metric"], settings.get("greater_is_better")
    part = "test" if all(line.values("test", metric) for line in lines) else "validation"
    scale, _ = scale_of(metric)
    scores = []
    for line in lines:
        if values := line.values(part, metric):
            mean, seconds = scale * fmean(values), fmean(line.figures("seconds"))
            scores.append(Score(line.label, mean, scale * deviation(values), len(values), seconds))
    return _Judged(part, metric, 1 if (metric != "loss" if more is None else more) else -1, scores)


def _tables(data: str, lines: Sequence[Line], judged: _Judged) -> Iterator[Table]:
    """What lines are compared by with its cost, and all that was measured besides."""
    measured = {
        (where, name) for line in lines for run in line.runs for where in PARTS for name in run.result.get(where) or {}
    }
    # Those that lines are compared by come first.
    ordered = sorted(measured, key=lambda m: (PARTS.index(m[0]), m[1] != judged.metric, m[1] == "loss", m[1]))
    scores = {pair: _score(lines, *pair, judged) for pair in ordered}
    first = judged.part, judged.metric
    named: dict[str, Column] = {"trained with": lambda line: line.label}
    main: dict[str, Column] = {
        **named,
        "seeds": lambda line: line.seeds,
        **({f"{judged.what}{scale_of(judged.metric)[1]}": scores[first]} if first in scores else {}),
        **{title: _cost(name, scale, digits) for title, name, scale, digits in COSTS},
    }
    used = {title: show for title, show in main.items() if any(map(show, lines))}
    yield Table.of(f"{short(data, 80)}: mean ± standard deviation over seeds; the best in bold", lines, used)
    for part in PARTS:
        own = (pair for pair in ordered if pair[0] == part and pair != first)
        others = {f"{spoken(name)}{scale_of(name)[1]}": scores[part, name] for _, name in own}
        if others:
            yield Table.of(f"{short(data, 80)}: the other figures of {part} rows", lines, {**named, **others})


def _score(lines: Sequence[Line], part: str, metric: str, judged: _Judged) -> Column:
    scale, _ = scale_of(metric)
    scored = [line for line in lines if line.values(part, metric) and metric == judged.metric and len(lines) > 1]
    best = max(scored, key=lambda line: judged.sign * fmean(line.values(part, metric)), default=None)

    def show(line: Line) -> str:
        text = spread(line.values(part, metric), scale=scale, digits=2 if scale > 1 else 3)
        return Best(text) if line is best else text

    return show


def _cost(name: str, scale: float, digits: int) -> Column:
    return lambda line: spread(line.figures(name), scale=scale, digits=digits)


def _gist(data: str, lines: Sequence[Line], judged: _Judged) -> Iterator[str]:
    scores, unit = judged.scores, scale_of(judged.metric)[1]
    if not scores:
        return
    best = max(scores, key=lambda score: judged.sign * score.mean)
    base = next((score for score in scores if score.label == "softmax"), None)
    text = f"{short(data, 60)}: {best.label} has the best {judged.what}, {best.text}{unit}"
    if base is not None and base is not best:
        gap, noise = abs(best.mean - base.mean), max(best.deviation, base.deviation)
        within = ", the same" if gap == 0 else ", a difference within one deviation" if gap <= noise else ""
        text += f"; softmax has {base.text}{unit}{within}"
    yield text + "."
    fastest = min(scores, key=lambda score: score.seconds)
    machines = {machine(run.record.provenance) for line in lines for run in line.runs}
    if base is not None and fastest is not base and len(machines) == 1:
        yield (
            f"{short(data, 60)}: {fastest.label} takes {base.seconds / fastest.seconds:.1f} times less time than "
            f"softmax; its {judged.what} is {fastest.text}{unit}, that of softmax {base.text}{unit}."
        )


# -- figures -----------------------------------------------------------------------------------------------------------

_TRAINED = {
    "loss": "Losses of different names are different functions: compare their shapes, not their heights.",
    "solved": "Of the rows that were trained: solved ones get no gradient. Those that skipping leaves out are not "
    "among them.",
}


def _blocks(data: str, lines: Sequence[Line], judged: _Judged) -> Iterator[Block]:
    yield from _tables(data, lines, judged)
    what, unit, scores = judged.what, scale_of(judged.metric)[1], judged.scores
    best = {score.label for score in sorted(scores, key=lambda score: -judged.sign * score.mean)[:MOST]}
    drawn = [line for line in lines if line.label in best] or list(lines[:MOST])
    if len(lines) > len(drawn):
        yield Words(f"The curves are those of the {len(drawn)} lines with the best {what}.")
    if len(scores) > 1:
        yield score_figure(data, what, unit, scores)
        note = " Times compare only between runs on one machine."
        yield time_figure(data, what, unit, scores, "seconds of training", note)
    for kind, name in (("train", "loss"), ("validation", judged.metric), ("train", "solved")):
        curves = [one for line in drawn if (one := curve(line, kind, name)) is not None]
        if curves:
            words = "Measured on rows that were not trained on." if kind == "validation" else _TRAINED[name]
            yield curve_figure(data, curves, kind, name, words)
