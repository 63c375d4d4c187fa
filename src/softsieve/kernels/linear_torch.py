"""Linear layer and AS cross-entropy in one, in plain torch: the backend for any device and dtype.

`kernels.linear_types.Backend` says what each function does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from softsieve.kernels.cross_entropy_torch import INF, accumulation_dtype
from softsieve.kernels.linear_types import (
    SLACK,
    Chunk,
    Entries,
    Layer,
    Saved,
    SavedSides,
    Scan,
    Settled,
    SortedEntries,
    Targets,
)

LISTED = 0
GATHERED = 1 << 22  # numbers of hidden states or weights that are gathered at a time


def _logits(chunk: Chunk) -> Tensor:
    """In the accumulation dtype; the products themselves where nothing is to be done."""
    x = chunk.products.to(accumulation_dtype(chunk.products))
    if chunk.bias is not None:
        x = x + chunk.bias[chunk.start : chunk.start + x.shape[1]].to(x.dtype)
    return chunk.cap * torch.tanh(x / chunk.cap) if chunk.cap else x


def _labels_in(chunk: Chunk, label: Tensor) -> tuple[Tensor, Tensor]:
    """Rows whose label is in the chunk, and its column."""
    column = label - chunk.start
    rows = ((column >= 0) & (column < chunk.products.shape[1])).nonzero().squeeze(1)
    return rows, column[rows]


def make_marks(layer: Layer, state: Scan) -> Tensor:
    """The largest logit besides the label's."""
    return state.rival


def scan(chunk: Chunk, label: Tensor, state: Scan, marks: Tensor) -> None:
    """Take in a chunk of logits."""
    x, (top, total, own, rival) = _logits(chunk), state
    rows, at = _labels_in(chunk, label)
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


def settle(layer: Layer, targets: Targets, state: Scan, marks: Tensor, allowance: Tensor | None = None) -> Settled:
    """Thresholds. Solved rows are listed, with nothing in their lists; no others are."""
    top, total, own, _ = state
    ratio = (total.log() - (own - top)).clamp_(min=0).exp_() * targets.delta.to(own.dtype)  # delta / p_t
    sparse = ratio < 1
    threshold = (own + torch.log1p(-ratio)).masked_fill_(~sparse, -INF)
    highest = marks if allowance is None else marks + allowance + threshold.abs() * SLACK
    solved = sparse & (highest < threshold)
    rivals, none = torch.zeros_like(own, dtype=torch.long), own.new_zeros(len(own), 0)
    counts = torch.stack([(~solved).sum(), (sparse & ~solved).sum(), torch.zeros_like(rivals[0])])
    return Settled(threshold, rivals, torch.zeros_like(own), solved, none.int(), none, counts)


def make_shares(targets: Targets, first: int, like: Tensor) -> Tensor:
    """The weight of every row, of its own and of its label; this shard begins at the class ``first``."""
    share = like.new_ones(len(targets.label), dtype=accumulation_dtype(like))
    of_label = None if targets.class_weight is None else targets.class_weight[targets.label + first]
    for weights in (of_label, targets.row_weight):
        share = share if weights is None else share * weights.to(share.dtype)
    return share


def finish(
    targets: Targets, state: Scan, settled: Settled, first: int, classes: int, reduction: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, from the sums over all classes."""
    top, total, own, rival = state
    log_total = total.log()
    lse = top + log_total
    nll = (log_total - (own - top)).clamp_(min=0)
    sparse = settled.threshold > -INF
    loss = torch.where(sparse, torch.minimum(settled.odds.log1p(), nll), nll)
    norm = (loss - nll).masked_fill_(~sparse, 0) + ((top - lse) + log_total)  # with what lse lost in rounding
    share = make_shares(targets, first, loss)
    loss = loss * share
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        parts = share.sum()
        parts = parts.masked_fill(parts == 0, 1)
        loss, share = loss / parts, share / parts
    kept = torch.where(sparse, settled.rivals + 1, classes)
    margin = torch.exp(-nll) - torch.exp((rival - top) - log_total)
    return loss, kept, lse, norm, share, margin, own >= top


def sum_kept(chunk: Chunk, rows: Tensor, label: Tensor, own: Tensor, settled: Settled) -> None:
    """Count the kept classes of a chunk, without the label, and add up their exponentials."""
    x = _logits(chunk)
    keep = x >= settled.threshold[rows, None]
    keep[_labels_in(chunk, label[rows])] = False
    settled.rivals[rows] += keep.sum(-1)
    settled.odds[rows] += (x - own[rows, None]).exp_().mul_(keep).sum(-1)


def differentiate(chunk: Chunk, rows: Tensor, label: Tensor, factor: Tensor, saved: Saved | SavedSides) -> None:
    """Put the gradient in the place of the products."""
    x, at_label = _logits(chunk), _labels_in(chunk, label[rows])
    slope = 1 - (x / chunk.cap).square() if chunk.cap else None
    threshold = saved.threshold[rows]
    all_dense = x.is_cpu and bool((threshold == -INF).all())  # often so; on a GPU, looking is waiting for it
    masked = None if all_dense else x < threshold[:, None]
    q = x.sub_((saved.lse + saved.norm)[rows, None]).exp_()  # the products themselves, if they are logits
    if masked is not None:
        masked[at_label] = False  # this product may round the label's logit otherwise than forward's did
        q.masked_fill_(masked, 0)
    q[at_label] -= 1
    q.mul_(factor[rows].masked_fill(saved.kept[rows] <= 1, 0)[:, None])
    if slope is not None:
        q *= slope
    if q.data_ptr() != chunk.products.data_ptr():
        chunk.products.copy_(q)


def make_entries(layer: Layer, label: Tensor, factor: Tensor, saved: Saved) -> Entries:
    """None: listed rows have no gradient."""
    return Entries(saved.logits, saved.classes, len(layer.weight))


def combine(entries: Entries, listed: Tensor, weight: Tensor, grad: Tensor) -> None:
    """Gradients of the hidden states of listed rows, 0 where nothing is listed."""
    grad.zero_()
    row, place = (entries.keys < entries.none).nonzero(as_tuple=True)
    _add_sums(grad, row, entries.coefficients[row, place], weight, entries.keys[row, place])


def spread(entries: SortedEntries, hidden: Tensor, grad: Tensor | None, grad_bias: Tensor | None) -> None:
    """Add to the gradients of weight and bias what is listed."""
    coefficients, keys, order = entries
    if not len(keys):
        return
    factor = coefficients.flatten()[order]
    if grad is not None:
        _add_sums(grad, keys, factor, hidden, order // coefficients.shape[1])
    if grad_bias is not None:
        _add_sums(grad_bias.unsqueeze(1), keys, factor, hidden.new_ones(1, 1), torch.zeros_like(order))


def _add_sums(grad: Tensor, to: Tensor, factor: Tensor, values: Tensor, index: Tensor) -> None:
    """Add ``factor * values[index]`` to the rows ``to`` of a gradient, which are in order, some entries at a time.

    Sums are made in the accumulation dtype, in the order of the entries.
    """
    step = max(1, GATHERED // values.shape[1])
    for start in range(0, len(to), step):
        part = slice(start, start + step)
        rows, place = torch.unique_consecutive(to[part], return_inverse=True)
        terms = values[index[part]].to(factor.dtype) * factor[part, None]
        sums = terms.new_zeros(len(rows), values.shape[1]).index_put_((place,), terms, accumulate=True)
        grad[rows] += sums.to(grad.dtype)
