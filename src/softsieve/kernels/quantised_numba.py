"""What the numba kernels ask of a weight: products with rows, their bytes, whether they changed.

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

from softsieve.kernels.base_numba import as_float, jit, jit_fast, prefetch


class Quantised(NamedTuple):
    """A quantised weight (n, d) as arrays: see `QuantisedWeight`."""

    codes: Any  # (n, d) int8, or (n, d / 2) for codes of 4 bits
    scales: Any  # (n, groups), raw bits if 16 wide
    minimums: Any  # the same or, when there are none, (0, 0)
    levels: Any  # (16,) float32: what codes of 4 bits stand for; (0,) for codes of 8 bits
    row_bytes: int


@jit_fast
def exact_row(row: Any, x: Any) -> Any:
    """Return ``row @ x``."""
    total = x.dtype.type(0)
    for j in range(x.size):
        total += as_float(row[j]) * x[j]
    return total


@jit_fast
def _sum(x: Any) -> Any:
    total = x.dtype.type(0)
    for j in range(x.size):
        total += x[j]
    return total


@jit_fast
def _code_product(codes: Any, x: Any) -> Any:
    """Return ``codes @ x``."""
    total = x.dtype.type(0)
    for j in range(x.size):
        total += x.dtype.type(codes[j]) * x[j]
    return total


@jit_fast
def _digit_product(codes: Any, levels: Any, low: Any, high: Any) -> Any:
    """Return the product of a group: the lower halves of its bytes with ``low``, the upper ones with ``high``."""
    total = low.dtype.type(0)
    for j in range(codes.size):
        digits = np.uint8(codes[j])
        total += levels[digits & 15] * low[j] + levels[digits >> 4] * high[j]
    return total


@jit_fast
def _quantised_row(weight: Quantised, number: int, x: Any) -> Any:
    """Return the product of a query with a row that is dequantised on the way."""
    codes, scales, levels = weight.codes[number], weight.scales[number], weight.levels
    group = x.size // scales.size
    half, total = group // 2, x.dtype.type(0)
    for g in range(scales.size):
        start = g * group
        part = x[start : start + group]
        if levels.size:
            value = _digit_product(codes[g * half : (g + 1) * half], levels, part[:half], part[half:])
        else:
            value = _code_product(codes[start : start + group], part)
        total += as_float(scales[g]) * value
        if weight.minimums.size:
            total += as_float(weight.minimums[number, g]) * _sum(part)
    return total


@jit
def _has_changed(rows: Any, probes: Any, samples: Any) -> bool:
    for r in range(samples.shape[0]):
        row, sample = rows[probes[r]], samples[r]
        for j in range(sample.size):
            if row[j] != sample[j]:
                return True
    return False


# -- what is asked of a weight of either kind ----------------------------------------------------------------------


def row_product(weight: Any, number: int, x: Any) -> Any:
    """Return ``weight[number] @ x``."""
    raise NotImplementedError


def prefetch_row(weight: Any, number: int) -> None:
    """Ask the memory for a row, which will be read soon."""
    raise NotImplementedError


def row_bytes(weight: Any) -> int:
    """Return the bytes of a row."""
    raise NotImplementedError


def has_changed(weight: Any, probes: Any, samples: Any) -> bool:
    """Compare the first probes with what they were: a weight of few rows, of the same kind."""
    raise NotImplementedError


def _is_quantised(weight: Any) -> bool:
    return isinstance(weight, types.BaseNamedTuple)


# Not strict: numba would compare the annotations of both signatures, of which lambdas have none.


@overload(row_product, strict=False)
def _row_product(weight: Any, number: Any, x: Any) -> Callable[..., Any]:
    if _is_quantised(weight):
        return lambda weight, number, x: _quantised_row(weight, number, x)
    return lambda weight, number, x: exact_row(weight[number], x)


@overload(prefetch_row, strict=False)
def _prefetch_row(weight: Any, number: Any) -> Callable[..., Any]:
    if _is_quantised(weight):

        def both(weight: Any, number: Any) -> None:
            prefetch(weight.codes, np.intp(number), 0)
            prefetch(weight.scales, np.intp(number), 0)

        return both
    return lambda weight, number: prefetch(weight, np.intp(number), 0)


@overload(row_bytes, strict=False)
def _row_bytes(weight: Any) -> Callable[..., Any]:
    if _is_quantised(weight):
        return lambda weight: weight.row_bytes
    return lambda weight: weight.shape[1] * weight.itemsize


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
