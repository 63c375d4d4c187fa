"""Files of rows: tables, and the word-a-line files of CoNLL.

Files of text are read as a stream, into columns that take little more than their bytes.
"""

from __future__ import annotations

import csv
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from softsieve.errors import InputError, first_line, listed, shown
from softsieve.extras import package
from softsieve.tasks.examples import Examples
from softsieve.tasks.files import iter_lines, open_text, parse_json
from softsieve.tasks.reading import Meter, Reading
from softsieve.tasks.texts import Column, Places


class Table(NamedTuple):
    """Columns as they were read, before anyone knows what they are for."""

    place: str  # file or data set
    columns: dict[str, Sequence[Any]]
    where: Sequence[str]  # place of every row
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


def read_table(path: Path, how: Reading) -> Table:
    """A .csv, .tsv, .jsonl, .json (or .gz of one) or .parquet file; no row is an error."""
    table = _TABLES[_extension(path)](path, how)
    if not len(table.where):
        how.say_left_out(path, 0)
        raise InputError(f"{path}: no rows")
    return table


def read_conll(path: Path, how: Reading, *, tags: bool = True) -> Examples:
    """Sentences of a CoNLL-style file: a word and its tag, first and last on a line, a blank line after a sentence.

    Without ``tags`` there may be words alone, which gives examples without labels.
    """
    words, labels, where, width = list[list[str]](), list[list[str]](), array("q"), 0
    for sentence in _sentences(path, how):
        width = width or len(sentence[0][1])
        try:
            for number, fields in sentence:
                if len(fields) < 2 and tags:
                    only = shown(fields[0])
                    raise InputError(f"{path}:{number}: expected a word and a tag, found only {only}")
                if len(fields) != width:
                    found = f"expected {width} columns as on the first line, found {len(fields)}"
                    raise InputError(f"{path}:{number}: {found}")
        except InputError as error:
            how.refuse(error)
            continue
        words.append([fields[0] for _, fields in sentence])
        labels.append([fields[-1] for _, fields in sentence])
        where.append(sentence[0][0])
    how.say_left_out(path, len(words))
    if not words:
        raise InputError(f"{path}: no sentences")
    return Examples(words, labels if width != 1 else [], Places(str(path), where))


def _sentences(path: Path, how: Reading) -> Iterator[list[tuple[int, list[str]]]]:
    """The lines of each sentence: their numbers and fields."""
    sentence: list[tuple[int, list[str]]] = []
    with open_text(path, how, newline="\n") as (file, meter):
        for number, line in enumerate(file, start=1):
            meter.tick(number)
            fields = re.split(r"[ \t]+", line.strip(" \t\r\n"))
            if fields != [""] and fields[0] != "-DOCSTART-":
                sentence.append((number, fields))
            elif sentence:
                yield sentence
                sentence = []
    if sentence:
        yield sentence


def _read_delimited(path: Path, how: Reading) -> Table:
    tabs = _extension(path) == ".tsv"
    delimiter = how.delimiter or ("\t" if tabs else _find_delimiter(path, how))
    # In a .tsv file a quotation mark is a character like any other.
    dialect: dict[str, Any] = {"quoting": csv.QUOTE_NONE} if tabs else {"strict": True}
    before = csv.field_size_limit(2**31 - 1)  # a text may be longer than the module's 128 kB
    try:
        with open_text(path, how) as (file, meter):
            return _read_cells(path, csv.reader(file, delimiter=delimiter, **dialect), meter, how)
    finally:
        csv.field_size_limit(before)


def _read_cells(path: Path, reader: Any, meter: Meter, how: Reading) -> Table:
    """The rows of a csv.reader below a header."""
    header: list[str] = []
    columns: list[Column] = []
    lines = array("q")
    line, going = 1, True
    while going:
        try:
            row = next(reader, None)
        except csv.Error as error:
            complaint = InputError(f"{path}:{line}: not a row of the table ({error})")
            if "unexpected end" in str(error) or not header:  # a quotation mark that nothing closes: no row is after it
                raise complaint from None
            how.refuse(complaint)
        else:
            going = row is not None
            if row and not header:
                header = [name.strip() for name in row]
                columns = [Column() for _ in header]
            elif row and len(row) != len(header):
                how.refuse(f"{path}:{line}: expected {len(header)} columns as in the header, found {len(row)}")
            elif row:
                for column, cell in zip(columns, row, strict=True):
                    column.append(cell)
                lines.append(line)
                meter.tick(len(lines))
        line = reader.line_num + 1
    if len(set(header)) != len(header):
        raise InputError(f"{path}:1: expected every column name once, found {listed(header)}")
    cells = {name: column.finish() for name, column in zip(header, columns, strict=True)}
    return Table(str(path), cells, Places(str(path), lines), path.parent)


def _find_delimiter(path: Path, how: Reading) -> str:
    """A comma, or what else the header of a .csv file is divided by where it has none."""
    with open_text(path, Reading(encoding=how.encoding)) as (file, _):
        header = next((line for line in file if line.strip()), "")
    if "," in header:
        return ","
    counts = {sign: header.count(sign) for sign in (";", "\t", "|")}
    best = max(counts, key=lambda sign: counts[sign])
    return best if counts[best] else ","


def _read_jsonl(path: Path, how: Reading) -> Table:
    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in iter_lines(path, how):
            try:
                row = parse_json(line, f"{path}:{number}")
                if not isinstance(row, dict):
                    raise InputError(f"{path}:{number}: expected a JSON object, found {type(row).__name__}")
            except InputError as error:
                how.refuse(error)
            else:
                yield number, row

    return _gather(path, objects())


def _gather(path: Path, rows: Iterable[tuple[int, dict[str, Any]]]) -> Table:
    """A table of objects and their numbers; what an object does not have is None."""
    columns: dict[str, Column] = {}
    numbers = array("q")
    for number, row in rows:
        for name, cell in row.items():
            if name not in columns:
                columns[name] = Column()
            columns[name].extend_to(len(numbers))
            columns[name].append(cell)
        numbers.append(number)
    for column in columns.values():
        column.extend_to(len(numbers))
    cells = {name: column.finish() for name, column in columns.items()}
    return Table(str(path), cells, Places(str(path), numbers), path.parent)


def _read_json(path: Path, how: Reading) -> Table:
    """A list of objects, an object of columns (lists, or objects by row as pandas writes them), or an object a line."""
    with open_text(path, how) as (file, _):
        text = file.read()
    try:
        content = parse_json(text, path)
    except InputError:
        if text.lstrip()[:1] != "{" or "\n" not in text.strip():
            raise
        return _read_jsonl(path, how)
    if isinstance(content, dict) and content and all(isinstance(cells, dict) for cells in content.values()):
        content = {name: list(cells.values()) for name, cells in content.items()}
    if isinstance(content, dict) and content and all(isinstance(cells, list) for cells in content.values()):
        lengths = {name: len(cells) for name, cells in content.items()}
        if len(set(lengths.values())) > 1:
            raise InputError(f"{path}: expected columns of equal length, found {json.dumps(lengths)[:200]}")
        content = [dict(zip(content, row, strict=True)) for row in zip(*content.values(), strict=True)]
    if not isinstance(content, list):
        raise InputError(f"{path}: expected a list of objects or an object of lists, found {shown(content)}")

    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        for number, row in enumerate(content, start=1):
            if isinstance(row, dict):
                yield number, row
            else:
                how.refuse(f"{path}:{number}: expected a JSON object, found {type(row).__name__}")

    return _gather(path, objects())


def _read_parquet(path: Path, how: Reading) -> Table:
    arrow, parquet = package("pyarrow", "a .parquet file"), package("pyarrow.parquet", "a .parquet file")
    rows = 0
    try:
        source = parquet.ParquetFile(arrow.memory_map(str(path)), pre_buffer=False)
        names = source.schema_arrow.names
        if len(set(names)) < len(names):
            raise InputError(f"{path}: expected every column name once, found {listed(names)}")
        columns = {name: Column() for name in names}
        # Without threads, which some versions fail to end with the program.
        for batch in source.iter_batches(BLOCK, use_threads=False):
            add_cells(columns, batch)
            rows += batch.num_rows
            how.progress(f"reading {path.name}", batch.num_rows / max(1, source.metadata.num_rows))
    except InputError:
        raise
    except (arrow.ArrowException, OSError, KeyError, OverflowError, ValueError) as error:
        raise InputError(f"{path}: not a parquet file ({first_line(error)})") from None
    cells = {name: column.finish() for name, column in columns.items()}
    return Table(str(path), cells, Places(str(path), range(1, rows + 1)), path.parent)


def add_cells(columns: Mapping[str, Column], batch: Any) -> None:
    """All cells of an Arrow table as they are stored: images and sounds are not decoded."""
    batch.validate(full=True)  # what was read may point anywhere
    for name, column in columns.items():
        for cell in batch.column(name).to_pylist():
            column.append(cell)


BLOCK = 4096  # rows of an Arrow table that are Python objects at a time
_TABLES: dict[str, Callable[[Path, Reading], Table]] = {
    ".csv": _read_delimited, ".tsv": _read_delimited, ".jsonl": _read_jsonl, ".json": _read_json,
    ".parquet": _read_parquet,
}  # fmt: skip
