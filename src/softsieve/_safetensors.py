"""The one way to read a safetensors file: nothing in it is executed, and whatever is wrong with it is one error.

And one to write tensors that will be read where the file is mapped, by many processes at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from softsieve._files import LINE
from softsieve.errors import InputError, first_line

# What the library raises for a damaged file, and what reading its metadata may raise.
_DAMAGED = (OSError, SafetensorError, KeyError, RuntimeError, TypeError, ValueError)

_KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


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


def write_aligned(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file in which tensors begin with a cache line, where their sizes permit.

    Read from the file's mapped memory, rows of whole cache lines are then as fast as those of a copy. The library's
    own `save_file` gives tensors whatever offset follows from the length of the header. The format has no holes, so
    tensors of whole lines come first, and the header is filled up with spaces.
    """
    names = sorted(tensors, key=lambda name: (tensors[name].nbytes % LINE > 0, -tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        value, start = tensors[name], end
        end += value.nbytes
        header[name] = {"dtype": _KINDS[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % LINE)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
