"""A number for what a tensor held when it was written, kept in the file, so that damage is noticed when it is read.

CRC-32: it finds every error within 32 bits and all but one in four billion of the others, and takes less time than
reading the file. That is for accidents. Who changes a file on purpose can change the number, too; so shapes and ranges
are checked all the same, and nothing in a file is executed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from softsieve.errors import InputError

KEY = "digests"  # in the metadata of a safetensors file


def digest(value: Tensor | str) -> int:
    """Of the dtype, the shape and the bits of a tensor, or of a text.

    Example:
        >>> digest(torch.tensor([1.0])) == digest(torch.tensor([[1.0]]))
        False
    """
    if isinstance(value, str):
        return zlib.crc32(value.encode())
    kind = zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode())
    flat = value.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy(), kind) if flat.numel() else kind  # type: ignore[arg-type]


def noted(values: Mapping[str, Tensor | str]) -> dict[str, str]:
    """What to add to the metadata of a file with these tensors.

    Example:
        >>> noted({"a": "text"})
        {'digests': '{"a": 999008199}'}
    """
    return {KEY: json.dumps({name: digest(value) for name, value in values.items()})}


def check(path: Path, metadata: Mapping[str, str] | None, values: Mapping[str, Tensor | str]) -> None:
    """Refuse tensors of a file that are not what was noted, if anything was."""
    if metadata is None or KEY not in metadata:
        return
    try:
        known = json.loads(metadata[KEY])
    except (ValueError, RecursionError):
        known = None
    if not isinstance(known, dict):
        raise InputError(f"{path}: damaged: its digests cannot be read")
    for name, value in values.items():
        if known.get(name) != digest(value):
            raise InputError(f"{path}: damaged: {name!r} is not what was written")
