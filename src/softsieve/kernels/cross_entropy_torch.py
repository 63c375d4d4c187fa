"""AS cross-entropy over the rows of a logits matrix in plain torch, for any device.

Forward goes over the logits in blocks of rows that stay in the cache and keeps a few scalars a row; only rows that are
sparse and not solved are visited again, where their kept classes are counted. Backward writes the gradient in one sweep
over the rows that have one. Nothing of size rows x classes exists but the gradient itself. `kernels.cross_entropy` says
what goes in and out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

INF = float("inf")

# Elements in a block of rows. On a CPU a block and its scratch stay in the cache (the fastest of 2^17 to 2^21 on two
# cores); elsewhere launches cost more than memory.
BLOCK = 1 << 20
BLOCK_ELSEWHERE = 1 << 24

Rows = slice | Tensor


def accumulation_dtype(logits: Tensor) -> torch.dtype:
    """float64 for float64 logits, float32 for everything narrower."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _choose(wanted: Tensor) -> Rows:
    """The wanted rows: a slice, which copies nothing, where that is all of them, else their indices.

    On an accelerator counting them would stall the queue: there it is always all of them, and callers blank the rest.
    """
    everything = slice(0, len(wanted))
    if not wanted.is_cpu:
        return everything
    index = wanted.nonzero().squeeze(1)
    return everything if len(index) == len(wanted) else index


def _sweep(logits: Tensor, rows: Rows, *, scratch: int) -> Iterator[tuple[Rows, Tensor, list[Tensor]]]:
    """Go over these rows block by block: the block's rows, its logits and its scratch, in the accumulation dtype.

    Scratch is allocated once: fresh memory for every block costs more than the arithmetic on it.
    """
    count = rows.stop if isinstance(rows, slice) else len(rows)
    if count == 0:
        return
    dtype, classes = accumulation_dtype(logits), logits.shape[1]
    step = max(1, (BLOCK if logits.is_cpu else BLOCK_ELSEWHERE) // classes)
    copies = logits.dtype != dtype or isinstance(rows, Tensor)
    memory = logits.new_empty(scratch + copies, min(step, count), classes, dtype=dtype)
    for start in range(0, count, step):
        stop = min(start + step, count)
        buffers = [buffer[: stop - start] for buffer in memory]
        block = slice(start, stop) if isinstance(rows, slice) else rows[start:stop]
        if logits.dtype != dtype:
            x = buffers.pop().copy_(logits[block])
        elif isinstance(block, Tensor):
            x = torch.index_select(logits, 0, block, out=buffers.pop())
        else:
            x = logits[block]
        yield block, x, buffers


def check_labels(target: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Labels (rows,) with 0 for those that are ignored, and which are not; refused outside [0, classes).

    Done beside the kernel: a compiled graph cannot read values before it.
    """
    counted = target != ignore_index
    label = target.masked_fill(~counted, 0)
    low, high = label.aminmax()
    if not target.is_cpu:
        torch._assert_async(
            (low >= 0) & (high < classes), f"target: expected labels in [0, {classes}) or {ignore_index}"
        )
    elif int(low) < 0 or int(high) >= classes:
        row = int(((label < 0) | (label >= classes)).nonzero()[0])
        raise ValueError(
            f"target: expected class labels in [0, {classes}) or ignore_index={ignore_index}, "
            f"found {int(target[row])} in row {row}"
        )
    return label, counted


def sum_rows(values: Tensor, counted: Tensor) -> Tensor:
    """Sum of the counted rows by `F.nll_loss`, in its cascade of partial sums: the bits of `F.cross_entropy`."""
    return F.nll_loss(-values.unsqueeze(1), counted.long() - 1, ignore_index=-1, reduction="sum")


def forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: float, ignore_index: int, reduction: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, threshold, kept, lse, norm, share and margin."""
    classes, dtype = logits.shape[1], accumulation_dtype(logits)
    limits = torch.finfo(dtype)
    label, counted = check_labels(target, classes, ignore_index)
    scalars = logits.new_zeros(len(logits), 4, dtype=dtype)  # ignored rows stay 0
    for rows, x, (log_p,) in _sweep(logits, _choose(counted), scratch=1):
        t = label[rows].unsqueeze(1)
        nll = torch.log_softmax(x, -1, out=log_p).gather(1, t).neg_()
        o_t = x.gather(1, t)
        rival = log_p.scatter_(1, t, -INF).amax(-1, keepdim=True).exp_()  # the likeliest other class
        margin = nll.neg().exp_().sub_(rival)
        ratio = nll.exp().clamp_(max=limits.max).mul_(-delta)  # -delta / p_t, at most -1 in a dense row
        threshold = ratio.clamp_(min=-1).log1p_().add_(o_t)
        scalars[rows] = torch.cat((nll, o_t, threshold, margin), 1)

    nll, o_t, threshold, margin = scalars.unbind(1)
    sparse = (threshold > -INF) & (nll < INF)
    # Logits decide what is kept. A margin says it but for rounding, which is as large as the threshold's in its row.
    near = margin.sub(o_t.abs(), alpha=8 * limits.eps) <= delta + 8 * limits.eps
    loss, kept = torch.zeros_like(nll), counted.to(dtype)
    for rows, x, (p, keep) in _sweep(logits, _choose(counted & sparse & near), scratch=2):
        t = label[rows].unsqueeze(1)
        p_t = torch.softmax(x, -1, out=p).gather(1, t)
        torch.ge(x, threshold[rows].unsqueeze(1), out=keep).scatter_(1, t, 0)
        kept[rows] = keep.sum(-1).add_(1)  # of 0.0 and 1.0, to vectorise: exact to 2^24
        ratio = p.mul_(keep).sum(-1, keepdim=True).div_(p_t)  # kept rivals over the target
        loss[rows] = torch.minimum(ratio.log1p_().squeeze(1), nll[rows])
    loss = torch.where(sparse, loss, nll)
    lse = o_t + nll  # loses digits where the target is far below the rest: summed again there
    for rows, x, _ in _sweep(logits, _choose(~(nll < 64)), scratch=0):
        lse[rows] = x.logsumexp(-1)
    dense = ~sparse
    threshold = threshold.masked_fill(dense, -INF)  # not NaN
    norm = (loss - nll).masked_fill_(dense, 0)
    kept = kept.masked_fill(dense, classes).long()
    if not logits.is_cpu:
        for scalar in (loss, threshold, kept, lse, norm, margin):
            scalar.masked_fill_(~counted, 0)

    share = counted.to(dtype)
    total = counted.sum()
    if weight is not None:
        share = weight.to(dtype)[label].masked_fill_(~counted, 0)
        loss = loss * share
        total = sum_rows(share, counted)
    if reduction != "none":
        loss = sum_rows(loss, counted)
    if reduction == "mean":
        total = total.masked_fill(total == 0, 1)
        loss, share = loss / total, share / total
    return loss, threshold, kept, lse, norm, share, margin.contiguous()


def backward(
    grad_rows: Tensor, logits: Tensor, target: Tensor, threshold: Tensor, kept: Tensor, lse: Tensor, norm: Tensor
) -> Tensor:
    """Gradient of the logits. ``lse`` is for kernels that have no fast softmax to call."""
    live = kept > 1
    label = target if logits.is_cpu else target.masked_fill(~live, 0)
    masks = not logits.is_cpu or bool((threshold > -INF).any())
    chosen = _choose(live)
    make = torch.empty_like if isinstance(chosen, slice) else torch.zeros_like
    grad = make(logits, memory_format=torch.contiguous_format)
    in_place = isinstance(chosen, slice) and grad.dtype == accumulation_dtype(logits)
    for rows, x, (a, keep) in _sweep(logits, chosen, scratch=2):
        q = torch.softmax(x, -1, out=grad[rows] if in_place else a)
        g = scale = grad_rows[rows].unsqueeze(1)
        if masks:
            q.mul_(torch.ge(x, threshold[rows].unsqueeze(1), out=keep))
            scale = g * torch.exp(-norm[rows]).unsqueeze(1)
        q.mul_(scale).scatter_add_(1, label[rows].unsqueeze(1), -g)
        if not logits.is_cpu:
            q.masked_fill_(~live[rows].unsqueeze(1), 0)
        if not in_place:
            grad[rows] = q.to(grad.dtype)
    return grad
