"""Classes and mistakes of trained models: the worst classes, what they are taken for, the most confident errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from softsieve.report.groups import data_sets
from softsieve.report.page import Block, Column, Part, Section, Table
from softsieve.report.read import Run
from softsieve.report.words import Row, short

MOST = 12  # runs
_SHARES = ("precision", "recall", "f1")


def section(runs: Sequence[Run]) -> Section:
    """Of all runs that left such a file, at least one."""
    named = [
        (f"{short(data, 60)}: {line.label}, seed {run.settings['seed']}", run.judged)
        for data, lines in data_sets(runs)
        for line in lines
        for run in line.runs
        if run.judged is not None
    ]
    left = f" The first {MOST} of {len(named)} runs are here." if len(named) > MOST else ""
    return Section(
        title="Classes and mistakes",
        how="How good the answers to held-out rows are, class by class, the worst first. Precision: how many of the "
        "rows that are given the class have it; recall: how many of the rows that have it are given it; F1: their "
        "harmonic mean. Mistakes that the model is sure of are often wrong labels." + left,
        parts=[Part(name, list(_blocks(judged)), _about(judged)) for name, judged in named[:MOST]],
        glance=[
            f"{name}: the class known worst is {short(judged['classes'][0]['label'], 40)}, F1 "
            f"{100 * judged['classes'][0]['f1']:.1f} %."
            for name, judged in named[:MOST]
            if judged["classes"]
        ],
    )


def _about(judged: Row) -> str:
    return f"{judged['rows']:,} rows of the {judged['part']} data."


def _blocks(judged: Row) -> Iterator[Block]:
    columns: dict[str, Column] = {"class": lambda row: short(row["label"], 60)}
    columns |= {f"{'F1' if name == 'f1' else name} %": _percent(name) for name in _SHARES}
    columns["rows"] = lambda row: f"{row['support']:,}"
    yield Table.of("Classes, the worst first", judged["classes"], columns)
    if judged["pairs"]:
        pairs: dict[str, Column] = {
            "class": lambda row: short(row["label"], 60),
            "taken for": lambda row: short(row["prediction"], 60),
            "rows": lambda row: f"{row['rows']:,}",
            "of the class %": _percent("share"),
        }
        yield Table.of("Classes that are taken for others, the most frequent first", judged["pairs"], pairs)
    if judged["mistakes"]:
        mistakes: dict[str, Column] = {
            "input": lambda row: short(row["input"], 300),
            "label": lambda row: short(row["label"], 60),
            "answer": lambda row: short(row["prediction"], 60),
            "probability": lambda row: f"{row['probability']:.3f}",
        }
        yield Table.of("The most confident mistakes", judged["mistakes"], mistakes)


def _percent(name: str) -> Column:
    return lambda row: f"{100 * row[name]:.1f}"
