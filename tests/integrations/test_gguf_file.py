"""Output layers of GGUF files: blocks as llama.cpp defines them, and files as the package writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from softsieve.errors import InputError
from softsieve.heads import QuantisedWeight
from softsieve.integrations.gguf_file import read_gguf_weight, unpack

SIZES = {"Q8_0": (32, 34, [0]), "Q4_0": (32, 18, [0]), "Q4_K": (256, 144, [0, 2]), "Q6_K": (256, 210, [208])}


def random_blocks(kind: str, rows: int = 5, count: int = 3) -> Any:
    """Rows of blocks, any bytes but for the places of numbers of 16 bits, which are finite."""
    _, size, halves = SIZES[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (rows, count, size), dtype=np.uint8)
    for place in halves:
        numbers = random.standard_normal((rows, count)).astype(np.float16)
        blocks[..., place : place + 2] = numbers.view(np.uint8).reshape(rows, count, 2)
    return blocks.reshape(rows, -1)


def half(block: Any, place: int) -> float:
    return float(block[place : place + 2].copy().view(np.float16)[0])


def decoded(kind: str, block: Any) -> list[float]:
    """The numbers of one block, entry by entry, after ggml-quants.c."""
    numbers = [int(byte) for byte in block]
    if kind == "Q8_0":
        return [half(block, 0) * (byte - 256 if byte > 127 else byte) for byte in numbers[2:]]
    if kind == "Q4_0":
        return [half(block, 0) * ((numbers[2 + j % 16] >> (4 if j >= 16 else 0) & 15) - 8) for j in range(32)]
    out = []
    for j in range(256):
        if kind == "Q4_K":
            codes, q, is_ = numbers[16:], numbers[4:16], j // 32
            if is_ < 4:
                scale, least = q[is_] & 63, q[is_ + 4] & 63
            else:
                scale = q[is_ + 4] & 15 | q[is_ - 4] >> 6 << 4
                least = q[is_ + 4] >> 4 | q[is_] >> 6 << 4
            code = codes[j // 64 * 32 + j % 32] >> (4 if j % 64 >= 32 else 0) & 15
            out.append(half(block, 0) * scale * code - half(block, 2) * least)
        else:
            part, at, quarter = j // 128, j % 32, j % 128 // 32
            low = numbers[part * 64 + at + 32 * (quarter % 2)] >> (4 if quarter >= 2 else 0) & 15
            high = numbers[128 + part * 32 + at] >> 2 * quarter & 3
            scale = numbers[192 + j // 16]
            out.append(half(block, 208) * (scale - 256 if scale > 127 else scale) * ((low | high << 4) - 32))
    return out


@pytest.mark.parametrize("kind", SIZES)
def test_blocks(kind: str) -> None:
    entries, size, _ = SIZES[kind]
    blocks = random_blocks(kind)
    weight = unpack(kind, blocks)
    assert tuple(weight.shape) == (5, 3 * entries)
    expected = [[value for block in row.reshape(-1, size) for value in decoded(kind, block)] for row in blocks]
    torch.testing.assert_close(weight.double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-4)


def write(path: Path, tensors: dict[str, tuple[Any, str]]) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", SIZES)
def test_a_file_of_the_package(tmp_path: Path, kind: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    gguf = pytest.importorskip("gguf")
    blocks = random_blocks(kind)
    path = write(tmp_path / "model.gguf", {"token_embd.weight": (blocks, kind)})
    weight = read_gguf_weight(path)
    assert isinstance(weight, QuantisedWeight)
    expected = quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    np.testing.assert_allclose(weight.float().numpy(), expected, rtol=1e-6, atol=1e-6)


def test_the_output_layer_comes_before_tied_embeddings(tmp_path: Path) -> None:
    plain = np.arange(64, dtype=np.float32).reshape(2, 32)
    path = write(
        tmp_path / "model.gguf", {"token_embd.weight": (random_blocks("Q8_0"), "Q8_0"), "output.weight": (plain, "F32")}
    )
    read = read_gguf_weight(path)
    assert isinstance(read, Tensor)
    assert torch.equal(read, torch.from_numpy(plain))
    assert isinstance(read_gguf_weight(path, "token_embd.weight"), QuantisedWeight)
    with pytest.raises(InputError, match="expected a tensor 'other', found"):
        read_gguf_weight(path, "other")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    blocks = np.zeros((4, 22), np.uint8)
    path = write(tmp_path / "model.gguf", {"output.weight": (blocks, "Q5_0")})
    with pytest.raises(InputError, match=r"output.weight: expected one of .* row.* one by one, found Q5_0"):
        read_gguf_weight(path)
    (tmp_path / "broken.gguf").write_bytes(b"no")
    with pytest.raises(InputError, match="cannot be read as GGUF"):
        read_gguf_weight(tmp_path / "broken.gguf")
    with pytest.raises(InputError, match="no such file"):
        read_gguf_weight(tmp_path / "none.gguf")
