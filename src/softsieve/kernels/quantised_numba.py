"""What the numba kernels ask of a weight: products with rows, and whether they changed.

A weight is an array or, for one that is quantised, a `Quantised` of arrays. Which of them it is decides when a kernel
is compiled, so that kernels for plain weights are what they would be without the other. Only other kernels call these
functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from softsieve.kernels.base_numba import (
    AHEAD,
    TOGETHER,
    as_float,
    jit_fast_making_stage,
    jit_fast_stage,
    jit_making_stage,
    jit_stage,
    prefetch_row,
)
from softsieve.kernels.parts_numba import in_parts


class Quantised(NamedTuple):
    """A quantised weight (n, d) as arrays: see `QuantisedWeight`."""

    codes: Any  # (n, d) int8, or (n, d / 2) for codes of 4 bits
    scales: Any  # (n, groups), raw bits if 16 wide
    minimums: Any  # the same or, when there are none, (0, 0)
    levels: Any  # (16,) float32: what codes of 4 bits stand for; (0,) for codes of 8 bits


@jit_fast_stage
def exact_row(row: Any, x: Any) -> Any:
    """Return ``row @ x``."""
    total = x.dtype.type(0)
    for j in range(x.size):
        total += as_float(row[j]) * x[j]
    return total


# The loop over a group is written out in each: a call takes longer than the 16 or 32 entries of a group.


@jit_fast_stage
def _code_row(codes: Any, scales: Any, x: Any) -> Any:
    """Return the product with a row of codes of 8 bits."""
    group, total = x.size // scales.size, x.dtype.type(0)
    for g in range(scales.size):
        some, part = codes[g * group : (g + 1) * group], x[g * group : (g + 1) * group]
        value = x.dtype.type(0)
        for j in range(part.size):
            value += as_float(some[j]) * part[j]
        total += as_float(scales[g]) * value
    return total


@jit_fast_stage
def _digit_row(codes: Any, scales: Any, levels: Any, x: Any) -> Any:
    """Return the product with a row of codes of 4 bits, two a byte: entries of both halves of a group."""
    half, total = codes.size // scales.size, x.dtype.type(0)
    for g in range(scales.size):
        some, part = codes[g * half : (g + 1) * half], x[2 * g * half : 2 * (g + 1) * half]
        low, high = part[:half], part[half:]
        value = x.dtype.type(0)
        for j in range(some.size):
            digits = np.uint8(some[j])
            value += levels[digits & 15] * low[j] + levels[digits >> 4] * high[j]
        total += as_float(scales[g]) * value
    return total


@jit_fast_making_stage
def _group_sums(x: Any, groups: int) -> Any:
    """Return what a query meets minimums with."""
    sums, group = np.zeros(groups, x.dtype), x.size // max(groups, 1)
    for g in range(groups):
        for value in x[g * group : (g + 1) * group]:
            sums[g] += value
    return sums


@jit_fast_stage
def _some_plain_rows(number: int, weight: Any, x: Any, rows: Any, out: Any) -> None:
    size = weight.shape[1] * weight.itemsize
    ahead = max(1, AHEAD // size)
    for r in range(number * TOGETHER, min((number + 1) * TOGETHER, rows.size)):
        if r + ahead < rows.size:
            prefetch_row(weight, rows[r + ahead], np.int64(0), size)
        out[r] = exact_row(weight[rows[r]], x)


@jit_stage
def _plain_rows(weight: Any, x: Any, rows: Any, out: Any, alone: int) -> None:
    in_parts(_some_plain_rows, -(-rows.size // TOGETHER), rows.size * x.size <= alone, (weight, x, rows, out))


@jit_fast_stage
def _some_quantised_rows(
    number: int, codes: Any, scales: Any, minimums: Any, levels: Any, x: Any, sums: Any, rows: Any, out: Any
) -> None:
    size = codes.shape[1]
    ahead = max(1, AHEAD // size)
    for r in range(number * TOGETHER, min((number + 1) * TOGETHER, rows.size)):
        if r + ahead < rows.size:
            prefetch_row(codes, rows[r + ahead], np.int64(0), size)
            prefetch_row(scales, rows[r + ahead], np.int64(0), scales.shape[1] * scales.itemsize)
        row, scale = codes[rows[r]], scales[rows[r]]
        out[r] = _digit_row(row, scale, levels, x) if levels.size else _code_row(row, scale, x)
        if sums.size:
            out[r] += exact_row(minimums[rows[r]], sums)


@jit_making_stage
def _quantised_rows(
    codes: Any, scales: Any, minimums: Any, levels: Any, x: Any, rows: Any, out: Any, alone: int
) -> None:
    given = codes, scales, minimums, levels, x, _group_sums(x, minimums.shape[1]), rows, out
    in_parts(_some_quantised_rows, -(-rows.size // TOGETHER), rows.size * x.size <= alone, given)


@jit_stage
def _has_changed(rows: Any, probes: Any, samples: Any) -> bool:
    for r in range(samples.shape[0]):
        row, sample = rows[probes[r]], samples[r]
        for j in range(sample.size):
            if row[j] != sample[j]:
                return True
    return False


# -- what is asked of a weight of either kind ----------------------------------------------------------------------


def row_products(weight: Any, x: Any, rows: Any, out: Any, alone: int) -> None:
    """Compute ``out[r] = weight[rows[r]] @ x``; up to ``alone`` entries by one thread."""
    raise NotImplementedError


def has_changed(weight: Any, probes: Any, samples: Any) -> bool:
    """Compare the first probes with what they were: a weight of few rows, of the same kind."""
    raise NotImplementedError


def _is_quantised(weight: Any) -> bool:
    return isinstance(weight, types.BaseNamedTuple)


# Not strict: numba would compare the annotations of both signatures, of which lambdas have none.


@overload(row_products, strict=False)
def _row_products(weight: Any, x: Any, rows: Any, out: Any, alone: Any) -> Callable[..., Any]:
    if _is_quantised(weight):  # its arrays one by one: a tuple of them takes longer to pass on than a row to read
        return lambda weight, x, rows, out, alone: _quantised_rows(
            weight.codes, weight.scales, weight.minimums, weight.levels, x, rows, out, alone
        )
    return lambda weight, x, rows, out, alone: _plain_rows(weight, x, rows, out, alone)


@overload(has_changed, strict=False)
def _any_has_changed(weight: Any, probes: Any, samples: Any) -> Callable[..., Any]:
    if not _is_quantised(weight):
        return lambda weight, probes, samples: _has_changed(weight, probes, samples)

    def any_part(weight: Any, probes: Any, samples: Any) -> bool:
        return (
            _has_changed(weight.codes, probes, samples.codes)
            or _has_changed(weight.scales, probes, samples.scales)
            or _has_changed(weight.minimums, probes, samples.minimums)
        )

    return any_part
