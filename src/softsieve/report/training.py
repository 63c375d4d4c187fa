"""Trained models: a table of each data set, and how loss, metric and solved share went."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from softsieve.report.figures import MOST, Axis, Panel, Trace, dots, plot
from softsieve.report.groups import Curve, Line, curve, data_sets
from softsieve.report.page import Block, Figure, Part, Section, Table, Words
from softsieve.report.read import Run
from softsieve.report.words import (
    Best,
    cell,
    count,
    deviation,
    list_of,
    machine,
    mean,
    number,
    sentence,
    short,
    spoken,
    spread,
)

PARTS = ("test", "validation")
COSTS = (  # title, name in the record, factor, digits
    ("seconds", "seconds", 1, 1),
    ("rows trained", "trained", 1, 0),
    ("rows only looked at", "screened", 1, 0),
    ("solved when last seen %", "solved", 100, 1),
    ("steps", "steps", 1, 0),
)
_POINTS = 12  # of a curve in its table


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
    text = "; ".join(filter(None, said))
    return sentence(text) + "."


# -- the table ---------------------------------------------------------------------------------------------------------


def judged(lines: Sequence[Line]) -> tuple[str, str]:
    """The part of the data and the metric that lines are compared by: test rows, where there are any."""
    metric = lines[0].settings["metric"]
    part = "test" if all(line.values("test", metric) for line in lines) else "validation"
    return part, metric


def _scale(metric: str) -> tuple[float, str]:
    """Factor and unit: shares are shown in per cent."""
    return (1.0, "") if metric == "loss" else (100.0, " %")


def _best(lines: Sequence[Line], part: str, metric: str) -> Line | None:
    """The line of the best mean."""
    scored = [line for line in lines if line.values(part, metric)]
    return max(scored, key=lambda line: _sign(line, metric) * mean(line.values(part, metric)), default=None)


def _sign(line: Line, metric: str) -> int:
    """1 where more of the metric is better, else -1."""
    more = line.settings.get("greater_is_better") if metric == line.settings["metric"] else None
    return 1 if (metric != "loss" if more is None else more) else -1


def _table(data: str, lines: Sequence[Line]) -> Table:
    part, chosen = judged(lines)
    found = {
        (where, name) for line in lines for run in line.runs for where in PARTS for name in run.result.get(where) or {}
    }
    scores = [
        (f"{where} {spoken(name)}{_scale(name)[1]}", _score(lines, where, name))
        for where, name in _ordered(found, chosen)
    ]
    first = [column for column in scores if column[0].startswith(f"{part} {spoken(chosen)}")]
    costs = [(title, _cost(name, scale, digits)) for title, name, scale, digits in COSTS]
    columns: list[tuple[str, Callable[[Line], str]]] = [
        ("seeds", lambda line: line.seeds),
        *first,
        *costs,
        *(column for column in scores if column not in first),
    ]
    used = [(title, show) for title, show in columns if any(show(line) for line in lines)]
    rows = [[line.label, *(show(line) for _, show in used)] for line in lines]
    caption = f"{short(data, 80)}: mean ± standard deviation over seeds; the best in bold"
    return Table(caption, ["trained with", *(title for title, _ in used)], rows)


def _ordered(found: Iterable[tuple[str, str]], chosen: str) -> list[tuple[str, str]]:
    """Parts and metrics, those that lines are compared by first."""
    return sorted(found, key=lambda pair: (PARTS.index(pair[0]), pair[1] != chosen, pair[1] == "loss", pair[1]))


def _score(lines: Sequence[Line], part: str, metric: str) -> Callable[[Line], str]:
    scale, _ = _scale(metric)
    best = _best(lines, part, metric) if len(lines) > 1 and metric == lines[0].settings["metric"] else None

    def show(line: Line) -> str:
        text = spread(line.values(part, metric), scale=scale, digits=2 if scale > 1 else 3)
        return Best(text) if line is best else text

    return show


def _cost(name: str, scale: float, digits: int) -> Callable[[Line], str]:
    return lambda line: spread(line.figures(name), scale=scale, digits=digits)


def _gist(data: str, lines: Sequence[Line]) -> Iterator[str]:
    part, metric = judged(lines)
    best = _best(lines, part, metric)
    if best is None:
        return
    scale, unit = _scale(metric)

    def said(line: Line) -> str:
        return f"{spread(line.values(part, metric), scale=scale)}{unit}"

    text = f"{short(data, 60)}: {best.label} has the best {part} {spoken(metric)}, {said(best)}"
    base = next((line for line in lines if line.label == "softmax"), None)
    if base is not None and base is not best and base.values(part, metric):
        gap = abs(mean(best.values(part, metric)) - mean(base.values(part, metric)))
        noise = max(deviation(best.values(part, metric)), deviation(base.values(part, metric)))
        within = "the same" if gap == 0 else "a difference within one deviation" if gap <= noise else ""
        text += f"; softmax has {said(base)}" + (f", {within}" if within else "")
    yield text + "."
    if base is None or len({machine(run.record.provenance) for line in lines for run in line.runs}) > 1:
        return
    timed = [line for line in lines if line.figures("seconds") and line.values(part, metric)]
    fastest = min(timed, key=lambda line: mean(line.figures("seconds")), default=base)
    if fastest is not base and base in timed:
        ratio = mean(base.figures("seconds")) / mean(fastest.figures("seconds"))
        yield (
            f"{short(data, 60)}: {fastest.label} takes {ratio:.1f} times less time than softmax; its {part} "
            f"{spoken(metric)} is {said(fastest)}, that of softmax {said(base)}."
        )


# -- figures -----------------------------------------------------------------------------------------------------------


def _blocks(data: str, lines: Sequence[Line]) -> Iterator[Block]:
    yield _table(data, lines)
    part, metric = judged(lines)
    scored = [line for line in lines if line.values(part, metric)]
    drawn = sorted(scored, key=lambda line: -_sign(line, metric) * mean(line.values(part, metric)))[:MOST]
    drawn = [line for line in lines if line in drawn] or list(lines[:MOST])
    if len(lines) > len(drawn):
        yield Words(f"The curves are those of the {len(drawn)} lines with the best {part} {spoken(metric)}.")
    if len(scored) > 1:
        yield _scores(data, scored, part, metric)
        yield _against_time(data, scored, part, metric)
    yield from _curves(data, drawn, metric)


def _scores(data: str, lines: Sequence[Line], part: str, metric: str) -> Figure:
    scale, unit = _scale(metric)
    values = [line.values(part, metric) for line in lines]
    means = [scale * mean(v) for v in values]
    errors = [scale * deviation(v) for v in values]
    order = sorted(range(len(lines)), key=lambda i: -means[i])
    top, low = lines[order[0]].label, lines[order[-1]].label
    words = f"Highest: {top}, {means[order[0]]:.2f}{unit}; lowest: {low}, {means[order[-1]]:.2f}{unit}."
    if means[order[0]] == means[order[-1]]:
        words = f"All are alike, {means[0]:.2f}{unit}."
    return Figure(
        title=sentence(f"{part} {spoken(metric)}"),
        caption=f"{words} Bars reach one standard deviation over seeds to each side; where they overlap, a difference "
        "may be chance.",
        plot=dots([line.label for line in lines], means, errors, Axis(f"{part} {spoken(metric)}", suffix=unit)),
        data=Table(
            f"{part} {spoken(metric)}{unit} on {short(data, 60)}",
            ["trained with", "mean", "deviation", "runs"],
            [[lines[i].label, f"{means[i]:.3f}", f"{errors[i]:.3f}", str(len(values[i]))] for i in order],
        ),
    )


def _against_time(data: str, lines: Sequence[Line], part: str, metric: str) -> Figure:
    scale, unit = _scale(metric)
    timed = [line for line in lines if line.figures("seconds")]
    points = [
        Trace(
            line.label,
            [mean(line.figures("seconds"))],
            [scale * mean(line.values(part, metric))],
            error=[scale * deviation(line.values(part, metric))],
            joined=False,
        )
        for line in timed
    ]
    fastest = min(timed, key=lambda line: mean(line.figures("seconds")))
    return Figure(
        title=sentence(f"{spoken(metric)} against time"),
        caption="Up is better, left is faster. Least time: "
        f"{fastest.label}, {mean(fastest.figures('seconds')):.1f} s. Times compare only between runs on one machine.",
        plot=plot(
            [Panel(points)], Axis("seconds of training", zero=True), Axis(f"{part} {spoken(metric)}", suffix=unit)
        ),
        data=Table(
            f"{part} {spoken(metric)}{unit} and seconds on {short(data, 60)}",
            ["trained with", "seconds", f"{part} {spoken(metric)}{unit}"],
            [[t.name, f"{t.x[0]:.2f}", f"{t.y[0]:.3f}"] for t in points],
        ),
    )


def _curves(data: str, lines: Sequence[Line], metric: str) -> Iterator[Figure]:
    wanted = {
        (
            "train",
            "loss",
        ): "Losses of different names are different functions: compare their shapes, not their heights.",
        ("validation", metric): "Measured on rows that were not trained on.",
        ("train", "solved"): "Of the rows that were trained: solved ones get no gradient. Those "
        "that skipping leaves out are not among them.",
    }
    for (kind, name), words in wanted.items():
        curves = [found for line in lines if (found := curve(line, kind, name)) is not None]
        if curves:
            yield _curve_figure(data, curves, kind, name, words)


def _curve_figure(data: str, curves: Sequence[Curve], kind: str, name: str, words: str) -> Figure:
    share = name != "loss"
    scale, unit = (100.0, " %") if share else (1.0, "")
    what = {"train loss": "training loss", "train solved": "solved rows"}.get(
        f"{kind} {name}", f"{kind} {spoken(name)}"
    )
    traces = [
        Trace(
            c.label,
            [100 * x for x in c.x],
            [scale * y for y in c.mean],
            error=[scale * e for e in c.deviation],
            slot=None,
        )
        for c in curves
    ]
    ends = "; ".join(
        f"{c.label} from {number(scale * c.mean[0], 3)} to {number(scale * c.mean[-1], 3)}{unit}" for c in curves[:4]
    )
    more = f", and {len(curves) - 4} more" if len(curves) > 4 else ""
    band = " Bands: one standard deviation over seeds." if any(any(c.deviation) for c in curves) else ""
    return Figure(
        title=sentence(f"{what} over training"),
        caption=f"{ends}{more}. {words}{band}",
        plot=plot([Panel(traces)], Axis("training done", suffix=" %"), Axis(what, suffix=unit, zero=name == "solved")),
        data=_curve_table(f"{what}{unit} over training on {short(data, 60)}", curves, scale),
    )


def _curve_table(caption: str, curves: Sequence[Curve], scale: float) -> Table:
    rows = []
    for c in curves:
        last = len(c.x) - 1
        for i in sorted({round(j * last / (_POINTS - 1)) for j in range(_POINTS)}):
            rows.append(
                [
                    c.label,
                    f"{100 * c.x[i]:.0f}",
                    f"{scale * c.mean[i]:.4g}",
                    f"{scale * c.deviation[i]:.2g}",
                    str(c.runs),
                ]
            )
    return Table(caption, ["trained with", "training done %", "mean", "deviation", "runs"], rows)
