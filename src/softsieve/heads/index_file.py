"""An adaptive head in one safetensors file. Loading it executes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from softsieve.errors import InputError, first_line

FORMAT = "softsieve.head"
VERSION = 2  # 2: calibrations of both kinds of devices


def write(path: Path, tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Write all or nothing: what was there before stays until the new file is complete.

    Raises:
        InputError: when the file cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    metadata = {"format": FORMAT, "version": str(VERSION), "settings": json.dumps(settings)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file({name: value.contiguous() for name, value in tensors.items()}, part, metadata)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be written: {first_line(error)}") from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and settings of a file that `write` made.

    Raises:
        InputError: when it cannot be read, is truncated, is something else, or has a newer format.
    """
    if not path.is_file():
        raise InputError(f"{path}: expected a file, found {'a folder' if path.is_dir() else 'none'}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise InputError(f"{path}: expected a saved AdaptiveSoftmax, found another safetensors file")
            if metadata.get("version") != str(VERSION):
                raise InputError(f"{path}: expected format version {VERSION}, found {metadata.get('version')}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        settings = json.loads(metadata["settings"])
        if not isinstance(settings, dict):
            raise ValueError("settings are no object")
    except InputError:
        raise
    except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {first_line(error)}") from error
    return tensors, settings
