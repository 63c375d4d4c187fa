"""Trained models: a table of each data set, and how loss, metric and solved share went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from softsieve.report.figures import MOST
from softsieve.report.groups import Line, curve, data_sets
from softsieve.report.page import Block, Part, Section, Table, Words
from softsieve.report.read import Run
from softsieve.report.scores import Score, curve_figure, scale_of, score_figure, time_figure
from softsieve.report.words import (
    Best,
    Column,
    cell,
    count,
    deviation,
    list_of,
    machine,
    sentence,
    short,
    spoken,
    spread,
)

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
        parts.append(Part(title=short(data, 80), how=_about(lines), blocks=list(_blocks(data, lines))))
        glance += _gist(data, lines)
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


def judged(lines: Sequence[Line]) -> tuple[str, str]:
    """The part of the data and the metric that lines are compared by: test rows, where there are any."""
    metric = lines[0].settings["metric"]
    part = "test" if all(line.values("test", metric) for line in lines) else "validation"
    return part, metric


def _best(lines: Sequence[Line], part: str, metric: str) -> Line | None:
    """The line of the best mean."""
    scored = [line for line in lines if line.values(part, metric)]
    return max(scored, key=lambda line: _sign(line, metric) * fmean(line.values(part, metric)), default=None)


def _sign(line: Line, metric: str) -> int:
    """1 where more of the metric is better, else -1."""
    more = line.settings.get("greater_is_better") if metric == line.settings["metric"] else None
    return 1 if (metric != "loss" if more is None else more) else -1


def _table(data: str, lines: Sequence[Line]) -> Table:
    part, chosen = judged(lines)
    measured = {
        (where, name) for line in lines for run in line.runs for where in PARTS for name in run.result.get(where) or {}
    }
    # Those that lines are compared by come first.
    ordered = sorted(measured, key=lambda pair: (PARTS.index(pair[0]), pair[1] != chosen, pair[1] == "loss", pair[1]))
    scores = {pair: _score(lines, *pair) for pair in ordered}
    titles = {(where, name): f"{where} {spoken(name)}{scale_of(name)[1]}" for where, name in ordered}
    first = (part, chosen)
    columns: dict[str, Column] = {
        "trained with": lambda line: line.label,
        "seeds": lambda line: line.seeds,
        **({titles[first]: scores[first]} if first in scores else {}),
        **{title: _cost(name, scale, digits) for title, name, scale, digits in COSTS},
        **{titles[pair]: show for pair, show in scores.items() if pair != first},
    }
    used = {title: show for title, show in columns.items() if any(map(show, lines))}
    return Table.of(f"{short(data, 80)}: mean ± standard deviation over seeds; the best in bold", lines, used)


def _score(lines: Sequence[Line], part: str, metric: str) -> Column:
    scale, _ = scale_of(metric)
    best = _best(lines, part, metric) if len(lines) > 1 and metric == lines[0].settings["metric"] else None

    def show(line: Line) -> str:
        text = spread(line.values(part, metric), scale=scale, digits=2 if scale > 1 else 3)
        return Best(text) if line is best else text

    return show


def _cost(name: str, scale: float, digits: int) -> Column:
    return lambda line: spread(line.figures(name), scale=scale, digits=digits)


def _gist(data: str, lines: Sequence[Line]) -> Iterator[str]:
    part, metric = judged(lines)
    best = _best(lines, part, metric)
    if best is None:
        return
    scale, unit = scale_of(metric)

    def said(line: Line) -> str:
        return f"{spread(line.values(part, metric), scale=scale)}{unit}"

    text = f"{short(data, 60)}: {best.label} has the best {part} {spoken(metric)}, {said(best)}"
    base = next((line for line in lines if line.label == "softmax"), None)
    if base is not None and base is not best and base.values(part, metric):
        gap = abs(fmean(best.values(part, metric)) - fmean(base.values(part, metric)))
        noise = max(deviation(best.values(part, metric)), deviation(base.values(part, metric)))
        within = "the same" if gap == 0 else "a difference within one deviation" if gap <= noise else ""
        text += f"; softmax has {said(base)}" + (f", {within}" if within else "")
    yield text + "."
    if base is None or len({machine(run.record.provenance) for line in lines for run in line.runs}) > 1:
        return
    timed = [line for line in lines if line.figures("seconds") and line.values(part, metric)]
    fastest = min(timed, key=lambda line: fmean(line.figures("seconds")), default=base)
    if fastest is not base and base in timed:
        ratio = fmean(base.figures("seconds")) / fmean(fastest.figures("seconds"))
        yield (
            f"{short(data, 60)}: {fastest.label} takes {ratio:.1f} times less time than softmax; its {part} "
            f"{spoken(metric)} is {said(fastest)}, that of softmax {said(base)}."
        )


# -- figures -----------------------------------------------------------------------------------------------------------

_CURVES = {
    "loss": "Losses of different names are different functions: compare their shapes, not their heights.",
    "metric": "Measured on rows that were not trained on.",
    "solved": "Of the rows that were trained: solved ones get no gradient. Those that skipping leaves out are not "
    "among them.",
}


def _blocks(data: str, lines: Sequence[Line]) -> Iterator[Block]:
    yield _table(data, lines)
    part, metric = judged(lines)
    scale, unit = scale_of(metric)
    what = f"{part} {spoken(metric)}"
    scored = [line for line in lines if line.values(part, metric)]
    best = sorted(scored, key=lambda line: -_sign(line, metric) * fmean(line.values(part, metric)))[:MOST]
    drawn = [line for line in lines if line in best] or list(lines[:MOST])
    if len(lines) > len(drawn):
        yield Words(f"The curves are those of the {len(drawn)} lines with the best {what}.")
    if len(scored) > 1:
        values = [(line, line.values(part, metric)) for line in scored]
        scores = [
            Score(line.label, scale * fmean(v), scale * deviation(v), len(v), fmean(line.figures("seconds")))
            for line, v in values
        ]
        yield score_figure(data, what, unit, scores)
        note = " Times compare only between runs on one machine."
        yield time_figure(data, what, unit, scores, "seconds of training", note)
    for kind, name, words in (
        ("train", "loss", "loss"),
        ("validation", metric, "metric"),
        ("train", "solved", "solved"),
    ):
        curves = [one for line in drawn if (one := curve(line, kind, name)) is not None]
        if curves:
            yield curve_figure(data, curves, kind, name, _CURVES[words])
