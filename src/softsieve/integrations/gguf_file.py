"""Output layers of GGUF files, whose rows stay quantised as the file has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softsieve.errors import InputError, first_line, listed
from softsieve.extras import loaded, package
from softsieve.heads.quantised import QuantisedWeight, Weight

SUFFIX = ".gguf"
OUTPUT = ("output.weight", "token_embd.weight")  # the first that there is; with tied weights it is the second
_AT_ONCE = 1 << 22  # bytes of blocks that are unpacked at a time


def read_gguf_weight(path: Path, tensor: str | None = None) -> Weight:
    """The weight of the output layer of a GGUF file: quantised if it is so there, else a tensor.

    Q8_0, Q4_0, Q4_K and Q6_K are read. The last two have scales of scales, which are multiplied out in float32, so
    that rows take a third to a half more than in the file and stand for the same numbers.

    Args:
        path: of the file.
        tensor: its name in the file; unless given ``output.weight`` or, of tied weights, ``token_embd.weight``.

    Raises:
        InputError: when the file cannot be read, has no such tensor, or one that is quantised in another way.
    """
    gguf = package("gguf", f"{path}:")
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    reader = loaded(lambda: gguf.GGUFReader(path), f"{path}: cannot be read as GGUF")
    tensors = {one.name: one for one in reader.tensors}
    names = OUTPUT if tensor is None else (tensor,)
    name = next((one for one in names if one in tensors), None)
    if name is None:
        raise InputError(f"{path}: expected a tensor {' or '.join(map(repr, names))}, found {listed(tensors)}")
    one = tensors[name]
    kind, blocks = one.tensor_type.name, one.data
    if blocks.ndim != 2:
        raise InputError(f"{path}: {name}: expected a matrix, found shape {blocks.shape}")
    if kind in _PLAIN:
        return torch.from_numpy(np.array(blocks)).view(_PLAIN[kind])
    if kind not in _UNPACK:
        raise InputError(
            f"{path}: {name}: expected one of {listed([*_PLAIN, *_UNPACK])}, whose rows can be read one by one, "
            f"found {kind}"
        )
    try:
        return unpack(kind, blocks)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"{path}: {name}: damaged: {first_line(error)}") from error


def unpack(kind: str, blocks: Any) -> QuantisedWeight:
    """A quantised weight from the blocks of its rows, an array (n, bytes), some rows at a time."""
    step = max(1, _AT_ONCE // blocks.shape[1])
    parts = [
        _UNPACK[kind](torch.from_numpy(np.array(blocks[start : start + step]))) for start in range(0, len(blocks), step)
    ]
    first = parts[0]
    minimums = None if first.minimums is None else torch.cat([part.minimums for part in parts])  # type: ignore[misc]
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    return QuantisedWeight(codes, scales, minimums, levels=first.levels)


# -- one kind of block each, rows (n, bytes) of uint8; see ggml-quants.c of llama.cpp ---------------------------------


def _half(values: Tensor) -> Tensor:
    """Numbers of float16, from two bytes each: (..., 2) to (...)."""
    return values.contiguous().view(torch.float16)[..., 0]


def _q8_0(rows: Tensor) -> QuantisedWeight:
    blocks = rows.view(len(rows), -1, 34)  # a scale and 32 codes
    return QuantisedWeight(blocks[..., 2:].reshape(len(rows), -1).view(torch.int8), _half(blocks[..., :2]))


def _q4_0(rows: Tensor) -> QuantisedWeight:
    blocks = rows.view(len(rows), -1, 18)  # a scale and 32 codes
    levels = torch.arange(-8, 8, dtype=torch.float32)
    return QuantisedWeight(blocks[..., 2:].reshape(len(rows), -1), _half(blocks[..., :2]), levels=levels)


def _q4_k(rows: Tensor) -> QuantisedWeight:
    blocks = rows.view(len(rows), -1, 144)  # two factors, 8 scales and 8 minimums of 6 bits, 256 codes
    factor, least = _half(blocks[..., :2]).float(), _half(blocks[..., 2:4]).float()
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    minimums = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
    bytes_ = blocks[..., 16:].view(*blocks.shape[:2], 4, 32)  # of two groups each, one in each half
    digits = torch.stack([bytes_ & 15, bytes_ >> 4], 3)
    return QuantisedWeight.from_digits(
        digits.reshape(len(rows), -1),
        (factor[..., None] * scales).view(len(rows), -1),
        (-least[..., None] * minimums).view(len(rows), -1),
    )


def _q6_k(rows: Tensor) -> QuantisedWeight:
    blocks = rows.view(len(rows), -1, 210)  # lower 4 bits, upper 2 bits, 16 scales of 8 bits, a factor
    low = blocks[..., :128].reshape(len(rows), -1, 2, 1, 64)
    high = blocks[..., 128:192].reshape(len(rows), -1, 2, 1, 32)
    low = torch.cat([low & 15, low >> 4], 3).flatten(3)  # 128 of each half block
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], 3).flatten(3)
    codes = (low | high << 4).view(torch.int8) - 32
    scales = _half(blocks[..., 208:]).float()[..., None] * blocks[..., 192:208].contiguous().view(torch.int8)
    return QuantisedWeight(codes.reshape(len(rows), -1), scales.view(len(rows), -1))


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_UNPACK: dict[str, Callable[[Tensor], QuantisedWeight]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "Q6_K": _q6_k}
