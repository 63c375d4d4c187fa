"""Comparisons of losses: the summary lines of `softsieve compare`, and how much was solved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from softsieve.report import plain
from softsieve.report.figures import MOST
from softsieve.report.groups import average
from softsieve.report.page import Block, Column, Part, Section, Table, numbers, texts
from softsieve.report.read import Record, expect
from softsieve.report.scores import Score, curve_figure, score_figure, time_figure
from softsieve.report.words import Best, Row, cell, grouped, is_number, sentence, short, spoken

NAMES = {
    "as-softmax": "AS-Softmax",
    "as-speed": "AS-Speed",
    "as-skip": "AS-Softmax, solved rows skipped",
    "as-skip-speed": "AS-Speed, solved rows skipped",
    "as-skip-speed-stopping": "AS-Speed, solved rows skipped, stopped early",
    "early-stopping": "softmax, stopped early",
    "infobatch": "softmax with InfoBatch",
    "selective-backprop": "softmax with Selective-Backprop",
    "seta": "softmax with SeTa",
}


def section(records: Sequence[Record]) -> Section:
    """Of all records of comparisons."""
    parts, glance = [], []
    for record in records:
        lines = [result for result in record.results if "mean" in result]
        runs = [result for result in record.results if "mean" not in result and isinstance(result.get("row"), str)]
        expect(record, lines, words="task row metric", numbers="seeds mean deviation seconds")
        if not lines:
            parts.append(Part(short(record.name, 60), [plain.table(record)]))
        for task, own in grouped(lines, lambda line: str(line["task"])).items():
            theirs = [run for run in runs if run.get("task") == task]
            title = f"{short(task, 60)} ({short(record.name, 60)})"
            parts.append(Part(title, list(_blocks(task, own, theirs)), _about(theirs)))
            glance.append(_gist(task, own))
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


def _score(line: Row) -> str:
    return f"{100 * line['mean']:.2f} ± {100 * line['deviation']:.2f}"


def _about(runs: Sequence[Row]) -> str:
    if not runs or not isinstance(runs[0].get("settings"), dict):
        return ""
    run, settings = runs[0], runs[0]["settings"]
    facts = [f"model: {cell(run.get('model'))} ({cell(run.get('parameters'))} parameters)"]
    facts += [f"{cell(run.get('classes'))} classes", f"rows: {cell(run.get('rows'))}"]
    names = ("epochs", "batch_size", "learning_rate", "delta")
    facts += [f"{spoken(name)} {cell(settings.get(name))}" for name in names]
    return sentence("; ".join(facts)) + "."


def _seconds(line: Row) -> str:
    beside = line.get("side_by_side")
    shared = f" ({beside} at a time)" if is_number(beside) and beside != 1 else ""
    return f"{line['seconds']:.1f}{shared}"


def _table(task: str, lines: Sequence[Row]) -> Table:
    best = max(lines, key=lambda line: line["mean"])
    columns: dict[str, Column] = {
        "trained with": _name,
        f"{spoken(lines[0]['metric'])} %": lambda line: Best(_score(line)) if line is best else _score(line),
        "p": numbers("p", "{:.3f}"),
        "seconds": _seconds,
        "speed": numbers("speed", "{:.2f}x"),
        "steps": numbers("steps", "{:,.0f}"),
        "rows trained": numbers("trained_rows", "{:,.0f}"),
        "rows only screened": numbers("screened_rows", "{:,.0f}"),
        "seeds": texts("seeds"),
    }
    return Table.of(f"{short(task, 60)}: mean ± standard deviation over seeds; the best mean in bold", lines, columns)


def _gist(task: str, lines: Sequence[Row]) -> str:
    best = max(lines, key=lambda line: line["mean"])
    text = f"{short(task, 60)}: {_name(best)} has the highest {spoken(best['metric'])}, {_score(best)} %"
    timed = [line for line in lines if is_number(line.get("speed")) and line["speed"] > 1]
    if timed:
        quick = max(timed, key=lambda line: line["speed"])
        text += f"; {_name(quick)} is fastest, {quick['speed']:.2f} times as fast as softmax, with {_score(quick)} %"
    return text + "."


def _blocks(task: str, lines: Sequence[Row], runs: Sequence[Row]) -> Iterator[Block]:
    yield _table(task, lines)
    what = f"test {spoken(lines[0]['metric'])}"
    scores = [
        Score(_name(line), 100 * line["mean"], 100 * line["deviation"], line["seeds"], line["seconds"])
        for line in lines
    ]
    if len(lines) > 1:
        yield score_figure(task, what, " %", scores)
        if len({cell(line.get("side_by_side")) for line in lines}) == 1:
            best = sorted(scores, key=lambda score: -score.mean)[:MOST]
            left = f" The {MOST} with the best {what} are drawn." if len(scores) > MOST else ""
            drawn = [score for score in scores if score in best]
            yield time_figure(task, what, " %", drawn, "seconds, median", left)
    by_name: dict[str, list[list[tuple[float, float]]]] = {}  # the share of solved rows as it was logged
    for run in runs:
        shares = run.get("solved")
        if isinstance(shares, list) and len(shares) > 1 and all(map(is_number, shares)):
            points = [((place + 1) / len(shares), share) for place, share in enumerate(shares)]
            by_name.setdefault(_name(run), []).append(points)
    curves = [curve for name, logged in by_name.items() if (curve := average(name, logged)) is not None]
    if curves:
        words = (
            "Of the rows that were trained on: where solved rows are skipped, what is left is mostly unsolved, so that "
            "the curve is lower."
        )
        yield curve_figure(task, curves, "train", "solved", words)
