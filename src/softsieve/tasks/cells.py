"""A cell of a table as an input or as labels, if it can be one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from softsieve.errors import InputError
from softsieve.tasks.examples import MEDIA


def input_cell(value: Any, kind: str, where: str, folder: Path) -> Any:
    """An input of that kind, as `Examples` has it; file names are those of files in the folder."""
    if kind in MEDIA:
        return _media(value, where, folder)
    if kind == "tokens":
        if not isinstance(value, list) or not value:
            raise InputError(f"{where}: expected a list of words, found {_shown(value)}")
        return [_string(word, where) for word in value]
    if not _string("" if value is None else value, where).strip():
        raise InputError(f"{where}: empty text")
    return value


def label_cell(value: Any, kind: str, where: str) -> Any:
    """The label, or the list of labels, of an example of that kind."""
    if kind not in ("multilabel", "tokens"):
        return _one_label(value, where)
    if kind == "multilabel" and isinstance(value, str):
        value = [label for label in re.split(r"[|,]", value) if label.strip()]
    if not isinstance(value, list):
        raise InputError(f"{where}: expected a list of labels, found {_shown(value)}")
    labels = [_one_label(label, where) for label in value]
    return list(dict.fromkeys(labels)) if kind == "multilabel" else labels


def _one_label(value: Any, where: str) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise InputError(f"{where}: empty label")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of integers turns into floats where one of them is missing
    if not isinstance(value, str | int):
        raise InputError(f"{where}: expected a label, found {_shown(value)}")
    return _string(str(value).strip(), where)


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: expected text, found {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:  # half a character, as "\ud83d" in JSON
        raise InputError(f"{where}: text is not valid Unicode") from None
    return value


def _media(value: Any, where: str, folder: Path) -> Path | bytes:
    """A file in the folder; or, of what Hugging Face stores as ``{"bytes", "path"}``, the bytes if there are any."""
    if isinstance(value, dict):
        content, value = value.get("bytes"), value.get("path")
        if content and isinstance(content, bytes):
            return content
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: expected a file name, found {_shown(value)}")
    path = folder / value
    if not path.is_file():
        raise InputError(f"{where}: no such file {path}")
    return path


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
