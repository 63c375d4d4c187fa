"""How data are read: what the caller said of files and bad rows, and what there is to say about what was found."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from softsieve import _checks
from softsieve._progress import ProgressCallback, no_progress
from softsieve.errors import InputError

ON_ERROR = ("stop", "skip")
FIRST = 3  # bad rows that are named
OFTEN = 2**14  # rows between two calls of the progress callback


@dataclass
class Reading:
    """Passed along while a source is read.

    Args:
        on_error: "stop" at the first bad row, or "skip" it and count.
        delimiter: between the cells of .csv and .tsv files; None: found.
        encoding: of text files; None: found.
        progress: called while large files are read.
    """

    on_error: str = "stop"
    delimiter: str | None = None
    encoding: str | None = None
    progress: ProgressCallback = no_progress
    notes: list[str] = field(default_factory=list)  # what a user should know
    bad: list[str] = field(default_factory=list)  # the first complaints about rows that were left out
    left_out: int = 0

    def __post_init__(self) -> None:
        _checks.choice("on_error", self.on_error, ON_ERROR)
        for name, value in {"delimiter": self.delimiter, "encoding": self.encoding}.items():
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name}: expected a string, found {type(value).__name__}")
        if self.delimiter is not None:
            self.delimiter = {"tab": "\t", "\\t": "\t", "space": " "}.get(self.delimiter, self.delimiter)
            if len(self.delimiter) != 1 or self.delimiter in '\r\n"\0':
                raise InputError(f"delimiter: expected one character or 'tab', found {self.delimiter!r}")
        if self.encoding is not None:
            try:
                known = codecs.lookup(self.encoding)._is_text_encoding
            except (LookupError, ValueError):
                known = False
            if not known:
                raise InputError(f"encoding: expected a name such as utf-8 or cp1252, found {self.encoding!r}")

    def refuse(self, message: str | InputError) -> None:
        """Complain about a row: it is left out, or the end of reading."""
        if self.on_error == "stop":
            raise message if isinstance(message, InputError) else InputError(message)
        self.left_out += 1
        if len(self.bad) < FIRST:
            self.bad.append(str(message))

    def say_left_out(self, place: object, kept: int) -> None:
        """Note how many rows of a place were left out, and begin to count anew; none kept is an error."""
        if self.left_out:
            some = "; ".join(self.bad) + ("; ..." if self.left_out > len(self.bad) else "")
            said = f"{place}: left out {self.left_out} of {self.left_out + kept} rows: {some}"
            if not kept:
                raise InputError(said)
            self.notes.append(said)
            self.left_out, self.bad = 0, []


class Meter:
    """Tells a progress callback how far a file is read."""

    def __init__(self, path: Path, file: Any, progress: ProgressCallback) -> None:
        self.what, self.file, self.progress = f"reading {path.name}", file, progress
        self.size, self.before = max(1, path.stat().st_size), 0

    def tick(self, row: int) -> None:
        """Say how far it is, every so many rows."""
        if row % OFTEN == 0:
            position = self.file.tell()
            self.progress(self.what, (position - self.before) / self.size)
            self.before = position


def unseen_note(name: str, labels: Sequence[Any], where: Sequence[str], known: set[str]) -> str | None:
    """What to say of rows with labels that training has not seen; None without any.

    Example:
        >>> unseen_note("test", ["a", "b", "c"], ["t:1", "t:2", "t:3"], {"a"})
        "test: 2 of 3 rows have labels that training has not seen and count as wrong: 'b' (t:2), 'c' (t:3)"
    """
    rows, first = 0, list[str]()
    for row, label in enumerate(labels):
        unseen = [one for one in (label if isinstance(label, list) else [label]) if one not in known]
        if unseen:
            rows += 1
            if len(first) < FIRST:
                first.append(f"{unseen[0]!r} ({where[row]})")
    if not rows:
        return None
    some = ", ".join(first) + (", ..." if rows > len(first) else "")
    return f"{name}: {rows} of {len(labels)} rows have labels that training has not seen and count as wrong: {some}"
