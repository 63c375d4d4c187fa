"""The one way to read a safetensors file: nothing in it is executed, and whatever is wrong with it is one error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from softsieve.errors import InputError, first_line

# What the library raises for a damaged file, and what reading its metadata may raise.
_DAMAGED = (OSError, SafetensorError, KeyError, RuntimeError, TypeError, ValueError)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file to read tensors and metadata from: what `safe_open`, which has no types, opens.

    An `InputError` names the file when it cannot be read, here or in the block.
    """
    try:
        with safe_open(path, "pt") as file:
            yield file
    except InputError:
        raise
    except _DAMAGED as error:
        raise InputError(f"{path}: cannot be read as safetensors: {first_line(error)}") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a file by name, and its metadata."""
    with opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
