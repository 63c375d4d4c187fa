"""Multi-label AS-Softmax against the threshold in Triton: one launch forward, one backward.

For logits of fp32 and narrower. `kernels.multilabel` says what goes in and out. Runs under Triton's interpreter too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from softsieve.kernels.cross_entropy_triton import LARGEST, _finish, _log1p, empty_results, settings


@triton.jit
def _log_with_threshold(total, base):
    """log(exp(-base) + total)."""
    return tl.where(base > 0.0, tl.log(tl.exp(-base) + total), _log1p(total))


@triton.jit
def _add(top, total, z):
    """Take rivals into a largest logit, at least 0, and a sum of exponentials over e^that."""
    higher = tl.maximum(top, tl.max(z, 0))
    return higher, total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)


@triton.jit
def _cut(norm, base, delta):
    """log(1 - delta / q_0), or -inf where q_0 is at most delta."""
    ratio = delta * tl.minimum(tl.exp(base + norm), LARGEST)
    return tl.where(ratio < 1.0, tl.log(1.0 - tl.minimum(ratio, 1.0)), -float("inf"))


@triton.jit
def _margin(top, base, norm):
    """By how much the threshold's probability is above that of the largest rival."""
    return tl.exp(-base - norm) - tl.exp((top - base) - norm)


@triton.jit
def _forward(
    logits, target, loss, sides, kept, margin, parts, valid, sums, done, stride, target_stride, classes, delta,
    MEAN: tl.constexpr, NONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read a row once, or twice if one of its sides is neither dense nor solved; write what is known of it.

    The program that is done last adds up the losses, so that their order does not depend on chance. A flag that is
    neither 0 nor 1 is not refused here: such a row is written with -1 kept classes, and ``valid`` is false.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target += row * target_stride
    base_n = tl.zeros((), tl.float32)
    base_p = tl.zeros((), tl.float32)
    total_n = tl.zeros((), tl.float32)
    total_p = tl.zeros((), tl.float32)
    top_n = tl.full((), -float("inf"), tl.float32)
    top_p = tl.full((), -float("inf"), tl.float32)
    positives = tl.zeros((), tl.int64)
    unusable = tl.zeros((), tl.int32)
    wrong = tl.zeros((), tl.int32)
    for start in range(0, classes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < classes
        x = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
        flag = tl.load(target + at, mask=inside, other=0)
        own = flag != 0
        wrong += tl.sum((own & (flag != 1)).to(tl.int32), 0)
        unusable += tl.sum(((x < float("inf")) == 0).to(tl.int32), 0)
        positives += tl.sum(own.to(tl.int64), 0)
        negative = tl.where(inside & (own == 0), x, -float("inf"))
        positive = tl.where(own, -x, -float("inf"))
        top_n = tl.maximum(top_n, tl.max(negative, 0))
        top_p = tl.maximum(top_p, tl.max(positive, 0))
        base_n, total_n = _add(base_n, total_n, negative)
        base_p, total_p = _add(base_p, total_p, positive)
    norm_n = _log_with_threshold(total_n, base_n)
    norm_p = _log_with_threshold(total_p, base_p)
    cut_n = _cut(norm_n, base_n, delta)
    cut_p = _cut(norm_p, base_p, delta)
    least = tl.minimum(_margin(top_n, base_n, norm_n), _margin(top_p, base_p, norm_p))
    none_n = (top_n < cut_n) | (positives == classes)
    none_p = (top_p < cut_p) | (positives == 0)
    count = tl.where(none_n, 0, classes - positives) + tl.where(none_p, 0, positives)
    some_n = (cut_n > -float("inf")) & (none_n == 0)
    some_p = (cut_p > -float("inf")) & (none_p == 0)
    if some_n | some_p:
        count = count * 0
        kept_n = tl.zeros((), tl.float32)
        kept_p = tl.zeros((), tl.float32)
        for start in range(0, classes, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < classes
            x = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
            own = tl.load(target + at, mask=inside, other=0) != 0
            keep_n = (x >= cut_n) & inside & (own == 0) & (none_n == 0)
            keep_p = (-x >= cut_p) & own & (none_p == 0)
            kept_n += tl.sum(tl.where(keep_n, tl.exp(x - base_n), 0.0), 0)
            kept_p += tl.sum(tl.where(keep_p, tl.exp(-x - base_p), 0.0), 0)
            count += tl.sum((keep_n | keep_p).to(tl.int64), 0)
        norm_n = tl.where(some_n, tl.minimum(_log_with_threshold(kept_n, base_n), norm_n), norm_n)
        norm_p = tl.where(some_p, tl.minimum(_log_with_threshold(kept_p, base_p), norm_p), norm_p)
    row_loss = tl.where(none_n, 0.0, base_n + norm_n) + tl.where(none_p, 0.0, base_p + norm_p)
    if top_p == float("inf"):
        row_loss = top_p
    if unusable > 0:  # an infinite positive would cost nothing: NaN, as in cross-entropy
        row_loss = row_loss * 0.0 + float("nan")
        least = least * 0.0 + float("nan")
        norm_n = norm_n * 0.0 + float("nan")
        norm_p = norm_p * 0.0 + float("nan")
        cut_n = cut_n * 0.0 - float("inf")
        cut_p = cut_p * 0.0 - float("inf")
        count = count * 0 + classes
    if wrong > 0:
        count = count * 0 - 1
    sides += row * 6
    tl.store(sides, cut_n)
    tl.store(sides + 1, cut_p)
    tl.store(sides + 2, base_n)
    tl.store(sides + 3, base_p)
    tl.store(sides + 4, norm_n)
    tl.store(sides + 5, norm_p)
    if NONE:
        tl.store(loss + row, row_loss)
    tl.store(kept + row, count)
    tl.store(margin + row, least)
    programs = tl.num_programs(0)
    tl.store(sums + row, row_loss)
    tl.store(sums + programs + row, 1.0)
    tl.store(sums + 2 * programs + row, (wrong > 0).to(tl.float32))
    tl.debug_barrier()
    if tl.atomic_add(done, 1, sem="acq_rel") == programs - 1:
        tl.debug_barrier()
        _finish(sums, programs, loss, parts, valid, MEAN, NONE)


@triton.jit
def _backward(
    grad, factor, logits, target, sides, kept, factor_stride, scale, stride, target_stride, classes,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Read a block of a row's logits and the row's numbers; write its gradient, which is 0 in a solved row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < classes
    q = tl.zeros((BLOCK,), tl.float32)
    if tl.load(kept + row) > 0:
        x = tl.load(logits + row * stride + at, mask=inside, other=0.0).to(tl.float32)
        own = tl.load(target + row * target_stride + at, mask=inside, other=0) != 0
        sides += row * 6
        z = tl.where(own, -x, x)
        cut = tl.where(own, tl.load(sides + 1), tl.load(sides))
        base = tl.where(own, tl.load(sides + 3), tl.load(sides + 2))
        q = tl.exp((z - base) - tl.where(own, tl.load(sides + 5), tl.load(sides + 4)))
        q = tl.where(z < cut, 0.0, tl.where(own, -q, q) * (tl.load(factor + row * factor_stride) * scale))
    tl.store(grad + row * classes + at, q.to(grad.dtype.element_ty), mask=inside)


def _readable(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the classes of a row beside each other."""
    target = target.view(torch.uint8) if target.dtype == torch.bool else target
    logits, target = (value if value.stride(1) == 1 else value.contiguous() for value in (logits, target))
    return logits, target


def forward(
    logits: Tensor, target: Tensor, delta: float, reduction: str
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Loss, sides, kept and margin, and whether all flags are valid."""
    logits, target = _readable(logits, target)
    rows, classes = logits.shape
    margin, sides = (torch.empty(size, dtype=torch.float32, device=logits.device) for size in ((rows,), (rows, 6)))
    kept = torch.empty(rows, dtype=torch.long, device=logits.device)
    loss, parts, sums, valid, done = empty_results(rows if reduction == "none" else 0, rows, logits.device)
    _forward[(rows,)](
        logits, target, loss, sides, kept, margin, parts, valid, sums, done,
        logits.stride(0), target.stride(0), classes, delta, MEAN=reduction == "mean", NONE=reduction == "none",
        **settings(classes),
    )  # fmt: skip
    return (loss, sides, kept, margin), valid


def backward(factor: Tensor, logits: Tensor, target: Tensor, sides: Tensor, kept: Tensor, scale: float = 1.0) -> Tensor:
    """Gradient of the logits, each row's times its factor, or the one of all, and ``scale``."""
    logits, target = _readable(logits, target)
    rows, classes = logits.shape
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    blocks = settings(classes)
    _backward[(rows, triton.cdiv(classes, blocks["BLOCK"]))](
        grad, factor, logits, target, sides, kept, factor.stride(0) if factor.ndim else 0, scale,
        logits.stride(0), target.stride(0), classes, **blocks,
    )  # fmt: skip
    return grad
