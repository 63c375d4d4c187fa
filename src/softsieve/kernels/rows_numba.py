"""Products of a query with rows in numba: rows of the weight of any dtype, and rows and columns of codes.

Inner loops run over contiguous slices, which is what the compiler vectorises. Rows are read where they are, never
gathered into a copy. Weights of 16 bits come as raw bits: bfloat16 as uint16, float16 as int16; quantised ones as
`Quantised`, whose rows are dequantised number by number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from softsieve.kernels.base_numba import (
    AHEAD,
    ALONE,
    TOGETHER,
    jit_fast,
    jit_fast_stage,
    jit_stage,
    prefetch,
    prefetch_row,
)
from softsieve.kernels.parts_numba import in_parts
from softsieve.kernels.quantised_numba import exact_row, row_products

SPREADS = 8  # bytes for the spreads of tiers, before the codes of a row


@jit_fast
def exact_rows(weight: Any, x: Any, rows: Any, bias: Any, out: Any, alone: int = ALONE) -> None:
    """Compute ``out[r] = weight[rows[r]] @ x + bias[rows[r]]``; an empty bias is none.

    Here and below one thread does the work up to ``alone`` entries.
    """
    row_products(weight, x, rows, out, alone)
    if bias.size:
        for r in range(rows.size):
            out[r] += bias[rows[r]]


@jit_fast_stage
def project(projection: Any, x: Any, low: int, high: int, out: Any) -> None:
    """Compute ``out[low:high] = projection[low:high] @ x``."""
    for j in range(low, high):
        out[j] = exact_row(projection[j], x)


@jit_fast_stage
def add_columns(codes: Any, y: Any, values: Any) -> None:
    """Compute ``values += codes.T @ y`` for a block of rows, four columns at a time."""
    even = y.size - y.size % 4
    for j in range(0, even, 4):
        c0, c1, c2, c3 = codes[j], codes[j + 1], codes[j + 2], codes[j + 3]
        y0, y1, y2, y3 = y[j], y[j + 1], y[j + 2], y[j + 3]
        for i in range(values.size):
            values[i] += y0 * c0[i] + y1 * c1[i] + y2 * c2[i] + y3 * c3[i]
    for j in range(even, y.size):
        c0, y0 = codes[j], y[j]
        for i in range(values.size):
            values[i] += y0 * c0[i]


@jit_fast_stage
def _code_row(codes: Any, y: Any) -> Any:
    total = np.float32(0)
    for j in range(y.size):
        total += np.float32(codes[j]) * y[j]
    return total


@jit_fast_stage
def _add_some(number: int, records: Any, tier: int, part: Any, rows: Any, start: int, out: Any, spreads: Any) -> None:
    stop = start + part.size
    ahead = max(1, AHEAD // part.size)
    for r in range(number * TOGETHER, min((number + 1) * TOGETHER, rows.size)):
        if r + ahead < rows.size:  # also beyond the last of these: who reads that next waits for nothing
            prefetch_row(records, rows[r + ahead], start, stop)
            if start:  # its spread
                prefetch(records, np.intp(rows[r + ahead]), 0)
        record = records[rows[r]]
        out[r] += _code_row(record[start:stop], part)
        spreads[r] = np.uint8(record[tier])


@jit_stage
def add_codes(
    records: Any, tier: int, y: Any, rows: Any, low: int, high: int, out: Any, spreads: Any, alone: int = ALONE
) -> None:
    """Compute ``out[r] += codes[rows[r], low:high] @ y[low:high]``, and copy the spreads of these rows in this tier.

    ``y`` has a 0 for each spread before its first number: from its beginning, a record is read in whole cache lines.
    """
    start = SPREADS + low if low else 0
    few = rows.size * (high - low) <= alone
    in_parts(
        _add_some, -(-rows.size // TOGETHER), few,
        (records, tier, y[start : SPREADS + high], rows, start, out, spreads),
    )  # fmt: skip
