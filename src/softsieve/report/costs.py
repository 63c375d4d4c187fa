"""What a loss costs: time and memory beside those of its rivals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from softsieve.report.figures import Axis, panels, plot
from softsieve.report.page import Block, Column, Figure, Suite, Table, numbers, sizes, texts
from softsieve.report.read import Record
from softsieve.report.words import Best, Row, cell, grouped, short


def _name(record: Record) -> str:
    s = record.settings
    return ", ".join(filter(None, [short(record.name, 60), cell(s.get("device")), cell(s.get("dtype"))]))


def _time(row: Row) -> str:
    """A ratio of times; in bold where it is a gain."""
    text = f"{row['time_ratio']:.2f}x"
    return Best(text) if row["time_ratio"] < 1 else text


def _table(record: Record, columns: Mapping[str, Column]) -> Table:
    caption = f"{short(record.name, 60)}: medians; faster than the rival in bold"
    return Table.of(caption, record.results, {"method": texts("method"), **columns})


def _ratios(record: Record, share: str, size: Column, caption: str) -> Figure:
    """Time against a share of rows, a panel for each size."""
    plotted = panels(
        grouped(record.results, size),
        lambda row: str(row["method"]),
        lambda row: 100 * row[share],
        lambda row: row["time_ratio"],
        limit=1,
    )
    return Figure(
        f"Time against the share of {share} rows",
        caption,
        plot(plotted, Axis(f"{share} rows", suffix=" %"), Axis("time / rival's", log=True), height=400),
        Table.of(
            f"{short(record.name, 60)}: time over the rival's",
            record.results,
            {
                "method": texts("method"),
                "size": size,
                f"{share} rows %": numbers(share, "{:.1f}", 100),
                "time ratio": numbers("time_ratio", "{:.3f}"),
            },
        ),
    )


def _losses(record: Record) -> Iterator[Block]:
    rows, size = record.results, sizes("rows", "classes")
    columns: dict[str, Column] = {
        "rows x classes": size,
        "solved rows %": numbers("solved", "{:.0f}", 100),
        "ms": numbers("ms", 3),
        "time": _time,
        "peak MB": numbers("peak_mb", 3),
        "memory": numbers("memory_ratio", "{:.2f}x"),
    }
    yield _table(record, columns)
    best = min((r for r in rows if r["time_ratio"] != 1), key=lambda r: float(r["time_ratio"]), default=rows[0])
    caption = (
        f"Below the dashed line is faster than torch's cross-entropy. Lowest: {best['method']} at {size(best)} with "
        f"{100 * best['solved']:.0f} % solved, {best['time_ratio']:.2f} times its time."
    )
    yield _ratios(record, "solved", size, caption)


def _linear(record: Record) -> Iterator[Block]:
    size = sizes("rows", "size", "classes")
    columns: dict[str, Column] = {
        "rows x width x classes": size,
        "dense rows %": numbers("dense", "{:.0f}", 100),
        "solved rows %": numbers("solved", "{:.0f}", 100),
        "ms": numbers("ms", 3),
        "time": _time,
        "extra MB": numbers("extra_mb", 4),
        "error of hidden gradient": numbers("hidden_error", "{:.2g}"),
        "error of weight gradient": numbers("weight_error", "{:.2g}"),
    }
    yield _table(record, columns)
    best = min(record.results, key=lambda r: float(r["time_ratio"]))
    caption = (
        f"Below the dashed line is faster than the fastest dense rival. Lowest: {best['method']} with "
        f"{100 * best['dense']:.0f} % dense at {best['classes']:,} classes, {best['time_ratio']:.2f} times its time."
    )
    yield _ratios(record, "dense", size, caption)


LOSSES = Suite(
    title="What the loss costs",
    how="Forward and backward pass of the loss alone, on made-up logits of which a share of rows is solved. Ratios "
    "are to torch's own cross-entropy in the same run: below 1 is faster, or takes less memory.",
    words="method",
    numbers="rows classes solved ms time_ratio peak_mb memory_ratio",
    name=_name,
    blocks=_losses,
)
LINEAR = Suite(
    title="Loss and last layer in one",
    how="The last layer and the loss together, forward and backward, without the matrix of all logits. A row is "
    "dense where nothing can be left out. Time ratios are to the fastest dense rival: below 1 is faster.",
    words="method",
    numbers="rows size classes dense solved ms extra_mb time_ratio",
    name=_name,
    blocks=_linear,
)
