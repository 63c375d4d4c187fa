"""Heads that are not read in full: speed and bytes against success, and how both go with size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from softsieve.report.figures import Axis, Panel, Trace, plot
from softsieve.report.page import Block, Figure, Part, Section, Table, Words
from softsieve.report.read import Record, expect, is_number
from softsieve.report.words import Best, cell, list_of, number, sentence, short

Row = Mapping[str, Any]


# -- operating points --------------------------------------------------------------------------------------------------


def bench(records: Sequence[Record]) -> Section:
    """Of `softsieve head bench`."""
    parts: list[Part] = []
    glance: list[str] = []
    for record in records:
        expect(record, record.results, words="corpus method", numbers="k success ms bytes_mean bytes_ratio time_ratio")
        parts.append(Part(title=_title(record), how=_about(record), blocks=list(_points(record))))
        glance += _gist(record)
    return Section(
        title="Heads: speed against success",
        how="A head turns a hidden state into the k most probable classes. Success is the share of queries answered "
        "with the right classes and with all probabilities close enough; the exact products read the whole weight. "
        "Less time is against the faster of these, fewer bytes against the weight in 16 bits: above 1 is better.",
        parts=parts,
        glance=glance,
    )


def _title(record: Record) -> str:
    settings = record.settings
    head = settings.get("model") or settings.get("head") or record.name
    return f"{short(cell(head), 60)} ({short(record.name, 60)})"


def _about(record: Record) -> str:
    s = record.settings
    said = []
    if is_number(s.get("n")) and is_number(s.get("d")):
        said.append(f"{s['n']:,} classes of {s['d']:,} dimensions")
    if is_number(s.get("eps")):
        said.append(f"a probability may be off by {100 * s['eps']:g} %")
    if isinstance(s.get("deltas"), list):
        said.append(
            f"wrong answers allowed (delta): {list_of([f'{100 * d:g} %' for d in s['deltas'] if is_number(d)])}"
        )
    if is_number(s.get("test_queries")):
        said.append(f"{s['test_queries']:,} queries of each text")
    text = "; ".join(said)
    return sentence(text) + "." if text else ""


def _method(row: Row) -> str:
    setting = row.get("setting")
    return f"{row['method']}, {setting}" if setting else str(row["method"])


def _points(record: Record) -> Iterator[Block]:
    rows = record.results
    body = []
    for row in rows:
        low, high = row.get("ms_p20"), row.get("ms_p80")
        spread = f" ({number(low, 3)} to {number(high, 3)})" if is_number(low) and is_number(high) else ""
        body.append(
            [
                short(_method(row), 80),
                short(row["corpus"], 60),
                cell(row["k"]),
                f"{100 * row['success']:.1f}",
                f"{number(row['ms'], 3)}{spread}",
                f"{row['time_ratio']:.2f}x",
                f"{row['bytes_mean'] / 1e6:,.2f}",
                f"{row['bytes_ratio']:.2f}x",
                f"{100 * row['exact_share']:.1f}" if is_number(row.get("exact_share")) else "",
                cell(row.get("index_mb")),
            ]
        )
    head = ["method", "text", "k", "success %", "ms (20 to 80 %)", "less time", "MB read", "fewer bytes"]
    yield Table(f"{short(record.name, 60)}: one query at a time, medians", [*head, "read in full %", "index MB"], body)
    if isinstance(record.settings.get("note"), str):
        yield Words(sentence(short(record.settings["note"])) + ".")
    yield _against(record, "ms", "time of an answer, ms", lambda row: row["ms"])
    yield _against(record, "MB", "read for an answer, MB", lambda row: row["bytes_mean"] / 1e6)


def _against(record: Record, unit: str, title: str, cost: Callable[[Row], float]) -> Figure:
    rows = record.results
    texts = list(dict.fromkeys(row["corpus"] for row in rows))
    ks = sorted({row["k"] for row in rows})
    methods = sorted(dict.fromkeys(row["method"] for row in rows), key=lambda name: not name.startswith("cascade"))
    several = len(ks) * len(texts) > 1

    def title_of(text: str, k: float) -> str:
        return f"{text}, k = {k}" if several else ""

    panels = []
    for k in ks:
        for text in texts:
            here = [row for row in rows if row["k"] == k and row["corpus"] == text]
            panels.append(Panel(list(_traces(here, methods, cost)), title_of(text, k), limit=_promised(record)))
    level = _promised(record)
    promise = f" The dashed line is that promise, {level:g} %." if level else ""
    cheap = min((row for row in rows if 100 * row["success"] >= (level or 0)), key=cost, default=rows[0])
    return Figure(
        title=f"Success against {'time' if unit == 'ms' else 'bytes read'}",
        caption=f"Up is more often right, left is {'faster' if unit == 'ms' else 'less to read'} (log scale). Least "
        f"with {'the success that is promised' if level else 'any success'}: "
        f"{_method(cheap)} on {cheap['corpus']}, k = {cheap['k']}: {number(cost(cheap), 3)} {unit} at "
        f"{100 * cheap['success']:.1f} % success.{promise}",
        plot=plot(
            panels,
            Axis(title, log=True),
            Axis("success", suffix=" %"),
            columns=len(texts),
            height=330 if len(ks) > 1 else 400,
        ),
        data=Table(
            f"{short(record.name, 60)}: success and {title}",
            ["method", "text", "k", unit, "success %"],
            [[_method(r), r["corpus"], cell(r["k"]), number(cost(r)), f"{100 * r['success']:.2f}"] for r in rows],
        ),
        wide=len(texts) > 1,
    )


def _traces(rows: Sequence[Row], methods: Sequence[str], cost: Callable[[Row], float]) -> Iterator[Trace]:
    for method in methods:
        here = sorted((row for row in rows if row["method"] == method), key=cost)
        if here:
            yield Trace(
                method,
                [cost(row) for row in here],
                [100 * row["success"] for row in here],
                joined=len(here) > 1 and all(a["success"] <= b["success"] for a, b in pairwise(here)),
                hints=[_method(row) for row in here],
                slot=methods.index(method),
            )


def _promised(record: Record) -> float | None:
    deltas = record.settings.get("deltas")
    return 100 * (1 - deltas[0]) if isinstance(deltas, list) and deltas and is_number(deltas[0]) else None


def _gist(record: Record) -> Iterator[str]:
    """The method of ours that needs least, on each k, over all texts."""
    rows = [row for row in record.results if row["method"] == "cascade"]
    for k, setting in sorted({(row["k"], str(row.get("setting") or "")) for row in rows}):
        here = [row for row in rows if (row["k"], str(row.get("setting") or "")) == (k, setting)]
        less = sorted(row["bytes_ratio"] for row in here)
        time = sorted(row["time_ratio"] for row in here)
        right = sorted(100 * row["success"] for row in here)
        case = ", ".join(filter(None, [_title(record), f"k = {k}", short(setting, 40)]))
        yield (
            f"{case}: the cascade reads {_range(less)} times fewer bytes and takes {_range(time)} times less time than "
            f"the faster exact product, at {_range(right)} % success."
        )


def _range(values: Sequence[float]) -> str:
    low, high = number(values[0], 3), number(values[-1], 3)
    return low if low == high else f"{low} to {high}"


# -- scaling -----------------------------------------------------------------------------------------------------------


def scaling(records: Sequence[Record]) -> Section:
    """Of `python -m benchmarks head-scaling`."""
    parts = []
    for record in records:
        expect(record, record.results, words="method", numbers="n d k success ms time_ratio bytes_ratio")
        parts.append(Part(title=short(record.name, 60), how=_about_scaling(record), blocks=list(_sizes(record))))
    return Section(
        title="Heads: how time goes with size",
        how="Made-up heads of several sizes, one query at a time. An exact product takes time in proportion to the "
        "size; a method whose line is flatter gains more the larger the head is.",
        parts=parts,
    )


def _about_scaling(record: Record) -> str:
    rank = record.settings.get("rank")
    return f"Queries of effective rank {rank:,}." if is_number(rank) else ""


def _sizes(record: Record) -> Iterator[Block]:
    rows = record.results
    body = [
        [
            short(_method(row), 80),
            cell(row["n"]),
            cell(row["d"]),
            cell(row["k"]),
            number(row["ms"], 3),
            f"{row['time_ratio']:.2f}x",
            f"{row['bytes_ratio']:.2f}x",
            f"{100 * row['success']:.1f}",
            cell(row.get("build_s")),
        ]
        for row in rows
    ]
    head = ["method", "classes", "dimensions", "k", "ms", "less time", "fewer bytes", "success %", "seconds to build"]
    yield Table(f"{short(record.name, 60)}: medians", head, body)
    axis = "d" if len({row["d"] for row in rows}) >= len({row["n"] for row in rows}) else "n"
    other = "n" if axis == "d" else "d"
    word = {"d": "dimensions", "n": "classes"}
    panels = []
    groups = sorted({(row["k"], row[other]) for row in rows})
    methods = list(dict.fromkeys(_method(row) for row in rows))
    for k, size in groups:
        traces = []
        for method in methods:
            here = sorted(
                (r for r in rows if (r["k"], r[other]) == (k, size) and _method(r) == method),
                key=lambda r: float(r[axis]),
            )
            ends = all(is_number(r.get("ms_p20")) and is_number(r.get("ms_p80")) for r in here)
            if here:
                traces.append(
                    Trace(
                        method,
                        [r[axis] for r in here],
                        [r["ms"] for r in here],
                        low=[r["ms_p20"] for r in here] if ends else None,
                        high=[r["ms_p80"] for r in here] if ends else None,
                        slot=methods.index(method),
                    )
                )
        panels.append(Panel(traces, f"{size:,} {word[other]}, k = {k}" if len(groups) > 1 else ""))
    last = max(rows, key=lambda row: (row[axis], row["time_ratio"]))
    yield Figure(
        title=f"Time against {word[axis]}",
        caption=f"Both scales are logarithmic; lower is faster. At {last[axis]:,} {word[axis]} {_method(last)} takes "
        f"{number(last['ms'], 3)} ms, {last['time_ratio']:.1f} times less than the faster exact product. Bars: from "
        "the 20th to the 80th percentile of the queries.",
        plot=plot(
            panels,
            Axis(word[axis], log=True, ticks=sorted({row[axis] for row in rows})),
            Axis("ms", log=True),
            columns=min(3, len(panels)),
            height=420,
        ),
        data=Table(
            f"{short(record.name, 60)}: time against {word[axis]}",
            ["method", word[other], "k", word[axis], "ms", "success %"],
            [
                [_method(r), cell(r[other]), cell(r["k"]), cell(r[axis]), number(r["ms"]), f"{100 * r['success']:.2f}"]
                for r in rows
            ],
        ),
        wide=len(panels) > 1,
    )


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def gpu(records: Sequence[Record]) -> Section:
    """Of `python -m benchmarks head --device cuda`."""
    parts = []
    for record in records:
        expect(record, record.results, words="method", numbers="n d batch us success over_product bytes_ratio")
        parts.append(Part(title=short(record.name, 60), blocks=list(_batches(record))))
    return Section(
        title="Heads on a GPU",
        how="The time of a batch of queries in microseconds. 'Less time' compares with the bare product of weight and "
        "queries: above 1 is faster than reading every weight once.",
        parts=parts,
    )


def _batches(record: Record) -> Iterator[Block]:
    rows = record.results
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        case = (cell(row.get("head")), row["n"], row["d"], row["batch"])
        best[case] = min(best.get(case, row["us"]), row["us"])
    body = []
    for row in rows:
        time = number(row["us"], 4)
        body.append(
            [
                short(row["method"], 60),
                cell(row.get("head")),
                f"{row['n']:,} x {row['d']:,}",
                cell(row["batch"]),
                Best(time) if row["us"] == best[(cell(row.get("head")), row["n"], row["d"], row["batch"])] else time,
                f"{row['over_product']:.2f}x",
                f"{row['bytes_ratio']:.2f}x",
                f"{100 * row['success']:.1f}",
            ]
        )
    head = ["method", "head", "classes x dimensions", "batch", "µs", "less time", "fewer bytes", "success %"]
    yield Table(f"{short(record.name, 60)}: medians; the fastest of each case in bold", head, body)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    shapes = list(dict.fromkeys((row["n"], row["d"]) for row in rows))
    panels = []
    for n, d in shapes:
        traces = []
        for method in methods:
            here = sorted(
                (r for r in rows if (r["n"], r["d"], r["method"]) == (n, d, method)), key=lambda r: float(r["batch"])
            )
            if here:
                xs, ys = [r["batch"] for r in here], [r["us"] for r in here]
                traces.append(Trace(method, xs, ys, slot=methods.index(method)))
        panels.append(Panel(traces, f"{n:,} x {d:,}"))
    top = max(rows, key=lambda row: row["over_product"])
    yield Figure(
        title="Time against batch size",
        caption=f"Both scales are logarithmic; lower is faster. Largest gain: {top['method']}, {top['n']:,} x "
        f"{top['d']:,}, batch {top['batch']}: {top['over_product']:.2f} times less time than the product, at "
        f"{100 * top['success']:.1f} % success.",
        plot=plot(
            panels,
            Axis("queries in a batch", log=True, ticks=sorted({row["batch"] for row in rows})),
            Axis("µs", log=True),
            columns=min(3, len(panels)),
            height=400,
        ),
        data=Table(
            f"{short(record.name, 60)}: time against batch size",
            ["method", "classes x dimensions", "batch", "µs"],
            [[r["method"], f"{r['n']:,} x {r['d']:,}", cell(r["batch"]), number(r["us"])] for r in rows],
        ),
        wide=len(panels) > 1,
    )
