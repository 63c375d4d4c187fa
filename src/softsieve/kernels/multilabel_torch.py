"""Multi-label AS-Softmax against the threshold in plain torch, for any device and dtype, in blocks of rows.

On a CPU rows of fp32 and narrower are done by `multilabel_numba`. `kernels.multilabel` says what goes in and out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from softsieve.kernels.cross_entropy_torch import BLOCK, BLOCK_ELSEWHERE, INF, accumulation_dtype

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
            parts = (part[rows].numpy() for part in (loss, sides, kept, margin))
            if multilabel_numba.forward(x.numpy(), flags.numpy(), delta, _threads(x), *parts):
                refuse_flags(target)
        return loss, sides, kept, margin
    for rows in _blocks(logits):
        loss[rows], sides[rows], kept[rows], margin[rows] = _forward_block(
            logits[rows].to(row.dtype), check_flags(target[rows]), delta
        )
    return loss, sides, kept, margin


def _forward_block(x: Tensor, positive: Tensor, delta: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z = torch.where(positive, -x, x)
    losses, counts, margins, numbers = [], [], [], []
    for rivals in (z.masked_fill(positive, -INF), z.masked_fill(~positive, -INF)):
        top = rivals.amax(-1)
        base = top.clamp(min=0)
        e = (rivals - base.unsqueeze(1)).exp_()
        norm = _log(e.sum(-1), base)
        lse = base + norm
        ratio = lse.exp().clamp(max=torch.finfo(x.dtype).max) * delta  # delta / q_0
        cut = torch.where(ratio < 1, torch.log1p(-ratio), -INF)
        keep = ~(rivals < cut.unsqueeze(1))
        keep &= ~positive if len(losses) == 0 else positive
        kept_norm = torch.minimum(_log((e * keep).sum(-1), base), norm)
        norm = torch.where(cut == -INF, norm, kept_norm)
        count = keep.sum(-1)
        losses.append(torch.where(count == 0, 0, base + norm))
        margins.append(torch.exp(-lse) - torch.exp(top - lse))
        counts.append(count)
        numbers.append((cut, base, norm))
    sides = torch.stack([part for pair in zip(*numbers, strict=True) for part in pair], 1)
    unusable = ~(x < INF).all(-1)  # an infinite positive would cost nothing: NaN, as in cross-entropy
    loss, margin = losses[0] + losses[1], torch.minimum(*margins)
    nan = float("nan")
    sides[:, 2:].masked_fill_(unusable.unsqueeze(1), nan)
    sides[:, :2].masked_fill_(unusable.unsqueeze(1), -INF)
    kept = (counts[0] + counts[1]).masked_fill(unusable, x.shape[1])
    loss = loss.masked_fill(loss.isnan(), INF).masked_fill(unusable, nan)  # NaN: a positive of -inf
    return loss, sides, kept, margin.masked_fill(unusable, nan)


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
            arrays = (array.numpy() for array in (part, factor[rows], x, flags, sides[rows], kept[rows]))
            multilabel_numba.backward(*arrays, _threads(x))
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
