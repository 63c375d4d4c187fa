"""AS-Softmax for any number of labels a row."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from softsieve import _checks
from softsieve.kernels import multilabel as kernel

INF = float("inf")
RULES = ("labels", "threshold")
positives = kernel.positives


class Masks(NamedTuple):
    """Where classes would be kept as negatives, and where as positives, (..., C), and the rows' margins, (...)."""

    negative: Tensor
    positive: Tensor
    margin: Tensor


def masks_against_labels(logits: Tensor, positive: Tensor, delta: float) -> Masks:
    """The published rule: positives and negatives against each other. With nobody on the other side all are kept."""
    p = logits.detach().softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    lowest = torch.where(positive, p, INF).amin(-1, keepdim=True)  # inf: no positive
    highest = torch.where(positive, -INF, p).amax(-1, keepdim=True)  # -inf: no negative
    one_sided = (lowest == INF) | (highest == -INF)
    beaten_negative = (lowest - p > delta) & ~one_sided
    beaten_positive = (p - highest > delta) & ~one_sided
    margin = (lowest - highest).masked_fill(one_sided, -1).squeeze(-1)
    return Masks(~beaten_negative, ~beaten_positive, margin)  # a NaN is not beaten


def multilabel_rows(logits: Tensor, negative: Tensor, positive: Tensor) -> Tensor:
    """``log(1 + sum exp(o) over negative) + log(1 + sum exp(-o) over positive)`` of every row, by log-sum-exp."""
    o = logits.to(torch.promote_types(logits.dtype, torch.float32))
    one = torch.zeros_like(o[..., :1])
    side_n = torch.cat([one, torch.where(negative, o, -INF)], -1).logsumexp(-1)
    side_p = torch.cat([one, torch.where(positive, -o, -INF)], -1).logsumexp(-1)
    return side_n + side_p


class MultiLabelStats(NamedTuple):
    """What `as_multilabel_loss` knows of every row after the forward pass. Detached from the graph.

    Attributes:
        solved: bool, shape of the leading dimensions. No class is kept, so that loss and gradient are exactly 0, and
            the classes whose logit is above 0 are those of the target. Against the threshold the first says the second;
            labels can be a margin apart on one side of 0, and then the row is not solved.
        kept: int64. How many classes are kept, of both kinds.
        margin: float32 (float64 for float64 logits), in [-1, 1]. Against the threshold: by how much its probability is
            above that of the nearest class, on the side where that is less; above delta in a solved row (but for
            rounding), at most 0 in a row that is predicted wrong. Against labels: the smallest probability of a
            positive minus the largest of a negative, -1 without either.

    Example:
        >>> logits = torch.tensor([[3.0, -4.0, -3.0], [3.0, 2.0, -4.0]])
        >>> target = torch.tensor([[1, 0, 0], [1, 0, 0]])
        >>> _, stats = as_multilabel_loss(logits, target, delta=0.5, against="threshold", return_stats=True)
        >>> stats.solved.tolist(), stats.kept.tolist()
        ([True, False], [0, 2])
        >>> stats.margin
        tensor([ 0.8896, -0.7599])
    """

    solved: Tensor
    kept: Tensor
    margin: Tensor


@overload
def as_multilabel_loss(
    logits: Tensor, target: Tensor, *, delta: float = ..., against: str = ..., reduction: str = ...,
    return_stats: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def as_multilabel_loss(
    logits: Tensor, target: Tensor, *, delta: float = ..., against: str = ..., reduction: str = ...,
    return_stats: Literal[True],
) -> tuple[Tensor, MultiLabelStats]: ...  # fmt: skip
@overload
def as_multilabel_loss(
    logits: Tensor, target: Tensor, *, delta: float = ..., against: str = ..., reduction: str = ...,
    return_stats: bool,
) -> Tensor | tuple[Tensor, MultiLabelStats]: ...  # fmt: skip
def as_multilabel_loss(
    logits: Tensor, target: Tensor, *, delta: float = 0.1, against: str = "labels", reduction: str = "mean",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, MultiLabelStats]:  # fmt: skip
    r"""Multi-label AS-Softmax loss: only classes that are not yet right by a margin add to it.

    A class is right by more than ``delta`` and left out, by the rule that ``against`` names:

    - ``"labels"``, as published. With ``p = logits.softmax(-1)``, negative j is kept when ``min over positives of p -
      p_j <= delta``, positive t when ``p_t - max over negatives of p <= delta``; a row without positives (negatives)
      keeps all its negatives (positives).
    - ``"threshold"``, ours. A trained model predicts the classes whose logit is above 0, so each kind is compared with
      a class of logit 0. With ``q = softmax([0, logits of negatives])``, negative j is kept when ``q_0 - q_j <=
      delta``; with ``q = softmax([0, -logits of positives])``, positive t when ``q_0 - q_t <= delta``. A row of which
      nothing is kept is predicted right. A delta of 0.7 did well.

    The masks are constants to autograd. Computes, for every row::

        torch.log(1 + logits[kept_negative].exp().sum()) + torch.log(1 + (-logits[kept_positive]).exp().sum())

    so that no finite logit overflows. With ``delta=1`` this is the plain multi-label softmax loss, by both rules.
    Against the threshold it is computed without the masks or any other temporary of the size of the logits, but for the
    gradient; against labels the masks are held.

    Args:
        logits: scores, fp16, bf16, fp32 or fp64.
        target: 1 for the classes that apply, 0 for the others; bool, integer or floating point.
        delta: margin in [0, 1].
        against: ``"labels"`` or ``"threshold"``.
        reduction: ``"none"``, ``"mean"`` or ``"sum"`` over the rows.
        return_stats: also return `MultiLabelStats`.

    Shape:
        logits and target ``(..., C)``; loss ``()``, or ``(...)`` with ``reduction="none"``.

    Returns:
        The loss, in the dtype of the logits (fp32 under autocast); with ``return_stats`` a pair.

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
    _checks.choice("against", against, RULES)
    _checks.choice("reduction", reduction, _checks.REDUCTIONS)
    work = _against_threshold if against == "threshold" else _against_labels
    loss, stats = work(logits, target, delta, reduction, return_stats)
    loss = loss if torch.is_autocast_enabled(logits.device.type) else loss.to(logits.dtype)
    return loss if stats is None else (loss, stats)


def _against_threshold(
    logits: Tensor, target: Tensor, delta: float, reduction: str, return_stats: bool
) -> tuple[Tensor, MultiLabelStats | None]:
    shape, classes = logits.shape[:-1], logits.shape[-1]
    flags = target.reshape(-1, classes)
    loss, _, kept, margin = kernel.as_multilabel_loss(logits.reshape(-1, classes), flags, delta, reduction)
    loss = loss.view(shape) if reduction == "none" else loss
    if not return_stats:
        return loss, None
    return loss, MultiLabelStats(*(s.view(shape) for s in (kept == 0, kept, margin)))


def _against_labels(
    logits: Tensor, target: Tensor, delta: float, reduction: str, return_stats: bool
) -> tuple[Tensor, MultiLabelStats | None]:
    positive = positives(target)
    masks = masks_against_labels(logits, positive, delta)
    kept = torch.where(positive, masks.positive, masks.negative)
    nothing = 0 * logits.detach().amax(-1)  # an infinite positive would cost nothing: NaN, as in cross-entropy
    rows = multilabel_rows(logits, kept & ~positive, kept & positive) + nothing
    loss = rows if reduction == "none" else rows.mean() if reduction == "mean" else rows.sum()
    if not return_stats:
        return loss, None
    right = ((logits.detach() > 0) == positive).all(-1) & (nothing == 0)
    count = kept.sum(-1)
    return loss, MultiLabelStats(right & (count == 0), count, masks.margin + nothing)
