"""Linear layer and AS cross-entropy in one, in plain torch: what is done with logits while they are there.

For any device and dtype. `kernels.linear` says what goes in and out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softsieve.kernels.cross_entropy_torch import INF, accumulation_dtype

LISTED = 0  # classes of a row that are listed


class Settled(NamedTuple):
    """What the threshold says of every row."""

    threshold: Tensor
    rivals: Tensor  # kept classes besides the label
    mass: Tensor  # of these, over that of the label
    listed: Tensor  # whether they are those that follow
    classes: Tensor  # (rows, so many), -1 for none
    logits: Tensor  # (rows, so many)


class Finished(NamedTuple):
    """The loss, reduced, and what else is known of every row."""

    loss: Tensor
    kept: Tensor
    lse: Tensor
    norm: Tensor  # exp((logit - lse) - norm) is the softmax over the kept classes
    share: Tensor  # in the loss
    right: Tensor  # whether no class has a larger logit than the label


def _logits(products: Tensor, bias: Tensor | None, cap: float, start: int) -> Tensor:
    """In the accumulation dtype; the products themselves where nothing is to be done."""
    x = products.to(accumulation_dtype(products))
    if bias is not None:
        x = x + bias[start : start + x.shape[1]].to(x.dtype)
    return cap * torch.tanh(x / cap) if cap else x


def _here(label: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows whose label is in the chunk, and where."""
    rows = ((label >= start) & (label < start + width)).nonzero().squeeze(1)
    return rows, label[rows] - start


def marks(layer: Any) -> Tensor:
    """Where `scan` is to keep the largest logit besides the label's."""
    rows: Tensor = layer.hidden.new_full((len(layer.hidden),), -INF, dtype=accumulation_dtype(layer.hidden))
    return rows


def scan(
    products: Tensor, bias: Tensor | None, cap: float, start: int, label: Tensor,
    top: Tensor, total: Tensor, own: Tensor, rival: Tensor,
) -> None:  # fmt: skip
    """Take in a chunk of logits: largest, mass over e^largest, logit of the label, and largest of the others."""
    x = _logits(products, bias, cap, start)
    rows, at = _here(label, start, x.shape[1])
    own[rows] = x[rows, at]
    x[rows, at] = -INF
    others = x.amax(-1)
    x[rows, at] = own[rows]
    torch.maximum(rival, others, out=rival)
    higher = torch.maximum(top, others)
    higher[rows] = torch.maximum(higher[rows], own[rows])
    base = higher.masked_fill(higher == -INF, 0)
    total.mul_(torch.exp(top - base)).add_(x.sub_(base[:, None]).exp_().sum(-1))
    top.copy_(higher)


def settle(layer: Any, label: Tensor, delta: Tensor, state: Sequence[Tensor], rival: Tensor) -> tuple[Settled, Tensor]:
    """Thresholds; how many rows are not solved, how many of these are not dense, and 0. Nothing is listed here."""
    top, total, own = state
    ratio = (total.log() - (own - top)).clamp_(min=0).exp_() * delta.to(own.dtype)  # delta / p_t
    sparse = ratio < 1
    threshold = (own + torch.log1p(-ratio)).masked_fill_(~sparse, -INF)
    solved = sparse & (rival < threshold)
    none = own.new_zeros(len(own), 0)
    settled = Settled(threshold, torch.zeros_like(label), torch.zeros_like(own), solved, none.int(), none)
    return settled, torch.stack([(~solved).sum(), (sparse & ~solved).sum(), torch.zeros_like(label[0])])


def finish(
    label: Tensor, class_weight: Tensor | None, row_weight: Tensor | None, state: Sequence[Tensor],
    settled: Settled, first: int, classes: int, reduction: str,
) -> Finished:  # fmt: skip
    """Loss, reduced, and kept, lse, norm, share and right of every row. Labels count from ``first``."""
    top, total, own = state
    log_total = total.log()
    lse = top + log_total
    nll = (log_total - (own - top)).clamp_(min=0)
    sparse = settled.threshold > -INF
    loss = torch.where(sparse, torch.minimum(settled.mass.log1p(), nll), nll)
    norm = (loss - nll).masked_fill_(~sparse, 0) + ((top - lse) + log_total)  # with what lse lost in rounding
    share = torch.ones_like(loss)
    for weights in (None if class_weight is None else class_weight[label + first], row_weight):
        share = share if weights is None else share * weights.to(share.dtype)
    loss = loss * share
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        parts = share.sum()
        parts = parts.masked_fill(parts == 0, 1)
        loss, share = loss / parts, share / parts
    kept = torch.where(sparse, settled.rivals + 1, classes)
    return Finished(loss, kept, lse, norm, share, own >= top)


def sum_kept(
    products: Tensor, bias: Tensor | None, cap: float, start: int, rows: Tensor, label: Tensor,
    own: Tensor, threshold: Tensor, count: Tensor, mass: Tensor,
) -> None:  # fmt: skip
    """Count the kept classes of a chunk of some rows, without the label, and add up their masses over its."""
    x = _logits(products, bias, cap, start)
    here, at = _here(label[rows], start, x.shape[1])
    keep = x >= threshold[rows, None]
    keep[here, at] = False
    count[rows] += keep.sum(-1)
    mass[rows] += (x - own[rows, None]).exp_().mul_(keep).sum(-1)


def differentiate(
    products: Tensor, bias: Tensor | None, cap: float, start: int, rows: Tensor, label: Tensor,
    factor: Tensor, threshold: Tensor, kept: Tensor, lse: Tensor, norm: Tensor,
) -> None:  # fmt: skip
    """Put the gradient in the place of a chunk of products of some rows."""
    x = _logits(products, bias, cap, start)
    here, at = _here(label[rows], start, x.shape[1])
    masked = x < threshold[rows, None]
    masked[here, at] = False  # this product may round the label's logit otherwise than forward's did
    q = (x - (lse + norm)[rows, None]).exp_().masked_fill_(masked, 0)
    q[here, at] -= 1
    q.mul_(factor[rows, None]).masked_fill_(kept[rows, None] <= 1, 0)
    if cap:
        q *= 1 - (x / cap).square()
    products.copy_(q)


def entries(*_: Any) -> None:
    """Nothing is listed."""


def combine(found: None, listed: Tensor, weight: Tensor, grad: Tensor) -> None:
    """0 where hidden states have no gradient, and everywhere else until there is one."""
    grad.zero_()


def spread(found: None, count: int, hidden: Tensor, grad: Tensor | None, grad_bias: Tensor | None) -> None:
    """Nothing is listed."""
