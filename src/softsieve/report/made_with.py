"""What was run and on what: data, settings, commit, versions, machine and date of everything on the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from softsieve.report.groups import Line, data_sets
from softsieve.report.page import Folded, Section, Table
from softsieve.report.read import Found, Record
from softsieve.report.words import cell, commit, count, date, list_of, machine, short, spoken

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


def section(found: Found) -> Section:
    """Of everything that was given."""
    rows, details = [], []
    for data, lines in data_sets(found.runs):
        for line in lines:
            made = [run.record.provenance for run in line.runs]
            rows.append([f"{short(data, 60)}: {line.label}", f"training, {count(len(made), 'run')}", *_made(made)])
            details.append(_details(f"{short(data, 60)}: {line.label}", _of_line(line), made))
    for record in found.records:
        rows.append(
            [short(record.name, 80), _WHAT.get(record.suite, short(record.suite, 60)), *_made([record.provenance])]
        )
        details.append(_details(short(record.name, 80), _of_record(record), [record.provenance]))
    return Section(
        title="What was run",
        how="Every figure on this page comes from one of these. The commit names the source it was made with; "
        "'modified' means that files had been changed since.",
        blocks=[
            Table("Everything on this page", ["name", "what", "date (UTC)", "commit", "machine", "torch"], rows),
            Folded("Settings and versions in full", details),
        ],
    )


def _made(made: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    dates = sorted(filter(None, map(date, made)))
    first, last = (dates[0], dates[-1]) if dates else ("", "")
    yield first if first == last else f"{first} to {last.removeprefix(first[:11])}"  # the day is said once
    yield _each(commit(m) for m in made)
    yield _each(machine(m) for m in made)
    yield _each(cell(_versions(m).get("torch")) for m in made)


def _each(names: Iterator[str]) -> str:
    return list_of([name for name in dict.fromkeys(names) if name])


def _versions(made: Mapping[str, Any]) -> Mapping[str, Any]:
    versions = made.get("versions")
    return versions if isinstance(versions, dict) else {}


def _of_line(line: Line) -> Iterator[tuple[str, str]]:
    yield "folders", short(", ".join(run.record.name for run in line.runs))
    yield "seed", list_of([str(run.settings["seed"]) for run in line.runs])
    yield from ((spoken(name), cell(value)) for name, value in line.settings.items() if name != "seed")


def _of_record(record: Record) -> Iterator[tuple[str, str]]:
    yield "suite", short(record.suite, 60)
    for name, value in record.settings.items():
        yield short(spoken(name), 60), cell(value) or "none"


def _details(name: str, settings: Iterator[tuple[str, str]], made: Sequence[Mapping[str, Any]]) -> Table:
    rows = [[key, value] for key, value in settings]
    rows += [[f"version of {short(key, 40)}", cell(value)] for key, value in _versions(made[0]).items()]
    return Table(name, ["setting", "value"], rows)
