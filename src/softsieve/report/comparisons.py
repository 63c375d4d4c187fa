"""Comparisons of losses: the summary lines of `softsieve compare`, and how much was solved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from softsieve.report import plain
from softsieve.report.figures import MOST, Axis, Panel, Trace, dots, plot
from softsieve.report.groups import average
from softsieve.report.page import Block, Figure, Part, Section, Table
from softsieve.report.read import Record, expect, is_number
from softsieve.report.words import Best, cell, number, sentence, short, spoken

Row = Mapping[str, Any]

NAMES = {
    "as-softmax": "AS-Softmax",
    "as-speed": "AS-Speed",
    "as-skip": "AS-Softmax, solved rows skipped",
    "as-skip-speed": "AS-Speed, solved rows skipped",
    "as-skip-speed-stopping": "AS-Speed, solved rows skipped, stopped early",
    "early-stopping": "softmax, stopped early",
    "infobatch": "softmax with InfoBatch",
}


def section(records: Sequence[Record]) -> Section:
    """Of all records of comparisons."""
    parts, glance = [], []
    for record in records:
        lines = [result for result in record.results if "mean" in result]
        runs = [result for result in record.results if "mean" not in result and isinstance(result.get("row"), str)]
        expect(record, lines, words="task row metric", numbers="seeds mean deviation seconds")
        if not lines:
            parts.append(Part(title=short(record.name, 60), blocks=[plain.table(record)]))
        for task in dict.fromkeys(line["task"] for line in lines):
            here = [line for line in lines if line["task"] == task]
            theirs = [run for run in runs if run.get("task") == task]
            parts.append(
                Part(
                    title=f"{short(task, 60)} ({short(record.name, 60)})",
                    how=_about(theirs),
                    blocks=list(_blocks(task, here, theirs)),
                )
            )
            glance.append(_gist(task, here))
    return Section(
        title="Losses compared",
        how="Every loss trained with the same seeds on the same data; mean ± standard deviation over seeds on test "
        "rows. p is the chance of a difference from softmax as large as this if there were none (paired t-test); "
        "speed is how many times less time it took than softmax in the same run.",
        parts=parts,
        glance=glance,
    )


def _name(line: Row) -> str:
    return NAMES.get(line["row"], short(line["row"], 80))


def _about(runs: Sequence[Row]) -> str:
    if not runs or not isinstance(runs[0].get("settings"), dict):
        return ""
    run, settings = runs[0], runs[0]["settings"]
    said = [f"model: {cell(run.get('model'))} ({cell(run.get('parameters'))} parameters)"]
    said += [f"{cell(run.get('classes'))} classes", f"rows: {cell(run.get('rows'))}"]
    said += [
        f"{spoken(name)} {cell(settings.get(name))}" for name in ("epochs", "batch_size", "learning_rate", "delta")
    ]
    text = "; ".join(said)
    return sentence(text) + "."


def _table(task: str, lines: Sequence[Row]) -> Table:
    metric = spoken(lines[0]["metric"])
    best = max(lines, key=lambda line: line["mean"])
    head = [
        "trained with",
        f"{metric} %",
        "p",
        "seconds",
        "speed",
        "steps",
        "rows trained",
        "rows only looked at",
        "seeds",
    ]
    rows = []
    for line in lines:
        score = f"{100 * line['mean']:.2f} ± {100 * line['deviation']:.2f}"
        beside = line.get("side_by_side")
        shared = f" ({beside} at a time)" if is_number(beside) and beside != 1 else ""
        rows.append(
            [
                _name(line),
                Best(score) if line is best else score,
                f"{line['p']:.3f}" if is_number(line.get("p")) else "",
                f"{line['seconds']:.1f}{shared}",
                f"{line['speed']:.2f}x" if is_number(line.get("speed")) else "",
                *(f"{line[name]:,.0f}" if is_number(line.get(name)) else "" for name in _COUNTS),
                cell(line["seeds"]),
            ]
        )
    return Table(f"{short(task, 60)}: mean ± standard deviation over seeds; the best mean in bold", head, rows)


_COUNTS = ("steps", "trained_rows", "screened_rows")


def _speed(line: Row) -> float | None:
    speed = line.get("speed")
    return speed if is_number(speed) else None


def _gist(task: str, lines: Sequence[Row]) -> str:
    best = max(lines, key=lambda line: line["mean"])
    text = (
        f"{short(task, 60)}: {_name(best)} has the highest {spoken(best['metric'])}, "
        f"{100 * best['mean']:.2f} ± {100 * best['deviation']:.2f} %"
    )
    quick = max(lines, key=lambda line: _speed(line) or 0)
    speed = _speed(quick)
    if speed is not None and speed > 1:
        text += (
            f"; {_name(quick)} is fastest, {speed:.2f} times as fast as softmax, "
            f"with {100 * quick['mean']:.2f} ± {100 * quick['deviation']:.2f} %"
        )
    return text + "."


def _blocks(task: str, lines: Sequence[Row], runs: Sequence[Row]) -> Iterator[Block]:
    yield _table(task, lines)
    if len(lines) > 1:
        yield _scores(task, lines)
        if len({cell(line.get("side_by_side")) for line in lines}) == 1:
            yield _against_time(task, lines)
    yield from _solved(task, runs)


def _scores(task: str, lines: Sequence[Row]) -> Figure:
    metric = spoken(lines[0]["metric"])
    means, errors = [100 * line["mean"] for line in lines], [100 * line["deviation"] for line in lines]
    top, low = max(lines, key=lambda line: line["mean"]), min(lines, key=lambda line: line["mean"])
    return Figure(
        title=f"Test {metric}",
        caption=f"Highest: {_name(top)}, {100 * top['mean']:.2f} %; lowest: {_name(low)}, {100 * low['mean']:.2f} %. "
        "Bars reach one standard deviation over seeds to each side.",
        plot=dots([_name(line) for line in lines], means, errors, Axis(f"test {metric}", suffix=" %")),
        data=Table(
            f"Test {metric} % on {short(task, 60)}",
            ["trained with", "mean", "deviation", "seeds"],
            [
                [_name(r), f"{m:.3f}", f"{e:.3f}", cell(r["seeds"])]
                for r, m, e in zip(lines, means, errors, strict=True)
            ],
        ),
    )


def _against_time(task: str, lines: Sequence[Row]) -> Figure:
    metric = spoken(lines[0]["metric"])
    traces = [
        Trace(_name(r), [r["seconds"]], [100 * r["mean"]], error=[100 * r["deviation"]], joined=False)
        for r in _chosen(lines)
    ]
    fastest = min(lines, key=lambda line: line["seconds"])
    left = f" The {len(traces)} with the best {metric} are drawn." if len(traces) < len(lines) else ""
    return Figure(
        title=sentence(f"{metric} against time"),
        caption=f"Up is better, left is faster. Least time: {_name(fastest)}, {fastest['seconds']:.1f} s, with "
        f"{100 * fastest['mean']:.2f} %.{left}",
        plot=plot([Panel(traces)], Axis("seconds, median", zero=True), Axis(f"test {metric}", suffix=" %"), height=440),
        data=Table(
            f"Test {metric} % and seconds on {short(task, 60)}",
            ["trained with", "seconds", f"{metric} %"],
            [[t.name, f"{t.x[0]:.2f}", f"{t.y[0]:.2f}"] for t in traces],
        ),
    )


def _chosen(lines: Sequence[Row]) -> list[Row]:
    best = sorted(lines, key=lambda line: -line["mean"])[:MOST]
    return [line for line in lines if line in best]


def _solved(task: str, runs: Sequence[Row]) -> Iterator[Figure]:
    """The share of solved rows as it was logged, for the rows of the table that know it."""
    by_row: dict[str, list[list[tuple[float, float]]]] = {}
    for run in runs:
        shares = run.get("solved")
        if isinstance(shares, list) and len(shares) > 1 and all(map(is_number, shares)):
            points = [(100 * (i + 1) / len(shares), 100 * share) for i, share in enumerate(shares)]
            by_row.setdefault(_name(run), []).append(points)
    curves = [found for name, logged in by_row.items() if (found := average(name, logged)) is not None]
    if not curves:
        return
    traces = [Trace(c.label, c.x, c.mean, error=c.deviation) for c in curves]
    ends = "; ".join(f"{c.label} ends at {number(c.mean[-1], 3)} %" for c in curves[:4])
    rows = []
    for c in curves:
        for i in sorted({round(j * (len(c.x) - 1) / 9) for j in range(10)}):
            rows.append([c.label, f"{c.x[i]:.0f}", f"{c.mean[i]:.1f}", f"{c.deviation[i]:.2g}"])
    yield Figure(
        title="Solved rows over training",
        caption=f"{ends}. Of the rows that were trained on: where solved rows are skipped, what is left is mostly "
        "unsolved, so that the curve is lower. Bands: one standard deviation over seeds.",
        plot=plot([Panel(traces)], Axis("steps done", suffix=" %"), Axis("rows solved", suffix=" %", zero=True)),
        data=Table(
            f"Solved rows % over training on {short(task, 60)}",
            ["trained with", "steps done %", "mean", "deviation"],
            rows,
        ),
    )
