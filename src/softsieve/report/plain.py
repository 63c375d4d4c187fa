"""Records of a suite without a section of its own, as plain tables."""

from __future__ import annotations

from collections.abc import Sequence

from softsieve.report.page import Part, Section, Table
from softsieve.report.read import Record
from softsieve.report.words import cell, count, short, spoken

_COLUMNS = 24


def section(suite: str, records: Sequence[Record]) -> Section:
    """Of one suite."""
    return Section(
        title=f"Results of {short(suite, 60)}",
        how="The results as they were recorded; a column is named as in the record.",
        parts=[
            Part(title=short(record.name, 60), blocks=[table(record)] if record.results else [], how=_how(record))
            for record in records
        ],
    )


def _how(record: Record) -> str:
    return count(len(record.results), "result") + "."


def table(record: Record) -> Table:
    """All results, a column for every field that one of them has."""
    found = dict.fromkeys(name for result in record.results for name in result)
    worded = [name for name in found if all(isinstance(result.get(name), str) for result in record.results)]
    names = list(dict.fromkeys((*worded[:1], *found)))[:_COLUMNS] or ["result"]  # the first names the row
    rows = [[cell(result.get(name)) for name in names] for result in record.results]
    return Table(f"{short(record.name, 60)}: results", [short(spoken(name), 60) for name in names], rows)
