"""What was run and on what: data, settings, commit, versions, machine and date of everything on the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from softsieve.report.groups import Line, data_sets
from softsieve.report.page import Folded, Section, Table
from softsieve.report.read import Record, Sources
from softsieve.report.words import Row, cell, commit, count, date, list_of, machine, short, spoken

_WHAT = {
    "compare": "comparison of losses",
    "head-bench": "heads: speed against success",
    "head-scaling": "heads of several sizes",
    "head-gpu": "heads on a GPU",
    "head": "heads",
    "losses": "time and memory of the loss",
    "linear": "loss and last layer in one",
    "generate": "text from a language model",
    "perplexity": "perplexity",
    "tests": "tests",
}


def section(sources: Sources) -> Section:
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
        what = _WHAT.get(record.suite, short(record.suite, 60))
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
