"""A file as bytes, text, lines or JSON."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from pathlib import Path
from typing import Any

from softsieve.errors import InputError, first_line

MOST, TIMES = 2**28, 200  # bytes that a packed file may unpack to, or this many times its own; data pack 2 to 20 times


def read_bytes(path: Path) -> bytes:
    """What a file holds, unpacked if it is a .gz or .xz; refused if that would fill the memory."""
    try:
        return _unpacked(path, path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise InputError(f"{path}: damaged {path.suffix} file ({first_line(error)})") from None
    except MemoryError:
        raise InputError(f"{path}: cannot be read (it does not fit the memory)") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def _unpacked(path: Path, content: bytes) -> bytes:
    end = path.suffix.lower()
    if end not in (".gz", ".xz"):
        return content
    most = max(MOST, TIMES * len(content))
    packed = io.BytesIO(content)
    with gzip.GzipFile(fileobj=packed) if end == ".gz" else lzma.LZMAFile(packed) as file:
        unpacked = file.read(most + 1)
    if len(unpacked) > most:
        raise InputError(f"{path}: expected data, found {len(content)} bytes that unpack to more than {most}")
    return unpacked


def read_text(path: Path) -> str:
    """What a UTF-8 file says, with its line ends as they are."""
    content = read_bytes(path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8 (byte {content[error.start]:#04x})") from None


def parse_json(text: str, place: object) -> Any:
    """What JSON says; ``place`` names it when it cannot be parsed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: invalid JSON ({first_line(error)})") from None


def read_lines(path: Path) -> list[tuple[str, str]]:
    """Place and text of every line that is not blank. Only a line feed ends a line: texts hold other separators."""
    lines = enumerate(read_text(path).split("\n"), start=1)
    return [(f"{path}:{number}", line.rstrip("\r")) for number, line in lines if line.strip()]
