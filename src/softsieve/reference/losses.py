"""AS-Softmax, word for word from the paper's formulas."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

INF = float("inf")


def _lead(logits: Tensor, label: Tensor) -> Tensor:
    """By how much the label's probability is larger than each class's; NaN where one is."""
    p = logits.detach().softmax(-1)
    return p.gather(-1, label.unsqueeze(-1)) - p


def _column(delta: float | Tensor, like: Tensor) -> Tensor:
    """Delta beside logits: a tensor has one number for each row."""
    return torch.as_tensor(delta, dtype=like.dtype, device=like.device).unsqueeze(-1)


def as_keep_mask(logits: Tensor, target: Tensor, *, delta: float | Tensor = 0.1, ignore_index: int = -100) -> Tensor:
    """Class j is kept when ``p_t - p_j <= delta``; an ignored row keeps nothing.

    >>> as_keep_mask(torch.tensor([[1.2, 1.5, 1.0, -0.35]]), torch.tensor([1]))
    tensor([[False,  True, False, False]])
    """
    counted = target != ignore_index
    return (_lead(logits, target.where(counted, 0)) <= _column(delta, logits)) & counted.unsqueeze(-1)


def as_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    delta: float | Tensor = 0.1,
    ignore_index: int = -100,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """``-log( exp(o_t) / sum over kept j of exp(o_j) )``.

    >>> as_cross_entropy(torch.tensor([[1.2, 1.5, 1.0, -0.35]]), torch.tensor([1]), delta=1.0)
    tensor(0.9181)
    """
    counted = target != ignore_index
    label = target.where(counted, 0)
    masked = (_lead(logits, label) > _column(delta, logits)) | ~counted.unsqueeze(-1)  # a NaN is not: it shall be seen
    masked.scatter_(-1, label.unsqueeze(-1), False)  # also in ignored rows, whose loss must be a number
    log_q = logits.masked_fill(masked, -INF).log_softmax(-1)
    w = (torch.ones(logits.shape[-1]) if weight is None else weight).to(logits)[label] * counted
    return _reduced(-log_q.gather(-1, label.unsqueeze(-1)).squeeze(-1).where(counted, 0) * w, w, reduction)


def _reduced(loss: Tensor, weights: Tensor, reduction: str) -> Tensor:
    """The weighted losses themselves, their sum, or that over the sum of the weights; 0 if there is none."""
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / weights.sum().where(weights.sum() != 0, 1)


def as_stats(
    logits: Tensor, target: Tensor, *, delta: float | Tensor = 0.1, ignore_index: int = -100
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Solved, kept, dense, lse and margin, all zero in ignored rows.

    >>> as_stats(torch.tensor([[9.0, 0.0]]), torch.tensor([0]))[:3]
    (tensor([True]), tensor([1]), tensor([False]))
    """
    counted = target != ignore_index
    label, asked = target.where(counted, 0), _column(delta, logits)
    kept = (~(_lead(logits, label) > asked)).sum(-1) * counted
    p = logits.detach().softmax(-1)
    own = p.gather(-1, label.unsqueeze(-1))
    dense = ~(own > asked).squeeze(-1) & counted
    margin = own.squeeze(-1) - p.scatter(-1, label.unsqueeze(-1), 0).amax(-1)
    return kept == 1, kept, dense, logits.logsumexp(-1).where(counted, 0), margin.where(counted, 0)


def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, softcap: float | None = None) -> Tensor:
    """``hidden @ weight.T + bias`` in float32 or wider, as ``softcap * tanh(x / softcap)`` with a softcap.

    >>> linear_logits(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [1.0, 0.0]]), softcap=1.0)
    tensor([[1.0000, 0.7616]])
    """
    logits = F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32))
    logits = logits if bias is None else logits + bias
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def linear_as_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, delta: float | Tensor = 0.1,
    ignore_index: int = -100, reduction: str = "mean", class_weight: Tensor | None = None,
    row_weight: Tensor | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """`as_cross_entropy` of `linear_logits`; a row is weighted by its own weight and by that of its label.

    >>> linear_as_cross_entropy(torch.eye(2), torch.tensor([[4.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    tensor(0.6566)
    """
    logits = linear_logits(hidden, weight, bias, softcap)
    loss = as_cross_entropy(logits, target, delta=delta, ignore_index=ignore_index, reduction="none")
    counted = target != ignore_index
    share = counted.to(logits.dtype)
    for weights in (None if class_weight is None else class_weight[target.where(counted, 0)], row_weight):
        share = share if weights is None else share * weights
    return _reduced(loss * share, share, reduction)


def linear_as_stats(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, delta: float | Tensor = 0.1,
    ignore_index: int = -100, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`as_stats` of `linear_logits`, and whether no class has a larger logit than the label.

    >>> linear_as_stats(torch.eye(2), torch.tensor([[4.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))[-1]
    tensor([ True, False])
    """
    logits, counted = linear_logits(hidden, weight, bias, softcap), target != ignore_index
    own = logits.gather(-1, target.where(counted, 0).unsqueeze(-1)).squeeze(-1)
    right = (own >= logits.amax(-1)) & counted
    return *as_stats(logits, target, delta=delta, ignore_index=ignore_index), right


def _kept_labels(o: Tensor, y: Tensor, delta: float, against: str) -> tuple[Tensor, Tensor]:
    """Which classes of a row are kept, and by how much the least of them is right."""
    o, positive, negative = o.detach(), y == 1, y == 0
    lead = torch.full_like(o, -1)  # below every delta: kept
    if against == "threshold":
        for side, rivals in ((negative, o[negative]), (positive, -o[positive])):
            q = torch.cat([o.new_zeros(1), rivals]).softmax(-1)
            lead[side] = q[0] - q[1:]
    elif positive.any() and negative.any():
        p = o.softmax(-1)
        lead = torch.where(positive, p - p[negative].max(), p[positive].min() - p)
    return lead <= delta, lead.min()


def as_multilabel_stats(
    logits: Tensor, target: Tensor, *, delta: float = 0.1, against: str = "labels"
) -> tuple[Tensor, Tensor, Tensor]:
    """Solved, kept and margin: a row is solved when it keeps nothing and logits above 0 are its labels.

    >>> as_multilabel_stats(torch.tensor([[3.0, -4.0]]), torch.tensor([[1, 0]]), against="threshold")
    (tensor([True]), tensor([0]), tensor([0.9051]))
    """
    rows = logits.reshape(-1, logits.shape[-1]), target.reshape(-1, logits.shape[-1])
    masks, margins = zip(*(_kept_labels(o, y, delta, against) for o, y in zip(*rows, strict=True)), strict=True)
    kept = torch.stack(masks).sum(-1).reshape(logits.shape[:-1])
    right = ((logits > 0) == (target == 1)).all(-1)
    return (kept == 0) & right, kept, torch.stack(margins).reshape(logits.shape[:-1])


def as_multilabel_loss(
    logits: Tensor, target: Tensor, *, delta: float = 0.1, against: str = "labels", reduction: str = "mean"
) -> Tensor:
    """``log(1 + sum kept negatives exp(o_j)) + log(1 + sum kept positives exp(-o_t))``, one row after the other.

    >>> as_multilabel_loss(torch.tensor([[1.2, 1.5, 1.0, -0.35]]), torch.tensor([[1, 1, 0, 0]]))
    tensor(1.5765)
    """
    losses = []
    for o, y in zip(logits.reshape(-1, logits.shape[-1]), target.reshape(-1, logits.shape[-1]), strict=True):
        keep, _ = _kept_labels(o, y, delta, against)
        negative, positive = o[keep & (y == 0)], o[keep & (y == 1)]
        losses.append(torch.log(1 + negative.exp().sum()) + torch.log(1 + (-positive).exp().sum()))
    loss = torch.stack(losses).reshape(logits.shape[:-1])
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def flags_of(labels: Tensor, classes: int, *, ignore_index: int = -100) -> Tensor:
    """Class numbers (..., labels), padded with ``ignore_index``, as 0/1 flags (..., classes).

    >>> flags_of(torch.tensor([[2, 0], [1, -100]]), 3)
    tensor([[1, 0, 1],
            [0, 1, 0]])
    """
    flags = torch.zeros(*labels.shape[:-1], classes + 1, dtype=torch.long, device=labels.device)
    return flags.scatter(-1, labels.where(labels != ignore_index, classes), 1)[..., :classes]


def _each_row(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, delta: float | Tensor, ignore_index: int
) -> list[tuple[Tensor, Tensor, float]]:
    """Logits and flags, (classes,) each, and delta."""
    logits, flags = linear_logits(hidden, weight, bias), flags_of(labels, len(weight), ignore_index=ignore_index)
    logits, flags = logits.reshape(-1, len(weight)), flags.reshape(-1, len(weight))
    margins = torch.as_tensor(delta, dtype=torch.float64).expand(labels.shape[:-1]).flatten().tolist()
    return list(zip(logits, flags, margins, strict=True))


def linear_as_multilabel_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, delta: float | Tensor = 0.5,
    against: str = "threshold", ignore_index: int = -100, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """`as_multilabel_loss` of `linear_logits`, one row after the other, with class numbers as labels.

    >>> linear_as_multilabel_loss(torch.eye(2), torch.tensor([[4.0, 0.0], [0.0, 1.0]]), torch.tensor([[0], [0]]))
    tensor(1.3498)
    """
    rows = _each_row(hidden, weight, labels, bias, delta, ignore_index)
    losses = [as_multilabel_loss(o, y, delta=d, against=against) for o, y, d in rows]
    loss = torch.stack(losses).reshape(labels.shape[:-1])
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def linear_as_multilabel_stats(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, delta: float | Tensor = 0.5,
    against: str = "threshold", ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`as_multilabel_stats` of `linear_logits`.

    >>> linear_as_multilabel_stats(torch.eye(2), torch.tensor([[4.0, 0.0], [-4.0, 1.0]]), torch.tensor([[0], [0]]))[:2]
    (tensor([ True, False]), tensor([0, 2]))
    """
    rows = _each_row(hidden, weight, labels, bias, delta, ignore_index)
    stats = [as_multilabel_stats(o, y, delta=d, against=against) for o, y, d in rows]
    solved, kept, margin = (torch.stack(part).reshape(labels.shape[:-1]) for part in zip(*stats, strict=True))
    return solved, kept, margin


def delta_table(final: float, initial: float, ratio: float, total_steps: int, shape: str = "linear") -> list[float]:
    """The margin at every step, filled in step by step.

    >>> delta_table(0.0, 1.0, 0.5, 4)
    [1.0, 0.5, 0.0, 0.0]
    """
    table = []
    for step in range(total_steps):
        left = max(0.0, 1 - step / (ratio * total_steps)) if ratio else 0.0  # 1 at the start, 0 when the way is done
        if shape == "cosine":
            left = 0.5 + 0.5 * math.cos(math.pi * (1 - left))
        table.append(final + (initial - final) * left)
    return table
