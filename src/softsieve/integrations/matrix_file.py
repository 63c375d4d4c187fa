"""Weights and queries from .npy and .safetensors files. Nothing in a file is executed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from softsieve import _digests
from softsieve._safetensors import opened
from softsieve.errors import InputError, first_line, listed
from softsieve.integrations.gguf_file import SUFFIX, read_gguf_weight

ROWS = 1 << 16  # queries that are read at a time
# What numpy raises for a damaged file.
_DAMAGED = (
    OSError, ValueError, EOFError, BadZipFile, MemoryError, NotImplementedError, OverflowError, RecursionError,
    SyntaxError, TypeError, TokenError,
)  # fmt: skip


def read_weight(path: Path, tensor: str = "weight", bias: str | None = None) -> tuple[Any, Tensor | None]:
    """A matrix (n, d) and, from a .safetensors file, its bias; of a GGUF file the output layer, as it is there."""
    if path.suffix == SUFFIX:
        return read_gguf_weight(path, None if tensor == "weight" else tensor), None
    if path.suffix == ".npy":
        return _make_tensor(path, _load_array(path)), None
    with _open(path) as file:
        names = list(file.keys())
        for name in (tensor, *([bias] if bias else [])):
            if name not in names:
                raise InputError(f"{path}: expected a tensor {name!r}, found {listed(names)}")
        name = bias or "bias"
        return _read(path, file, tensor), _read(path, file, name) if name in names else None


def read_queries(
    path: Path, corpora: Sequence[str] | None, part: str, *, step: int, missing: bool = False
) -> Iterator[Tensor]:
    """Queries (N, d), some at a time.

    Args:
        corpora: which NAME of the tensors NAME.part, all if not given; without such tensors the only matrix there is.
        part: "calibration" or "test".
        step: 1: all rows, 2: the first of two, -2: the second of two.
        missing: whether there may be none.
    """
    start = 1 if step < 0 else 0
    if path.suffix == ".npy":
        if part == "test" and missing:
            return
        array = _load_array(path)
        if array.ndim != 2:
            raise InputError(f"{path}: expected a matrix (N, d), found shape {array.shape}")
        for first in range(0, len(array), ROWS):
            yield _make_tensor(path, array[first : first + ROWS][start :: abs(step)])
        return
    with _open(path) as file:
        names = [name for name in file.keys() if name.endswith(f".{part}")]  # noqa: SIM118
        if corpora:
            wanted = [f"{corpus}.{part}" for corpus in corpora]
            for name in wanted if not missing else ():
                if name not in names:
                    raise InputError(f"{path}: expected {name}, found {listed(file.keys())}")
            names = [name for name in wanted if name in names]
        elif not names and not missing:
            names = [name for name in file.keys() if len(file.get_slice(name).get_shape()) == 2]  # noqa: SIM118
            if len(names) != 1:
                raise InputError(
                    f"{path}: expected tensors NAME.{part} or a single matrix, found {listed(file.keys())}"
                )
        for name in names:
            rows = _read(path, file, name)
            if rows.ndim != 2:
                raise InputError(f"{path}: {name}: expected a matrix (N, d), found shape {tuple(rows.shape)}")
            yield rows[start :: abs(step)]


def _open(path: Path) -> AbstractContextManager[Any]:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.suffix != ".safetensors":
        raise InputError(f"{path}: expected a file .safetensors or .npy")
    return opened(path)


def _read(path: Path, file: Any, name: str) -> Tensor:
    value: Tensor = file.get_tensor(name)
    _digests.check(path, file.metadata(), {name: value})
    return value


def _make_tensor(path: Path, rows: np.ndarray) -> Tensor:
    try:
        return torch.from_numpy(np.array(rows, dtype=rows.dtype.newbyteorder("=")))
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: expected an array of numbers, found {rows.dtype} ({first_line(error)})") from None


def _load_array(path: Path) -> np.ndarray:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except _DAMAGED as error:
        raise InputError(f"{path}: cannot be read as .npy: {first_line(error)}") from None
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: expected one array, found several")
    return array
