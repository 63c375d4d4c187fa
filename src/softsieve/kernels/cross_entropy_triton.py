"""AS cross-entropy over the rows of a logits matrix in Triton: one launch forward, one backward.

For logits of fp32 and narrower. What is known of the rows is one tensor, (8, rows): threshold, kept, lse, norm, share
and margin, as `kernels.cross_entropy` has them, the loss, and whether no class has a larger logit than the label; share
and loss are those before a mean is divided by ``parts``. Logits may be the products of a linear layer, whose bias is
added and whose cap is applied here. Runs under Triton's interpreter too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from softsieve.kernels.launches import Launches
from softsieve.kernels.linear_types import NUMBERS

ROWS = tl.constexpr(1024)  # rows at a time in the reduction
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
KEPT = 1  # its place among the numbers of a row
PARTS, VALID = 0, 1  # places in what `forward_numbers` leaves
WHOLE = 4096  # classes of a row that a program can hold
MANY = 64  # rows at a time, at most
ALONE = 8192  # logits that one program can hold, of rows and classes rounded up to powers of 2
# Of longer rows: rows, classes at a time and warps of a program, and the same where there are at most so FEW rows.
LONG, LONG_FEW, FEW = (1, 2048, 8), (1, 4096, 16), 264
# What `_finish` reads and writes: what losses are divided by, whether labels are valid, how many programs are done, and
# the sums of all programs.
_PARTS, _VALID, _DONE, _SUMS = (tl.constexpr(place) for place in range(4))


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
def _load(
    line, bias, start, use, classes, width, cap, BIASED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Some logits of some rows, -inf where there are none or the row is of no use; and their classes. (rows, BLOCK)

    As many as ``width`` may be read of a row: threads that read many at once read all or none.
    """
    at = start + tl.arange(0, BLOCK)[None, :]
    inside = use[:, None] & (at < classes)
    at = tl.broadcast_to(at, inside.shape)
    x = tl.load(line[:, None] + at, mask=use[:, None] & (at < width), other=0.0)
    return _logit(x, bias, at, inside, cap, BIASED, CAPPED), at


@triton.jit
def _take_in(x, y, z, u, top, total):
    """The largest logits of lanes, and their sums of exponentials over e^top, with four more each. (rows, BLOCK)

    Lanes are added up when all are read: until then, threads need not wait for each other.
    """
    higher = tl.maximum(tl.maximum(top, tl.maximum(x, y)), tl.maximum(z, u))
    base = tl.where(higher == -float("inf"), 0.0, higher)  # from -inf nothing can be subtracted
    more = (tl.exp(x - base) + tl.exp(y - base)) + (tl.exp(z - base) + tl.exp(u - base))
    return higher, total * tl.exp(top - base) + more


@triton.jit
def _others(x, at, label):
    """Without the label's logit."""
    return tl.where(at == label[:, None], -float("inf"), x)


@triton.jit
def _sum_lanes(own, lane_top, lane_total):
    """The largest logit, the largest but the label's, and the sum of exponentials over e^top, of all lanes and it."""
    rival = tl.max(lane_top, 1)
    top = tl.maximum(own, rival)
    base = tl.where(top == -float("inf"), 0.0, top)
    lanes = lane_total * tl.exp(tl.where(lane_top == -float("inf"), 0.0, lane_top) - base[:, None])
    return top, rival, tl.sum(tl.where(lane_total == 0.0, 0.0, lanes), 1) + tl.exp(own - base)


@triton.jit
def _kept(x, at, label, own, cut, use, classes):
    """Which of these logits reach the threshold, and their exponentials over the label's, 0 for the label itself."""
    keep = (x >= cut[:, None]) & (at < classes) & use[:, None]
    rivals = keep & (at != label[:, None])
    return keep.to(tl.int32), tl.where(rivals, tl.exp(x - own[:, None]), 0.0)


@triton.jit
def _write_results(work, loss, losses, shares, wrong, MEAN: tl.constexpr, NONE: tl.constexpr):
    """Write the loss, its divisor, and whether labels are valid."""
    parts = tl.full((), 1.0, tl.float32)
    if MEAN:
        parts = tl.where(shares == 0.0, 1.0, shares)
    if not NONE:
        tl.store(loss, losses / parts)
    tl.store(work + _PARTS, parts)
    tl.store(work + _VALID, (wrong == 0.0).to(tl.float32))


@triton.jit
def _finish(work, programs, loss, MEAN: tl.constexpr, NONE: tl.constexpr):
    """Read what all programs added up, in a fixed order, and write what they give together."""
    sums = work + _SUMS
    losses = tl.zeros((ROWS,), tl.float32)
    shares = tl.zeros((ROWS,), tl.float32)
    wrong = tl.zeros((ROWS,), tl.float32)
    for start in range(0, programs, ROWS):
        at = start + tl.arange(0, ROWS)
        losses += tl.load(sums + at, mask=at < programs, other=0.0, cache_modifier=".cg")
        shares += tl.load(sums + programs + at, mask=at < programs, other=0.0, cache_modifier=".cg")
        wrong += tl.load(sums + 2 * programs + at, mask=at < programs, other=0.0, cache_modifier=".cg")
    _write_results(work, loss, tl.sum(losses, 0), tl.sum(shares, 0), tl.sum(wrong, 0), MEAN, NONE)


@triton.jit
def _hand_in(
    work, loss, row_losses, shares, wrong, MEAN: tl.constexpr, NONE: tl.constexpr, ALONE: tl.constexpr
):  # fmt: skip
    """Write what this program adds up; the program that is the last to do so adds up those of all."""
    if ALONE:
        _write_results(work, loss, row_losses, shares, wrong, MEAN, NONE)
    else:
        program, programs = tl.program_id(0), tl.num_programs(0)
        sums = work + _SUMS + program
        tl.store(sums, row_losses)
        tl.store(sums + programs, shares)
        tl.store(sums + 2 * programs, wrong)
        tl.debug_barrier()
        if tl.atomic_add(work + _DONE, 1.0, sem="acq_rel") == programs - 1:
            tl.debug_barrier()
            _finish(work, programs, loss, MEAN, NONE)


@triton.jit
def _forward(
    logits, bias, target, delta, weight, row_weight, numbers, loss, work,
    stride, rows, span, classes, width, margin, delta_stride, ignore_index, cap,
    WEIGHTED: tl.constexpr, ROW_WEIGHTED: tl.constexpr, MARGINS: tl.constexpr, BIASED: tl.constexpr,
    CAPPED: tl.constexpr, MEAN: tl.constexpr, NONE: tl.constexpr, ALONE: tl.constexpr, WHOLE: tl.constexpr,
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
    if WHOLE:
        x, at = _load(line, bias, 0, use, classes, width, cap, BIASED, CAPPED, BLOCK)
        others = _others(x, at, label)
        rival = tl.max(others, 1)
        top = tl.maximum(o, rival)
        base = tl.where(top == -float("inf"), 0.0, top)
        total = tl.sum(tl.exp(others - base[:, None]), 1) + tl.exp(o - base)
    else:
        lane_top = tl.full((ROWS_AT_ONCE, BLOCK), -float("inf"), tl.float32)
        lane_total = tl.zeros((ROWS_AT_ONCE, BLOCK), tl.float32)
        for start in range(0, classes, 4 * BLOCK):
            x, at = _load(line, bias, start, use, classes, width, cap, BIASED, CAPPED, BLOCK)
            y, next_at = _load(line, bias, start + BLOCK, use, classes, width, cap, BIASED, CAPPED, BLOCK)
            z, third_at = _load(line, bias, start + 2 * BLOCK, use, classes, width, cap, BIASED, CAPPED, BLOCK)
            u, last_at = _load(line, bias, start + 3 * BLOCK, use, classes, width, cap, BIASED, CAPPED, BLOCK)
            lane_top, lane_total = _take_in(
                _others(x, at, label), _others(y, next_at, label), _others(z, third_at, label),
                _others(u, last_at, label), lane_top, lane_total,
            )  # fmt: skip
        top, rival, total = _sum_lanes(o, lane_top, lane_total)
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
    if WHOLE:
        keep, rivals = _kept(x, at, label, o, cut, use, classes)
        count, odds = tl.sum(keep, 1), tl.sum(rivals, 1)
    else:
        lane_count = tl.zeros((ROWS_AT_ONCE, BLOCK), tl.int32)
        lane_odds = tl.zeros((ROWS_AT_ONCE, BLOCK), tl.float32)
        if tl.sum(sparse.to(tl.int32), 0) > 0:
            for start in range(0, classes, BLOCK):
                x, at = _load(line, bias, start, use, classes, width, cap, BIASED, CAPPED, BLOCK)
                keep, rivals = _kept(x, at, label, o, cut, use, classes)
                lane_count += keep
                lane_odds += rivals
        count, odds = tl.sum(lane_count, 1), tl.sum(lane_odds, 1)
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
    _hand_in(work, loss, tl.sum(row_loss, 0), tl.sum(share, 0), tl.sum((kept < 0).to(tl.float32), 0), MEAN, NONE, ALONE)


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
    grad, grad_loss, logits, bias, target, numbers, work, each, grad_stride, stride, rows, span, classes, width, cap,
    GIVEN: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr, ROWS_AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read a block of some rows' logits and these rows' numbers; write the gradient, which is 0 in a solved row.

    It may be written in the logits' place.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)
    inside = row < rows
    numbers += row
    live = tl.load(numbers + span, mask=inside, other=0.0) > 1.0
    factor = tl.load(numbers + 4 * span, mask=live, other=0.0) / tl.load(work + _PARTS)
    if GIVEN:
        factor *= tl.load(grad_loss + row * each, mask=live, other=0.0).to(tl.float32)
    cut = tl.load(numbers, mask=live, other=0.0)
    lse = tl.load(numbers + 2 * span, mask=live, other=0.0)
    norm = tl.load(numbers + 3 * span, mask=live, other=0.0)
    label = tl.load(target + row, mask=live, other=-1).to(tl.int32)
    start = tl.program_id(1) * BLOCK
    x, at = _load(logits + row * stride, bias, start, live, classes, width, cap, BIASED, CAPPED, BLOCK)
    own = at == label[:, None]  # kept, also if these products round its logit otherwise than forward's did
    q = tl.exp((x - lse[:, None]) - norm[:, None])
    q = tl.where((x < cut[:, None]) & (own == 0), 0.0, q)
    q = (q - tl.where(own, 1.0, 0.0)) * factor[:, None]
    if CAPPED:
        q *= 1.0 - (x / cap) * (x / cap)
    q = tl.where(live[:, None] & (at < classes), q, 0.0)
    tl.store(grad + row[:, None] * grad_stride + at, q.to(grad.dtype.element_ty), mask=inside[:, None] & (at < width))


@triton.jit
def _multiply(values, by, count, BLOCK: tl.constexpr):
    """Multiply numbers in place."""
    lane = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, count, tl.num_programs(0) * BLOCK):
        inside = start + lane < count
        x = tl.load(values + start + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(values + start + lane, (x * by).to(values.dtype.element_ty), mask=inside)


@triton.jit
def _scale(a, b, c, factor, count_a, count_b, count_c, BLOCK: tl.constexpr):
    """Multiply three tensors by a factor; nothing of them is read where it is 1."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        _multiply(a, by, count_a, BLOCK)
        _multiply(b, by, count_b, BLOCK)
        _multiply(c, by, count_c, BLOCK)


class Rows(NamedTuple):
    """What forward leaves of the rows."""

    loss: Tensor  # (), or (rows,) where it is not reduced
    numbers: Tensor  # (8, rows)
    work: Tensor  # begins with what the losses were divided by and with whether all labels are in range


@lru_cache(maxsize=1024)  # for `next_power_of_2` takes a tenth of the time of a small call
def settings(classes: int) -> dict[str, int]:
    """How many classes a program takes at a time, and with how many warps."""
    block = min(triton.next_power_of_2(classes), 4096)
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 256))}


@lru_cache(maxsize=1024)
def shapes(rows: int, classes: int) -> tuple[bool, tuple[int, int, int], tuple[int, int, int]]:
    """Whether a program has whole rows; rows, classes at a time and warps of one, forward and backward."""
    block = min(triton.next_power_of_2(classes), WHOLE)
    all_rows = triton.next_power_of_2(rows)
    at_once = max(1, min(2048 // block, all_rows, MANY))
    if all_rows <= MANY and all_rows * block <= ALONE:  # one program need not wait for others
        at_once = all_rows
    either = at_once, block, max(1, min(8, at_once * block // 512))
    if classes <= WHOLE:
        return True, either, either
    return False, LONG if rows > FEW else LONG_FEW, either


def empty_work(programs: int, device: torch.device) -> Tensor:
    """What `_finish` reads and writes, before a launch."""
    if programs == 1:
        return torch.empty(_SUMS.value, dtype=torch.float32, device=device)
    return torch.zeros(_SUMS.value + 3 * programs, dtype=torch.float32, device=device)


def forward_numbers(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: float | Tensor, ignore_index: int, reduction: str,
    *, bias: Tensor | None = None, row_weight: Tensor | None = None, cap: float = 0.0, numbers: Tensor | None = None,
    padding: int = 0,
) -> Rows:  # fmt: skip
    """Loss and what is known of the rows; ``numbers`` may be given, as columns of a larger tensor of them.

    The logits of a row must lie beside each other, and all other tensors must be contiguous. After each row there may
    be ``padding``, numbers that may be read and, in backward, written.
    """
    (rows, classes), device = logits.shape, logits.device
    whole, (at_once, block, warps), _ = shapes(rows, classes)
    programs = -(-rows // at_once)
    if numbers is None:
        numbers = torch.empty((NUMBERS, rows), dtype=torch.float32, device=device)
    work = empty_work(programs, device)
    loss = torch.empty((rows,) if reduction == "none" else (), dtype=torch.float32, device=device)
    margins, margin, delta_stride = target, 0.0, 0
    if isinstance(delta, Tensor):
        margins, delta_stride = delta, delta.ndim
    else:
        margin = delta
    others = bias, weight, row_weight, None if margins is target else margins
    dtypes = tuple(None if other is None else other.dtype for other in others)
    stride, span = logits.stride(0), numbers.stride(0)
    sizes = rows, classes, padding, stride, span, delta_stride, ignore_index
    _launch_forward(
        (device, logits.dtype, sizes, reduction, cap > 0, dtypes),
        (logits, target, numbers, *(other for other in others if other is not None)), (programs, 1, 1),
        logits, logits if bias is None else bias, target, margins, logits if weight is None else weight,
        logits if row_weight is None else row_weight, numbers, loss, work,
        stride, rows, span, classes, classes + padding, margin, delta_stride, ignore_index, cap,
        weight is not None, row_weight is not None, margins is not target, bias is not None, cap > 0,
        reduction == "mean", reduction == "none", programs == 1, whole, at_once, block, num_warps=warps,
    )  # fmt: skip
    return Rows(loss, numbers, work)


def backward_numbers(
    grad_loss: Tensor | None, logits: Tensor, target: Tensor, numbers: Tensor, work: Tensor, grad: Tensor,
    *, bias: Tensor | None = None, cap: float = 0.0, padding: int = 0,
) -> Tensor:  # fmt: skip
    """Write the gradient, times that of the loss, (), or of each row's, if any; it may have the place of the logits."""
    rows, classes = logits.shape
    _, _, (at_once, block, warps) = shapes(rows, classes)
    each = 0 if grad_loss is None or not grad_loss.ndim else grad_loss.stride(0)
    strides = grad.stride(0), logits.stride(0), numbers.stride(0)
    dtypes = logits.dtype, None if grad_loss is None else grad_loss.dtype, None if bias is None else bias.dtype
    factor = work if grad_loss is None else grad_loss
    _launch_backward(
        (logits.device, dtypes, rows, classes, padding, strides, each, cap > 0),
        (grad, factor, logits, target, numbers, work, logits if bias is None else bias),
        (-(-rows // at_once), -(-classes // block), 1),
        grad, factor, logits, logits if bias is None else bias, target, numbers, work,
        each, strides[0], strides[1], rows, strides[2], classes, classes + padding, cap,
        grad_loss is not None, bias is not None, cap > 0, at_once, block, num_warps=warps,
    )  # fmt: skip
    return grad


_launch_forward, _launch_backward, _launch_scale = Launches(_forward), Launches(_backward), Launches(_scale)


def scale(values: Sequence[Tensor | None], factor: Tensor) -> None:
    """Multiply up to three tensors in place by a factor that is not read on the host."""
    some = [value for value in values if value is not None]
    some += [some[0]] * (3 - len(some))
    present = sum(value is not None for value in values)
    counts = [value.numel() if number < present else 0 for number, value in enumerate(some)]
    programs = min(1024, -(-max(counts) // 4096))
    key = (factor.device, factor.dtype, tuple(value.dtype for value in some), tuple(counts))
    _launch_scale(key, (*some, factor), (programs, 1, 1), *some, factor, *counts, 4096, num_warps=8)


def forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: float, ignore_index: int, reduction: str
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Loss, threshold, kept, lse, norm, share and margin, and whether all labels are valid."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    weight = None if weight is None else weight.contiguous()
    loss, numbers, work = forward_numbers(logits, target.contiguous(), weight, delta, ignore_index, reduction)
    threshold, kept, lse, norm, share, margin, *_ = (part.clone() for part in numbers.unbind())
    return (loss, threshold, kept.long(), lse, norm, share / work[PARTS], margin), work[VALID]


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
    one = torch.ones(1, device=logits.device)
    return backward_numbers(one[0], logits, target.contiguous(), numbers, one, grad)
