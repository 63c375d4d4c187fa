"""Dithered codes on the CPU, in numba: rotation, preview of all rows, finer codes of some, sums. Raw arrays only.

A code has 4 bits; its number, 0 to 15, is called a digit here. Byte j of a row holds the digits of coordinates j (low
half) and j + c (high half), where c bytes make a row, so that both halves of a query are contiguous.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from softsieve.kernels.base_numba import ALONE, BLOCK, exp, jit_fast, jit_parallel

TILE = 128  # rows of a block that the preview works on together, which is twice as fast as all of them
GROUP = 16  # bytes that the preview adds up before it adds them to the rest, which keeps rounding small
STRETCH = 128  # the same for a row by itself


# -- digits ------------------------------------------------------------------------------------------------------------


def _digit(shift: int) -> Any:
    """Make a function that returns four bits of a byte as a float, without the wide integers that numba would use."""

    @intrinsic
    def digit(typingctx: Any, byte: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.IntType(8)
            moved = builder.lshr(args[0], ir.Constant(kind, shift))
            return builder.uitofp(builder.and_(moved, ir.Constant(kind, 15)), ir.FloatType())

        return types.float32(types.uint8), codegen

    return digit


_low, _high = _digit(0), _digit(4)


# -- rotation ----------------------------------------------------------------------------------------------------------


@jit_fast
def _hadamard(part: Any) -> None:
    """Transform a power of two of numbers by the Hadamard matrix, in place, not normalised."""
    step = 1
    while step < part.size:
        for start in range(0, part.size, 2 * step):
            first, second = part[start : start + step], part[start + step : start + 2 * step]
            for i in range(step):
                first[i], second[i] = first[i] + second[i], first[i] - second[i]
        step *= 2


@jit_fast
def _turn(row: Any, factors: Any) -> None:
    power = factors.shape[1]
    for start, factor in ((0, factors[0]), (row.size - power, factors[1])):
        part = row[start : start + power]
        for j in range(power):
            part[j] *= factor[j]
        _hadamard(part)


@jit_parallel
def rotate_rows(rows: Any, factors: Any) -> None:
    """Rotate rows (m, d) in place: signs and Hadamard transform of the first p coordinates, then of the last p.

    The power of two p is the greatest in d, so the two overlap, every coordinate is in one of them, and nothing has to
    be filled up.

    Args:
        factors: the signs, over the root of p. (2, p)
    """
    if rows.size <= ALONE:
        for r in range(len(rows)):
            _turn(rows[r], factors)
    else:
        for r in prange(len(rows)):
            _turn(rows[r], factors)


# -- products ----------------------------------------------------------------------------------------------------------


@jit_fast
def _preview(codes: Any, low: Any, high: Any, offset: Any, out: Any) -> None:
    part = np.empty(TILE, np.float32)
    for tile in range(0, BLOCK, TILE):
        values = out[tile : tile + TILE]
        values[:] = offset
        for start in range(0, low.size, GROUP):
            stop = min(start + GROUP, low.size)
            even = stop - (stop - start) % 2
            part[:] = 0
            for j in range(start, even, 2):
                c0, c1 = codes[j, tile : tile + TILE], codes[j + 1, tile : tile + TILE]
                l0, l1, h0, h1 = low[j], low[j + 1], high[j], high[j + 1]
                for i in range(TILE):
                    part[i] += (_low(c0[i]) * l0 + _high(c0[i]) * h0) + (_low(c1[i]) * l1 + _high(c1[i]) * h1)
            if even < stop:
                c0, l0, h0 = codes[even, tile : tile + TILE], low[even], high[even]
                for i in range(TILE):
                    part[i] += _low(c0[i]) * l0 + _high(c0[i]) * h0
            for i in range(TILE):
                values[i] += part[i]


@jit_parallel
def preview(codes: Any, y: Any, offset: Any, out: Any) -> None:
    """Compute ``out[i] = offset + digits of row i @ y`` for all rows.

    Args:
        codes: (blocks, c, BLOCK), a column of a block at a time.
        y: the query, filled up with zeros. (2, c)
        out: (blocks * BLOCK,)
    """
    if codes.size <= ALONE:
        for b in range(len(codes)):
            _preview(codes[b], y[0], y[1], offset, out[b * BLOCK : (b + 1) * BLOCK])
    else:
        for b in prange(len(codes)):
            _preview(codes[b], y[0], y[1], offset, out[b * BLOCK : (b + 1) * BLOCK])


@jit_fast
def _row(codes: Any, low: Any, high: Any) -> Any:
    total = np.float32(0)
    for start in range(0, codes.size, STRETCH):
        stop, own = start + STRETCH, np.float32(0)
        part, first, second = codes[start:stop], low[start:stop], high[start:stop]
        for j in range(part.size):
            own += _low(part[j]) * first[j] + _high(part[j]) * second[j]
        total += own
    return total


@jit_parallel
def refine(codes: Any, y: Any, offset: Any, rows: Any, out: Any) -> None:
    """Compute ``out[r] = offset + digits of row rows[r] @ y``, with the codes (n, c) a row at a time."""
    low, high = y[0], y[1]
    if rows.size * y.shape[1] <= ALONE:
        for r in range(rows.size):
            out[r] = offset + _row(codes[rows[r]], low, high)
    else:
        for r in prange(rows.size):
            out[r] = offset + _row(codes[rows[r]], low, high)


# -- sums of exponentials ----------------------------------------------------------------------------------------------


@jit_fast
def _sum_block(low: Any, high: Any, shift: Any, gap: Any) -> Any:
    least, most = np.float32(0), np.float32(0)
    for i in range(low.size):
        small, large = exp(low[i] - shift), exp(high[i] - shift)
        gap[i] = large - small
        least += small
        most += large
    return least, most


@jit_parallel
def sum_exponentials(low: Any, high: Any, shift: Any, gap: Any) -> Any:
    """Sum up the exponentials of all lower and of all upper ends, over that of ``shift``, the greatest upper end.

    ``gap[i]`` becomes how far those of row i are apart.
    """
    blocks = -(-low.size // BLOCK)
    least, most = np.zeros(blocks), np.zeros(blocks)
    if low.size <= ALONE:
        for b in range(blocks):
            start, stop = b * BLOCK, (b + 1) * BLOCK
            least[b], most[b] = _sum_block(low[start:stop], high[start:stop], shift, gap[start:stop])
    else:
        for b in prange(blocks):
            start, stop = b * BLOCK, (b + 1) * BLOCK
            least[b], most[b] = _sum_block(low[start:stop], high[start:stop], shift, gap[start:stop])
    return least.sum(), most.sum()


@jit_fast
def gap_threshold(gap: Any, allowed: float) -> Any:
    """Return a number such that the gaps up to it add up to no more than ``allowed``, nor to much less."""
    low, high = allowed / gap.size, gap.max()
    for _ in range(12):
        if low >= high:
            break
        middle = math.sqrt(low * high)
        bound, total = np.float32(middle), np.float32(0)
        for i in range(gap.size):
            total += gap[i] if gap[i] <= bound else np.float32(0)
        if total <= allowed:
            low = middle
        else:
            high = middle
    return np.float32(low)
