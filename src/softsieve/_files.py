"""Files and folders that are written all or nothing, and folders that one process at a time works in.

What is being written lies beside its place, in a folder ``.NAME.PID``, until it is whole. Its process holds a lock in
that folder (of `filelock`), which the system takes back when the process ends, however it ends. So what a killed one
left behind is known for that, and the next one that writes to the same place takes it away.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from softsieve.errors import InputError

LINE = 64  # bytes of a cache line, with which tensors begin in files that are read where they are mapped
_LOCK = ".lock"  # the file in a folder that is locked
_OLD = "old"  # what was in the place of a folder, for the moment that it takes to move


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of ``path`` when all went well, and is gone when not.

    An `OSError`, on a full disk for instance, names ``path``; what was there before is as it was.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     with replacing(Path(folder, "a.txt")) as part:
        ...         _ = part.write_text("whole")
        ...     [path.name for path in Path(folder).iterdir()]
        ['a.txt']
    """
    try:
        with _room(path) as room:
            part = room / path.name
            yield part
            _flush(part)
            part.replace(path)
    except OSError as error:
        if error.errno is not None:  # a write that fails does not say where
            error.filename = str(path)
        raise


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written beside its place and moved there when complete: `replacing` for a function that writes."""
    with replacing(path) as part:
        write(part)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill, which takes the place of ``folder`` when all went well, and is gone when not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _room(folder) as room:
        part = room / folder.name
        part.mkdir()
        yield part
        for file in part.rglob("*"):
            if file.is_file():
                _flush(file)
        _put(part, folder)


def remove_folder(folder: Path) -> None:
    """Take a folder away, if it is there: all of it at once, so that no half of it is ever found in its place."""
    with suppress(OSError), _room(folder) as room:
        folder.replace(room / folder.name)


def sweep(folder: Path, names: str) -> None:
    """Take away what killed processes left of files and folders of these names, a regular expression."""
    if not folder.is_dir():
        return
    pattern = re.compile(rf"\.({names})\.\d+(-\d+)?")
    for room, match in [(path, pattern.fullmatch(path.name)) for path in folder.iterdir()]:
        if match is None:
            continue
        with suppress(OSError), _locked_room(room) as state:
            if state == "ours":
                if (room / _OLD).exists() and not (folder / match[1]).exists():  # killed between two moves
                    (room / _OLD).replace(folder / match[1])
                _remove(room)


@contextmanager
def only_one(folder: Path, what: str) -> Iterator[None]:
    """Refuse to work in a folder, which is made if it is not there, while another process does.

    Where nothing can be locked, as on some network drives, nothing is refused.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder, only_one(Path(folder), "training"):
        ...     try:
        ...         with only_one(Path(folder), "training"):
        ...             pass
        ...     except InputError as error:
        ...         print(str(error).removeprefix(folder))
        : another process is training there: wait for it to end, or choose another folder
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror}") from error
    try:
        with _locked(folder) as state:
            if state == "another's":
                raise InputError(
                    f"{folder}: another process is {what} there: wait for it to end, or choose another folder"
                )
            try:
                yield
            finally:
                if state == "ours":
                    with suppress(OSError):  # on Windows the file goes when it is closed
                        (folder / _LOCK).unlink()
    finally:
        if made:
            with suppress(OSError):  # it holds something
                folder.rmdir()


def check_writable(path: Path) -> None:
    """Refuse a path whose nearest folder cannot be written to, before hours are spent on what would go there."""
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise InputError(f"{path}: cannot be written to")


@contextmanager
def _room(path: Path) -> Iterator[Path]:
    """An empty folder beside ``path``, of this call alone."""
    sweep(path.parent, re.escape(path.name))
    for number in itertools.count():
        room = path.with_name(f".{path.name}.{os.getpid()}" + (f"-{number}" if number else ""))
        try:
            room.mkdir()
        except FileExistsError:  # of another thread, or of a process of the same number on another machine
            continue
        with _locked_room(room) as state:
            if state == "another's" or not room.exists():
                continue  # taken for something left behind, between making and locking it
            try:
                yield room
            finally:
                _remove(room)
            return


@contextmanager
def _locked_room(room: Path) -> Iterator[str]:
    """`_locked`, and an empty room is gone after it: on Windows none can be removed while its lock is open."""
    try:
        with _locked(room) as state:
            yield state
    finally:
        with suppress(OSError):  # it is gone, or another's
            room.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[str]:
    """Hold the lock of a folder if nobody does; whose it is now: "ours", "another's", or "nobody's" if it has none."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        lock.acquire()
        state = "ours" if (folder / _LOCK).exists() else "another's"  # who removed it has removed the folder
    except Timeout:
        state = "another's"
    except (OSError, NotImplementedError):  # a drive without locks, or a folder that cannot be written to
        state = "nobody's"
    try:
        yield state
    finally:
        lock.release()


def _remove(room: Path) -> None:
    shutil.rmtree(room, ignore_errors=True)


def _flush(path: Path) -> None:
    with path.open("rb") as opened:
        os.fsync(opened.fileno())


def _put(part: Path, folder: Path) -> None:
    """Move a folder to its place; what is there, if anything, goes to where it came from."""
    if not folder.is_dir():
        try:
            part.replace(folder)
            return
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    if not _exchanged(part, folder):  # then there is a moment without either
        old = part.with_name(_OLD)
        folder.replace(old)
        try:
            part.replace(folder)
        finally:
            if not folder.exists():
                old.replace(folder)


def _exchanged(one: Path, other: Path) -> bool:
    """Swap two folders in one go; False where the system or the drive cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
