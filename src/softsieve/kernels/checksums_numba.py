"""Checksums of the rows of a weight in numba: one pass at the speed of memory. Raw arrays only."""

from __future__ import annotations

from typing import Any

import numpy as np

from softsieve.kernels.base_numba import jit, jit_stage

__all__ = ["sum_rows"]


@jit_stage
def _sum_row(row: Any, factors: Any) -> Any:
    total = np.int64(0)
    for j in range(row.size):
        total += np.int64(row[j]) * factors[j]
    return total


@jit
def sum_rows(bits: Any, factors: Any, out: Any) -> None:
    """Compute ``out[r] = sum over j of bits[r, j] * factors[j]``, modulo 2^64; ``bits`` (rows, d) are whole numbers."""
    for r in range(bits.shape[0]):
        out[r] = _sum_row(bits[r], factors)
