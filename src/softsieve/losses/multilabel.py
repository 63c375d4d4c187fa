"""AS-Softmax for any number of labels a row."""

from __future__ import annotations

import torch
from torch import Tensor

from softsieve import _checks

INF = float("inf")


@torch.library.custom_op("softsieve::positives", mutates_args=())
def positives(target: Tensor) -> Tensor:
    """0/1 targets as bool. An op of its own, because a compiled graph cannot read the values to refuse others."""
    wrong = (target != 0) & (target != 1)
    if not target.is_cpu:
        torch._assert_async(~wrong.any(), "target: expected only 0 and 1")
    elif wrong.any():
        raise ValueError(f"target: expected only 0 and 1, found {target[wrong][0].item()}")
    return target != 0


@positives.register_fake
def _(target: Tensor) -> Tensor:
    return torch.empty_like(target, dtype=torch.bool)


def multilabel_keep_masks(logits: Tensor, positive: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Where a class would be kept as a negative, and where as a positive. With nobody on the other side: everywhere."""
    p = logits.detach().softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    lowest = torch.where(positive, p, INF).amin(-1, keepdim=True)  # inf: no positive
    highest = torch.where(positive, -INF, p).amax(-1, keepdim=True)  # -inf: no negative
    beaten_negative = (lowest - p > delta) & (lowest < INF)
    beaten_positive = (p - highest > delta) & (highest > -INF)
    return ~beaten_negative, ~beaten_positive  # a NaN is not beaten


def multilabel_rows(logits: Tensor, negative: Tensor, positive: Tensor) -> Tensor:
    """``log(1 + sum exp(o) over negative) + log(1 + sum exp(-o) over positive)`` of every row, by log-sum-exp."""
    o = logits.to(torch.promote_types(logits.dtype, torch.float32))
    one = torch.zeros_like(o[..., :1])
    side_n = torch.cat([one, torch.where(negative, o, -INF)], -1).logsumexp(-1)
    side_p = torch.cat([one, torch.where(positive, -o, -INF)], -1).logsumexp(-1)
    return side_n + side_p


def as_multilabel_loss(logits: Tensor, target: Tensor, *, delta: float = 0.1, reduction: str = "mean") -> Tensor:
    r"""Multi-label AS-Softmax loss: only positives and negatives that are not yet a margin apart add to it.

    With ``p = logits.softmax(-1)``, negative j is kept when ``min over positives of p - p_j <= delta``, positive t when
    ``p_t - max over negatives of p <= delta``; a row without positives (negatives) keeps all its negatives (positives).
    The masks are constants to autograd. Computes, for every row::

        torch.log(1 + logits[kept_negative].exp().sum()) + torch.log(1 + (-logits[kept_positive]).exp().sum())

    so that no finite logit overflows. With ``delta=1`` this is the plain multi-label softmax loss. A trained model
    predicts the classes whose logit is above 0.

    Args:
        logits: scores, fp16, bf16, fp32 or fp64.
        target: 1 for the classes that apply, 0 for the others; bool, integer or floating point.
        delta: margin in [0, 1].
        reduction: ``"none"``, ``"mean"`` or ``"sum"`` over the rows.

    Shape:
        logits and target ``(..., C)``; loss ``()``, or ``(...)`` with ``reduction="none"``.

    Returns:
        The loss, in the dtype of the logits (fp32 under autocast).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was found.

    Example:
        >>> logits = torch.tensor([[1.2, 1.5, 1.0, -0.35], [2.5, 3.5, 0.4, 0.3], [2.5, 3.5, 0.4, 0.3]])
        >>> target = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 1]])
        >>> as_multilabel_loss(logits, target, delta=0.1)
        tensor(2.0778)

    Reference: *Adaptive Sparse Softmax*, arXiv 2508.03175.
    """
    _checks.logits(logits)
    _checks.target(target, logits, multilabel=True)
    delta = _checks.number("delta", delta, 0, 1)
    _checks.choice("reduction", reduction, _checks.REDUCTIONS)
    positive = positives(target)
    keep_negative, keep_positive = multilabel_keep_masks(logits, positive, delta)
    rows = multilabel_rows(logits, keep_negative & ~positive, keep_positive & positive)
    rows = rows + 0 * logits.detach().amax(-1)  # an infinite positive would cost nothing: NaN, as in cross-entropy
    loss = rows if reduction == "none" else rows.mean() if reduction == "mean" else rows.sum()
    return loss if torch.is_autocast_enabled(logits.device.type) else loss.to(logits.dtype)
