"""Rounding to 8 bits at random in one pass over the rows, in Triton, and products of what is rounded on tensor cores.

Bits of e4m3 are made from those of float32: what the mantissa loses is 20 bits, below which as many random ones are
added. Runs under Triton's interpreter too, where the product is emulated.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from softsieve.kernels import linear_screening_torch
from softsieve.kernels.cross_entropy_triton import _logit
from softsieve.kernels.launches import Launches
from softsieve.kernels.linear_types import Layer
from softsieve.kernels.updates_triton import _noise


@triton.jit(do_not_specialize=["first", "seed"])
def _quantise(
    values, profile, rounded, scales, norms, errors,
    size, padded, first, seed,
    GROWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read a row twice; write it in 8 bits, with its scale and the norms of its squares and of its errors."""
    row = tl.program_id(0).to(tl.int64)
    values += row * size
    peak = tl.zeros((BLOCK,), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.abs(tl.load(values + at, mask=at < size, other=0.0).to(tl.float32))
        peak = tl.maximum(peak, x)
        broken |= tl.where(x < float("inf"), 0, 1)  # infinite or not a number
    peak_of_row = tl.max(peak, 0)
    largest = peak_of_row * 0.0022321429569274187  # 1/448
    exponent = tl.where(peak_of_row > 0.0, (largest.to(tl.int32, bitcast=True) >> 23) + 1, 127)  # rounded up
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(tl.max(broken, 0) > 0, float("nan"), scale)
    norm = tl.zeros((BLOCK,), tl.float32)
    error = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, padded, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(values + at, mask=at < size, other=0.0).to(tl.float32)
        magnitude = tl.minimum(tl.abs(x) * inverse, 448.0)
        noise = (_noise(seed, (first + row) * size + at) >> 12).to(tl.int32)  # 20 bits
        bits = magnitude.to(tl.int32, bitcast=True)
        normal = magnitude >= 0.015625
        steps = magnitude * 512.0  # of the grid below the smallest normal number
        code = ((bits + noise) >> 20) - 960  # another bias of the exponent
        code = tl.where(normal, code, tl.floor(steps + noise.to(tl.float32) * 9.5367431640625e-07).to(tl.int32))
        code |= tl.where(x < 0.0, 128, 0)
        tl.store(rounded + row * padded + at, code.to(tl.uint8), mask=at < padded)
        half = tl.where(normal, (bits & 0x7F800000).to(tl.float32, bitcast=True) * 0.0625, 0.0009765625)
        half = tl.where(x == 0.0, 0.0, half)
        if GROWN:
            above = (((bits + 0xFFFFF) >> 20) << 20).to(tl.float32, bitcast=True)
            magnitude = tl.where(normal, above, tl.ceil(steps) * 0.001953125)
        share = tl.load(profile + at, mask=at < size, other=0.0)
        norm += share * (magnitude * magnitude) * (magnitude * magnitude)
        error += share * (half * half) * (half * half)
    tl.store(scales + row, scale)
    tl.store(norms + row, tl.sqrt(tl.sum(norm, 0)) * scale * scale)
    tl.store(errors + row, tl.sqrt(tl.sum(error, 0)) * scale * scale)


@triton.jit
def _own(
    hidden, weight, bias, label, own,
    size, classes, cap,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read a hidden state and the weights of its label; write the label's logit, NaN for a label out of range."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(label + row)
    inside = (t >= 0) & (t < classes)
    t = tl.where(inside, t, 0)
    sums = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        h = tl.load(hidden + row * size + at, mask=at < size, other=0.0).to(tl.float32)
        sums += h * tl.load(weight + t * size + at, mask=at < size, other=0.0).to(tl.float32)
    x = tl.sum(sums, 0).to(weight.dtype.element_ty)  # as the product of matrices rounds
    x = _logit(x, bias, t, None, cap, BIASED, CAPPED)
    tl.store(own + row, tl.where(inside, x, float("nan")))


@lru_cache(maxsize=1024)
def settings(columns: int) -> tuple[int, int]:
    """How many of them a program takes at a time, of which few are beyond the last one, and with how many warps."""
    whole = min(triton.next_power_of_2(columns), 4096)
    blocks = (whole >> n for n in range(4) if whole >> n >= min(whole, 512))
    block = min(blocks, key=lambda size: (-(-columns // size) * size, -size))
    return block, 4 if block <= 2048 else 8


_launch_quantise = Launches(_quantise)


def quantise(values: Tensor, profile: Tensor, rounded: Any, first: int, seed: int, *, grown: bool) -> None:
    """`linear_screening_torch.quantise`, with other random numbers."""
    (rows, size), padded = values.shape, rounded.values.shape[1]
    block, warps = settings(padded)
    codes, scale, norm, error = rounded.values.view(torch.uint8), rounded.scale, rounded.norm, rounded.error
    _launch_quantise(
        (values.device, values.dtype, size, padded, grown),
        (values, profile, codes, scale, norm, error), (rows, 1, 1),
        values, profile, codes, scale, norm, error, size, padded, first, seed, grown, block, num_warps=warps,
    )  # fmt: skip


def multiply(hidden: Any, weight: Any, products: Tensor) -> None:
    """Write the products of the values, rounded to bfloat16."""
    if products.is_cpu:
        linear_screening_torch.multiply(hidden, weight, products)
        return
    # with fast accumulation a tenth to a sixth faster, and three times as far off, which is more than `SLACK` allows
    torch._scaled_mm(
        hidden.values, weight.values.t(), scale_a=hidden.scale[:, None], scale_b=weight.scale[None],
        out_dtype=torch.bfloat16, use_fast_accum=False, out=products,
    )  # fmt: skip


def own_logits(layer: Layer, label: Tensor) -> Tensor:
    """`linear_screening_torch.own_logits`."""
    hidden, weight, bias, cap = layer
    rows, size = hidden.shape
    own = hidden.new_empty(rows, dtype=torch.float32)
    _own[(rows,)](
        hidden, weight, weight if bias is None else bias, label, own, size, len(weight), cap,
        BIASED=bias is not None, CAPPED=cap > 0, BLOCK=settings(size)[0], num_warps=4,
    )  # fmt: skip
    return own
