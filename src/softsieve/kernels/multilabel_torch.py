"""Multi-label AS-Softmax against the threshold in plain torch, for any device and dtype, in blocks of rows.

On a CPU rows of fp32 and narrower are done by `multilabel_numba`. `kernels.multilabel` says what goes in and out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from softsieve.kernels.cross_entropy_torch import BLOCK, BLOCK_ELSEWHERE, INF, accumulation_dtype

NAN = float("nan")
WRONG = "target: expected only 0 and 1"
READ_AS_THEY_ARE = (torch.bool, torch.uint8, torch.float32, torch.int64)
SMALL = 1 << 18  # logits up to which one thread does the work


def _blocks(logits: Tensor, *, whole: bool = False) -> Iterator[slice]:
    """Rows that are worked on together: all of them if nothing of their size has to be made."""
    rows, classes = logits.shape
    most = BLOCK if logits.is_cpu else BLOCK_ELSEWHERE
    step = rows if whole else max(1, most // classes)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def check_flags(flags: Tensor) -> Tensor:
    """0/1 flags as bool. On an accelerator, reading them would stall the queue: there the device asserts it."""
    positive = flags != 0
    if flags.dtype == torch.bool:
        return positive
    wrong = positive & (flags != 1)
    if not flags.is_cpu:
        torch._assert_async(~wrong.any(), WRONG)
    elif wrong.any():
        refuse_flags(flags)
    return positive


def refuse_flags(flags: Tensor) -> None:
    """Raise for the first flag that is neither 0 nor 1."""
    wrong = flags[(flags != 0) & (flags != 1)]
    raise ValueError(f"{WRONG}, found {wrong[0].item()}")


def uses_numba(logits: Tensor) -> bool:
    """Whether the compiled loops can do it."""
    return logits.is_cpu and logits.dtype != torch.float64


def forward(logits: Tensor, target: Tensor, delta: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss of every row, its sides, how many classes it keeps, and its margin."""
    row = logits.new_empty(len(logits), dtype=accumulation_dtype(logits))
    loss, margin, sides = torch.empty_like(row), torch.empty_like(row), row.new_empty(len(row), 6)
    kept = torch.empty_like(row, dtype=torch.long)
    if uses_numba(logits):
        from softsieve.kernels import multilabel_numba

        for rows, x, flags, _ in _arrays(logits, target):
            parts = [part[rows].numpy() for part in (loss, sides, kept, margin)]
            if multilabel_numba.forward(x.numpy(), flags.numpy(), *parts, delta=delta, threads=_threads(x)):
                refuse_flags(target)
        return loss, sides, kept, margin
    for rows in _blocks(logits):
        loss[rows], sides[rows], kept[rows], margin[rows] = _forward_block(
            logits[rows].to(row.dtype), check_flags(target[rows]), delta
        )
    return loss, sides, kept, margin


class Side(NamedTuple):
    """What AS-Softmax of the threshold and its rivals says, (rows,) each."""

    cut: Tensor
    base: Tensor
    norm: Tensor
    loss: Tensor
    kept: Tensor
    margin: Tensor


def settle_side(rivals: Tensor, present: Tensor, delta: float | Tensor) -> tuple[Side, Tensor]:
    """One side of a row, of rivals (rows, so many) of which some are present; and which are kept."""
    rivals = rivals.masked_fill(~present, -INF)
    top = rivals.amax(-1)
    base = top.clamp(min=0)
    e = (rivals - base.unsqueeze(1)).exp_()
    norm = _log(e.sum(-1), base)
    lse = base + norm
    ratio = lse.exp().clamp(max=torch.finfo(lse.dtype).max) * delta  # delta / q_0
    cut = torch.where(ratio < 1, torch.log1p(-ratio), -INF)
    keep = ~(rivals < cut.unsqueeze(1)) & present
    kept_norm = torch.minimum(_log((e * keep).sum(-1), base), norm)
    margin = torch.exp(-lse) - torch.exp(top - lse)
    norm = torch.where(cut == -INF, norm, kept_norm)
    kept = keep.sum(-1)
    return Side(cut, base, norm, torch.where(kept == 0, 0, base + norm), kept, margin), keep


def _forward_block(x: Tensor, positive: Tensor, delta: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    negatives, positives = settle_side(x, ~positive, delta)[0], settle_side(-x, positive, delta)[0]
    pairs = zip(negatives[:3], positives[:3], strict=True)
    sides = torch.stack([number for pair in pairs for number in pair], 1)
    loss, margin = negatives.loss + positives.loss, torch.minimum(negatives.margin, positives.margin)
    unusable = ~(x < INF).all(-1)  # an infinite positive would cost nothing: NaN, as in cross-entropy
    sides[:, 2:].masked_fill_(unusable.unsqueeze(1), NAN)
    sides[:, :2].masked_fill_(unusable.unsqueeze(1), -INF)
    kept = (negatives.kept + positives.kept).masked_fill(unusable, x.shape[1])
    loss = loss.masked_fill(loss.isnan(), INF).masked_fill(unusable, NAN)  # NaN: a positive of -inf
    return loss, sides, kept, margin.masked_fill(unusable, NAN)


def _log(total: Tensor, base: Tensor) -> Tensor:
    """``log(e^-base + total)``."""
    return torch.where(base > 0, torch.log(torch.exp(-base) + total), torch.log1p(total))


def backward(factor: Tensor, logits: Tensor, target: Tensor, sides: Tensor, kept: Tensor) -> Tensor:
    """Gradient of the logits, each row's times its factor."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if uses_numba(logits):
        from softsieve.kernels import multilabel_numba

        factor = factor.contiguous()
        for rows, x, flags, scratch in _arrays(logits, target):
            part = grad[rows] if grad.dtype == torch.float32 else scratch
            arrays = [array.numpy() for array in (part, factor[rows], x, flags, sides[rows], kept[rows])]
            multilabel_numba.backward(*arrays, threads=_threads(x))
            if grad.dtype != torch.float32:
                grad[rows] = part
        return grad
    for rows in _blocks(logits):
        weights, positive = soft_weights(logits[rows], target[rows], sides[rows], kept[rows])
        grad[rows] = torch.where(positive, -weights, weights).mul_(factor[rows].unsqueeze(1)).to(grad.dtype)
    return grad


def soft_weights(logits: Tensor, target: Tensor, sides: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over each side's threshold and kept classes, (rows, classes), and where the positives are."""
    x, positive = logits.to(sides.dtype), target != 0
    z = torch.where(positive, -x, x)
    cut, base, norm = (torch.where(positive, sides[:, i + 1, None], sides[:, i, None]) for i in (0, 2, 4))
    weights = ((z - base) - norm).exp()
    return weights.masked_fill((z < cut) | (kept == 0).unsqueeze(1), 0), positive


def _arrays(logits: Tensor, target: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Rows, their logits as contiguous float32, their flags as something that is read as it is, and scratch."""
    logits, scratch = logits.detach(), logits.new_empty(0, dtype=torch.float32)
    as_it_is = logits.dtype == torch.float32 and logits.is_contiguous()
    whole = as_it_is and target.dtype in READ_AS_THEY_ARE and target.is_contiguous()
    for rows in _blocks(logits, whole=whole):
        x, flags = logits[rows].float().contiguous(), target[rows]
        if flags.dtype not in READ_AS_THEY_ARE:
            flags = check_flags(flags)
        flags = flags.contiguous()
        if flags.dtype == torch.bool:
            flags = flags.view(torch.uint8)
        if logits.dtype != torch.float32:
            scratch = scratch if scratch.shape == x.shape else torch.empty_like(x)
        yield rows, x, flags, scratch


def _threads(x: Tensor) -> int:
    return 1 if x.numel() <= SMALL else min(torch.get_num_threads(), len(x))
