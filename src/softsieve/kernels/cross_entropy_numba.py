"""AS cross-entropy over the rows of a logits matrix in compiled loops, for fp32 and narrower on a CPU.

Forward is torch's log-softmax, whose bits are those of `F.cross_entropy`, and one pass over what it leaves in the
cache; only rows that are sparse and not solved are read once more. Backward reads a row and writes its gradient. What
is known of the rows is one tensor, (7, rows): threshold, kept, lse, norm, share and margin, as `kernels.cross_entropy`
has them, and the loss; share and loss are those before a mean is divided by ``parts``, as in `cross_entropy_triton`.

Tensors are handed over as addresses: for a small batch, making arrays of them would take longer than the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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

INF, NAN, NONE, ONE = np.float32(np.inf), np.float32(np.nan), np.float32(0), np.float32(1)
LOWEST = np.finfo(np.float32).min  # of no rival; a loop that begins with -inf does not vectorise
DIGITS = 8 * 2.0**-23  # by how much rounding may move a margin or, for a logit of 1, a threshold
FAR = 64  # where the loss is larger than this, a target's logit and loss say too little of the others' sum
LEVELS = 8
SMALL = 1 << 18  # logits up to which one thread does the work
NUMBER = torch.empty((), dtype=torch.float32, device="cpu")  # one to make others from takes less than a dtype
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
    x_at: int, log_p_at: int, target_at: int, weight_at: int, numbers_at: int, stride: int, rows: int, classes: int,
    delta: float, ignore_index: int,
) -> None:  # fmt: skip
    """Fill in the numbers of so many rows; those of the next number are ``stride`` further on."""
    x, log_p = carray(as_floats(x_at), (rows, classes)), carray(as_floats(log_p_at), (rows, classes))
    target, weight = carray(as_labels(target_at), rows), carray(as_floats(weight_at), classes)
    numbers = carray(as_floats(numbers_at), (NUMBERS, stride))
    for row in range(rows):
        label = target[row]
        if label == ignore_index or not 0 <= label < classes:  # which `_reduce` finds
            for number in range(NUMBERS):
                numbers[number, row] = NONE
            continue
        threshold, kept, lse, norm, margin, loss = _forward_row(x[row], log_p[row], label, delta)
        share = weight[label] if weight_at else ONE
        numbers[THRESHOLD, row], numbers[KEPT, row], numbers[LSE, row] = threshold, kept, lse
        numbers[NORM, row], numbers[SHARE, row], numbers[MARGIN, row] = norm, share, margin
        numbers[LOSS, row] = loss * share


@jit_sums_parallel
def _forward_spans(
    x_at: int, log_p_at: int, target_at: int, weight_at: int, numbers_at: int, stride: int, rows: int, classes: int,
    delta: float, ignore_index: int, spans: int,
) -> None:  # fmt: skip
    for span in prange(spans):
        low, high = np.int64(span) * rows // spans, (np.int64(span) + 1) * rows // spans
        skipped = 4 * low * classes
        _forward_rows(
            x_at + skipped, log_p_at + skipped, target_at + 8 * low, weight_at, numbers_at + 4 * low, stride,
            high - low, classes, delta, ignore_index,
        )  # fmt: skip


@jit
def _sum(values: Any, target: Any, ignore_index: int) -> Any:
    """Return the sum of the rows that count: the cascade of partial sums of `F.nll_loss`, its bits."""
    bits = 0
    while (1 << bits) < values.size:
        bits += 1
    power = max(4, bits // LEVELS)
    partial = np.zeros(LEVELS, np.float32)
    for row in range(values.size):
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
    return total


@jit
def _reduce(
    target_at: int, numbers_at: int, loss_at: int, rows: int, classes: int, ignore_index: int, mean: int, weighted: int
) -> float:
    """Write the sum of the losses over what it is divided by, which is returned, or 0 if a label is out of range."""
    target, numbers = carray(as_labels(target_at), rows), carray(as_floats(numbers_at), (NUMBERS, rows))
    counted = 0
    for label in target:
        if label != ignore_index:
            counted += 1
            if not 0 <= label < classes:
                return 0.0
    parts = 1.0
    if mean:
        parts = np.float64(_sum(numbers[SHARE], target, ignore_index)) if weighted else np.float64(counted)
        parts = 1.0 if parts == 0 else parts
    carray(as_floats(loss_at), 1)[0] = _sum(numbers[LOSS], target, ignore_index) / np.float32(parts)
    return parts


@jit
def _forward_alone(
    x_at: int, log_p_at: int, target_at: int, weight_at: int, numbers_at: int, loss_at: int, rows: int, classes: int,
    delta: float, ignore_index: int, mean: int,
) -> float:  # fmt: skip
    """Do all rows in one call, where more of them would be a good part of the time."""
    _forward_rows(x_at, log_p_at, target_at, weight_at, numbers_at, rows, rows, classes, delta, ignore_index)
    return _reduce(target_at, numbers_at, loss_at, rows, classes, ignore_index, mean, weight_at)


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
    grad_at: int, x_at: int, grad_loss_at: int, each: int, target_at: int, numbers_at: int, stride: int, rows: int,
    classes: int, parts: float,
) -> None:  # fmt: skip
    x, grad = carray(as_floats(x_at), (rows, classes)), carray(as_floats(grad_at), (rows, classes))
    target, numbers = carray(as_labels(target_at), rows), carray(as_floats(numbers_at), (NUMBERS, stride))
    grad_loss = carray(as_floats(grad_loss_at), rows if each else 1)
    for row in range(rows):
        line = grad[row]
        if numbers[KEPT, row] <= 1:
            line[:] = NONE
            continue
        factor = grad_loss[row if each else 0] * (numbers[SHARE, row] / np.float32(parts))
        # The sum is taken anew: that of a row whose logits are far from 0 is not in the digits of lse.
        scale = factor / _exponentials(line, x[row], numbers[THRESHOLD, row], numbers[LSE, row])
        for j in range(classes):
            line[j] *= scale
        line[target[row]] -= factor


@jit_sums_parallel
def _backward_spans(
    grad_at: int, x_at: int, grad_loss_at: int, each: int, target_at: int, numbers_at: int, stride: int, rows: int,
    classes: int, parts: float, spans: int,
) -> None:  # fmt: skip
    for span in prange(spans):
        low, high = np.int64(span) * rows // spans, (np.int64(span) + 1) * rows // spans
        skipped = 4 * low * classes
        _backward_rows(
            grad_at + skipped, x_at + skipped, grad_loss_at + (4 * low if each else 0), each, target_at + 8 * low,
            numbers_at + 4 * low, stride, high - low, classes, parts,
        )  # fmt: skip


def _blocks(logits: Tensor, *, whole: bool) -> Iterator[tuple[int, int, Tensor]]:
    """First row, number of rows and logits as contiguous float32, block by block: all rows if no scratch is needed."""
    rows, classes = logits.shape
    step = rows if whole else max(1, cross_entropy_torch.BLOCK // classes)
    for first in range(0, rows, step):
        x = logits[first : first + step].float().contiguous()
        yield first, len(x), x


def _share_out(alone: Any, spans: Any, x: Tensor, *args: Any) -> None:
    """Have a block done by one thread, or by more."""
    threads = 1 if x.numel() <= SMALL else min(torch.get_num_threads(), len(x))
    if threads == 1:
        alone(*args)
    else:
        spans(*args, threads)


def forward_numbers(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: float, ignore_index: int, reduction: str
) -> tuple[Tensor, Tensor, tuple[float]]:
    """The loss, reduced, the numbers of all rows, and what the losses were divided by."""
    (rows, classes), target = logits.shape, target.contiguous()
    weight = None if weight is None else weight.to(torch.float32).contiguous()
    weight_at = 0 if weight is None else weight.data_ptr()
    numbers, loss, mean = NUMBER.new_empty(NUMBERS, rows), torch.empty_like(NUMBER), int(reduction == "mean")
    target_at, numbers_at, loss_at = target.data_ptr(), numbers.data_ptr(), loss.data_ptr()
    if rows * classes <= SMALL:
        x = logits if logits.dtype is torch.float32 and logits.is_contiguous() else logits.float().contiguous()
        log_p = torch.log_softmax(x, -1)
        parts = _forward_alone(
            x.data_ptr(), log_p.data_ptr(), target_at, weight_at, numbers_at, loss_at, rows, classes, delta,
            ignore_index, mean,
        )  # fmt: skip
    else:
        log_p = None
        for first, height, x in _blocks(logits, whole=rows * classes <= cross_entropy_torch.BLOCK):
            log_p = torch.log_softmax(x, -1) if log_p is None else torch.log_softmax(x, -1, out=log_p[:height])
            _share_out(
                _forward_rows, _forward_spans, x, x.data_ptr(), log_p.data_ptr(), target_at + 8 * first, weight_at,
                numbers_at + 4 * first, rows, height, classes, delta, ignore_index,
            )  # fmt: skip
        parts = _reduce(target_at, numbers_at, loss_at, rows, classes, ignore_index, mean, weight_at)
    if not parts:
        cross_entropy_torch.check_labels(target, classes, ignore_index)
    return numbers[LOSS].clone() if reduction == "none" else loss, numbers, (parts,)


def backward_numbers(
    grad_loss: Tensor, logits: Tensor, target: Tensor, numbers: Tensor, work: tuple[float], grad: Tensor
) -> Tensor:
    """Write the gradient of the logits, times that of the loss, which is one number or one for each row."""
    (rows, classes), grad_loss, target = logits.shape, grad_loss.contiguous(), target.contiguous()
    each, (parts,) = grad_loss.ndim, work
    grad_loss_at, target_at, numbers_at = grad_loss.data_ptr(), target.data_ptr(), numbers.data_ptr()
    ready = logits.dtype is torch.float32 and logits.is_contiguous()
    if ready and rows * classes <= SMALL:
        _backward_rows(
            grad.data_ptr(), logits.data_ptr(), grad_loss_at, each, target_at, numbers_at, rows, rows, classes, parts
        )
        return grad
    narrow = grad.dtype != torch.float32
    for first, height, x in _blocks(logits, whole=ready):
        part = torch.empty_like(x) if narrow else grad[first : first + height]
        _share_out(
            _backward_rows, _backward_spans, x, part.data_ptr(), x.data_ptr(), grad_loss_at + 4 * first * each, each,
            target_at + 8 * first, numbers_at + 4 * first, rows, height, classes, parts,
        )  # fmt: skip
        if narrow:
            grad[first : first + height] = part
    return grad
