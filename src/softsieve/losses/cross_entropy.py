"""AS-Softmax for one label a row: the keep mask, the loss and its statistics."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from softsieve import _checks
from softsieve.kernels import cross_entropy as kernel


class ASStats(NamedTuple):
    """What AS-Softmax knows of every row after the forward pass, at no extra cost. Detached from the graph.

    A row whose label is ignored is neither solved nor dense, keeps 0 classes and has ``lse`` and margin 0, so sums over
    rows are sums over the rows that count.

    Attributes:
        solved: bool, shape of the target. Only the target is kept: loss and gradient are exactly 0.
        kept: int64, shape of the target. How many classes are kept, the target among them.
        dense: bool, shape of the target. The target's probability is at most delta, so nothing is masked.
        lse: float32 (float64 for float64 logits), shape of the target. Log-sum-exp over *all* classes.
        margin: like ``lse``, in [-1, 1]. The target's probability minus the largest of another class, over *all*
            classes: above delta in a solved row (but for rounding), at most 0 in a row that is predicted wrong.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0, 0.0], [0.0, 4.0, 0.0], [1.0, 1.0, 0.0]])
        >>> _, stats = as_cross_entropy(logits, torch.tensor([0, 2, 1]), delta=0.1, return_stats=True)
        >>> stats.solved.tolist(), stats.kept.tolist(), stats.dense.tolist()
        ([True, False, False], [1, 3, 2], [False, True, False])
        >>> stats.margin
        tensor([ 0.9470, -0.9470,  0.0000])
    """

    solved: Tensor
    kept: Tensor
    dense: Tensor
    lse: Tensor
    margin: Tensor


def as_keep_mask(logits: Tensor, target: Tensor, *, delta: float = 0.1, ignore_index: int = -100) -> Tensor:
    r"""The classes that AS-Softmax keeps: those the target does not yet beat by more than ``delta``.

    Computes::

        p = logits.softmax(-1)
        p.gather(-1, target[..., None]) - p <= delta

    The target is always kept, a row whose label is ignored keeps nothing, and a NaN is never kept.

    Args:
        logits: scores before the softmax, fp16, bf16, fp32 or fp64.
        target: class labels, any integer dtype.
        delta: margin in [0, 1]; 1 keeps everything.
        ignore_index: label of rows that do not count; any integer.

    Shape:
        logits ``(..., C)``, classes last, target ``(...)``, result ``(..., C)``. Warns as `as_cross_entropy` does.

    Returns:
        bool tensor, True where the class is kept. Constant to autograd.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was found.

    Example:
        >>> logits = torch.tensor([[1.2, 1.5, 1.0, -0.35], [2.5, 3.5, 0.4, 0.3]])
        >>> as_keep_mask(logits, torch.tensor([1, 2]), delta=0.1)
        tensor([[False,  True, False, False],
                [ True,  True,  True,  True]])

    Reference: *Adaptive Sparse Softmax*, arXiv 2508.03175.
    """
    _checks.logits(logits)
    _checks.target(target, logits)
    _checks.class_last(logits)
    delta = _checks.number("delta", delta, 0, 1)
    _checks.ignore_index(ignore_index)
    x, t = logits.detach().reshape(-1, logits.shape[-1]), target.reshape(-1).long()
    _, threshold, kept, *_ = kernel.as_cross_entropy(x, t, None, delta, ignore_index, "none")
    mask: Tensor = (x >= threshold.unsqueeze(1)) & (kept > 0).unsqueeze(1)
    return mask.view(logits.shape)


@overload
def as_cross_entropy(
    logits: Tensor, target: Tensor, *, delta: float = ..., ignore_index: int = ..., reduction: str = ...,
    weight: Tensor | None = ..., return_stats: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def as_cross_entropy(
    logits: Tensor, target: Tensor, *, delta: float = ..., ignore_index: int = ..., reduction: str = ...,
    weight: Tensor | None = ..., return_stats: Literal[True],
) -> tuple[Tensor, ASStats]: ...  # fmt: skip
@overload
def as_cross_entropy(
    logits: Tensor, target: Tensor, *, delta: float = ..., ignore_index: int = ..., reduction: str = ...,
    weight: Tensor | None = ..., return_stats: bool,
) -> Tensor | tuple[Tensor, ASStats]: ...  # fmt: skip
def as_cross_entropy(
    logits: Tensor, target: Tensor, *, delta: float = 0.1, ignore_index: int = -100, reduction: str = "mean",
    weight: Tensor | None = None, return_stats: bool = False,
) -> Tensor | tuple[Tensor, ASStats]:  # fmt: skip
    r"""AS-Softmax cross-entropy: cross-entropy over the classes that can still matter.

    Computes::

        keep = as_keep_mask(logits, target, delta=delta)
        F.cross_entropy(logits.masked_fill(~keep, -inf), target)

    without the mask, the masked logits or any other temporary of the size of the logits. The mask is a constant to
    autograd: a masked class has gradient exactly 0, and a row in which only the target is kept (*solved*) has loss and
    gradient exactly 0. With ``delta=1`` the loss is that of `F.cross_entropy`: the same bits in fp32 and fp64 on a CPU,
    the same to rounding elsewhere. Sums over fp16 and bf16 logits are taken in fp32, where `F.cross_entropy` on a CPU
    uses 16 bits.

    Args:
        logits: scores before the softmax, fp16, bf16, fp32 or fp64.
        target: class labels, any integer dtype.
        delta: margin in [0, 1] by which the target must beat a class to mask it. May change from call to call.
        ignore_index: label of rows that add nothing to loss, gradient or statistics; any integer.
        reduction: ``"none"``, ``"mean"`` (over the rows that count; 0 if they weigh nothing) or ``"sum"``.
        weight: weight of each class; a row is weighted by that of its target, and the mean is a weighted mean.
        return_stats: also return `ASStats`.

    Shape:
        logits ``(..., C)``, target ``(...)``, weight ``(C,)``; loss ``()``, or ``(...)`` with ``reduction="none"``.
        Classes are last, where `F.cross_entropy` has ``(N, C, ...)``: give it ``logits.movedim(1, -1)``. Of logits
        ``(N, L, C)`` with L equal to C both would take the same shapes for another meaning, which a warning tells; with
        ``logits.flatten(0, -2)`` and ``target.flatten()`` there is nothing to mistake.

    Returns:
        The loss, in the dtype of the logits (fp32 under autocast); with ``return_stats`` the pair of it and `ASStats`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was found. Labels out of range on a GPU
            stop the device with an assertion instead, as they do in `F.cross_entropy`: reading stalls the queue.

    Example:
        >>> logits = torch.tensor([[1.2, 1.5, 1.0, -0.35], [2.5, 3.5, 0.4, 0.3]], requires_grad=True)
        >>> loss = as_cross_entropy(logits, torch.tensor([1, 2]), delta=0.1)
        >>> loss.backward()
        >>> round(loss.item(), 4)
        1.7371
        >>> logits.grad[0]  # solved: class 1 beats the others by more than 0.1
        tensor([0., 0., 0., 0.])

    Reference: *Adaptive Sparse Softmax*, arXiv 2508.03175.
    """
    if not _checks.usual(logits, target):
        _checks.logits(logits)
        _checks.target(target, logits)
        _checks.class_last(logits)
    delta = _checks.number("delta", delta, 0, 1)
    _checks.ignore_index(ignore_index)
    _checks.choice("reduction", reduction, _checks.REDUCTIONS)
    if weight is not None:
        _checks.weight(weight, logits)
    x, t = logits, target if target.dtype is torch.int64 else target.long()
    if logits.ndim != 2:
        x, t = logits.reshape(-1, logits.shape[-1]), t.reshape(-1)
    known: list[Tensor] | None = [] if return_stats else None
    loss = kernel.as_cross_entropy_loss(x, t, weight, delta, ignore_index, reduction, known)
    if loss.dtype != logits.dtype and not torch.is_autocast_enabled(logits.device.type):
        loss = loss.to(logits.dtype)
    if reduction == "none":
        loss = loss.view(target.shape)
    if known is None:
        return loss
    threshold, kept, lse, *_, margin = known
    stats = ASStats(solved=kept == 1, kept=kept, dense=threshold == -float("inf"), lse=lse, margin=margin)
    return loss, ASStats(*(s.view(target.shape) for s in stats))
