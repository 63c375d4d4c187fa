"""What a loss costs: time and memory beside those of its rivals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from softsieve.report.figures import Axis, Panel, Trace, plot
from softsieve.report.page import Block, Figure, Part, Section, Table
from softsieve.report.read import Record, expect, is_number
from softsieve.report.words import Best, cell, number, short

Row = Mapping[str, Any]


def losses(records: Sequence[Record]) -> Section:
    """Of `python -m benchmarks losses`."""
    parts = []
    for record in records:
        expect(
            record,
            record.results,
            words="method",
            numbers="rows classes solved ms time_ratio peak_mb memory_ratio",
        )
        parts.append(Part(title=_title(record), blocks=list(_losses(record))))
    return Section(
        title="What the loss costs",
        how="Forward and backward pass of the loss alone, on made-up logits of which a share of rows is solved. Ratios "
        "are to torch's own cross-entropy in the same run: below 1 is faster, or takes less memory.",
        parts=parts,
    )


def _title(record: Record) -> str:
    s = record.settings
    return ", ".join(filter(None, [short(record.name, 60), cell(s.get("device")), cell(s.get("dtype"))]))


def _losses(record: Record) -> Iterator[Block]:
    rows = record.results
    body = [
        [
            short(r["method"], 60),
            f"{r['rows']:,} x {r['classes']:,}",
            f"{100 * r['solved']:.0f}",
            number(r["ms"], 3),
            _below_one(r["time_ratio"]),
            number(r["peak_mb"], 3),
            f"{r['memory_ratio']:.2f}x",
        ]
        for r in rows
    ]
    head = ["method", "rows x classes", "solved rows %", "ms", "time", "peak MB", "memory"]
    yield Table(f"{short(record.name, 60)}: medians; faster than the rival in bold", head, body)
    best = min((r for r in rows if r["time_ratio"] != 1), key=lambda r: float(r["time_ratio"]), default=rows[0])
    yield _ratios(
        record,
        "solved",
        "solved rows",
        "Time against the share of solved rows",
        f"Below the dashed line is faster than torch's cross-entropy. Lowest: {best['method']} at {best['rows']:,} x "
        f"{best['classes']:,} with {100 * best['solved']:.0f} % solved, {best['time_ratio']:.2f} times its time.",
        [f"{r['rows']:,} x {r['classes']:,}" for r in rows],
    )


def _below_one(ratio: float) -> str:
    text = f"{ratio:.2f}x"
    return Best(text) if ratio < 1 else text


def _ratios(record: Record, x: str, said: str, title: str, caption: str, cases: Sequence[str]) -> Figure:
    rows = record.results
    methods = list(dict.fromkeys(row["method"] for row in rows))
    panels = []
    for case in dict.fromkeys(cases):
        traces = []
        for method in methods:
            here = [r for r, c in zip(rows, cases, strict=True) if c == case and r["method"] == method]
            here.sort(key=lambda r: float(r[x]))
            if here:
                xs, ys = [100 * r[x] for r in here], [r["time_ratio"] for r in here]
                traces.append(Trace(method, xs, ys, slot=methods.index(method)))
        panels.append(Panel(traces, case, limit=1))
    return Figure(
        title=title,
        caption=caption,
        plot=plot(
            panels,
            Axis(said, suffix=" %"),
            Axis("time / rival's", log=True),
            columns=min(3, len(panels)),
            height=400,
        ),
        data=Table(
            f"{short(record.name, 60)}: time over the rival's",
            ["method", "size", f"{said} %", "time ratio"],
            [[r["method"], c, f"{100 * r[x]:.1f}", f"{r['time_ratio']:.3f}"] for r, c in zip(rows, cases, strict=True)],
        ),
        wide=len(panels) > 1,
    )


def linear(records: Sequence[Record]) -> Section:
    """Of `python -m benchmarks linear`."""
    parts = []
    for record in records:
        expect(record, record.results, words="method", numbers="rows size classes dense solved ms extra_mb time_ratio")
        parts.append(Part(title=_title(record), blocks=list(_linear(record))))
    return Section(
        title="Loss and last layer in one",
        how="The last layer and the loss together, forward and backward, without the matrix of all logits. A row is "
        "dense where nothing can be left out. Time ratios are to the fastest dense rival: below 1 is faster.",
        parts=parts,
    )


def _linear(record: Record) -> Iterator[Block]:
    rows = record.results
    body = [
        [
            short(r["method"], 60),
            f"{r['rows']:,} x {r['size']:,} x {r['classes']:,}",
            f"{100 * r['dense']:.0f}",
            f"{100 * r['solved']:.0f}",
            number(r["ms"], 3),
            _below_one(r["time_ratio"]),
            number(r["extra_mb"], 4),
            *(f"{r[name]:.2g}" if is_number(r.get(name)) else "" for name in ("hidden_error", "weight_error")),
        ]
        for r in rows
    ]
    head = ["method", "rows x width x classes", "dense rows %", "solved rows %", "ms", "time", "extra MB"]
    yield Table(
        f"{short(record.name, 60)}: medians; faster than the rival in bold",
        [*head, "error of hidden gradient", "error of weight gradient"],
        body,
    )
    best = min(rows, key=lambda r: float(r["time_ratio"]))
    yield _ratios(
        record,
        "dense",
        "dense rows",
        "Time against the share of dense rows",
        f"Below the dashed line is faster than the fastest dense rival. Lowest: {best['method']} with "
        f"{100 * best['dense']:.0f} % dense at {best['classes']:,} classes, {best['time_ratio']:.2f} times its time.",
        [f"{r['rows']:,} x {r['size']:,} x {r['classes']:,}" for r in rows],
    )
