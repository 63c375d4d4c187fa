"""Real logits under a margin that the reader moves: which classes are masked, which rows are solved.

What is masked comes from `as_keep_mask`, asked once for every place of the slider; the page computes no margins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from softsieve.extras import package
from softsieve.losses import as_keep_mask
from softsieve.report.figures import Axis, Panel, Trace, finish, plot
from softsieve.report.groups import data_sets
from softsieve.report.page import Column, Explorer, Figure, Section, Table
from softsieve.report.read import Logits, Run
from softsieve.report.words import cell, is_number, short, some

STEPS = 100  # of the slider, from 0 to 1
SHOWN = 24  # classes of a row
MOST = 40  # runs
_SOME = (5, 10, 20, 30, 50)  # steps in the table
_ROWS = 30


def section(runs: Sequence[Run]) -> Section:
    """Of all runs that left logits, at least one."""
    named = [
        (f"{short(data, 40)}: {line.label}, seed {run.settings['seed']}", run, run.logits)
        for data, lines in data_sets(runs)
        for line in sorted(lines, key=lambda line: line.label == "softmax")  # what a margin did comes first
        for run in line.runs
        if run.logits is not None
    ]
    payloads = [_payload(*run) for run in named[:MOST]]
    left = f" The first {MOST} of {len(named)} runs with logits are here." if len(named) > MOST else ""
    return Section(
        title="Move the margin",
        how="Held-out rows of a trained model. A rival class is masked, and no longer pushed down, once the label's "
        "probability exceeds its own by more than delta; a row whose rivals are all masked is solved. A small delta "
        "masks much, delta 1 nothing: that is plain softmax." + left,
        blocks=[
            Explorer(payloads, [_map(payloads[0]), _curves(payloads[0])]),
            Table(
                "Solved rows % / masked rival classes % at some margins",
                ["run", *(f"delta {step / STEPS:.2f}" for step in _SOME)],
                [[p["name"], *(_counts(p, step) for step in _SOME)] for p in payloads],
            ),
        ],
    )


def _payload(name: str, run: Run, logits: Logits) -> dict[str, Any]:
    labels = run.settings.get("labels") or list(map(str, range(logits.logits.shape[1])))
    delta = run.settings.get("delta")
    shown = min(1.0, max(0.0, float(delta))) if is_number(delta) else 0.1
    return payload(name, logits, [short(cell(label), 40) for label in labels], shown)


def _counts(p: dict[str, Any], step: int) -> str:
    solved, masked = p["solved"][step], p["masked"][step]
    return f"{100 * solved / p['rows']:.1f} / {100 * masked / max(1, p['rivals']):.1f}"


# -- what the page is told ---------------------------------------------------------------------------------------------


def kept_from(logits: Tensor, target: Tensor) -> Tensor:
    """The first step of the slider at which a class is kept: at all below it, it is masked.

    Shape:
        logits ``(rows, classes)``, target ``(rows,)``, result ``(rows, classes)`` in [0, `STEPS`].

    Example:
        >>> kept_from(torch.tensor([[0.0, 1.0, 5.0]]), torch.tensor([2]))
        tensor([[97, 96,  0]])
    """
    masked = torch.zeros_like(logits, dtype=torch.int64)
    for step in range(STEPS + 1):
        masked += ~as_keep_mask(logits, target, delta=step / STEPS)
    return masked


def payload(name: str, source: Logits, labels: Sequence[str], delta: float) -> dict[str, Any]:
    """What the page needs of a run: counts for each step, and the classes it shows, rows by margin."""
    logits, target = source.logits, source.target
    rows, classes = logits.shape
    first = kept_from(logits, target)
    p = logits.softmax(-1)
    rivals = torch.ones_like(first, dtype=torch.bool).scatter_(1, target.unsqueeze(1), False)
    until = first.masked_fill(~rivals, STEPS + 1).amin(1)  # solved at steps below it
    margin = p.gather(1, target.unsqueeze(1)).squeeze(1) - p.masked_fill(~rivals, -1).amax(1)
    order = sorted(range(rows), key=lambda row: (-int(until[row]), -float(margin[row])))
    ranked = classes > SHOWN
    if ranked:  # the target, then its rivals from the strongest on
        columns = p.scatter(1, target.unsqueeze(1), 2.0).topk(SHOWN).indices
    else:
        columns = torch.arange(classes).expand(rows, classes)
    steps = torch.arange(STEPS + 1)
    return {
        "name": name,
        "part": source.part,
        "delta": round(delta * STEPS),
        "rows": rows,
        "rivals": rows * (classes - 1),
        "masked": (first[rivals].unsqueeze(1) > steps).sum(0).tolist(),
        "solved": (until.unsqueeze(1) > steps).sum(0).tolist(),
        "ranked": ranked,
        "labels": list(labels),
        "target": target[order].tolist(),
        "until": until[order].tolist(),
        "classes": columns[order].tolist() if ranked else None,
        "p": [[round(value, 4) for value in row] for row in p.gather(1, columns)[order].tolist()],
        "first": first.gather(1, columns)[order].tolist(),
    }


# -- its figures, which the page fills ---------------------------------------------------------------------------------


def _map(p: dict[str, Any]) -> Figure:
    objects = package("plotly.graph_objects", "a report")
    heat = {"type": "heatmap", "z": [[None]], "zmin": 0, "zmax": 1, "xgap": 0, "ygap": 0, "hoverongaps": True}
    bar = {"title": {"text": "probability"}, "thickness": 12, "len": 0.9}
    strip = {"type": "heatmap", "z": [[None]], "xaxis": "x2", "showscale": False, "meta": {"role": "solved"}}
    figure = objects.Figure(data=[{**heat, "meta": {"role": "heat"}, "colorbar": bar}, strip])
    axis, until = {"showgrid": False, "zeroline": False}, p["until"]
    figure.update_layout(
        xaxis={**axis, "domain": [0, 0.93], "title": {"text": "class"}},
        xaxis2={**axis, "domain": [0.945, 1], "tickvals": [0], "ticktext": ["solved"]},
        yaxis={**axis, "autorange": "reversed", "title": {"text": "rows, largest margin first"}},
    )
    columns: dict[str, Column] = {
        "row": lambda place: str(place + 1),
        "label": lambda place: str(p["labels"][p["target"][place]]),
        "probability of the label": lambda place: f"{p['p'][place][0 if p['ranked'] else p['target'][place]]:.3f}",
        "solved while delta is below": lambda place: f"{until[place] / STEPS:.2f}" if until[place] else "never",
    }
    return Figure(
        "Rows and classes",
        f"One row of pixels is one held-out row, one column a class (of more than {SHOWN}: the label, then its "
        "strongest rivals). Grey: masked. In colour: kept, by its "
        "probability. The strip at the right marks solved rows; the line is the frontier between solved and not.",
        finish(figure, legend=0, height=520),
        Table.of(f"Rows of {p['name']}, every so many by margin", some(p["rows"], _ROWS), columns),
        key="explorer-map",
    )


def _curves(p: dict[str, Any]) -> Figure:
    delta = [step / STEPS for step in range(STEPS + 1)]
    names = ("rival classes masked", "rows solved")
    lines = [Trace(name, delta, [None] * len(delta)) for name in names]
    points = [Trace(name, [0], [0], joined=False) for name in names]  # at the present delta
    axes = Axis("delta", range=(0, 1)), Axis("share", suffix=" %", range=(-2, 103))
    columns: dict[str, Column] = {
        "delta": lambda step: f"{step / STEPS:.2f}",
        "rival classes masked": lambda step: f"{p['masked'][step]:,} of {p['rivals']:,}",
        "rows solved": lambda step: f"{p['solved'][step]:,} of {p['rows']:,}",
    }
    return Figure(
        "What each margin would leave out",
        "The solid curve is the share of rival classes that are masked, the dashed one that of rows that are "
        "solved, for every delta; the markers stand at the present one. Both fall to 0 at delta 1.",
        plot([Panel([*lines, *points])], *axes, height=340),
        Table.of(f"Masked and solved of {p['name']}", range(0, STEPS + 1, 5), columns),
        key="explorer-curves",
    )
