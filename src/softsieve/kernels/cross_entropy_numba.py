"""AS cross-entropy over the rows of a logits matrix in compiled loops, for fp32 and narrower on a CPU.

Forward is torch's log-softmax, whose bits are those of `F.cross_entropy`, and one pass over what it leaves in the
cache; only rows that are sparse and not solved are read once more. Backward reads a row and writes its gradient. What
is known of the rows is one tensor, (7, rows): threshold, kept, lse, norm, share and margin, as `kernels.cross_entropy`
has them, and the loss.

Tensors are handed over as addresses: for a small batch, making arrays of them would take longer than the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numba import carray, prange
from torch import Tensor

from softsieve.kernels import cross_entropy_torch
from softsieve.kernels.base_numba import (
    as_floats,
    as_labels,
    choose,
    exp_rounded,
    jit,
    jit_sums,
    jit_sums_parallel,
    larger_of_any,
)

INF, NAN, NONE = np.float32(np.inf), np.float32(np.nan), np.float32(0)
LOWEST = np.finfo(np.float32).min  # of no rival; a loop that begins with -inf does not vectorise
DIGITS = 8 * 2.0**-23  # by how much rounding may move a margin or, for a logit of 1, a threshold
FAR = 64  # where the loss is larger than this, a target's logit and loss say too little of the others' sum
LEVELS = 8
SMALL = 1 << 18  # logits up to which one thread does the work
THRESHOLD, KEPT, LSE, NORM, SHARE, MARGIN, LOSS = range(7)  # of a row
NUMBERS = 7


@jit_sums
def _largest(values: Any) -> Any:
    top = LOWEST
    for j in range(values.size):
        top = larger_of_any(top, values[j])
    return top


@jit_sums
def _sum_kept(x: Any, log_p: Any, threshold: Any) -> Any:
    """Return the probability of the classes that reach the threshold, and their number."""
    total, kept = NONE, np.int32(0)
    for j in range(x.size):
        keep = x[j] >= threshold
        total += choose(keep, exp_rounded(log_p[j]), NONE)
        kept += np.int32(keep)
    return total, kept


@jit
def _far_lse(x: Any, rival: Any) -> Any:
    """Return the log-sum-exp of a row by its largest logit, whose log-probability this is."""
    top = x[0]
    for value in x:
        if value != value:
            return NAN
        top = max(top, value)
    return top if abs(top) == INF else np.float32(np.float64(top) - rival)


@jit
def _forward_row(x: Any, log_p: Any, label: int, delta: float) -> Any:
    """Return threshold, number of kept classes, lse, norm, margin and loss of a row."""
    loss, own, before, after = -log_p[label], np.float64(x[label]), slice(0, label), slice(label + 1, x.size)
    nll = np.float64(loss)
    rival = larger_of_any(_largest(log_p[before]), _largest(log_p[after]))
    p = math.exp(-nll)
    margin = p - math.exp(np.float64(rival))
    lse = np.float32(own + nll) if nll < FAR else _far_lse(x, rival)
    ratio = delta * min(math.exp(nll), 1e300)  # delta over the target's probability
    if not (ratio < 1 and nll < INF):
        return -INF, np.int64(x.size), lse, NONE, np.float32(margin), loss
    threshold, kept = np.float32(own + math.log1p(-ratio)), np.int64(1)
    # Logits decide what is kept. A margin says it but for rounding, which is as large as the threshold's in its row.
    if margin - DIGITS * abs(own) <= delta + DIGITS:
        one, so_many = _sum_kept(x[before], log_p[before], threshold)
        other, as_many = _sum_kept(x[after], log_p[after], threshold)
        kept += so_many + as_many
        nll = min(math.log1p((np.float64(one) + other) / p), nll)
    else:
        nll = 0.0
    return threshold, kept, lse, np.float32(nll - loss), np.float32(margin), np.float32(nll)


@jit
def _forward_rows(
    x_at: int, log_p_at: int, target_at: int, numbers_at: int, rows: int, classes: int, first: int, low: int, high: int,
    delta: float, ignore_index: int, share: float,
) -> None:  # fmt: skip
    """Fill in the numbers of a block's rows from low to high; the block begins at the row ``first`` of all rows."""
    x, log_p = carray(as_floats(x_at), (high, classes)), carray(as_floats(log_p_at), (high, classes))
    target, numbers = carray(as_labels(target_at), rows), carray(as_floats(numbers_at), (NUMBERS, rows))
    for row in range(low, high):
        place, label = first + row, target[first + row]
        if label == ignore_index:
            for number in range(NUMBERS):
                numbers[number, place] = NONE
            continue
        threshold, kept, lse, norm, margin, loss = _forward_row(x[row], log_p[row], label, delta)
        if share > 0:
            numbers[SHARE, place] = share
        else:  # weights of the labels are there
            loss *= numbers[SHARE, place]
        numbers[THRESHOLD, place], numbers[KEPT, place], numbers[LSE, place] = threshold, kept, lse
        numbers[NORM, place], numbers[MARGIN, place], numbers[LOSS, place] = norm, margin, loss


@jit_sums_parallel
def _forward_spans(
    x_at: int, log_p_at: int, target_at: int, numbers_at: int, rows: int, classes: int, first: int, height: int,
    spans: int, delta: float, ignore_index: int, share: float,
) -> None:  # fmt: skip
    for span in prange(spans):
        low, high = span * height // spans, (span + 1) * height // spans
        _forward_rows(
            x_at, log_p_at, target_at, numbers_at, rows, classes, first, low, high, delta, ignore_index, share
        )


@jit
def _count(target_at: int, rows: int, classes: int, ignore_index: int) -> int:
    """Return how many rows count, or -1 where a label is out of range."""
    counted = 0
    for label in carray(as_labels(target_at), rows):
        if label != ignore_index:
            counted += 1
            if not 0 <= label < classes:
                return -1
    return counted


@jit
def _sum(values_at: int, target_at: int, rows: int, ignore_index: int, total_at: int, divisor: float) -> None:
    """Write the sum of the rows that count, over the divisor: the cascade of partial sums of `F.nll_loss`, its bits."""
    values, target = carray(as_floats(values_at), rows), carray(as_labels(target_at), rows)
    bits = 0
    while (1 << bits) < rows:
        bits += 1
    power = max(4, bits // LEVELS)
    partial = np.zeros(LEVELS, np.float32)
    for row in range(rows):
        if target[row] == ignore_index:
            continue
        partial[0] += values[row]
        for level in range(LEVELS - 1):
            if row & (((1 << power) - 1) << (level * power)):
                break
            partial[level + 1] += partial[level]
            partial[level] = NONE
    total = NONE
    for level in range(LEVELS):
        total += partial[level]
    carray(as_floats(total_at), 1)[0] = total / np.float32(divisor)


@jit_sums
def _exponentials(grad: Any, x: Any, threshold: Any, lse: Any) -> Any:
    """Write the probabilities of the kept classes of a row, and return their sum."""
    total = NONE
    for j in range(x.size):
        e = choose(x[j] < threshold, NONE, exp_rounded(x[j] - lse))
        grad[j] = e
        total += e
    return total


@jit
def _backward_rows(
    grad_at: int, x_at: int, grad_loss_at: int, each: bool, target_at: int, numbers_at: int, rows: int, classes: int,
    first: int, low: int, high: int,
) -> None:  # fmt: skip
    x, grad = carray(as_floats(x_at), (high, classes)), carray(as_floats(grad_at), (high, classes))
    target, numbers = carray(as_labels(target_at), rows), carray(as_floats(numbers_at), (NUMBERS, rows))
    grad_loss = carray(as_floats(grad_loss_at), rows if each else 1)
    for row in range(low, high):
        place, line = first + row, grad[row]
        if numbers[KEPT, place] <= 1:
            line[:] = NONE
            continue
        factor = grad_loss[place if each else 0] * numbers[SHARE, place]
        # The sum is taken anew: that of a row whose logits are far from 0 is not in the digits of lse.
        scale = factor / _exponentials(line, x[row], numbers[THRESHOLD, place], numbers[LSE, place])
        for j in range(classes):
            line[j] *= scale
        line[target[place]] -= factor


@jit_sums_parallel
def _backward_spans(
    grad_at: int, x_at: int, grad_loss_at: int, each: bool, target_at: int, numbers_at: int, rows: int, classes: int,
    first: int, height: int, spans: int,
) -> None:  # fmt: skip
    for span in prange(spans):
        low, high = span * height // spans, (span + 1) * height // spans
        _backward_rows(grad_at, x_at, grad_loss_at, each, target_at, numbers_at, rows, classes, first, low, high)


def _blocks(logits: Tensor, *, whole: bool) -> Iterable[tuple[int, Tensor]]:
    """First row and logits as contiguous float32, block by block: all rows at once if no scratch is needed."""
    if whole:
        return ((0, logits.float().contiguous()),)
    step = max(1, cross_entropy_torch.BLOCK // logits.shape[1])
    firsts = range(0, logits.shape[0], step)
    return ((first, logits[first : first + step].float().contiguous()) for first in firsts)


def _threads(x: Tensor) -> int:
    return 1 if x.numel() <= SMALL else min(torch.get_num_threads(), x.shape[0])


def forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: float, ignore_index: int, reduction: str
) -> tuple[Tensor, Tensor]:
    """The loss, reduced, and the numbers of all rows."""
    rows, classes = logits.shape
    target = target.contiguous()
    target_at = target.data_ptr()
    counted = _count(target_at, rows, classes, ignore_index)
    if counted < 0:
        cross_entropy_torch.check_labels(target, classes, ignore_index)
    numbers = torch.empty(NUMBERS, rows, dtype=torch.float32)
    numbers_at = numbers.data_ptr()
    total = float(counted or 1) if reduction == "mean" else 1.0
    share = 1.0 / total
    if weight is not None:
        numbers[SHARE] = weight.to(torch.float32)[target.where(target != ignore_index, 0)]
        share = 0.0
    log_p = None
    for first, x in _blocks(logits, whole=logits.numel() <= cross_entropy_torch.BLOCK):
        log_p = torch.log_softmax(x, -1) if log_p is None else torch.log_softmax(x, -1, out=log_p[: len(x)])
        places = x.data_ptr(), log_p.data_ptr(), target_at, numbers_at, rows, classes, first
        threads = _threads(x)
        if threads == 1:
            _forward_rows(*places, 0, x.shape[0], delta, ignore_index, share)
        else:
            _forward_spans(*places, x.shape[0], threads, delta, ignore_index, share)
    if reduction == "none":
        return numbers[LOSS].clone(), numbers
    loss = torch.empty((), dtype=torch.float32)
    if reduction == "mean" and weight is not None:
        _sum(numbers_at + 4 * SHARE * rows, target_at, rows, ignore_index, loss.data_ptr(), 1.0)
        total = loss.item() or 1.0
        numbers[SHARE] /= total
    _sum(numbers_at + 4 * LOSS * rows, target_at, rows, ignore_index, loss.data_ptr(), total)
    return loss, numbers


def backward(grad_loss: Tensor, logits: Tensor, target: Tensor, numbers: Tensor) -> Tensor:
    """Gradient of the logits, by that of the loss, which is one number or one for each row."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    grad_loss, target, narrow = grad_loss.contiguous(), target.contiguous(), logits.dtype != torch.float32
    rows, classes = logits.shape
    others = grad_loss.data_ptr(), grad_loss.ndim == 1, target.data_ptr(), numbers.data_ptr(), rows, classes
    for first, x in _blocks(logits, whole=not narrow and logits.is_contiguous()):
        part = torch.empty_like(x) if narrow else grad[first : first + len(x)] if first else grad
        threads = _threads(x)
        if threads == 1:
            _backward_rows(part.data_ptr(), x.data_ptr(), *others, first, 0, x.shape[0])
        else:
            _backward_spans(part.data_ptr(), x.data_ptr(), *others, first, x.shape[0], threads)
        if narrow:
            grad[first : first + len(x)] = part
    return grad
