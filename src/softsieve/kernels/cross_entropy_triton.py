"""AS cross-entropy over the rows of a logits matrix in Triton: two launches forward, one backward.

For logits of fp32 and narrower. `kernels.cross_entropy` says what goes in and out. Runs under Triton's interpreter too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = tl.constexpr(1024)  # rows at a time in the reduction
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0 to full precision: the rounding error of 1 + x cancels."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _forward(
    logits, target, weight, loss, threshold, kept, lse, norm, share, margin,
    stride, classes, delta, ignore_index,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read a row of logits once, or twice if it is sparse; write its weighted loss and its six constants.

    A label out of range is not refused here: such a row is written with -1 kept classes, which `_reduce` reports.
    """
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(target + row)
    logits += row * stride
    row_loss = tl.zeros((), tl.float32)
    cut = tl.zeros((), tl.float32)
    count = tl.zeros((), tl.int64)
    row_lse = tl.zeros((), tl.float32)
    row_norm = tl.zeros((), tl.float32)
    row_share = tl.zeros((), tl.float32)
    row_margin = tl.zeros((), tl.float32)
    if t != ignore_index:
        if (t < 0) | (t >= classes):
            count -= 1
        else:
            # log-sum-exp, with 0 in place of a maximum of -inf, from which nothing can be subtracted
            o = tl.load(logits + t).to(tl.float32)
            top = o
            rival = tl.full((), -float("inf"), tl.float32)  # the largest other logit
            total = tl.zeros((), tl.float32)
            for start in range(0, classes, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = tl.load(logits + at, mask=at < classes, other=-float("inf")).to(tl.float32)
                rival = tl.maximum(rival, tl.max(tl.where(at == t.to(tl.int32), -float("inf"), x), 0))
                higher = tl.maximum(o, rival)
                base = tl.where(higher == -float("inf"), 0.0, higher)
                total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), 0)
                top = higher
            log_total = tl.log(total)
            row_lse = top + log_total
            log_pt = (o - top) - log_total
            nll = -log_pt
            row_margin = tl.exp(log_pt) - tl.exp((rival - top) - log_total)
            ratio = -delta * tl.minimum(tl.exp(nll), LARGEST)  # -delta / p_t, at most -1 in a dense row
            cut = o + tl.log(1.0 + tl.maximum(ratio, -1.0))
            cut = tl.where((log_pt > -float("inf")) & (ratio > -1.0), cut, -float("inf")).to(tl.float32)
            if cut > -float("inf"):
                rivals = tl.zeros((), tl.float32)
                for start in range(0, classes, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    x = tl.load(logits + at, mask=at < classes, other=-float("inf")).to(tl.float32)
                    keep = (x >= cut) & (at < classes)
                    count += tl.sum(keep.to(tl.int64), 0)
                    rivals += tl.sum(tl.where(keep & (at != t), tl.exp(x - o), 0.0), 0)
                row_loss = tl.minimum(_log1p(rivals), nll)
                row_norm = row_loss - nll + ((top - row_lse) + log_total)
            else:
                count += classes
                row_loss = nll
                row_norm = (top - row_lse) + log_total  # what row_lse lost in rounding
            row_share += 1.0
            if WEIGHTED:
                row_share = tl.load(weight + t).to(tl.float32)
    tl.store(loss + row, row_loss * row_share)
    tl.store(threshold + row, cut)
    tl.store(kept + row, count)
    tl.store(lse + row, row_lse)
    tl.store(norm + row, row_norm)
    tl.store(share + row, row_share)
    tl.store(margin + row, row_margin)


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
    grad, grad_rows, logits, target, threshold, kept, lse, norm, stride, classes,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Read a block of a row's logits and the row's constants; write its gradient, which is 0 in a solved row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    q = tl.zeros((BLOCK,), tl.float32)
    if tl.load(kept + row) > 1:
        x = tl.load(logits + row * stride + at, mask=at < classes, other=-float("inf")).to(tl.float32)
        q = tl.exp((x - tl.load(lse + row)) - tl.load(norm + row))
        q = tl.where(x < tl.load(threshold + row), 0.0, q)
        q = (q - tl.where(at == tl.load(target + row), 1.0, 0.0)) * tl.load(grad_rows + row)
    tl.store(grad + row * classes + at, q.to(grad.dtype.element_ty), mask=at < classes)


def settings(classes: int) -> dict[str, int]:
    """How many classes a program takes at a time, and with how many warps."""
    block = min(triton.next_power_of_2(classes), 4096)
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 256))}


def forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: float, ignore_index: int, reduction: str
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Loss, threshold, kept, lse, norm, share and margin, and whether all labels are valid."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    target = target.contiguous()
    weight = None if weight is None else weight.contiguous()
    rows, classes = logits.shape
    loss, threshold, lse, norm, share, margin = (logits.new_empty(rows, dtype=torch.float32) for _ in range(6))
    kept = logits.new_empty(rows, dtype=torch.long)
    _forward[(rows,)](
        logits, target, target if weight is None else weight, loss, threshold, kept, lse, norm, share, margin,
        logits.stride(0), classes, delta, ignore_index, WEIGHTED=weight is not None, **settings(classes),
    )  # fmt: skip
    loss, valid = reduce_rows(loss, kept, share, reduction)
    return (loss, threshold, kept, lse, norm, share, margin), valid


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
    rows, classes = logits.shape
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    blocks = settings(classes)
    _backward[(rows, triton.cdiv(classes, blocks["BLOCK"]))](
        grad, grad_rows.contiguous(), logits, target.contiguous(), threshold, kept, lse, norm,
        logits.stride(0), classes, **blocks,
    )  # fmt: skip
    return grad
