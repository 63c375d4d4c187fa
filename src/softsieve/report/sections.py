"""The sections of a page. To give a suite one of its own: a `Suite`, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone

from softsieve import __version__
from softsieve.report import classes, comparisons, costs, explorer, heads, language, plain, training
from softsieve.report.groups import Line, data_sets
from softsieve.report.page import Folded, Section, Table
from softsieve.report.read import Record, Sources
from softsieve.report.words import Row, cell, commit, count, date, grouped, list_of, machine, short, spoken

# What was run, in words, and what makes a section of its records; without that, plain tables do.
SUITES: dict[str, tuple[str, Callable[[Sequence[Record]], Section] | None]] = {
    "compare": ("comparison of losses", comparisons.section),
    "head-bench": ("heads: speed against success", heads.BENCH),
    "head-scaling": ("heads of several sizes", heads.SCALING),
    "head-gpu": ("heads on a GPU", heads.GPU),
    "losses": ("time and memory of the loss", costs.LOSSES),
    "linear": ("loss and last layer in one", costs.LINEAR),
    "generate": ("text from a language model", language.GENERATE),
    "perplexity": ("perplexity", language.PERPLEXITY),
    "head": ("heads", None),
}


def sections(sources: Sources) -> list[Section]:
    """All that there is something to say in, the one on what was run last."""
    pages: list[Section] = []
    if sources.runs:
        pages.append(training.section(sources.runs))
    if any(run.judged is not None for run in sources.runs):
        pages.append(classes.section(sources.runs))
    if any(run.logits is not None for run in sources.runs):
        pages.append(explorer.section(sources.runs))
    suites = grouped(sources.records, lambda record: record.suite)
    for suite in sorted(suites, key=lambda name: [*SUITES, name].index(name)):
        full = [record for record in suites[suite] if record.results]
        empty = [record for record in suites[suite] if not record.results]
        make = SUITES.get(suite, ("", None))[1] or plain.suite(suite)
        pages += [make(full)] if full else []
        pages += [plain.suite(suite)(empty)] if empty else []
    return [*pages, _what_was_run(sources)]


def made(sources: Sources) -> dict[str, str]:
    """When the page was made, and of what."""
    kinds = [count(len(sources.runs), "training run")] if sources.runs else []
    if sources.records:
        kinds.append(count(len(sources.records), "record of measurements", "records of measurements"))
    machines = [name for name in dict.fromkeys(machine(record.provenance) for record in sources.all) if name]
    return {
        "of": " and ".join(kinds),
        "on": "; ".join(machines[:3]) + ("; ..." if len(machines) > 3 else ""),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
    }


# -- what was run: data, settings, commit, versions, machine and date of everything on the page ------------------------


def _what_was_run(sources: Sources) -> Section:
    """Of everything that the page is made of."""
    rows, details = [], []

    def add(name: str, what: str, settings: Iterable[tuple[str, str]], made: Sequence[Row]) -> None:
        rows.append([name, what, *_made(made)])
        versions = ((f"version of {short(key, 40)}", cell(value)) for key, value in _versions(made[0]).items())
        details.append(Table(name, ["setting", "value"], [*settings, *versions]))

    for data, lines in data_sets(sources.runs):
        for line in lines:
            made = [run.record.provenance for run in line.runs]
            add(f"{short(data, 60)}: {line.label}", f"training, {count(len(made), 'run')}", _of_line(line), made)
    for record in sources.records:
        what = SUITES[record.suite][0] if record.suite in SUITES else short(record.suite, 60)
        add(short(record.name, 80), what, _of_record(record), [record.provenance])
    return Section(
        title="What was run",
        how="Every figure on this page comes from one of these. The commit names the source it was made with; "
        "'modified' means that files had been changed since.",
        blocks=[
            Table("Everything on this page", ["name", "what", "date (UTC)", "commit", "machine", "torch"], rows),
            Folded("Settings and versions in full", details),
        ],
    )


def _made(made: Sequence[Row]) -> Iterator[str]:
    dates = sorted(filter(None, map(date, made)))
    first, last = (dates[0], dates[-1]) if dates else ("", "")
    yield first if first == last else f"{first} to {last.removeprefix(first[:11])}"  # the day is said once
    for show in (commit, machine, lambda provenance: cell(_versions(provenance).get("torch"))):
        yield list_of([name for name in dict.fromkeys(map(show, made)) if name])


def _versions(provenance: Row) -> Row:
    versions = provenance.get("versions")
    return versions if isinstance(versions, dict) else {}


def _of_line(line: Line) -> Iterator[tuple[str, str]]:
    yield "folders", short(", ".join(run.record.name for run in line.runs))
    yield "seed", list_of([str(run.settings["seed"]) for run in line.runs])
    yield from ((spoken(name), cell(value)) for name, value in line.settings.items() if name != "seed")


def _of_record(record: Record) -> Iterator[tuple[str, str]]:
    yield "suite", short(record.suite, 60)
    for name, value in record.settings.items():
        yield short(spoken(name), 60), cell(value) or "none"
