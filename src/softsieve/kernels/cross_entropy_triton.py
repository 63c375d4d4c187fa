"""AS cross-entropy over the rows of a logits matrix in Triton: one launch forward, one backward.

For logits of fp32 and narrower. What is known of the rows is one tensor, (8, rows): threshold, kept, lse, norm, share
and margin, as `kernels.cross_entropy` has them, the loss, and whether no class has a larger logit than the label; share
and loss are those before a mean is divided by ``parts``. Logits may be the products of a linear layer, whose bias is
added and whose cap is applied here. Runs under Triton's interpreter too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = tl.constexpr(1024)  # rows at a time in the reduction
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
NUMBERS = 8  # of a row
KEPT, RIGHT = 1, 7  # their places among them
_NUMBERS = tl.constexpr(NUMBERS)


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0 to full precision: the rounding error of 1 + x cancels."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _logit(x, bias, at, inside, cap, BIASED: tl.constexpr, CAPPED: tl.constexpr):
    """Turn products into logits of the classes ``at``: add the bias, cap them, and write -inf where none is inside."""
    x = x.to(tl.float32)
    if BIASED:
        x += tl.load(bias + at, mask=inside).to(tl.float32)
    if CAPPED:
        u = x / cap
        v = u * u
        small = x * (1.0 - v * (1.0 / 3 - v * (2.0 / 15 - v * (17.0 / 315))))
        x = tl.where(v < 0.02, small, cap * (2.0 / (1.0 + tl.exp(-2.0 * u)) - 1.0))  # cap * tanh(x / cap)
    if inside is not None:
        x = tl.where(inside, x, -float("inf"))
    return x


@triton.jit
def _load(line, bias, start, use, classes, cap, BIASED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Some logits of some rows, -inf where there are none or the row is of no use; and their classes. (rows, BLOCK)"""
    at = start + tl.arange(0, BLOCK)[None, :]
    inside = use[:, None] & (at < classes)
    at = tl.broadcast_to(at, inside.shape)
    x = tl.load(line[:, None] + at, mask=inside, other=0.0)
    return _logit(x, bias, at, inside, cap, BIASED, CAPPED), at


@triton.jit
def _take_in(x, at, label, own, top, rival, total):
    """The largest logit, the largest but the label's, and the sum of exponentials over e^top, with these logits."""
    rival = tl.maximum(rival, tl.max(tl.where(at == label[:, None], -float("inf"), x), 1))
    higher = tl.maximum(own, rival)
    base = tl.where(higher == -float("inf"), 0.0, higher)  # from -inf nothing can be subtracted
    return higher, rival, total * tl.exp(top - base) + tl.sum(tl.exp(x - base[:, None]), 1)


@triton.jit
def _count_kept(x, at, label, own, cut, use, classes):
    """How many of these logits reach the threshold, and the sum of their exponentials over the label's, without it."""
    keep = (x >= cut[:, None]) & (at < classes) & use[:, None]
    rivals = keep & (at != label[:, None])
    return tl.sum(keep.to(tl.int32), 1), tl.sum(tl.where(rivals, tl.exp(x - own[:, None]), 0.0), 1)


@triton.jit
def _finish(sums, programs, loss, parts, valid, MEAN: tl.constexpr, NONE: tl.constexpr):
    """Read what all programs added up, in a fixed order; write the loss, its divisor, and whether labels are valid."""
    losses = tl.zeros((ROWS,), tl.float32)
    shares = tl.zeros((ROWS,), tl.float32)
    wrong = tl.zeros((ROWS,), tl.float32)
    for start in range(0, programs, ROWS):
        at = start + tl.arange(0, ROWS)
        losses += tl.load(sums + at, mask=at < programs, other=0.0, cache_modifier=".cg")
        shares += tl.load(sums + programs + at, mask=at < programs, other=0.0, cache_modifier=".cg")
        wrong += tl.load(sums + 2 * programs + at, mask=at < programs, other=0.0, cache_modifier=".cg")
    total = tl.sum(losses, 0)
    all_parts = tl.full((), 1.0, tl.float32)
    if MEAN:
        all_parts = tl.sum(shares, 0)
        all_parts = tl.where(all_parts == 0.0, 1.0, all_parts)
    if not NONE:
        tl.store(loss, total / all_parts)
    tl.store(parts, all_parts)
    tl.store(valid, tl.sum(wrong, 0) == 0.0)


@triton.jit
def _forward(
    logits, bias, target, delta, weight, row_weight, numbers, loss, parts, valid, sums, done,
    stride, rows, span, classes, margin, delta_stride, ignore_index, cap,
    WEIGHTED: tl.constexpr, ROW_WEIGHTED: tl.constexpr, MARGINS: tl.constexpr, BIASED: tl.constexpr,
    CAPPED: tl.constexpr, MEAN: tl.constexpr, NONE: tl.constexpr, WHOLE: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read some rows of logits once, or twice if they are longer than a block and sparse; write what is known of them.

    The program that is done last adds up the losses, so that their order does not depend on chance. A label out of
    range is not refused here: such a row is written with -1 kept classes, and ``valid`` is false.
    """
    program = tl.program_id(0)
    row = program.to(tl.int64) * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)
    inside = row < rows
    t = tl.load(target + row, mask=inside, other=0)
    counted = inside & (t != ignore_index)
    use = counted & (t >= 0) & (t < classes)
    label = tl.where(use, t, 0).to(tl.int32)
    line = logits + row * stride
    o = _logit(tl.load(line + label, mask=use, other=0.0), bias, label, use, cap, BIASED, CAPPED)
    o = tl.where(use, o, 0.0)
    rival = tl.full((ROWS_AT_ONCE,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS_AT_ONCE,), tl.float32)
    top = o
    if WHOLE:
        x, at = _load(line, bias, 0, use, classes, cap, BIASED, CAPPED, BLOCK)
        top, rival, total = _take_in(x, at, label, o, top, rival, total)
    else:
        for start in range(0, classes, BLOCK):
            x, at = _load(line, bias, start, use, classes, cap, BIASED, CAPPED, BLOCK)
            top, rival, total = _take_in(x, at, label, o, top, rival, total)
    log_total = tl.log(total)
    lse = top + log_total
    log_pt = (o - top) - log_total
    nll = -log_pt
    own_margin = tl.exp(log_pt) - tl.exp((rival - top) - log_total)
    if MARGINS:
        margin = tl.load(delta + row * delta_stride, mask=inside, other=0.0).to(tl.float32)
    ratio = -margin * tl.minimum(tl.exp(nll), LARGEST)  # -delta / p_t, at most -1 in a dense row
    sparse = use & (log_pt > -float("inf")) & (ratio > -1.0)
    cut = tl.where(sparse, o + tl.log(1.0 + tl.maximum(ratio, -1.0)), -float("inf")).to(tl.float32)
    sparse = sparse & (cut > -float("inf"))
    count = tl.zeros((ROWS_AT_ONCE,), tl.int32)
    odds = tl.zeros((ROWS_AT_ONCE,), tl.float32)
    if WHOLE:
        count, odds = _count_kept(x, at, label, o, cut, use, classes)
    elif tl.sum(sparse.to(tl.int32), 0) > 0:
        for start in range(0, classes, BLOCK):
            x, at = _load(line, bias, start, use, classes, cap, BIASED, CAPPED, BLOCK)
            many, more = _count_kept(x, at, label, o, cut, use, classes)
            count += many
            odds += more
    row_loss = tl.where(sparse, tl.minimum(_log1p(odds), nll), nll)
    norm = tl.where(sparse, row_loss - nll, 0.0) + ((top - lse) + log_total)  # with what lse lost in rounding
    share = tl.where(use, 1.0, 0.0)
    if WEIGHTED:
        share *= tl.load(weight + label, mask=use, other=0.0).to(tl.float32)
    if ROW_WEIGHTED:
        share *= tl.load(row_weight + row, mask=use, other=0.0).to(tl.float32)
    row_loss = tl.where(use, row_loss * share, 0.0)
    kept = tl.where(use, tl.where(sparse, count, classes), tl.where(counted, -1, 0))
    numbers += row
    tl.store(numbers, tl.where(use, cut, 0.0), mask=inside)
    tl.store(numbers + span, kept.to(tl.float32), mask=inside)
    tl.store(numbers + 2 * span, tl.where(use, lse, 0.0), mask=inside)
    tl.store(numbers + 3 * span, tl.where(use, norm, 0.0), mask=inside)
    tl.store(numbers + 4 * span, share, mask=inside)
    tl.store(numbers + 5 * span, tl.where(use, own_margin, 0.0), mask=inside)
    tl.store(numbers + 6 * span, row_loss, mask=inside)
    tl.store(numbers + 7 * span, tl.where(use & (o >= rival), 1.0, 0.0), mask=inside)
    if NONE:
        tl.store(loss + row, row_loss, mask=inside)
    programs = tl.num_programs(0)
    tl.store(sums + program, tl.sum(row_loss, 0))
    tl.store(sums + programs + program, tl.sum(share, 0))
    tl.store(sums + 2 * programs + program, tl.sum((kept < 0).to(tl.float32), 0))
    tl.debug_barrier()
    if tl.atomic_add(done, 1, sem="acq_rel") == programs - 1:
        tl.debug_barrier()
        _finish(sums, programs, loss, parts, valid, MEAN, NONE)


@triton.jit
def _reduce(loss, kept, share, result, valid, rows, MEAN: tl.constexpr):  # fmt: skip
    """Read all rows' losses, shares and counts in one program; write their sum or mean, and if all labels are valid.

    The order of the sum is fixed. For a mean, the shares are divided in place by their sum.
    """
    losses = tl.zeros((ROWS,), tl.float32)
    shares = tl.zeros((ROWS,), tl.float32)
    fewest = tl.zeros((ROWS,), tl.int64)
    for start in range(0, rows, ROWS):
        at = start + tl.arange(0, ROWS)
        losses += tl.load(loss + at, mask=at < rows, other=0.0)
        shares += tl.load(share + at, mask=at < rows, other=0.0)
        fewest = tl.minimum(fewest, tl.load(kept + at, mask=at < rows, other=0))
    total = tl.sum(losses, 0)
    if MEAN:
        parts = tl.sum(shares, 0)
        parts = tl.where(parts == 0.0, 1.0, parts)
        total /= parts
        for start in range(0, rows, ROWS):
            at = start + tl.arange(0, ROWS)
            part = tl.load(share + at, mask=at < rows, other=0.0)
            tl.store(share + at, part / parts, mask=at < rows)
    tl.store(result, total)
    tl.store(valid, tl.min(fewest, 0) >= 0)


@triton.jit
def _backward(
    grad, grad_loss, logits, bias, target, numbers, parts, grad_stride, stride, rows, span, classes, cap,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, ROWS_AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read a block of some rows' logits and these rows' numbers; write the gradient, which is 0 in a solved row.

    It may be written in the logits' place.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)
    inside = row < rows
    numbers += row
    live = tl.load(numbers + span, mask=inside, other=0.0) > 1.0
    factor = tl.load(grad_loss + row * grad_stride, mask=live, other=0.0).to(tl.float32)
    factor *= tl.load(numbers + 4 * span, mask=live, other=0.0) / tl.load(parts)
    cut = tl.load(numbers, mask=live, other=0.0)
    lse = tl.load(numbers + 2 * span, mask=live, other=0.0)
    norm = tl.load(numbers + 3 * span, mask=live, other=0.0)
    label = tl.load(target + row, mask=live, other=-1).to(tl.int32)
    start = tl.program_id(1) * BLOCK
    x, at = _load(logits + row * stride, bias, start, live, classes, cap, BIASED, CAPPED, BLOCK)
    own = at == label[:, None]  # kept, also if these products round its logit otherwise than forward's did
    q = tl.exp((x - lse[:, None]) - norm[:, None])
    q = tl.where((x < cut[:, None]) & (own == 0), 0.0, q)
    q = (q - tl.where(own, 1.0, 0.0)) * factor[:, None]
    if CAPPED:
        q *= 1.0 - (x / cap) * (x / cap)
    q = tl.where(live[:, None], q, 0.0)
    tl.store(grad + row[:, None] * classes + at, q.to(grad.dtype.element_ty), mask=inside[:, None] & (at < classes))


@triton.jit
def _scale(values, factor, count, BLOCK: tl.constexpr):
    """Multiply numbers by a factor; nothing is read where it is 1."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            at = values + start + tl.arange(0, BLOCK)
            x = tl.load(at, mask=start + tl.arange(0, BLOCK) < count, other=0.0).to(tl.float32)
            tl.store(at, (x * by).to(values.dtype.element_ty), mask=start + tl.arange(0, BLOCK) < count)


class Rows(NamedTuple):
    """What forward leaves of the rows."""

    loss: Tensor  # (), or (rows,) where it is not reduced
    numbers: Tensor  # (8, rows)
    parts: Tensor  # (): what the losses were divided by
    valid: Tensor  # bool (): whether all labels are in range


@lru_cache(maxsize=1024)
def settings(classes: int) -> dict[str, int]:
    """How many classes a program takes at a time, and with how many warps."""
    block = min(triton.next_power_of_2(classes), 4096)
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 256))}


@lru_cache(maxsize=1024)  # for `next_power_of_2` takes a tenth of the time of a small call
def shape_of(rows: int, classes: int) -> dict[str, int]:
    """How many rows and classes a program takes at a time, and with how many warps."""
    block = min(triton.next_power_of_2(classes), 8192 if rows < 512 else 4096)
    at_once = max(1, min(2048 // block, triton.next_power_of_2(rows), 64))
    return {"ROWS_AT_ONCE": at_once, "BLOCK": block, "num_warps": max(1, min(16, at_once * block // 512))}


def empty_results(rows: int, programs: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Where `_finish` writes the loss, of so many rows or of all, and the divisor; its inputs; valid; and a 0."""
    loss = torch.empty((rows,) if rows else (), dtype=torch.float32, device=device)
    parts = torch.empty((), dtype=torch.float32, device=device)
    sums = torch.empty(3 * programs, dtype=torch.float32, device=device)
    valid = torch.empty((), dtype=torch.bool, device=device)
    return loss, parts, sums, valid, torch.zeros(1, dtype=torch.int32, device=device)


def forward_numbers(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: float | Tensor, ignore_index: int, reduction: str,
    *, bias: Tensor | None = None, row_weight: Tensor | None = None, cap: float = 0.0, numbers: Tensor | None = None,
) -> Rows:  # fmt: skip
    """Loss and what is known of the rows; ``numbers`` may be given, as columns of a larger tensor of them.

    Rows of logits must be contiguous, and so must be all other tensors.
    """
    rows, classes = logits.shape
    shape = shape_of(rows, classes)
    programs = -(-rows // shape["ROWS_AT_ONCE"])
    device = logits.device
    if numbers is None:
        numbers = torch.empty((NUMBERS, rows), dtype=torch.float32, device=device)
    loss, parts, sums, valid, done = empty_results(rows if reduction == "none" else 0, programs, device)
    margins, margin, delta_stride = target, 0.0, 0
    if isinstance(delta, Tensor):
        margins, delta_stride = delta, delta.ndim
    else:
        margin = delta
    _forward[(programs,)](
        logits, logits if bias is None else bias, target, margins,
        logits if weight is None else weight, logits if row_weight is None else row_weight,
        numbers, loss, parts, valid, sums, done,
        logits.stride(0), rows, numbers.stride(0), classes, margin, delta_stride, ignore_index, cap,
        WEIGHTED=weight is not None, ROW_WEIGHTED=row_weight is not None, MARGINS=margins is not target,
        BIASED=bias is not None, CAPPED=cap > 0, MEAN=reduction == "mean", NONE=reduction == "none",
        WHOLE=classes <= shape["BLOCK"], **shape,
    )  # fmt: skip
    return Rows(loss, numbers, parts, valid)


def backward_numbers(
    grad_loss: Tensor, logits: Tensor, target: Tensor, numbers: Tensor, parts: Tensor, grad: Tensor,
    *, bias: Tensor | None = None, cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Write the gradient, times that of the loss, (), or of each row's; it may have the place of the logits."""
    rows, classes = logits.shape
    shape = shape_of(rows, classes)
    _backward[(-(-rows // shape["ROWS_AT_ONCE"]), -(-classes // shape["BLOCK"]))](
        grad, grad_loss, logits, logits if bias is None else bias, target, numbers, parts,
        grad_loss.stride(0) if grad_loss.ndim else 0, logits.stride(0), rows, numbers.stride(0), classes, cap,
        BIASED=bias is not None, CAPPED=cap > 0, **shape,
    )  # fmt: skip
    return grad


def scale(values: Tensor, factor: Tensor) -> None:
    """Multiply numbers in place by a factor that is not read on the host."""
    count = values.numel()
    _scale[(min(1024, -(-count // 4096)),)](values, factor, count, BLOCK=4096, num_warps=8)


def forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: float, ignore_index: int, reduction: str
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Loss, threshold, kept, lse, norm, share and margin, and whether all labels are valid."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    weight = None if weight is None else weight.contiguous()
    loss, numbers, parts, valid = forward_numbers(logits, target.contiguous(), weight, delta, ignore_index, reduction)
    threshold, kept, lse, norm, share, margin, *_ = (part.clone() for part in numbers.unbind())
    return (loss, threshold, kept.long(), lse, norm, share / parts, margin), valid


def reduce_rows(loss: Tensor, kept: Tensor, share: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    """The loss, and whether all labels are valid; for a mean the shares are divided in place."""
    result, valid = loss.new_empty(()), loss.new_empty((), dtype=torch.bool)
    _reduce[(1,)](loss, kept, share, result, valid, len(loss), MEAN=reduction == "mean")
    return loss if reduction == "none" else result, valid


def backward(
    grad_rows: Tensor, logits: Tensor, target: Tensor, threshold: Tensor, kept: Tensor, lse: Tensor, norm: Tensor
) -> Tensor:
    """Gradient of the logits."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    numbers = torch.stack((threshold, kept.float(), lse, norm, grad_rows.float()))
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    one = torch.ones((), device=logits.device)
    return backward_numbers(one, logits, target.contiguous(), numbers, one, grad)
