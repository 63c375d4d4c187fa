"""Data that a program holds: lists, arrays, frames and data sets of Hugging Face, as examples."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from softsieve.errors import InputError, listed, shown
from softsieve.tasks.columns import find_labels, read_label, table_examples, table_inputs
from softsieve.tasks.examples import PARTS, Examples, Part, Wanted, media_kind
from softsieve.tasks.read import make_table
from softsieve.tasks.tables import Table

INPUTS, LABELS = "X", "y"  # as the arguments are called, and columns of data without names


class Given(NamedTuple):
    """Examples with labels, and how these were given."""

    part: Part
    whole: bool  # as whole numbers
    truth: bool  # as True and False
    columns: list[str] | None  # of flags, 0 and 1 in a column a label: the labels in the order of the columns


def object_examples(
    inputs: Any, labels: Any, wanted: Wanted, *, columns: Sequence[str] | None = None, flags: bool | None = None
) -> Given:
    """Examples of objects with labels.

    Args:
        inputs: texts, lists of words, images or sounds; or a table that has them in a column: a `pandas.DataFrame`, a
            `datasets.Dataset` or a dict of lists.
        labels: one for each; or the name of a column of the table; None: a column whose name tells, or which is wanted.
        wanted: what the caller says of kind and columns.
        columns: the labels that the columns of flags are of, where these have no names; None: their numbers.
        flags: whether lists of 0 and 1, as many in every row, are flags; None: where that can be told.

    Raises:
        InputError, TypeError: naming X or y, what was expected and what was found.

    Example:
        >>> given = object_examples(["good", "bad"], [1, 0], Wanted(None, None, None))
        >>> given.part.kind, given.part.examples.labels, given.whole
        ('text', ['1', '0'], True)
    """
    table, wanted, named = _make_table(inputs, wanted)
    names: list[Any] | None = None  # of the columns of flags, and the labels that these are
    order: list[str] | None = None
    if labels is None and not named:
        raise InputError(f"{LABELS}: expected a label for each of {len(table.where)} rows, found none")
    if isinstance(labels, str):
        if not named:
            raise InputError(f"{LABELS}: expected labels, or the name of a column of a table, found {labels!r}")
        wanted = wanted._replace(label_column=labels)
    elif labels is not None:
        cells, names = _read_labels(labels, columns)
        if len(cells) != len(table.where):
            raise InputError(f"{LABELS}: expected {len(table.where)} labels, one a row, found {len(cells)}")
        own = _free_name(table, cells)
        table.columns[own] = cells
        wanted = wanted._replace(label_column=own)
        if names is not None:
            order = [read_label(name, "text", f"{LABELS}: names of columns") for name in names]
            _expect_once(LABELS, order)
            wanted = wanted._replace(kind=wanted.kind or "multilabel")
    column = find_labels(table, wanted)
    cells = [] if column is None else table.columns[column]  # type: ignore[assignment]
    whole, truth = _label_type(cells if names is None else names)
    wanted = wanted._replace(kind=wanted.kind or _object_kind(table, wanted))
    part = table_examples(_with_media(table, wanted, column), wanted)
    if names is None and part.kind == "multilabel" and _are_flags(cells, flags):
        wanted = wanted._replace(kind=part.kind, label_column=None, text_column=wanted.text_column if named else None)
        return object_examples(inputs, np.array(list(cells)), wanted, columns=columns)
    return Given(part if order is None else part._replace(labels=order), whole, truth, order)


def object_inputs(inputs: Any, kind: str, wanted: Wanted) -> Examples:
    """Examples of objects without labels, which are left aside where a table has them.

    Raises:
        InputError, TypeError: naming X, what was expected and what was found.
    """
    table, wanted, named = _make_table(inputs, wanted._replace(kind=kind))
    known = wanted.label_column in (None, *table.columns)
    label = find_labels(table, wanted) if known and named else None
    if label is not None and len(table.columns) > 1:
        del table.columns[label]
        table = table._replace(names={})
    wanted = wanted._replace(label_column=None)
    return table_inputs(_with_media(table, wanted, None), kind, wanted)._replace(labels=[], others={})


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


def _make_table(inputs: Any, wanted: Wanted) -> tuple[Table, Wanted, bool]:
    """A table of the inputs, whose cells are Python's; what is wanted of it: of plain inputs, their column.

    And whether its columns have names, which those of plain inputs have not.
    """
    if _is(inputs, "datasets", "DatasetDict"):
        raise TypeError(f"{INPUTS}: expected one data set, found a DatasetDict of {listed(inputs)}")
    if _is(inputs, "datasets", "Dataset"):
        return make_table(INPUTS, inputs), wanted, True
    named = True
    if _is(inputs, "pandas", "DataFrame"):
        _expect_once(INPUTS, inputs.columns)
        columns = {str(name): _cells(inputs[name].tolist()) for name in inputs.columns}
    elif isinstance(inputs, Mapping):
        _expect_once(INPUTS, inputs)
        columns = {str(name): _cells(_listed(INPUTS, cells)) for name, cells in inputs.items()}
    else:
        columns, named = {INPUTS: _cells(_listed(INPUTS, inputs))}, False
        wanted = wanted._replace(text_column=INPUTS)
    rows = {len(cells) for cells in columns.values()}
    if len(rows) > 1:
        raise InputError(f"{INPUTS}: expected columns of one length, found {', '.join(map(str, sorted(rows)))}")
    if rows in (set(), {0}):
        raise InputError(f"{INPUTS}: no rows")
    return Table(INPUTS, {**columns}, [f"{INPUTS}[{row}]" for row in range(rows.pop())]), wanted, named


def _expect_once(argument: str, columns: Iterable[Any]) -> None:
    """Refuse names of columns that come twice, as strings."""
    names = [str(name) for name in columns]
    if len({*names}) < len(names):
        raise InputError(f"{argument}: expected every column name once, found {listed(names)}")


def _free_name(table: Table, cells: list[Any]) -> str:
    """A name for a column of labels beside those of the table, or that of its own column ``y`` if it holds the same."""
    own = table.columns.get(LABELS, ())
    plain = all(isinstance(one, str | int | float) for one in own)  # what can be compared
    if plain and list(own) == cells:
        return LABELS
    name = LABELS
    while name in table.columns:
        name += "'"
    return name


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


def _read_labels(labels: Any, columns: Sequence[str] | None) -> tuple[list[Any], list[Any] | None]:
    """A cell of labels for each row; of flags, with all labels in the order of the columns."""
    shape: tuple[int, ...] = getattr(labels, "shape", ())
    if len(shape) != 2 or shape[1] == 1:
        return _cells(_listed(LABELS, labels)), None
    flags = np.asarray(labels)
    if flags.dtype.kind not in "biuf" or not np.isin(flags, (0, 1)).all():
        raise InputError(f"{LABELS}: expected labels, or 0 and 1 in a column a label, found an array of {flags.dtype}")
    names: list[Any] = list(range(shape[1]) if columns is None else columns)
    if hasattr(labels, "columns"):
        names = _cells(list(labels.columns))
    elif len(names) != shape[1]:
        raise InputError(f"{LABELS}: expected {len(names)} columns, one a label, found {shape[1]}")
    return [[names[column] for column in row.nonzero()[0]] for row in flags], names


def _are_flags(cells: Sequence[Any], asked: bool | None) -> bool:
    """Whether lists are flags, as scikit-learn takes rows of 0 and 1 of one length; labels do not come twice in a row.

    Raises:
        InputError: for what may be either, where it is not ``asked``.
    """
    width = len(cells[0]) if len(cells) and isinstance(cells[0], list) else 0
    fit = width > 1 and all(isinstance(row, list) and len(row) == width for row in cells)
    if asked is False or not fit or not all(_is_flag(one) for row in cells for one in row):
        return False
    if asked is None and all(len({*row}) == width for row in cells):
        raise InputError(
            f"{LABELS}: expected labels, or an array of 0 and 1 with a column a label, found lists that may be either, "
            f"such as {cells[0]}; give numpy.array(y), or labels as strings"
        )
    return True


def _is_flag(value: Any) -> bool:
    return isinstance(value, int | float) and value in (0, 1)


def _label_type(cells: Sequence[Any]) -> tuple[bool, bool]:
    """Whether labels are whole numbers, and whether they are True and False: these have to be told from their names."""
    every = [one for cell in cells for one in (cell if isinstance(cell, list) else [cell]) if one is not None]
    truths = [isinstance(one, bool) for one in every]
    numbers = [isinstance(one, int) or (isinstance(one, float) and one.is_integer()) for one in every]
    if any(numbers) and any(isinstance(one, str) for one in every):
        raise InputError(f"{LABELS}: expected labels that are strings or whole numbers, found both")
    if any(truths) and not all(truths):
        raise InputError(f"{LABELS}: expected labels that are True and False or whole numbers, found both")
    return bool(every) and all(numbers) and not any(truths), bool(every) and all(truths)


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


def _with_media(table: Table, wanted: Wanted, label: str | None) -> Table:
    """The table with images and sounds as `Examples` has them; the column of labels stays."""
    if wanted.kind == "image":
        convert = _as_pixels
    elif wanted.kind == "audio":
        convert = _as_sound
    else:
        return table
    columns = {
        name: [convert(cell, where) for cell, where in zip(cells, table.where, strict=True)] if name != label else cells
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
