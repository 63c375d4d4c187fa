"""Files of rows: tables, and the word-a-line files of CoNLL."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from softsieve.errors import InputError, first_line, listed, shown
from softsieve.extras import package
from softsieve.tasks.examples import Examples
from softsieve.tasks.files import parse_json, read_bytes, read_lines, read_text


class Table(NamedTuple):
    """Columns as they were read, before anyone knows what they are for."""

    place: str  # file or data set
    columns: dict[str, list[Any]]
    where: list[str]  # place of every row
    folder: Path = Path()  # what file names in it are relative to
    media: Mapping[str, str] = MappingProxyType({})  # columns declared to be images or sounds, with their kind
    names: Mapping[str, list[str]] = MappingProxyType({})  # label sets that columns declare


def is_table(path: Path) -> bool:
    """Whether `read_table` reads files of that name."""
    return _extension(path) in _TABLES and not path.name.lower().endswith(".parquet.gz")


def is_conll(path: Path) -> bool:
    """Whether files of that name hold a word a line."""
    return _extension(path) in (".conll", ".txt")


def _extension(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def read_table(path: Path) -> Table:
    """A .csv, .tsv, .jsonl (or .gz of one) or .parquet file; no row is an error."""
    table = _TABLES[_extension(path)](path)
    if not table.where:
        raise InputError(f"{path}: no rows")
    return table


def read_conll(path: Path, *, tags: bool = True) -> Examples:
    """Sentences of a CoNLL-style file: a word and its tag, first and last on a line, a blank line after a sentence.

    Without ``tags`` there may be words alone, which gives examples without labels.
    """
    examples, width = Examples([], [], []), None
    inside = False
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        fields = re.split(r"[ \t]+", line.strip(" \t\r"))
        if fields == [""] or fields[0] == "-DOCSTART-":
            inside = False
            continue
        where = f"{path}:{number}"
        width = width or len(fields)
        if len(fields) < 2 and tags:
            raise InputError(f"{where}: expected a word and a tag, found only {shown(fields[0])}")
        if len(fields) != width:
            raise InputError(f"{where}: expected {width} columns as on the first line, found {len(fields)}")
        if not inside:
            examples.inputs.append([])
            examples.labels.append([])
            examples.where.append(where)
            inside = True
        examples.inputs[-1].append(fields[0])
        examples.labels[-1].append(fields[-1])
    if not examples.inputs:
        raise InputError(f"{path}: no sentences")
    return examples if width != 1 else examples._replace(labels=[])


def _read_delimited(path: Path) -> Table:
    dialect: dict[str, Any] = {"strict": True}
    if _extension(path) == ".tsv":
        dialect = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}  # a quotation mark is a character like any other
    reader = csv.reader(io.StringIO(read_text(path), newline=""), **dialect)
    before = csv.field_size_limit(2**31 - 1)  # a text may be longer than the module's 128 kB
    rows: list[list[str]] = []
    where: list[str] = []
    line = 1
    try:
        header = [name.strip() for name in next((row for row in reader if row), [])]
        line = reader.line_num + 1
        for row in reader:
            if row and len(row) != len(header):
                raise InputError(f"{path}:{line}: expected {len(header)} columns as in the header, found {len(row)}")
            if row:
                rows.append(row)
                where.append(f"{path}:{line}")
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"{path}:{line}: not a row of the table ({error})") from None
    finally:
        csv.field_size_limit(before)
    if len(set(header)) != len(header):
        raise InputError(f"{path}:1: expected every column name once, found {listed(header)}")
    columns: dict[str, list[Any]] = {name: [row[i] for row in rows] for i, name in enumerate(header)}
    return Table(str(path), columns, where, path.parent)


def _read_jsonl(path: Path) -> Table:
    rows, where = [], []
    for place, line in read_lines(path):
        row = parse_json(line, place)
        if not isinstance(row, dict):
            raise InputError(f"{place}: expected a JSON object, found {type(row).__name__}")
        rows.append(row)
        where.append(place)
    names = dict.fromkeys(name for row in rows for name in row)
    return Table(str(path), {name: [row.get(name) for row in rows] for name in names}, where, path.parent)


def _read_parquet(path: Path) -> Table:
    arrow, parquet = package("pyarrow", "a .parquet file"), package("pyarrow.parquet", "a .parquet file")
    try:
        # Without threads, which some versions fail to end with the program.
        source = parquet.ParquetFile(arrow.BufferReader(read_bytes(path)), pre_buffer=False)
        table = source.read(use_threads=False)
        columns = arrow_columns(table)
    except (arrow.ArrowException, OSError, KeyError, OverflowError, ValueError) as error:
        raise InputError(f"{path}: not a parquet file ({first_line(error)})") from None
    return Table(str(path), columns, [f"{path}:{row + 1}" for row in range(table.num_rows)], path.parent)


def arrow_columns(table: Any) -> dict[str, list[Any]]:
    """All cells of an Arrow table as they are stored: images and sounds are not decoded."""
    table.validate(full=True)  # what was read may point anywhere
    return {name: table.column(name).to_pylist() for name in table.column_names}


_TABLES: dict[str, Callable[[Path], Table]] = {
    ".csv": _read_delimited, ".tsv": _read_delimited, ".jsonl": _read_jsonl, ".parquet": _read_parquet,
}  # fmt: skip
