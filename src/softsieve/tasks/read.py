"""Reads a user's data: files, folders with a sub-folder per class, Hugging Face data sets.

Whatever the source, its tables become `Examples` in `_examples`; only folders of images or sounds need no table.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from softsieve.errors import InputError
from softsieve.tasks.examples import KINDS, Data, Examples, label_names

PARTS = {"train": ("train",), "validation": ("validation", "valid", "dev", "val"), "test": ("test",)}
MEDIA = {"image": (".png", ".jpg", ".jpeg", ".bmp", ".webp"), "audio": (".wav", ".flac", ".ogg", ".mp3")}

# Column names by preference, in lower case.
_TEXT = ("text", "sentence", "content", "utterance", "query", "question", "review", "comment", "message", "title")
_WORDS = ("tokens", "words")
_FILES = ("file", "path", "image", "audio", "file_name", "filename", "img")
_LABEL = ("label", "labels", "intent", "category", "class", "target", "topic", "topics", "tags", "ner_tags", "pos_tags")


def read_data(
    source: str | Path,
    *,
    validation: str | Path | None = None,
    test: str | Path | None = None,
    kind: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    validation_share: float = 0.1,
    seed: int = 0,
) -> Data:
    """A data set from a file, a folder, or the name of a Hugging Face data set.

    Files are .csv, .tsv (read without quoting), .jsonl, .parquet and, for tokens, CoNLL-style .conll or .txt; all but
    .parquet also as .gz. Folders hold one folder of images or sounds per class, or train, validation and test folders
    of such; or files train.csv, validation.csv, ...; or what `datasets.Dataset.save_to_disk` wrote.

    Args:
        source: the training data, and the validation and test data that come with it.
        validation: validation data of its own. Without any, `validation_share` of the training rows are held out.
        test: test data of its own.
        kind: one of `KINDS`; found from the data when None. Multi-label cells of a text file ("a|b" or "a,b") are only
            taken apart with ``kind="multilabel"``.
        text_column: column of the inputs (texts, words or file names), where its name does not tell.
        label_column: column of the labels, where its name does not tell.
        validation_share: share of the training rows to hold out, from 0 (none) to below 1.
        seed: of that draw.

    Raises:
        InputError: saying what cannot be used, and where.
    """
    if kind is not None and kind not in KINDS:
        raise InputError(f"kind: expected one of {', '.join(KINDS)}, found {kind!r}")
    if not 0 <= validation_share < 1:
        raise InputError(f"validation_share: expected a number from 0 to below 1, found {validation_share}")
    wanted = _Wanted(kind, text_column, label_column)
    parts = _read(source, wanted)
    train = parts["train"]
    wanted = wanted._replace(kind=train.kind)  # what training is, the other parts must be
    rest: dict[str, Examples | None] = {}
    for name, own in (("validation", validation), ("test", test)):
        part = parts.get(name) if own is None else _one_part(own, name, wanted)
        if part is not None and part.kind != train.kind:
            raise InputError(f"{part.examples.where[0]}: expected {train.kind} as in training, found {part.kind}")
        rest[name] = None if part is None else part.examples
    data = Data(_name(source), train.kind, train.examples, rest["validation"], rest["test"], train.labels)
    _check_labels(data, str(source))
    if data.validation is None and validation_share > 0:
        kept, held_out = hold_out(data, max(1, round(validation_share * len(data.train.inputs))), seed=seed)
        data = data._replace(train=kept, validation=held_out)
    return data


def read_inputs(
    source: str | Path, kind: str, *, text_column: str | None = None, label_column: str | None = None
) -> Examples:
    """What a trained model is to answer: a source as of `read_data`, with labels or without (an empty list).

    Without labels it may also be a file of texts, one a line (.txt); of words, one a line (.txt, .conll); or a folder
    of images or sounds. Of a source with several parts it is the test.

    Args:
        source: file, folder or name of a data set.
        kind: one of `KINDS`, what the model was trained on.
        text_column, label_column: as in `read_data`; a column of labels with gaps counts as none.

    Raises:
        InputError: saying what cannot be used, and where.
    """
    path, wanted = Path(source), _Wanted(kind, text_column, label_column)
    if path.is_dir() and kind in MEDIA:
        files = [file for file in sorted(path.iterdir()) if file.is_file() and _media_kind(file.name) == kind]
        if files:
            return Examples(files, [], [str(file) for file in files])
    if path.is_file() and _extension(path) in _CONLL:
        return read_conll(path, tags=False) if kind == "tokens" else line_inputs(read_lines(path), kind, path.parent)
    if path.is_file() and _readable(path):
        return _to_answer(read_table(path), kind, wanted)
    return _one_part(source, "test", wanted).examples


def line_inputs(lines: Iterable[tuple[str, str]], kind: str, folder: Path = Path()) -> Examples:
    """Examples without labels from places and lines: texts, words between spaces, or names of files in the folder."""
    examples = Examples([], [], [])
    for where, line in lines:
        examples.inputs.append(_input(line.split() if kind == "tokens" else line, kind, where, folder))
        examples.where.append(where)
    return examples


class _Wanted(NamedTuple):
    """What the caller said of the data."""

    kind: str | None
    text_column: str | None = None
    label_column: str | None = None


class _Part(NamedTuple):
    """One part as read: its kind, its examples and the label set its source declares."""

    kind: str
    examples: Examples
    labels: list[str] | None = None


def _name(source: str | Path) -> str:
    path = Path(source)
    if path.is_file():
        return Path(path.name.removesuffix(".gz")).stem
    return path.resolve().name if path.is_dir() else str(source)


def _read(source: str | Path, wanted: _Wanted) -> dict[str, _Part]:
    """The parts of a source by name, "train" always; a single file is all training."""
    path = Path(source)
    if path.is_file():
        return {"train": _read_file(path, wanted)}
    if path.is_dir():
        return _read_folder(path, wanted)
    return _read_hub(str(source), wanted)


def _one_part(source: str | Path, name: str, wanted: _Wanted) -> _Part:
    """The part of that name, or the only one, of a source the caller gave for it."""
    parts = _read(source, wanted)
    if name not in parts and len(parts) != 1:
        raise InputError(f"{source}: expected a part {name!r}, found {_listed(parts)}")
    return parts.get(name, parts["train"])


def _check_labels(data: Data, source: str) -> None:
    """Refuse a single class, and labels that training does not know."""
    known = set(label_names(data))
    seen = set(label_names(data._replace(labels=None)))
    least = 1 if data.kind == "multilabel" else 2  # any number of labels a row: one of them may be there or not
    if len(seen) < least:
        raise InputError(f"{source}: expected at least {least} classes to train on, found {sorted(seen)}")
    for part in (data.validation, data.test):
        if part is None:
            continue
        for where, labels in zip(part.where, part.labels, strict=True):
            for label in _as_list(labels):
                if label not in known:
                    raise InputError(f"{where}: label {label!r} does not occur in the training data")


def _as_list(labels: Any) -> list[Any]:
    return labels if isinstance(labels, list) else [labels]


# Validation rows


def hold_out(data: Data, count: int, *, seed: int, keep_labels: bool = True) -> tuple[Examples, Examples]:
    """Training examples without `count` of them, and those, in the order of the data.

    With one label a row they come from every class alike where each has one to give and one to keep. Otherwise they are
    drawn at random, and with `keep_labels` fewer than `count` rather than that a label disappears from training.
    """
    train = data.train
    order = np.random.default_rng(seed).permutation(len(train.inputs)).tolist()
    by_class: dict[str, list[int]] = {}
    if data.kind in ("text", "image", "audio"):
        for row in order:
            by_class.setdefault(train.labels[row], []).append(row)
    if by_class and all(len(order) <= count * len(rows) <= len(order) * (len(rows) - 1) for rows in by_class.values()):
        quota = {label: divmod(count * len(rows), len(order)) for label, rows in by_class.items()}
        largest = sorted(quota, key=lambda label: (-quota[label][1], label))  # remainder
        extra = set(largest[: count - sum(whole for whole, _ in quota.values())])
        chosen = {row for label, rows in by_class.items() for row in rows[: quota[label][0] + (label in extra)]}
    else:
        chosen = _spare_rows(train, order, min(count, len(order) - 1), keep_labels)
    if not chosen:
        raise InputError(
            f"{train.where[0]}: too few rows ({len(order)}) to hold any out for validation; "
            "give validation data or validation_share=0"
        )

    def pick(rows: list[int]) -> Examples:
        return Examples(*([values[row] for row in rows] for values in train))

    return pick([row for row in range(len(order)) if row not in chosen]), pick(sorted(chosen))


def _spare_rows(train: Examples, order: list[int], count: int, keep_labels: bool) -> set[int]:
    """The first `count` rows of `order`; with `keep_labels`, of those whose labels training has elsewhere too."""
    if not keep_labels:
        return set(order[:count])
    left = Counter(label for labels in train.labels for label in _as_list(labels))
    chosen: set[int] = set()
    for row in order:
        here = Counter(_as_list(train.labels[row]))
        if len(chosen) < count and all(left[label] > times for label, times in here.items()):
            left.subtract(here)
            chosen.add(row)
    return chosen


# Files


class Table(NamedTuple):
    """Columns as they were read, before anyone knows what they are for."""

    place: str  # file or data set
    columns: dict[str, list[Any]]
    where: list[str]  # place of every row
    folder: Path = Path()  # what file names in it are relative to
    media: Mapping[str, str] = MappingProxyType({})  # columns declared to be images or sounds, with their kind
    names: Mapping[str, list[str]] = MappingProxyType({})  # label sets that columns declare


def package(name: str, what: str) -> Any:
    """The module of an optional package, or an error that says how to get it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(f"{what} needs the package {error.name}: pip install 'softsieve[train]'") from None


def read_bytes(path: Path) -> bytes:
    """What a file holds, unpacked if it is a .gz or .xz."""
    unpack: Callable[[bytes], bytes] = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix.lower(), bytes)
    try:
        return unpack(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise InputError(f"{path}: damaged {path.suffix} file ({_one_line(error)})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def read_text(path: Path) -> str:
    """What a UTF-8 file says, with its line ends as they are."""
    content = read_bytes(path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8 (byte {content[error.start]:#04x})") from None


def read_lines(path: Path) -> list[tuple[str, str]]:
    """Place and text of every line that is not blank. Only a line feed ends a line: texts hold other separators."""
    lines = enumerate(read_text(path).split("\n"), start=1)
    return [(f"{path}:{number}", line.rstrip("\r")) for number, line in lines if line.strip()]


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
            raise InputError(f"{where}: expected a word and a tag, found only {fields[0]!r}")
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


def _extension(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _readable(path: Path) -> bool:
    packed = path.name.lower().endswith(".gz")
    return _extension(path) in (*_TABLES, *_CONLL) and not (packed and _extension(path) == ".parquet")


def _read_file(path: Path, wanted: _Wanted) -> _Part:
    if not _readable(path):
        expected = ".csv, .tsv, .jsonl, .conll, .txt (or .gz of these) or .parquet"
        raise InputError(f"{path}: expected a file {expected}, found {''.join(path.suffixes[-2:]) or 'no extension'}")
    if _extension(path) not in _CONLL:
        return _examples(read_table(path), wanted)
    if wanted.kind not in (None, "tokens"):
        raise InputError(f"{path}: such a file holds tokens, a word and a tag a line, not {wanted.kind}")
    return _Part("tokens", read_conll(path))


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
        header = next((row for row in reader if row), [])
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
        raise InputError(f"{path}:1: expected every column name once, found {_listed(header)}")
    columns: dict[str, list[Any]] = {name: [row[i] for row in rows] for i, name in enumerate(header)}
    return Table(str(path), columns, where, path.parent)


def _read_jsonl(path: Path) -> Table:
    rows, where = [], []
    for place, line in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{place}: invalid JSON ({_one_line(error)})") from None
        if not isinstance(row, dict):
            raise InputError(f"{place}: expected a JSON object, found {type(row).__name__}")
        rows.append(row)
        where.append(place)
    names = dict.fromkeys(name for row in rows for name in row)
    return Table(str(path), {name: [row.get(name) for row in rows] for name in names}, where, path.parent)


def _read_parquet(path: Path) -> Table:
    arrow, parquet = package("pyarrow", "a .parquet file"), package("pyarrow.parquet", "a .parquet file")
    try:
        table = parquet.read_table(io.BytesIO(read_bytes(path)))
        columns = {name: table.column(name).to_pylist() for name in table.column_names}
    except (arrow.ArrowException, OSError, KeyError) as error:
        raise InputError(f"{path}: not a parquet file ({_one_line(error)})") from None
    return Table(str(path), columns, [f"{path}:{row + 1}" for row in range(table.num_rows)], path.parent)


_TABLES: dict[str, Callable[[Path], Table]] = {
    ".csv": _read_delimited,
    ".tsv": _read_delimited,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
_CONLL = (".conll", ".txt")


# Tables to examples


def _examples(table: Table, wanted: _Wanted) -> _Part:
    label = _find_labels(table, wanted)
    kind = wanted.kind or _find_kind(table, label, wanted.text_column)
    inputs = _inputs(table, kind, wanted.text_column, label)
    examples = Examples(inputs, [], table.where)
    for where, words, answer in zip(table.where, inputs, table.columns[label], strict=True):
        labels = _label(answer, kind, f"{where}: column {label!r}")
        if kind == "tokens" and len(words) != len(labels):
            raise InputError(f"{where}: expected a label a word, found {len(words)} words and {len(labels)} labels")
        examples.labels.append(labels)
    return _Part(kind, examples, table.names.get(label))


def _inputs(table: Table, kind: str, column: str | None, label: str | None) -> list[Any]:
    column = _named(table, column) if column is not None else _find_inputs(table, kind, label)
    if column == label:
        raise InputError(f"{table.place}: column {column!r} cannot be both the input and the label")
    cells = zip(table.columns[column], table.where, strict=True)
    return [_input(value, kind, f"{where}: column {column!r}", table.folder) for value, where in cells]


def _to_answer(table: Table, kind: str, wanted: _Wanted) -> Examples:
    """Examples with labels if every row has one (of multi-label rows, any), else without."""
    label = None if wanted.label_column is None else _named(table, wanted.label_column)
    if label is None:
        label = _find(table, _LABEL, but=wanted.text_column)
    answers = table.columns[label] if label is not None else [None]
    blank = [value is None or not str(value).strip() for value in answers]
    if (None not in answers and not all(blank)) if kind == "multilabel" else not any(blank):
        return _examples(table, wanted._replace(label_column=label)).examples
    return Examples(_inputs(table, kind, wanted.text_column, label), [], table.where)


def _find(table: Table, names: Iterable[str], but: str | None = None) -> str | None:
    """The column whose name, in any case, comes first among `names`."""
    columns = {column.lower(): column for column in table.columns if column != but}
    return next((columns[name] for name in names if name in columns), None)


def _named(table: Table, name: str) -> str:
    found = name if name in table.columns else _find(table, [name.lower()])
    if found is None:
        raise InputError(f"{table.place}: no column {name!r}, there are {_listed(table.columns)}")
    return found


def _find_labels(table: Table, wanted: _Wanted) -> str:
    if wanted.label_column is not None:
        return _named(table, wanted.label_column)
    found = _find(table, _LABEL, but=wanted.text_column)
    if found is None and len(table.names) == 1:
        found = next(iter(table.names))
    if found is None:
        raise InputError(f"{table.place}: no column of labels found among {_listed(table.columns)}; give label_column")
    return found


def _find_kind(table: Table, label: str, column: str | None) -> str:
    column = None if column is None else _named(table, column)
    if _holds(table, label, list):
        words = column or _find(table, _WORDS, but=label)
        return "tokens" if words is not None and _holds(table, words, list) else "multilabel"
    media = _find_media(table) if column is None else column
    if media is None:
        return "text"
    if media in table.media:
        return table.media[media]
    kinds = {_media_kind(value) for value in table.columns[media]}
    return "text" if len(kinds) > 1 else kinds.pop() or "text"


def _media_kind(file: object) -> str | None:
    end = Path(file).suffix.lower() if isinstance(file, str) else ""
    return next((kind for kind, extensions in MEDIA.items() if end in extensions), None)


def _find_media(table: Table) -> str | None:
    return next(iter(table.media), None) or _find(table, _FILES)


def _find_inputs(table: Table, kind: str, label: str | None) -> str:
    """The column of the inputs by its name; of texts also the only column that can be one."""
    found: str | None
    if kind in MEDIA:
        found, what = _find_media(table), "file names"
    elif kind == "tokens":
        found, what = _find(table, _WORDS, but=label), "words"
    else:
        found, what = _find(table, _TEXT, but=label), "texts"
        texts = [column for column in table.columns if column != label and _is_text(table.columns[column])]
        if found is None and len(texts) == 1:
            found = texts[0]
    if found is None:
        raise InputError(f"{table.place}: no column of {what} found among {_listed(table.columns)}; give text_column")
    return found


def _holds(table: Table, column: str, what: type) -> bool:
    return any(isinstance(value, what) for value in table.columns[column])


def _is_text(values: list[Any]) -> bool:
    """Whether values are strings, and not all of them numbers."""
    if not all(isinstance(value, str) for value in values):
        return False
    return not all(re.fullmatch(r"\s*[-+]?[0-9.]*(e[-+]?[0-9]+)?\s*", value, re.IGNORECASE) for value in values)


def _input(value: Any, kind: str, where: str, folder: Path) -> Any:
    if kind in MEDIA:
        return _media(value, kind, where, folder)
    if kind == "tokens":
        if not isinstance(value, list) or not value:
            raise InputError(f"{where}: expected a list of words, found {_shown(value)}")
        return [_string(word, where) for word in value]
    if not _string("" if value is None else value, where).strip():
        raise InputError(f"{where}: empty text")
    return value


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: expected text, found {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:  # half a character, as "\ud83d" in JSON
        raise InputError(f"{where}: text is not valid Unicode") from None
    return value


def _label(value: Any, kind: str, where: str) -> Any:
    if kind == "multilabel":
        if isinstance(value, str):
            value = [label for label in re.split(r"[|,]", value) if label.strip()]
        if not isinstance(value, list):
            raise InputError(f"{where}: expected a list of labels, found {_shown(value)}")
        return list(dict.fromkeys(_one_label(label, where) for label in value))
    if kind == "tokens":
        if not isinstance(value, list):
            raise InputError(f"{where}: expected a list of labels, found {_shown(value)}")
        return [_one_label(label, where) for label in value]
    return _one_label(value, where)


def _one_label(value: Any, where: str) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise InputError(f"{where}: empty label")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of integers turns into floats where one of them is missing
    if not isinstance(value, str | int):
        raise InputError(f"{where}: expected a label, found {_shown(value)}")
    return _string(str(value).strip(), where)


def _media(value: Any, kind: str, where: str, folder: Path) -> Any:
    """A file in the folder; or, of what Hugging Face stores as ``{"bytes", "path"}``, the decoded image or sound."""
    if isinstance(value, dict) and (value.get("bytes") or value.get("path")):
        return _decoded(io.BytesIO(value["bytes"]) if value.get("bytes") else value["path"], kind, where)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: expected a file name, found {_shown(value)}")
    path = folder / value
    if not path.is_file():
        raise InputError(f"{where}: no such file {path}")
    return path


def _decoded(file: Any, kind: str, where: str) -> Any:
    library = package("PIL.Image" if kind == "image" else "soundfile", f"decoding {kind}")
    try:
        if kind == "image":
            image = library.open(file)
            return np.array(image.convert("L" if image.mode in ("1", "L") else "RGB"))
        samples, rate = library.read(file, dtype="float32", always_2d=True)
    except (OSError, ValueError, RuntimeError, SyntaxError) as error:  # SyntaxError: Pillow's word for a broken PNG
        raise InputError(f"{where}: unreadable {kind} ({_one_line(error)})") from None
    return samples.mean(1), rate


# Folders


def _read_folder(folder: Path, wanted: _Wanted) -> dict[str, _Part]:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        datasets = package("datasets", "a Hugging Face data set")
        loaded = _load(lambda: datasets.load_from_disk(str(folder)), f"{folder}: damaged Hugging Face data set")
        return _from_datasets(str(folder), loaded, wanted)
    files = {part: _part_file(folder, part) for part in PARTS}
    if files["train"] is not None:
        return {part: _read_file(path, wanted) for part, path in files.items() if path is not None}
    inside = _folders(folder)
    names = {path.name for path in inside}
    if "train" in names and all(any(name in aliases for aliases in PARTS.values()) for name in names):
        found = {part: [path for path in inside if path.name in aliases] for part, aliases in PARTS.items()}
        return {part: _read_classes(_only(paths, part), wanted) for part, paths in found.items() if paths}
    return {"train": _read_classes(folder, wanted)}


def _part_file(folder: Path, part: str) -> Path | None:
    names = PARTS[part]
    found = [p for p in sorted(folder.iterdir()) if p.name.split(".")[0] in names and p.is_file() and _readable(p)]
    return _only(found, part) if found else None


def _only(paths: list[Path], part: str) -> Path:
    if len(paths) > 1:
        raise InputError(f"{paths[0].parent}: expected one {part} part, found {_listed(path.name for path in paths)}")
    return paths[0]


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))


def _read_classes(folder: Path, wanted: _Wanted) -> _Part:
    """A folder that holds a folder of images or sounds per class."""
    if wanted.kind not in (None, *MEDIA):
        raise InputError(f"{folder}: expected a file train.csv (.tsv, .jsonl, ...) for {wanted.kind}, found none")
    classes = _folders(folder)
    if not classes:
        raise InputError(
            f"{folder}: expected a folder per class or a file train.csv (.tsv, .jsonl, ...), found neither"
        )
    kinds = tuple(MEDIA) if wanted.kind is None else (wanted.kind,)
    examples = Examples([], [], [])
    found: set[str | None] = set()
    for class_folder in classes:
        names = sorted(path.name for path in class_folder.iterdir() if path.is_file() and path.name[0] != ".")
        files = [name for name in names if _media_kind(name) in kinds]
        if not files:
            expected = ", ".join(extension for kind in kinds for extension in MEDIA[kind])
            raise InputError(f"{class_folder}: expected files {expected}, found none")
        examples.inputs.extend(class_folder / name for name in files)
        examples.labels.extend([class_folder.name] * len(files))
        examples.where.extend(str(class_folder / name) for name in files)
        found.update(_media_kind(name) for name in files)
    if len(found) > 1:
        raise InputError(f"{folder}: expected images or sounds, found both; say which kind to read")
    return _Part(str(found.pop()), examples)


# Hugging Face data sets


def _read_hub(source: str, wanted: _Wanted) -> dict[str, _Part]:
    """A data set by its name: "name", "user/name", with its configuration behind ":" or "/"."""
    name, _, config = source.partition(":")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*){0,2}", name) or _readable(Path(source)):
        raise InputError(f"{source}: no such file or folder")
    datasets = package("datasets", f"{source}: no such file or folder; a Hugging Face data set")
    if name.count("/") == 2 and not config:
        name, _, config = name.rpartition("/")

    def load() -> Any:
        try:
            return datasets.load_dataset(name, config or None)
        except datasets.exceptions.DatasetNotFoundError:
            if config or "/" not in name:
                raise
            return datasets.load_dataset(*name.split("/"))  # "glue/sst2" is a configuration, not a user's

    return _from_datasets(source, _load(load, f"{source}: neither a file or folder nor a data set to load"), wanted)


def _load(load: Callable[[], Any], complaint: str) -> Any:
    try:
        return load()
    except Exception as error:  # the library, its network stack and the data set's files raise anything
        raise InputError(f"{complaint} ({_one_line(error)})") from None


def _from_datasets(source: str, loaded: Any, wanted: _Wanted) -> dict[str, _Part]:
    splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if len(splits) == 1:
        splits = {"train": next(iter(splits.values()))}
    parts = {}
    for part, aliases in PARTS.items():
        split = next((name for name in aliases if name in splits), None)
        if split is None:
            continue
        table = _dataset_table(f"{source}:{split}", splits[split])
        withheld = all(value is None for value in table.columns[_find_labels(table, wanted)])
        if part == "train" or not withheld:  # benchmarks publish tests without their labels
            parts[part] = _examples(table, wanted)
    if "train" not in parts:
        raise InputError(f"{source}: expected a split 'train', found {_listed(splits)}")
    return parts


def _dataset_table(place: str, dataset: Any) -> Table:
    """A split with its class numbers turned into names."""
    datasets = package("datasets", "a Hugging Face data set")
    if not len(dataset):
        raise InputError(f"{place}: no rows")
    arrow = dataset.with_format("arrow")[:]  # as stored: images and sounds are not decoded here
    columns = {name: arrow.column(name).to_pylist() for name in arrow.column_names}
    media, names = {}, {}
    for column, feature in dataset.features.items():
        if isinstance(feature, datasets.Image | datasets.Audio):
            media[column] = "image" if isinstance(feature, datasets.Image) else "audio"
        inner = getattr(feature, "feature", feature)  # of a list
        if isinstance(inner, datasets.ClassLabel):
            names[column] = [name.strip() for name in inner.names]
            columns[column] = [_class_names(value, names[column]) for value in columns[column]]
    return Table(place, columns, [f"{place}:{row + 1}" for row in range(len(dataset))], media=media, names=names)


def _class_names(value: Any, names: list[str]) -> Any:
    """The name of a class number, None for none (-1); of a list, of each."""
    if isinstance(value, list):
        return [_class_names(one, names) for one in value]
    return names[value] if value is not None and 0 <= value < len(names) else None


# Words of the messages


def _listed(names: Iterable[str]) -> str:
    names = [repr(name) for name in names]
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") if names else "none"


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
