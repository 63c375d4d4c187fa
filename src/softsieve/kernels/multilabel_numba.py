"""Multi-label AS-Softmax against the threshold in numba, for float32 logits on a CPU.

A row is read three times forward, of which the memory sees the first: for its largest logits, for its sums, and, where
some classes are masked and some are not, for the sums over those that are kept. Backward reads and writes it once.
`kernels.multilabel` says what the numbers of a row are. Classes that apply are those whose flag is not 0.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import prange

from softsieve.kernels.base_numba import choose, exp_rounded, jit_sums, jit_sums_parallel, larger_of_any

INF, NAN, NONE = np.float32(np.inf), np.float32(np.nan), np.float32(0)
LOWEST = np.finfo(np.float32).min  # of no rival; a loop that begins with -inf does not vectorise


@jit_sums
def _largest(x: Any, flags: Any) -> Any:
    """Return the largest rival of each side, the number of positives, of logits that are too large, of wrong flags."""
    negative, positive = LOWEST, LOWEST
    positives, unusable, wrong = np.int32(0), np.int32(0), np.int32(0)
    for j in range(x.size):
        own = flags[j] != 0
        negative = larger_of_any(negative, choose(own, LOWEST, x[j]))
        positive = larger_of_any(positive, choose(own, -x[j], LOWEST))
        positives += np.int32(own)
        unusable += np.int32(not x[j] < INF)
        wrong += np.int32(own) & np.int32(flags[j] != 1)
    return negative, positive, positives, unusable, wrong


@jit_sums
def _sum(x: Any, flags: Any, bases: Any) -> Any:
    """Return the sums of the exponentials of either side's rivals, over that of its base."""
    first, second = bases
    negative, positive = NONE, NONE
    for j in range(x.size):
        own = flags[j] != 0
        e = exp_rounded(choose(own, -x[j] - second, x[j] - first))
        negative += choose(own, NONE, e)
        positive += choose(own, e, NONE)
    return negative, positive


@jit_sums
def _sum_kept(x: Any, flags: Any, bases: Any, cuts: Any) -> Any:
    """Return `_sum` over the rivals that reach their side's cut, and their number."""
    first, second = bases
    first_cut, second_cut = cuts
    negative, positive, kept = NONE, NONE, np.int32(0)
    for j in range(x.size):
        own = flags[j] != 0
        z = choose(own, -x[j], x[j])
        keep = z >= choose(own, second_cut, first_cut)
        e = choose(keep, exp_rounded(z - choose(own, second, first)), NONE)
        negative += choose(own, NONE, e)
        positive += choose(own, e, NONE)
        kept += np.int32(keep)
    return negative, positive, kept


@jit_sums
def _log(total: float, base: float) -> float:
    """Return ``log(e^-base + total)``, which with the base is the logarithm of 1 and of what is over e^base."""
    return math.log1p(total) if base == 0 else math.log(math.exp(-base) + total)


@jit_sums
def _settle(top: Any, total: float, delta: float) -> Any:
    """Return a side's cut, its norm over all rivals, and its margin, from its largest rival and its sum."""
    small = math.exp(-abs(top))
    threshold, largest = (max(small, 1e-300), 1.0) if top > 0 else (1.0, small)  # both over e^base
    ratio = delta * (threshold + total) / threshold  # delta / q_0
    cut = np.float32(math.log1p(-ratio)) if ratio < 1 else -INF
    norm = math.log(small + total) if top > 0 else math.log1p(total)
    return cut, norm, (threshold - largest) / (threshold + total)


@jit_sums
def _forward_row(x: Any, flags: Any, delta: float, sides: Any) -> Any:
    """Return loss, number of kept classes, margin and number of wrong flags; write the numbers of both sides."""
    top_n, top_p, positives, unusable, wrong = _largest(x, flags)
    if unusable or top_p == INF:
        sides[:] = NAN
        sides[:2] = -INF
        return INF if not unusable else NAN, np.int64(x.size), NAN, wrong
    bases = larger_of_any(top_n, NONE), larger_of_any(top_p, NONE)
    sums = _sum(x, flags, bases)
    cut_n, norm_n, margin_n = _settle(top_n, sums[0], delta)
    cut_p, norm_p, margin_p = _settle(top_p, sums[1], delta)
    margin = min(margin_n, margin_p)
    sides[0], sides[1] = cut_n, cut_p
    none_n, none_p = top_n < cut_n, top_p < cut_p
    kept = np.int64(0)
    if (cut_n == -INF or none_n) and (cut_p == -INF or none_p):
        kept += (0 if none_n else x.size - positives) + (0 if none_p else positives)
    else:
        cuts = INF if none_n else cut_n, INF if none_p else cut_p
        kept_n, kept_p, count = _sum_kept(x, flags, bases, cuts)
        kept += count
        norm_n = norm_n if cut_n == -INF else min(_log(kept_n, bases[0]), norm_n)
        norm_p = norm_p if cut_p == -INF else min(_log(kept_p, bases[1]), norm_p)
    sides[2], sides[3] = bases
    sides[4], sides[5] = norm_n, norm_p
    loss = (0.0 if none_n else bases[0] + norm_n) + (0.0 if none_p else bases[1] + norm_p)
    return np.float32(loss), kept, np.float32(margin), wrong


@jit_sums
def _forward_rows(
    x: Any, flags: Any, delta: float, low: int, high: int, loss: Any, sides: Any, kept: Any, margin: Any
) -> int:
    wrong = np.int64(0)
    for row in range(low, high):
        loss[row], kept[row], margin[row], here = _forward_row(x[row], flags[row], delta, sides[row])
        wrong += here
    return wrong


@jit_sums_parallel
def _forward_spans(x: Any, flags: Any, delta: float, spans: int, loss: Any, sides: Any, kept: Any, margin: Any) -> int:
    wrong = np.int64(0)
    for span in prange(spans):
        low, high = span * len(x) // spans, (span + 1) * len(x) // spans
        wrong += _forward_rows(x, flags, delta, low, high, loss, sides, kept, margin)
    return wrong


@jit_sums
def _backward_row(grad: Any, factor: Any, x: Any, flags: Any, sides: Any) -> None:
    cut_n, cut_p, base_n, base_p, norm_n, norm_p = sides[0], sides[1], sides[2], sides[3], sides[4], sides[5]
    for j in range(x.size):
        own = flags[j] != 0
        z = choose(own, -x[j], x[j])
        e = exp_rounded((z - choose(own, base_p, base_n)) - choose(own, norm_p, norm_n))
        e = choose(z < choose(own, cut_p, cut_n), NONE, e)
        grad[j] = choose(own, -e, e) * factor


@jit_sums
def _backward_rows(grad: Any, factor: Any, x: Any, flags: Any, sides: Any, kept: Any, low: int, high: int) -> None:
    for row in range(low, high):
        if kept[row] == 0:
            grad[row] = NONE
        else:
            _backward_row(grad[row], factor[row], x[row], flags[row], sides[row])


@jit_sums_parallel
def _backward_spans(grad: Any, factor: Any, x: Any, flags: Any, sides: Any, kept: Any, spans: int) -> None:
    for span in prange(spans):
        low, high = span * len(x) // spans, (span + 1) * len(x) // spans
        _backward_rows(grad, factor, x, flags, sides, kept, low, high)


def forward(x: Any, flags: Any, loss: Any, sides: Any, kept: Any, margin: Any, *, delta: float, threads: int) -> int:
    """Fill in what is known of these rows, and return how many flags are neither 0 nor 1. All arrays are contiguous."""
    if threads == 1:
        wrong: int = _forward_rows(x, flags, delta, 0, len(x), loss, sides, kept, margin)
    else:
        wrong = _forward_spans(x, flags, delta, threads, loss, sides, kept, margin)
    return wrong


def backward(grad: Any, factor: Any, x: Any, flags: Any, sides: Any, kept: Any, *, threads: int) -> None:
    """Fill in the gradient of these rows, each times its factor."""
    if threads == 1:
        _backward_rows(grad, factor, x, flags, sides, kept, 0, len(x))
    else:
        _backward_spans(grad, factor, x, flags, sides, kept, threads)
