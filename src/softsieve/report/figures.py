"""Plots by plotly. Colours are left to the page, which knows whether it is light or dark: a trace says its slot."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from softsieve.extras import package
from softsieve.report.words import Row, number, short

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "star", "cross", "triangle-down")
COLOURS = 8
HEIGHT = 380
MOST = 12  # lines in a plot


class Trace(NamedTuple):
    """Points of one name, joined where they are a line."""

    name: str
    x: Sequence[Any]
    y: Sequence[Any]
    error: Sequence[float] | None = None  # above and below: a band where points are joined, else bars
    low: Sequence[float] | None = None  # ends of the bars, where these are not alike
    high: Sequence[float] | None = None
    joined: bool = True
    hints: Sequence[str] = ()  # shown with each point
    slot: int | None = None  # of its colour; else its place among the traces


class Panel(NamedTuple):
    """Axes with traces in them."""

    traces: Sequence[Trace]
    title: str = ""
    limit: float | None = None  # a level to compare with


class Axis(NamedTuple):
    """What it says, and how."""

    title: str
    log: bool = False
    suffix: str = ""
    ticks: Sequence[float] | None = None
    zero: bool = False  # from 0 on
    range: tuple[float, float] | None = None


def plain(text: str) -> str:
    """Text that plotly, which knows some HTML, shows as it stands.

    Example:
        >>> plain("<b>a</b>")
        '&lt;b&gt;a&lt;/b&gt;'
    """
    return html.escape(short(text, 70), quote=False)


def panels(
    cases: Mapping[str, Sequence[Row]],
    name: Callable[[Row], str],
    x: Callable[[Row], float],
    y: Callable[[Row], float],
    *,
    names: Sequence[str] = (),
    limit: float | None = None,
    more: Callable[[Sequence[Row]], dict[str, Any]] = lambda points: {},
) -> list[Panel]:
    """A panel for each case, by its title, and in it a trace for each name, from left to right.

    ``name``, ``x`` and ``y`` are of a row, ``more`` are further properties of a trace, made of its rows; ``names`` is
    the order of the colours, if not that of the rows.
    """
    names = list(names or dict.fromkeys(name(row) for rows in cases.values() for row in rows))
    drawn = []
    for title, rows in cases.items():
        traces = []
        for slot, own in enumerate(names):
            points = sorted((row for row in rows if name(row) == own), key=x)
            if points:
                places = [x(row) for row in points]
                traces.append(Trace(own, places, [y(row) for row in points], slot=slot, **more(points)))
        drawn.append(Panel(traces, title, limit))
    return drawn


def plot(
    panels: Sequence[Panel], x: Axis, y: Axis, *, columns: int | None = None, height: int = HEIGHT
) -> dict[str, Any]:
    """Panels side by side on like axes, at most three in a row if ``columns`` does not say; the y axis is shared."""
    subplots = package("plotly.subplots", "a report")
    columns = columns or min(3, len(panels))
    rows = -(-len(panels) // columns)
    titled = any(panel.title for panel in panels)
    figure = subplots.make_subplots(
        rows=rows,
        cols=columns,
        shared_yaxes="all",
        shared_xaxes="all",
        subplot_titles=[plain(panel.title) for panel in panels] if titled else None,
        horizontal_spacing=0.04,
        vertical_spacing=0.14 if rows > 1 else 0,
    )
    slots: dict[str, int] = {}  # one name has one colour in all panels
    xs: list[float] = []
    ys: list[float] = []
    for index, panel in enumerate(panels):
        place = {"row": index // columns + 1, "col": index % columns + 1}
        for trace in panel.traces:
            new = trace.name not in slots
            slot = slots.setdefault(trace.name, len(slots))
            for drawn in _draw(trace, slot if trace.slot is None else trace.slot, new):
                figure.add_trace(drawn, **place)
            xs += trace.x
            ys += [*trace.y, *(trace.low or ()), *(trace.high or ())]
        if panel.limit is not None:
            figure.add_hline(y=panel.limit, line={"dash": "dash", "width": 1.2}, name="limit", **place)
            ys.append(panel.limit)
    figure.update_xaxes(**_axis(x, xs))
    figure.update_yaxes(**_axis(y, ys))
    figure.update_xaxes(title_text="", selector=lambda axis: axis.showticklabels is False)
    figure.update_yaxes(title_text="", selector=lambda axis: axis.showticklabels is False)
    return finish(figure, legend=len(slots), height=height * rows, titled=titled, wide=columns > 1)


def _draw(trace: Trace, slot: int, new: bool) -> list[dict[str, Any]]:
    name = plain(trace.name)
    common = {"type": "scatter", "name": name, "legendgroup": name, "x": list(trace.x)}
    again = slot // COLOURS  # colours begin anew: other symbols go with them
    symbol, dash = SYMBOLS[(slot + 3 * again) % len(SYMBOLS)], DASHES[(slot + again) % len(DASHES)]
    drawn = []
    if trace.joined and trace.error is not None and any(trace.error):
        edge = {**common, "mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
        ends = [[m + sign * e for m, e in zip(trace.y, trace.error, strict=True)] for sign in (-1, 1)]
        meta = {"slot": slot, "role": "band"}
        drawn += [{**edge, "y": ends[0], "meta": meta}, {**edge, "y": ends[1], "fill": "tonexty", "meta": meta}]
    point: dict[str, Any] = {
        **common,
        "y": list(trace.y),
        "mode": "lines+markers" if trace.joined and len(trace.x) <= 30 else "lines" if trace.joined else "markers",
        "line": {"dash": dash, "width": 2.2},
        "marker": {"symbol": symbol, "size": 8 if trace.joined else 11},
        "showlegend": new,
        "meta": {"slot": slot, "role": "line"},
    }
    if trace.hints:
        point |= {"text": [plain(hint) for hint in trace.hints], "hovertemplate": "%{text}<br>%{x}, %{y}"}
    if trace.low is not None and trace.high is not None:
        above = [h - v for h, v in zip(trace.high, trace.y, strict=True)]
        below = [v - low for low, v in zip(trace.low, trace.y, strict=True)]
        point["error_y"] = {"type": "data", "array": above, "arrayminus": below, "thickness": 1.2, "width": 4}
    elif not trace.joined and trace.error is not None and any(trace.error):
        point["error_y"] = {"type": "data", "array": list(trace.error), "thickness": 1.2, "width": 4}
    return [*drawn, point]


def _decades(values: Sequence[float]) -> list[float]:
    """Round numbers for a log axis: powers of ten, with others between where these are few.

    Example:
        >>> _decades([0.3, 40]), _decades([1, 3000])
        ([0.3, 1, 3, 10, 30], [1, 10, 100, 1000])
    """
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive) / 1.4, max(positive) * 1.4
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    between = {0: (1, 1.5, 2, 3, 5, 7), 1: (1, 2, 5), 2: (1, 3)}.get(int(math.log10(high / low)), (1,))
    ticks = [float(f"{digit}e{power}") for power in powers for digit in between]
    return [int(tick) if tick.is_integer() else tick for tick in ticks if low <= tick <= high]


def _axis(axis: Axis, values: Sequence[float] = ()) -> dict[str, Any]:
    options: dict[str, Any] = {"title_text": axis.title, "ticksuffix": axis.suffix}
    if axis.log:
        options["type"] = "log"
    ticks = _decades(values) if axis.log and axis.ticks is None else axis.ticks
    if ticks is not None:
        options |= {"tickvals": list(ticks), "ticktext": [f"{number(tick)}{axis.suffix}" for tick in ticks]}
    if axis.zero:
        options["rangemode"] = "tozero"
    if axis.range is not None:
        options["range"] = axis.range
    return options


def dots(names: Sequence[str], values: Sequence[float], errors: Sequence[float], x: Axis) -> dict[str, Any]:
    """A point a name, with its deviation, one below the other."""
    objects = package("plotly.graph_objects", "a report")
    shown = [plain(short(name, 60)) for name in names]
    places = list(range(len(names)))
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "x": list(values),
        "y": places,
        "text": shown,
        "hovertemplate": "%{text}: %{x}<extra></extra>",
        "marker": {"size": 11},
        "meta": {"slot": 0, "role": "line"},
        "showlegend": False,
    }
    if any(errors):
        trace["error_x"] = {"type": "data", "array": list(errors), "thickness": 1.5, "width": 5}
    figure = objects.Figure(data=[trace])
    figure.update_xaxes(**_axis(x))
    figure.update_yaxes(tickvals=places, ticktext=shown, autorange="reversed", automargin=True, zeroline=False)
    broad = len(names) > 6 or max(map(len, names)) > 28
    return finish(figure, legend=0, height=120 + 34 * len(names), broad=broad)


def finish(
    figure: Any, *, legend: int, height: int, titled: bool = False, broad: bool = False, wide: bool = False
) -> dict[str, Any]:
    """As plotly.js takes it, with what the page needs to lay it out.

    A ``broad`` figure needs the width of the page; in a ``wide`` one, panels stand side by side, and a small screen
    scrolls them.
    """
    above = 1 + (32 if titled else 6) / max(100, height - 110)  # the legend, above titles of panels
    figure.update_layout(
        template={},
        margin={"l": 68, "r": 18, "t": 34, "b": 54},
        hovermode="closest",
        showlegend=legend > 0,
        legend={"orientation": "h", "yanchor": "bottom", "y": above, "x": 0, "xanchor": "left"},
        meta={"legend": legend, "height": height, "broad": broad or wide or legend > 6, "wide": wide},
    )
    drawn: dict[str, Any] = json.loads(figure.to_json())
    return drawn
