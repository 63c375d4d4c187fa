"""Columns of texts that take their bytes and little more, and on a disk where there are many."""

from __future__ import annotations

import os
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, overload

import numpy as np

from softsieve.errors import InputError, first_line

IN_MEMORY = 2**24  # bytes of a column that are kept in memory; beyond, they are in a temporary file


class Spilled:
    """The bytes of a file, read where they are asked for: mapped, they would count as memory page by page, or all."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._lock = file, threading.Lock()

    def __getitem__(self, part: slice) -> bytes:
        start, size = part.start, part.stop - part.start
        if hasattr(os, "pread"):
            return os.pread(self._file.fileno(), size, start)
        with self._lock:  # Windows
            self._file.seek(start)
            return self._file.read(size)


class Texts(Sequence[Any]):
    """Strings, or None, in the bytes of their UTF-8; to be read like a list, and equal to one of the same strings.

    Example:
        >>> texts = make_column(["one", None, "three"])
        >>> texts[2], texts[-2], len(texts), list(texts.pick([2, 0]))
        ('three', None, 3, ['three', 'one'])
    """

    def __init__(self, content: bytes | Spilled, starts: Any, ends: Any) -> None:
        self._content, self._starts, self._ends = content, starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, row: int) -> Any: ...
    @overload
    def __getitem__(self, row: slice) -> Texts: ...
    def __getitem__(self, row: int | slice) -> Any:
        if isinstance(row, slice):
            return Texts(self._content, self._starts[row], self._ends[row])
        start, end = int(self._starts[row]), int(self._ends[row])
        return None if end < 0 else self._content[start:end].decode()

    def __iter__(self) -> Iterator[Any]:
        for start, end in zip(self._starts.tolist(), self._ends.tolist(), strict=True):
            yield None if end < 0 else self._content[start:end].decode()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Texts({list(self)!r})" if len(self) <= 10 else f"<{len(self)} texts>"

    def __reduce__(self) -> tuple[Callable[[Sequence[Any]], Sequence[Any]], tuple[list[Any]]]:
        return make_column, (list(self),)

    def pick(self, rows: Sequence[int]) -> Texts:
        """Some of the texts, in the order of ``rows``; no text is copied."""
        index = np.asarray(rows, np.int64)
        return Texts(self._content, self._starts[index], self._ends[index])

    @property
    def complete(self) -> bool:
        """Whether no text is missing."""
        return bool((self._ends >= 0).all())


class Column:
    """Takes cells one after the other: as `Texts` while they are strings or None, as a list where others come."""

    def __init__(self) -> None:
        self._buffer, self._file = bytearray(), None
        self._size = 0  # bytes so far
        self._starts, self._ends = array("q"), array("q")
        self._cells: list[Any] | None = None

    _file: BinaryIO | None

    def __len__(self) -> int:
        return len(self._starts) if self._cells is None else len(self._cells)

    def append(self, cell: Any) -> None:
        """Add a cell."""
        if self._cells is not None:
            self._cells.append(cell)
        elif cell is None:
            self._starts.append(self._size)
            self._ends.append(-1)
        else:
            try:
                content = cell.encode()
            except (AttributeError, UnicodeEncodeError):  # no string, or half a character as "\ud83d" in JSON
                self._cells = [*self.finish(), cell]
                return
            self._starts.append(self._size)
            self._size += len(content)
            self._ends.append(self._size)
            self._buffer += content
            if len(self._buffer) > IN_MEMORY:
                self._flush()

    def extend_to(self, rows: int) -> None:
        """Add cells without content until there are so many."""
        while len(self) < rows:
            self.append(None)

    def _flush(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="softsieve-")  # noqa: SIM115, the column keeps it
            self._file.write(self._buffer)
            self._file.flush()
        except OSError as error:
            place = tempfile.gettempdir()
            raise InputError(f"{place}: texts cannot be kept there ({first_line(error)}); set TMPDIR") from None
        self._buffer.clear()

    def finish(self) -> Sequence[Any]:
        """All cells."""
        if self._cells is not None:
            return self._cells
        if self._file is not None:
            self._flush()
        content = bytes(self._buffer) if self._file is None else Spilled(self._file)
        return Texts(content, np.array(self._starts, np.int64), np.array(self._ends, np.int64))


def make_column(cells: Sequence[Any]) -> Sequence[Any]:
    """Cells as `Column` keeps them."""
    column = Column()
    for cell in cells:
        column.append(cell)
    return column.finish()


class Places(Sequence[str]):
    """Where rows are, "train.csv:17", made when they are asked for.

    Example:
        >>> list(Places("train.csv", [2, 3]))
        ['train.csv:2', 'train.csv:3']
    """

    def __init__(self, place: str, numbers: Any) -> None:
        self._place, self._numbers = place, np.asarray(numbers, np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> Places: ...
    def __getitem__(self, row: int | slice) -> Any:
        if isinstance(row, slice):
            return Places(self._place, self._numbers[row])
        return f"{self._place}:{self._numbers[row]}"

    def __iter__(self) -> Iterator[str]:
        return (f"{self._place}:{number}" for number in self._numbers.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Places({list(self)!r})" if len(self) <= 10 else f"<{len(self)} places in {self._place}>"

    def pick(self, rows: Sequence[int]) -> Places:
        """Some of them, in the order of ``rows``."""
        return Places(self._place, self._numbers[np.asarray(rows, np.int64)])


def pick_cells(cells: Sequence[Any], rows: Sequence[int]) -> Any:
    """Some of the cells, in the order of ``rows``."""
    return cells.pick(rows) if isinstance(cells, Texts | Places) else [cells[row] for row in rows]
