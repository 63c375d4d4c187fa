"""A file as bytes, text, lines or JSON."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO

from softsieve.errors import InputError, first_line
from softsieve.tasks.reading import Meter, Reading

MOST, TIMES = 2**28, 200  # bytes that a packed file may unpack to, or this many times its own; data pack 2 to 20 times
CHUNK = 2**20  # bytes that are decoded at a time
MARKS = {  # with which a file says its encoding; of those that begin alike the longer first
    codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip


def read_bytes(path: Path) -> bytes:
    """What a file holds, unpacked if it is a .gz or .xz; refused if that would fill the memory."""
    with _one_complaint(path):
        return _unpacked(path, path.read_bytes())


@contextmanager
def _one_complaint(path: Path) -> Iterator[None]:
    """Say what is wrong with a file in one line."""
    try:
        yield
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


@contextmanager
def open_text(path: Path, how: Reading, *, newline: str = "") -> Iterator[tuple[TextIO, Meter]]:
    """A text file to be read as a stream, with its line ends as they are, and a meter of how far it is read.

    Every byte of it was looked at before, so that nothing is wrong with its encoding later.
    """
    encoding = _find_encoding(path, how)
    with _one_complaint(path), path.open("rb") as file:
        unpacked = _unpacking(path, file)
        yield io.TextIOWrapper(unpacked, encoding=encoding, newline=newline), Meter(path, file, how.progress)


def _unpacking(path: Path, file: IO[bytes]) -> Any:
    end = path.suffix.lower()
    return gzip.open(file) if end == ".gz" else lzma.open(file) if end == ".xz" else file


def _find_encoding(path: Path, how: Reading) -> str:
    """The encoding that was named, that the file begins by naming, UTF-8, or cp1252 where nothing speaks against it."""
    with _one_complaint(path), path.open("rb") as file, _unpacking(path, file) as content:
        begin = content.read(4)
    encoding = how.encoding or next((name for mark, name in MARKS.items() if begin.startswith(mark)), "utf-8")
    problem = _find_problem(path, encoding)
    if problem is None:
        return encoding
    if how.encoding is None and encoding == "utf-8" and not _speaks_against_cp1252(path):
        why = f"byte {problem.byte} in line {problem.line} is not UTF-8"
        how.notes.append(f"{path}: read as cp1252, for {why}; give encoding if it is another")
        return "cp1252"
    name = encoding.upper().removesuffix("-SIG") if encoding.lower().startswith("utf") else encoding
    raise InputError(f"{path}:{problem.line}: not {name} (byte {problem.byte})")


class _Problem(NamedTuple):
    line: int
    byte: str


def _chunks(path: Path) -> Iterator[bytes]:
    """What a file holds, unpacked, piece by piece; refused if it unpacks to far more than data do."""
    with _one_complaint(path), path.open("rb") as file, _unpacking(path, file) as content:
        total, packed = 0, path.stat().st_size
        most = max(MOST, TIMES * packed)
        while chunk := content.read(CHUNK):
            total += len(chunk)
            if total > most:
                raise InputError(f"{path}: expected data, found {packed} bytes that unpack to more than {most}")
            yield chunk


def _find_problem(path: Path, encoding: str) -> _Problem | None:
    """The line and the value of the first byte that cannot be decoded."""
    decoder = codecs.getincrementaldecoder(encoding)()
    line, chunk = 1, b""
    try:
        for chunk in _chunks(path):
            line += decoder.decode(chunk).count("\n")
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        return _Problem(line + before.count(b"\n"), f"{error.object[error.start]:#04x}")
    except UnicodeError:  # UTF-16 and UTF-32 without a beginning
        return _Problem(line, f"{chunk[0]:#04x}" if chunk else "missing")
    return None


def _speaks_against_cp1252(path: Path) -> bool:
    """Whether bytes are of no text in cp1252, or letters of UTF-8 show that a file in that is damaged."""
    rest = b""
    for chunk in _chunks(path):
        some = rest + chunk
        if re.search(rb"[\x00-\x08\x0e-\x1f\x7f\x81\x8d\x8f\x90\x9d]", chunk):
            return True
        if re.search(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}", some):
            return True
        rest = some[-3:]
    return False


def parse_json(text: str, place: object) -> Any:
    """What JSON says; ``place`` names it when it cannot be parsed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: invalid JSON ({first_line(error)})") from None


def iter_lines(path: Path, how: Reading) -> Iterator[tuple[int, str]]:
    """Number and text of every line that is not blank. Only a line feed ends a line: texts hold other separators."""
    with open_text(path, how, newline="\n") as (file, meter):
        for number, line in enumerate(file, start=1):
            meter.tick(number)
            if line.strip():
                yield number, line.rstrip("\n").rstrip("\r")


def read_lines(path: Path) -> list[tuple[str, str]]:
    """Place and text of every line of a UTF-8 file that is not blank, as of `iter_lines`."""
    lines = enumerate(read_text(path).split("\n"), start=1)
    return [(f"{path}:{number}", line.rstrip("\r")) for number, line in lines if line.strip()]
