"""Heads that are not read in full: speed and bytes against success, and how both go with size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from softsieve.report.figures import Axis, panels, plot
from softsieve.report.page import Block, Column, Figure, Suite, Table, Words, numbers, sizes, texts
from softsieve.report.read import Record
from softsieve.report.words import Best, Row, cell, grouped, is_number, list_of, number, sentence, short

_FIGURES: dict[str, Column] = {
    "less time": numbers("time_ratio", "{:.2f}x"),
    "fewer bytes": numbers("bytes_ratio", "{:.2f}x"),
    "success %": numbers("success", "{:.1f}", 100),
}


def _method(row: Row) -> str:
    setting = row.get("setting")
    return f"{row['method']}, {setting}" if setting else str(row["method"])


def _has_spread(row: Row) -> bool:
    return is_number(row.get("ms_p20")) and is_number(row.get("ms_p80"))


# -- operating points --------------------------------------------------------------------------------------------------


def _name(record: Record) -> str:
    settings = record.settings
    head = settings.get("model") or settings.get("head") or record.name
    return f"{short(cell(head), 60)} ({short(record.name, 60)})"


def _about(record: Record) -> str:
    s = record.settings
    facts = []
    if is_number(s.get("n")) and is_number(s.get("d")):
        facts.append(f"{s['n']:,} classes of {s['d']:,} dimensions")
    if is_number(s.get("eps")):
        facts.append(f"a probability may be off by {100 * s['eps']:g} %")
    if isinstance(s.get("deltas"), list):
        shares = [f"{100 * delta:g} %" for delta in s["deltas"] if is_number(delta)]
        facts.append(f"wrong answers allowed (delta): {list_of(shares)}")
    if is_number(s.get("test_queries")):
        facts.append(f"{s['test_queries']:,} queries of each text")
    return sentence("; ".join(facts)) + "." if facts else ""


def _ms(row: Row) -> str:
    spread = f" ({number(row['ms_p20'], 3)} to {number(row['ms_p80'], 3)})" if _has_spread(row) else ""
    return f"{number(row['ms'], 3)}{spread}"


_POINTS: dict[str, Column] = {
    "method": lambda row: short(_method(row), 80),
    "text": texts("corpus"),
    "k": texts("k"),
    "success %": _FIGURES["success %"],
    "ms (20 to 80 %)": _ms,
    "less time": _FIGURES["less time"],
    "MB read": numbers("bytes_mean", "{:,.2f}", 1e-6),
    "fewer bytes": _FIGURES["fewer bytes"],
    "read in full %": numbers("exact_share", "{:.1f}", 100),
    "index MB": texts("index_mb"),
}


def _points(record: Record) -> Iterator[Block]:
    yield Table.of(f"{short(record.name, 60)}: one query at a time, medians", record.results, _POINTS)
    if isinstance(record.settings.get("note"), str):
        yield Words(sentence(short(record.settings["note"])) + ".")
    yield _against(record, "ms", "time of an answer, ms", lambda row: row["ms"])
    yield _against(record, "MB", "read for an answer, MB", lambda row: row["bytes_mean"] / 1e6)


def _against(record: Record, unit: str, title: str, cost: Callable[[Row], float]) -> Figure:
    """Success against what an answer costs, a panel for each text and k."""
    rows = record.results
    corpora, ks = list(dict.fromkeys(row["corpus"] for row in rows)), sorted({row["k"] for row in rows})
    cases = {
        f"{corpus}, k = {k}": [row for row in rows if (row["k"], row["corpus"]) == (k, corpus)]
        for k in ks
        for corpus in corpora
    }
    deltas = record.settings.get("deltas")
    level = 100 * (1 - deltas[0]) if isinstance(deltas, list) and deltas and is_number(deltas[0]) else None
    plotted = panels(
        cases if len(cases) > 1 else {"": rows},
        lambda row: str(row["method"]),
        cost,
        lambda row: 100 * row["success"],
        names=sorted(dict.fromkeys(row["method"] for row in rows), key=lambda name: not name.startswith("cascade")),
        limit=level,
        more=lambda points: {
            "joined": len(points) > 1 and all(a["success"] <= b["success"] for a, b in pairwise(points)),
            "hints": [_method(row) for row in points],
        },
    )
    promise = f" The dashed line is that promise, {level:g} %." if level else ""
    cheap = min((row for row in rows if 100 * row["success"] >= (level or 0)), key=cost, default=rows[0])
    height = 330 if len(ks) > 1 else 400
    data: dict[str, Column] = {
        "method": _method,
        "text": lambda row: str(row["corpus"]),
        "k": texts("k"),
        unit: lambda row: number(cost(row)),
        "success %": numbers("success", "{:.2f}", 100),
    }
    return Figure(
        f"Success against {'time' if unit == 'ms' else 'bytes read'}",
        f"Up is more often right, left is {'faster' if unit == 'ms' else 'less to read'} (log scale). Least "
        f"with {'the success that is promised' if level else 'any success'}: "
        f"{_method(cheap)} on {cheap['corpus']}, k = {cheap['k']}: {number(cost(cheap), 3)} {unit} at "
        f"{100 * cheap['success']:.1f} % success.{promise}",
        plot(plotted, Axis(title, log=True), Axis("success", suffix=" %"), columns=len(corpora), height=height),
        Table.of(f"{short(record.name, 60)}: success and {title}", rows, data),
    )


def _gist(record: Record) -> Iterator[str]:
    """What the cascade needs, on each k, over all texts."""
    rows = [row for row in record.results if row["method"] == "cascade"]
    for (k, setting), own in sorted(grouped(rows, lambda row: (row["k"], str(row.get("setting") or ""))).items()):
        case = ", ".join(filter(None, [_name(record), f"k = {k}", short(setting, 40)]))
        yield (
            f"{case}: the cascade reads {_range(own, 'bytes_ratio')} times fewer bytes and takes "
            f"{_range(own, 'time_ratio')} times less time than the faster exact product, at "
            f"{_range(own, 'success', 100)} % success."
        )


def _range(rows: Sequence[Row], name: str, scale: float = 1) -> str:
    values = [scale * row[name] for row in rows]
    low, high = number(min(values), 3), number(max(values), 3)
    return low if low == high else f"{low} to {high}"


BENCH = Suite(
    title="Heads: speed against success",
    how="A head turns a hidden state into the k most probable classes. Success is the share of queries answered "
    "with the right classes and with all probabilities close enough; the exact products read the whole weight. "
    "Less time is against the faster of these, fewer bytes against the weight in 16 bits: above 1 is better.",
    words="corpus method",
    numbers="k success ms bytes_mean bytes_ratio time_ratio",
    name=_name,
    about=_about,
    blocks=_points,
    gist=_gist,
)


# -- scaling -----------------------------------------------------------------------------------------------------------

_SIZES: dict[str, Column] = {
    "method": lambda row: short(_method(row), 80),
    "classes": texts("n"),
    "dimensions": texts("d"),
    "k": texts("k"),
    "ms": numbers("ms", 3),
    **_FIGURES,
    "seconds to build": texts("build_s"),
}


def _spread(points: Sequence[Row]) -> dict[str, Any]:
    if not all(map(_has_spread, points)):
        return {}
    return {"low": [row["ms_p20"] for row in points], "high": [row["ms_p80"] for row in points]}


def _sizes(record: Record) -> Iterator[Block]:
    rows = record.results
    yield Table.of(f"{short(record.name, 60)}: medians", rows, _SIZES)
    varied, fixed = ("d", "n") if len({row["d"] for row in rows}) >= len({row["n"] for row in rows}) else ("n", "d")
    names = {"d": "dimensions", "n": "classes"}
    cases = grouped(
        sorted(rows, key=lambda row: (row["k"], row[fixed])),
        lambda row: f"{row[fixed]:,} {names[fixed]}, k = {row['k']}",
    )
    plotted = panels(
        cases if len(cases) > 1 else {"": rows},
        _method,
        lambda row: row[varied],
        lambda row: row["ms"],
        names=list(dict.fromkeys(map(_method, rows))),
        more=_spread,
    )
    last = max(rows, key=lambda row: (row[varied], row["time_ratio"]))
    data: dict[str, Column] = {
        "method": _method,
        names[fixed]: texts(fixed),
        "k": texts("k"),
        names[varied]: texts(varied),
        "ms": numbers("ms", 4),
        "success %": numbers("success", "{:.2f}", 100),
    }
    ticks = sorted({row[varied] for row in rows})
    yield Figure(
        f"Time against {names[varied]}",
        f"Both scales are logarithmic; lower is faster. At {last[varied]:,} {names[varied]} {_method(last)} takes "
        f"{number(last['ms'], 3)} ms, {last['time_ratio']:.1f} times less than the faster exact product. Bars: from "
        "the 20th to the 80th percentile of the queries.",
        plot(plotted, Axis(names[varied], log=True, ticks=ticks), Axis("ms", log=True), height=420),
        Table.of(f"{short(record.name, 60)}: time against {names[varied]}", rows, data),
    )


SCALING = Suite(
    title="Heads: how time goes with size",
    how="Made-up heads of several sizes, one query at a time. An exact product takes time in proportion to the "
    "size; a method whose line is flatter gains more the larger the head is.",
    words="method",
    numbers="n d k success ms time_ratio bytes_ratio",
    about=lambda record: numbers("rank", "Queries of effective rank {:,}.")(record.settings),
    blocks=_sizes,
)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def _batches(record: Record) -> Iterator[Block]:
    rows, name, size = record.results, short(record.name, 60), sizes("n", "d")
    by_case = grouped(rows, lambda row: (cell(row.get("head")), size(row), row["batch"]))
    fastest = {id(row) for own in by_case.values() for row in own if row["us"] == min(r["us"] for r in own)}
    columns: dict[str, Column] = {
        "method": texts("method"),
        "head": texts("head", 240),
        "classes x dimensions": size,
        "batch": texts("batch"),
        "µs": lambda row: Best(number(row["us"])) if id(row) in fastest else number(row["us"]),
        "less time": numbers("over_product", "{:.2f}x"),
        "fewer bytes": _FIGURES["fewer bytes"],
        "success %": _FIGURES["success %"],
    }
    yield Table.of(f"{name}: medians; the fastest of each case in bold", rows, columns)
    plotted = panels(
        grouped(rows, size), lambda row: str(row["method"]), lambda row: row["batch"], lambda row: row["us"]
    )
    top = max(rows, key=lambda row: row["over_product"])
    data = {"method": texts("method"), "classes x dimensions": size, "batch": texts("batch"), "µs": numbers("us", 4)}
    ticks = sorted({row["batch"] for row in rows})
    yield Figure(
        "Time against batch size",
        f"Both scales are logarithmic; lower is faster. Largest gain: {top['method']}, {size(top)}, batch "
        f"{top['batch']}: {top['over_product']:.2f} times less time than the product, at "
        f"{100 * top['success']:.1f} % success.",
        plot(plotted, Axis("queries in a batch", log=True, ticks=ticks), Axis("µs", log=True), height=400),
        Table.of(f"{name}: time against batch size", rows, data),
    )


GPU = Suite(
    title="Heads on a GPU",
    how="The time of a batch of queries in microseconds. 'Less time' compares with the bare product of weight and "
    "queries: above 1 is faster than reading every weight once.",
    words="method",
    numbers="n d batch us success over_product bytes_ratio",
    blocks=_batches,
)
