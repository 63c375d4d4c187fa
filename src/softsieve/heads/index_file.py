"""An adaptive head in one safetensors file. Loading it executes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from softsieve import _digests
from softsieve._files import replacing
from softsieve._safetensors import opened, write_aligned
from softsieve.errors import InputError, first_line

FORMAT = "softsieve.head"
VERSION = 3  # 2: calibrations of both kinds of devices; 3: digests, which 2, still read, has not
_ATTEMPTS = 100  # at reading a file that others replace all the time
_SETTINGS = "the settings"  # among the digests; no tensor has this name


def write(path: Path, tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Write all or nothing: what was there before stays until the new file is complete.

    Raises:
        InputError: when the file cannot be written.
    """
    text = json.dumps(settings)
    digests = _digests.noted({**tensors, _SETTINGS: text})
    metadata = {"format": FORMAT, "version": str(VERSION), "settings": text, **digests}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            write_aligned(part, tensors, metadata)
    except (OSError, RuntimeError) as error:
        raise InputError(f"{path}: cannot be written: {first_line(error)}") from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and settings of a file that `write` made.

    Raises:
        InputError: when it cannot be read, is truncated or damaged, is something else, or has a newer format.
    """
    for _ in range(_ATTEMPTS):
        seen = _seen(path)
        try:
            return _read(path)
        except InputError:
            if _seen(path) == seen:
                raise  # else another process put a new file there: the library opens it twice, header and data
    return _read(path)


def _seen(path: Path) -> tuple[int, int] | None:
    """Which file is there now."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise InputError(f"{path}: expected a file, found {'a folder' if path.is_dir() else 'none'}")
    with opened(path) as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise InputError(f"{path}: expected a saved AdaptiveSoftmax, found another safetensors file")
        version = metadata.get("version")
        if version not in ("2", str(VERSION)):
            raise InputError(f"{path}: expected format version {VERSION}, found {str(version)[:40]}")
        if version != "2" and _digests.KEY not in metadata:
            raise InputError(f"{path}: damaged: its digests are missing")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _digests.check(path, metadata, {**tensors, _SETTINGS: metadata["settings"]})
        settings = json.loads(metadata["settings"])
        if not isinstance(settings, dict):
            raise ValueError("settings are no object")
    return tensors, settings
