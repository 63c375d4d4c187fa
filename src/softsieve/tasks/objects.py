"""Data that a program holds: lists, arrays, frames and data sets of Hugging Face, as examples."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from softsieve.errors import InputError, listed, shown
from softsieve.tasks.columns import find_labels, table_examples, table_inputs
from softsieve.tasks.examples import PARTS, Examples, Part, Wanted, media_kind
from softsieve.tasks.read import make_table
from softsieve.tasks.tables import Table

INPUTS, LABELS = "X", "y"  # columns of data without names, as the arguments are called


class Given(NamedTuple):
    """Examples with labels, and how these were given."""

    part: Part
    whole: bool  # as whole numbers
    flags: bool  # as an array of 0 and 1, a column a label


def object_examples(inputs: Any, labels: Any, wanted: Wanted) -> Given:
    """Examples of objects with labels.

    Args:
        inputs: texts, lists of words, images or sounds; or a table that has them in a column: a `pandas.DataFrame`, a
            `datasets.Dataset` or a dict of lists.
        labels: one for each; or the name of a column of the table; None: a column whose name tells, or which is wanted.
        wanted: what the caller says of kind and columns.

    Raises:
        InputError, TypeError: naming X or y, what was expected and what was found.

    Example:
        >>> given = object_examples(["good", "bad"], [1, 0], Wanted(None, None, None))
        >>> given.part.kind, given.part.examples.labels, given.whole
        ('text', ['1', '0'], True)
    """
    table, wanted = _make_table(inputs, wanted)
    names: list[str] | None = None
    flags = False
    if labels is None and INPUTS in table.columns:
        raise InputError(f"{LABELS}: expected a label for each of {len(table.where)} rows, found none")
    if isinstance(labels, str):
        if INPUTS in table.columns:
            raise InputError(f"{LABELS}: expected labels, or the name of a column of a table, found {labels!r}")
        wanted = wanted._replace(label_column=labels)
    elif labels is not None:
        cells, names = _read_labels(labels)
        flags = names is not None
        if len(cells) != len(table.where):
            raise InputError(f"{LABELS}: expected {len(table.where)} labels, one a row, found {len(cells)}")
        table.columns[LABELS] = cells
        wanted = wanted._replace(label_column=LABELS, kind=wanted.kind or ("multilabel" if flags else None))
    column = find_labels(table, wanted)
    whole = column is not None and _are_whole(table.columns[column])
    wanted = wanted._replace(kind=wanted.kind or _object_kind(table, wanted))
    part = table_examples(_with_media(table, wanted), wanted)
    return Given(part if names is None else part._replace(labels=names), whole, flags)


def object_inputs(inputs: Any, kind: str, wanted: Wanted) -> Examples:
    """Examples of objects without labels, which are left aside where a table has them.

    Raises:
        InputError, TypeError: naming X, what was expected and what was found.
    """
    table, wanted = _make_table(inputs, wanted._replace(kind=kind))
    known = wanted.label_column in (None, *table.columns)
    label = find_labels(table, wanted) if known and INPUTS not in table.columns else None
    if label is not None and len(table.columns) > 1:
        del table.columns[label]
        table = table._replace(names={})
    wanted = wanted._replace(label_column=None)
    return table_inputs(_with_media(table, wanted), kind, wanted)._replace(labels=[], others={})


def parts_of(inputs: Any) -> tuple[Any, Any]:
    """Training and validation data of a `datasets.DatasetDict`; anything else is training data."""
    if not _is(inputs, "datasets", "DatasetDict"):
        return inputs, None
    found = [next((inputs[name] for name in PARTS[part] if name in inputs), None) for part in ("train", "validation")]
    if found[0] is None:
        raise InputError(f"{INPUTS}: expected a part 'train', found {listed(inputs)}")
    return found[0], found[1]


def _is(value: Any, package: str, name: str) -> bool:
    """Whether a value is of a package's type, which is not imported for that."""
    kind = getattr(sys.modules.get(package), name, None)
    return kind is not None and isinstance(value, kind)


def _make_table(inputs: Any, wanted: Wanted) -> tuple[Table, Wanted]:
    """A table of the inputs, whose cells are Python's, and what is wanted of it: of plain inputs, their column."""
    if _is(inputs, "datasets", "DatasetDict"):
        raise TypeError(f"{INPUTS}: expected one data set, found a DatasetDict of {listed(inputs)}")
    if _is(inputs, "datasets", "Dataset"):
        return make_table(INPUTS, inputs), wanted
    if _is(inputs, "pandas", "DataFrame"):
        columns = {str(name): _cells(inputs[name].tolist()) for name in inputs.columns}
        if len(columns) < inputs.shape[1]:
            raise InputError(f"{INPUTS}: expected every column name once, found {listed(map(str, inputs.columns))}")
    elif isinstance(inputs, Mapping):
        columns = {str(name): _cells(_listed(INPUTS, cells)) for name, cells in inputs.items()}
    else:
        columns = {INPUTS: _cells(_listed(INPUTS, inputs))}
        wanted = wanted._replace(text_column=INPUTS)
    rows = {len(cells) for cells in columns.values()}
    if len(rows) > 1:
        raise InputError(f"{INPUTS}: expected columns of one length, found {', '.join(map(str, sorted(rows)))}")
    if rows in (set(), {0}):
        raise InputError(f"{INPUTS}: no rows")
    return Table(INPUTS, {**columns}, [f"{INPUTS}[{row}]" for row in range(rows.pop())]), wanted


def _listed(name: str, values: Any) -> list[Any]:
    """The rows of what holds them."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: expected a list, an array, a Series or a table, found {type(values).__name__}")
    shape = getattr(values, "shape", None)
    if shape == ():
        raise TypeError(f"{name}: expected a list, an array, a Series or a table, found a single value")
    if shape is not None and len(shape) == 2 and shape[1] == 1:  # a column, as scikit-learn hands them on
        values = np.asarray(values).ravel()
    return list(values)


def _cells(values: list[Any]) -> list[Any]:
    return [_cell(value) for value in values]


def _cell(value: Any) -> Any:
    """As Python and readers of files have it: None for what is missing, lists of words and labels, plain numbers."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(_cell(one) for one in value)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype != np.uint8 and value.dtype.kind not in "f":
        return _cells(value.tolist())
    if isinstance(value, list) or (isinstance(value, tuple) and not _is_sound(value)):
        return _cells(list(value))
    return value


def _is_sound(value: Any) -> bool:
    """Whether it is a pair of samples and their rate."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return isinstance(value[1], int | float | np.integer) and not isinstance(value[0], str | int)


def _read_labels(labels: Any) -> tuple[list[Any], list[str] | None]:
    """A cell of labels for each row; of flags, with the names of all labels."""
    shape: tuple[int, ...] = getattr(labels, "shape", ())
    if len(shape) != 2 or shape[1] == 1:
        return _cells(_listed(LABELS, labels)), None
    flags = np.asarray(labels)
    if flags.dtype.kind not in "biuf" or not np.isin(flags, (0, 1)).all():
        raise InputError(f"{LABELS}: expected labels, or 0 and 1 in a column a label, found an array of {flags.dtype}")
    names = list(getattr(labels, "columns", range(shape[1])))
    return [[names[column] for column in row.nonzero()[0]] for row in flags], [str(name) for name in names]


def _are_whole(cells: Sequence[Any]) -> bool:
    """Whether labels are whole numbers, which have to be told from their digits."""
    every = [one for cell in cells for one in (cell if isinstance(cell, list) else [cell]) if one is not None]
    numbers = [isinstance(one, int) or (isinstance(one, float) and one.is_integer()) for one in every]
    if any(numbers) and any(isinstance(one, str) for one in every):
        raise InputError(f"{LABELS}: expected labels that are strings or whole numbers, found both")
    return bool(every) and all(numbers)


# Images and sounds


def _object_kind(table: Table, wanted: Wanted) -> str | None:
    """The kind that objects tell by what they are; None where names and lists have to."""
    cells = table.columns.get(wanted.text_column or "", [])
    kinds = {_media_kind(cell) for cell in cells}
    return kinds.pop() if len(kinds) == 1 else None


def _media_kind(cell: Any) -> str | None:
    if _is_sound(cell) or (isinstance(cell, Mapping) and "array" in cell):
        return "audio"
    if isinstance(cell, np.ndarray) or _is(cell, "PIL.Image", "Image") or _is(cell, "torch", "Tensor"):
        return "image"
    return media_kind(cell)


def _with_media(table: Table, wanted: Wanted) -> Table:
    """The table with images and sounds as `Examples` has them."""
    if wanted.kind == "image":
        convert = _as_pixels
    elif wanted.kind == "audio":
        convert = _as_sound
    else:
        return table
    columns = {
        name: [convert(cell, where) for cell, where in zip(cells, table.where, strict=True)]
        if name != LABELS
        else cells
        for name, cells in table.columns.items()
    }
    return table._replace(columns=columns)


def _as_pixels(cell: Any, where: str) -> Any:
    if _is(cell, "PIL.Image", "Image"):
        return np.asarray(cell.convert("L" if cell.mode in ("1", "L") else "RGB"))
    if isinstance(cell, np.ndarray) or _is(cell, "torch", "Tensor"):
        pixels = np.asarray(cell)
        if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)):
            found = f"{pixels.dtype} {pixels.shape}"
            raise InputError(
                f"{where}: expected pixels of type uint8, (height, width) or with 3 colours, found {found}"
            )
        return pixels
    return cell


def _as_sound(cell: Any, where: str) -> Any:
    if isinstance(cell, Mapping) and "array" in cell:
        cell = (cell["array"], cell.get("sampling_rate"))
    if isinstance(cell, np.ndarray | tuple) and not _is_sound(cell):
        raise InputError(f"{where}: expected (samples, rate), found {shown(type(cell).__name__)}")
    if not _is_sound(cell):
        return cell
    try:
        samples, rate = np.asarray(cell[0], dtype=np.float32), int(cell[1])
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: expected (samples, rate), found {error}") from None
    if samples.ndim != 1:
        raise InputError(f"{where}: expected samples of one channel, found an array of shape {samples.shape}")
    return samples, rate
