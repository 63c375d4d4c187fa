"""Comparisons of losses: the summary lines of `softsieve compare`, and how much was solved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from softsieve.report import plain
from softsieve.report.figures import MOST
from softsieve.report.groups import average
from softsieve.report.page import Block, Column, Folded, Part, Section, Table, numbers, texts
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
        others = [result for result in record.results if "mean" not in result and isinstance(result.get("row"), str)]
        runs = [result for result in others if "trial" not in result]
        trials = [result for result in others if "trial" in result]
        expect(record, lines, words="task row metric", numbers="seeds mean deviation seconds")
        if not lines:
            parts.append(Part(short(record.name, 60), [plain.table(record)]))
        for task, own in grouped(lines, lambda line: str(line["task"])).items():
            theirs = [run for run in runs if run.get("task") == task]
            title = f"{short(task, 60)} ({short(record.name, 60)})"
            blocks = [*_blocks(task, own, theirs), *_searched(task, [t for t in trials if t.get("task") == task])]
            parts.append(Part(title, blocks, _about(theirs)))
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
    each = [run["settings"] for run in runs if isinstance(run.get("settings"), dict)]
    names = ("epochs", "batch_size", "learning_rate", "delta")
    same = [name for name in names if len({cell(one.get(name)) for one in each}) == 1]
    facts += [f"{spoken(name)} {cell(settings.get(name))}" for name in same]
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
    told = [(name, cell(value)) for line in lines for name, value in _settings(line).items()]
    if len(set(told)) > len({name for name, _ in told}):
        columns["settings"] = lambda line: _say(_settings(line))
    return Table.of(f"{short(task, 60)}: mean ± standard deviation over seeds; the best mean in bold", lines, columns)


def _settings(line: Row) -> Row:
    """What a search chooses; earlier versions did not write it."""
    settings = line.get("settings")
    return settings if isinstance(settings, dict) else {}


def _say(settings: Row) -> str:
    return short(", ".join(f"{spoken(name)} {cell(value)}" for name, value in settings.items()), 120)


def _searched(task: str, trials: Sequence[Row]) -> Iterator[Block]:
    """All trials of a search, those that were chosen in bold."""

    def score(trial: Row) -> str:
        value = (trial.get("validation") or {}).get(trial.get("metric"))
        return f"{100 * value:.2f}" if is_number(value) else ""

    def settings(trial: Row) -> str:
        told = _settings(trial)
        names = ("epochs", "learning_rate", *(("delta",) if told.get("loss") == "as-softmax" else ()))
        own = told.get("loss_options")
        return _say({**{name: told.get(name) for name in names}, **(own if isinstance(own, dict) else {})})

    columns: dict[str, Column] = {
        "trained with": _name,
        "trial": texts("trial"),
        "settings": lambda trial: Best(settings(trial)) if trial.get("chosen") is True else settings(trial),
        "validation %": score,
        "seconds": numbers("seconds", "{:.1f}"),
        "failed": texts("failed", 120),
    }
    if trials:
        table = Table.of(f"{short(task, 60)}: trials on validation rows; what was chosen in bold", trials, columns)
        yield Folded(f"How the settings of {short(task, 60)} were found", [table])


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
