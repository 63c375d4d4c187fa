"""`kernels.updates` in one pass over the weight, in Triton.

Runs under Triton's interpreter too. Numbers of bfloat16 are taken as the upper halves of float32's bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from softsieve.kernels.launches import Launches
from softsieve.kernels.updates import SGD, AdamW

BLOCK = 1024


@triton.jit
def _load(values, at, inside, BITS: tl.constexpr):
    """Numbers as float32; as the upper half of its bits where the memory has int16."""
    x = tl.load(values + at, mask=inside, other=0)
    if BITS:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _mix(x, key):
    """A hash of 32 bits, whose upper half every bit of ``x`` and of a well mixed ``key`` changes."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B + key
    return (x ^ (x >> 13)) * 0xC2B2AE35


@triton.jit
def _noise(seed, at):
    """32 random bits of each number, from its place and the 64 of the seed.

    Ten integer operations of a number, besides those of the seed. Philox, which `tl.randint` is, takes a hundred: of
    a step of millions of classes as long as its three products.
    """
    key = seed.to(tl.int64)
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    first = _mix(low ^ (_mix(high, 0x27D4EB2F) >> 3), high)
    second = _mix(first ^ (first >> 15), low)
    x = _mix(at.to(tl.uint32) * 0x9E3779B1 + first, second ^ (second >> 16))
    return x ^ (x >> 16)


@triton.jit
def _store(values, at, inside, x, seed, BITS: tl.constexpr):
    """Write numbers; where the memory has int16, rounded up or down at random such that the mean is right."""
    if BITS:
        noise = (_noise(seed, at) & 0xFFFF).to(tl.int32)
        tl.store(values + at, ((x.to(tl.int32, bitcast=True) + noise) >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(values + at, x.to(values.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _sgd(
    values, grads, buffers, count, lr, momentum, decay, seed,
    MOMENTUM: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read some numbers with their gradients; write what SGD makes of them, and the buffers of momentum."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = _load(values, at, inside, BITS)
    g = _load(grads, at, inside, False) + decay * x
    if MOMENTUM:
        g += momentum * _load(buffers, at, inside, False)
        tl.store(buffers + at, g, mask=inside)
    _store(values, at, inside, x - lr * g, seed, BITS)


@triton.jit(do_not_specialize=["seed"])
def _adamw(
    values, grads, means, squares, count, lr, beta1, beta2, eps, decay, scale1, scale2, seed,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read some numbers with their gradients and moments; write what AdamW makes of all but the gradients."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = _load(grads, at, inside, False)
    m = _load(means, at, inside, False)
    m += (1 - beta1) * (g - m)
    v = beta2 * _load(squares, at, inside, False) + (1 - beta2) * g * g
    tl.store(means + at, m, mask=inside)
    tl.store(squares + at, v, mask=inside)
    x = _load(values, at, inside, BITS) * (1 - lr * decay)
    _store(values, at, inside, x - lr * scale1 * m / (tl.sqrt(v) * scale2 + eps), seed, BITS)


@triton.jit(do_not_specialize=["seed"])
def _sgd_product(
    values, gradient, hidden, classes, rows, size, lr, seed,
    BITS: tl.constexpr, PAIRED: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Read a block of the weights of some classes; write what SGD makes of them, their gradient a product.

    Where they are PAIRED the memory has int32, two numbers each, which share 32 random bits. Blocks of the same classes
    follow each other, and find the gradient of their logits in the cache.
    """
    across = tl.cdiv(size, COLUMNS)
    at = (tl.program_id(0) // across) * CLASSES + tl.arange(0, CLASSES)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((CLASSES, COLUMNS), tl.float32)
    for first in range(0, rows, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        g = tl.load(gradient + row * classes + at[None, :], mask=(row < rows) & (at < classes)[None, :], other=0.0)
        h = tl.load(hidden + row * size + column[None, :], mask=(row < rows) & (column < size)[None, :], other=0.0)
        total = tl.dot(tl.trans(g), h, total, input_precision="ieee")
    if PAIRED:
        even, odd = tl.split(tl.reshape(total, (CLASSES, COLUMNS // 2, 2)))
        column = (tl.program_id(0) % across) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        place = at[:, None] * (size // 2) + column[None, :]
        inside = (at < classes)[:, None] & (column < size // 2)[None, :]
        both = tl.load(values + place, mask=inside, other=0)
        noise = _noise(seed, place)
        even = (both << 16).to(tl.float32, bitcast=True) - lr * even
        odd = (both & -65536).to(tl.float32, bitcast=True) - lr * odd
        even = (even.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)) >> 16
        odd = (odd.to(tl.uint32, bitcast=True) + (noise >> 16)) & 0xFFFF0000
        tl.store(values + place, (even | odd).to(tl.int32, bitcast=True), mask=inside)
    else:
        place = at[:, None] * size + column[None, :]
        inside = (at < classes)[:, None] & (column < size)[None, :]
        _store(values, place, inside, _load(values, place, inside, BITS) - lr * total, seed, BITS)


_launch_sgd, _launch_adamw, _launch_sgd_product = Launches(_sgd), Launches(_adamw), Launches(_sgd_product)


def sgd_product(value: Tensor, gradient: Tensor, hidden: Tensor, lr: float, seed: int | None) -> None:
    """``value -= lr * gradient.T @ hidden``, the product written nowhere, and rounded as `update` does.

    Of (classes, size), (rows, classes) and (rows, size).
    """
    (classes, size), rows, bits = value.shape, len(hidden), seed is not None
    paired = bits and size % 2 == 0 and value.data_ptr() % 4 == 0
    most = triton.next_power_of_2
    block = 64, max(16, min(128, most(size))), max(16, min(64, most(rows)))  # classes, columns, rows
    values = value.view(torch.int32 if paired else torch.int16) if bits else value
    args = values, gradient, hidden, classes, rows, size, lr, seed or 0
    grid = triton.cdiv(classes, block[0]) * triton.cdiv(size, block[1]), 1, 1
    _launch_sgd_product.by_types(grid, args, (bits, paired, *block), num_warps=4, num_stages=3)


def update(value: Tensor, grad: Tensor, states: Sequence[Tensor], rule: SGD | AdamW, seed: int | None) -> None:
    """As `kernels.updates.update`; contiguous tensors of fewer than 2^31 numbers."""
    count, bits = value.numel(), seed is not None
    values = value.view(torch.int16) if bits else value
    grid = triton.cdiv(count, BLOCK), 1, 1
    if isinstance(rule, SGD):
        momentum = bool(rule.momentum)
        buffers = states[0] if momentum else grad
        args = values, grad, buffers, count, rule.lr, rule.momentum, rule.weight_decay, seed or 0
        _launch_sgd.by_types(grid, args, (momentum, bits, BLOCK), num_warps=4)
        return
    scale1, scale2 = 1 / rule.correction1, rule.correction2**-0.5
    numbers = count, rule.lr, rule.beta1, rule.beta2, rule.eps, rule.weight_decay, scale1, scale2, seed or 0
    _launch_adamw.by_types(grid, (values, grad, *states, *numbers), (bits, BLOCK), num_warps=4)
