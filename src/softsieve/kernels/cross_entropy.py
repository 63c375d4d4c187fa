"""AS cross-entropy over the rows of a logits matrix, as two custom ops: in plain torch for any device, Triton on CUDA.

In torch, forward goes over the logits in blocks of rows that stay in the cache and keeps a few scalars a row; only rows
that are sparse and not solved are visited again. Backward writes the gradient in one sweep over the rows that have one.
Nothing of size rows x classes exists but the gradient itself.

The one decision, taken in the forward op and read everywhere else, is the row's threshold: class j is kept when
logit_j >= threshold. It follows from p_t - p_j <= delta by dividing by p_t:

    threshold = logit_t + log(1 - delta / p_t)    where p_t > delta (a sparse row), else -inf (a dense row)

so the target and its ties are kept whatever the rounding. A NaN in a row makes its threshold, loss and gradient NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

INF = float("inf")

# Elements in a block of rows. On a CPU a block and its scratch stay in the cache (the fastest of 2^17 to 2^21 on two
# cores); elsewhere launches cost more than memory.
BLOCK = 1 << 20
BLOCK_ELSEWHERE = 1 << 24


Rows = slice | Tensor
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


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

    Done beside the kernel: a compiled graph cannot look at values before it.
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
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: Tensor, ignore_index: int, reduction: str
) -> Outputs:
    """Reduced loss, and for every row its threshold, number of kept classes, lse, norm and share in the loss.

    ``lse`` is the log-sum-exp over all classes, ``norm`` what makes ``exp((logits - lse) - norm)`` the softmax over the
    kept ones, share the derivative of the reduced loss by that of the row. All are 0 in ignored rows. ``delta`` is a
    tensor () on the CPU, not a number: a compiled graph would be compiled anew for every value of a number.
    """
    classes, dtype = logits.shape[1], accumulation_dtype(logits)
    margin, largest = float(delta), torch.finfo(dtype).max
    label, counted = check_labels(target, classes, ignore_index)
    scalars = logits.new_zeros(len(logits), 4, dtype=dtype)  # ignored rows stay 0
    for rows, x, (a,) in _sweep(logits, _choose(counted), scratch=1):
        t = label[rows].unsqueeze(1)
        nll = torch.log_softmax(x, -1, out=a).gather(1, t).neg_()
        o_t = x.gather(1, t)
        ratio = nll.exp().clamp_(max=largest).mul_(-margin)  # -delta / p_t, at most -1 in a dense row
        threshold = ratio.clamp_(min=-1).log1p_().add_(o_t)
        kept = torch.ge(x, threshold, out=a).sum(-1, keepdim=True)  # of 0.0 and 1.0, to vectorise: exact to 2^24
        scalars[rows] = torch.cat((nll, o_t, threshold, kept), 1)

    nll, o_t, threshold, kept = scalars.unbind(1)
    sparse = threshold > -INF
    loss = nll.masked_fill(sparse, 0)
    for rows, x, (p, keep) in _sweep(logits, _choose(sparse & (kept > 1)), scratch=2):
        t = label[rows].unsqueeze(1)
        p_t = torch.softmax(x, -1, out=p).gather(1, t)
        torch.ge(x, threshold[rows].unsqueeze(1), out=keep).scatter_(1, t, 0)
        ratio = p.mul_(keep).sum(-1, keepdim=True).div_(p_t)  # kept rivals over the target
        loss[rows] = torch.where(sparse[rows], torch.minimum(ratio.log1p_().squeeze(1), nll[rows]), nll[rows])
    lse = o_t + nll  # loses digits where the target is far below the rest: look again there
    for rows, x, _ in _sweep(logits, _choose(~(nll < 64)), scratch=0):
        lse[rows] = x.logsumexp(-1)
    dense = ~sparse
    norm = (loss - nll).masked_fill_(dense, 0)
    kept = kept.masked_fill(dense, classes).long()
    if not logits.is_cpu:
        for scalar in (loss, threshold, kept, lse, norm):
            scalar.masked_fill_(~counted, 0)

    share = counted.to(dtype)
    total = counted.sum()
    if weight is not None:
        share = weight.to(dtype)[label] * share
        loss = loss * share
        total = sum_rows(share, counted)
    if reduction != "none":
        loss = sum_rows(loss, counted)
    if reduction == "mean":
        total = total.masked_fill(total == 0, 1)
        loss, share = loss / total, share / total
    return loss, threshold.clone(), kept, lse, norm, share


def backward(
    grad_rows: Tensor, logits: Tensor, target: Tensor, threshold: Tensor, kept: Tensor, lse: Tensor, norm: Tensor
) -> Tensor:
    """``grad_rows * (softmax over kept classes - one-hot target)``, exactly 0 in solved and ignored rows."""
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


as_cross_entropy = torch.library.custom_op("softsieve::as_cross_entropy", forward, mutates_args=())
as_cross_entropy_backward = torch.library.custom_op("softsieve::as_cross_entropy_backward", backward, mutates_args=())


@as_cross_entropy.register_fake
def _(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: Tensor, ignore_index: int, reduction: str
) -> Outputs:
    row = logits.new_empty(logits.shape[0], dtype=accumulation_dtype(logits))
    loss = torch.empty_like(row) if reduction == "none" else row.new_empty(())
    threshold, lse, norm, share = (torch.empty_like(row) for _ in range(4))
    return loss, threshold, torch.empty_like(row, dtype=torch.long), lse, norm, share


@as_cross_entropy_backward.register_fake
def _(
    grad_rows: Tensor, logits: Tensor, target: Tensor, threshold: Tensor, kept: Tensor, lse: Tensor, norm: Tensor
) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, *_ = inputs
    _, *scalars = output
    ctx.save_for_backward(logits, target, *scalars)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None, None, None, None]:
    if grad_loss is None:
        return None, None, None, None, None, None
    *saved, share = ctx.saved_tensors
    return as_cross_entropy_backward(grad_loss * share, *saved), None, None, None, None, None


as_cross_entropy.register_autograd(_backward, setup_context=_save)


def _save_twice(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _double_backward(ctx: Any, grad_grad: Tensor) -> tuple[Tensor | None, ...]:
    """For gradient penalties and Hessians: plain torch, with temporaries of the size of the logits."""
    grad_rows, logits, target, threshold, kept, _, _ = ctx.saved_tensors
    live = (kept > 1).unsqueeze(1)
    label = torch.where(kept > 0, target, 0).unsqueeze(1)
    masked = (logits < threshold.unsqueeze(1)) & live
    q = torch.softmax(logits.masked_fill(masked, -INF), -1, dtype=accumulation_dtype(logits)) * live
    along = (q * grad_grad).sum(-1, keepdim=True)
    to_rows = (along - live * grad_grad.gather(1, label)).squeeze(1)
    to_logits = grad_rows.unsqueeze(1) * q * (grad_grad - along)
    return to_rows.to(grad_rows.dtype), to_logits.to(logits.dtype), None, None, None, None, None


as_cross_entropy_backward.register_autograd(_double_backward, setup_context=_save_twice)


if find_spec("triton") is not None:

    @as_cross_entropy.register_kernel("cuda")
    def _(
        logits: Tensor, target: Tensor, weight: Tensor | None, delta: Tensor, ignore_index: int, reduction: str
    ) -> Outputs:
        if logits.dtype == torch.float64:
            return forward(logits, target, weight, delta, ignore_index, reduction)
        from softsieve.kernels import cross_entropy_triton

        outputs, valid = cross_entropy_triton.forward(logits, target, weight, float(delta), ignore_index, reduction)
        torch._assert_async(valid, f"target: expected labels in [0, {logits.shape[1]}) or {ignore_index}")
        return outputs

    @as_cross_entropy_backward.register_kernel("cuda")
    def _(
        grad_rows: Tensor, logits: Tensor, target: Tensor, threshold: Tensor, kept: Tensor, lse: Tensor, norm: Tensor
    ) -> Tensor:
        if logits.dtype == torch.float64:
            return backward(grad_rows, logits, target, threshold, kept, lse, norm)
        from softsieve.kernels import cross_entropy_triton

        return cross_entropy_triton.backward(grad_rows, logits, target, threshold, kept, lse, norm)
