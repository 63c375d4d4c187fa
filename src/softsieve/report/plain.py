"""Records of a suite without a section of its own, as plain tables."""

from __future__ import annotations

from softsieve.report.page import Suite, Table
from softsieve.report.read import Record
from softsieve.report.words import cell, count, short, spoken

_COLUMNS = 24


def suite(name: str) -> Suite:
    """Of any name."""
    return Suite(
        title=f"Results of {short(name, 60)}",
        how="The results as they were recorded; a column is named as in the record.",
        about=lambda record: count(len(record.results), "result") + ".",
        blocks=lambda record: [table(record)] if record.results else [],
    )


def table(record: Record) -> Table:
    """All results, a column for every field that one of them has."""
    fields = dict.fromkeys(name for result in record.results for name in result)
    worded = [name for name in fields if all(isinstance(result.get(name), str) for result in record.results)]
    names = list(dict.fromkeys((*worded[:1], *fields)))[:_COLUMNS] or ["result"]  # the first names the row
    rows = [[cell(result.get(name)) for name in names] for result in record.results]
    return Table(f"{short(record.name, 60)}: results", [short(spoken(name), 60) for name in names], rows)
