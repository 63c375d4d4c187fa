"""What `kernels.linear_multilabel` computes of each row and its labels, in Triton: one launch instead of dozens.

Each is a program a row. A step of few dense rows is so short on a GPU that a host which launches every addition by
itself would take longer. Runs under Triton's interpreter too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from softsieve.kernels.cross_entropy_triton import LARGEST, _log1p
from softsieve.kernels.launches import Launches
from softsieve.kernels.linear_types import Entries, SavedSides, Scan, Settled


@triton.jit
def _own(
    labels, own, wrong, width, first, count, classes, ignore_index, CHECKED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Read the labels of a row; write them as numbers of this shard's classes, -1 for others and for padding.

    Also raise the flag ``wrong`` if one is out of range or there twice, or there is none.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    t = tl.load(labels + row * width + at, mask=at < width, other=-1)
    present = (t != ignore_index) & (at < width)
    here = present & (t >= first) & (t < first + count)
    tl.store(own + row * width + at, tl.where(here, t - first, -1), mask=at < width)
    if CHECKED:
        outside = present & ((t < 0) | (t >= classes))
        same = (t[:, None] == t[None, :]) & (at[:, None] < at[None, :]) & present[:, None] & present[None, :]
        faults = tl.sum(outside.to(tl.int32), 0) + tl.sum(tl.sum(same.to(tl.int32), 1), 0)
        if (faults > 0) | (tl.sum(present.to(tl.int32), 0) == 0):
            tl.store(wrong, 1)


_launch_own = Launches(_own)


def own_labels(labels: Tensor, first: int, count: int, classes: int, ignore_index: int, *, check: bool) -> Tensor:
    """Labels (rows, so many) counted from this shard's ``first`` class, -1 for others; on a GPU all can be asserted."""
    rows, width = labels.shape
    own = torch.empty_like(labels)
    wrong = labels.new_zeros((), dtype=torch.int32) if check else labels
    args = labels, own, wrong, width, first, count, classes, ignore_index
    _launch_own.by_types((rows, 1, 1), args, (check, triton.next_power_of_2(width)), num_warps=1)
    if check:
        torch._assert_async(wrong == 0, f"labels: expected different class numbers in [0, {classes}) in every row")
    return own


@triton.jit
def _log_with_threshold(total, base):
    """log(exp(-base) + total)."""
    return tl.where(base > 0.0, tl.log(tl.exp(-base) + total), _log1p(total))


@triton.jit
def _finish(
    labels, delta, top, total, own, rival, threshold, rivals, odds,
    loss, kept, margin, kept_negatives, lse, norm, gradient,
    width, delta_stride, classes, ignore_index, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read the sums of a row's negatives and the logits of its labels; write its loss and what else is known of it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    t = tl.load(labels + row * width + at, mask=inside, other=0)
    present = (t != ignore_index) & inside
    count = tl.sum(present.to(tl.int64), 0)

    highest = tl.load(top + row)
    log_total = _log_with_threshold(tl.load(total + row), highest)
    all_log = highest + log_total
    sparse = tl.load(threshold + row) > -float("inf")
    negative_loss = tl.where(sparse, tl.minimum(_log1p(tl.load(odds + row)), all_log), all_log)
    negatives = tl.where(sparse, tl.load(rivals + row).to(tl.int64), classes - count)
    lost = (highest - all_log) + log_total  # in rounding
    tl.store(lse + row, all_log)
    tl.store(norm + row, tl.where(sparse, negative_loss - all_log, 0.0) + lost)
    tl.store(kept_negatives + row, negatives + 1)
    lead = tl.exp(-all_log) - tl.exp((tl.load(rival + row) - highest) - log_total)

    o = tl.load(own + row * width + at, mask=present, other=float("inf"))
    z = -o
    peak = tl.max(z, 0)
    base = tl.where(peak > 0.0, peak, 0.0)
    e = tl.exp(z - base)
    whole = _log_with_threshold(tl.sum(e, 0), base)
    ratio = tl.load(delta + row * delta_stride).to(tl.float32) * tl.minimum(tl.exp(base + whole), LARGEST)
    cut = tl.where(ratio < 1.0, tl.log(1.0 - tl.minimum(ratio, 1.0)), -float("inf"))
    keep = ((z < cut) == 0) & present
    part = tl.minimum(_log_with_threshold(tl.sum(tl.where(keep, e, 0.0), 0), base), whole)
    positives = tl.sum(keep.to(tl.int64), 0)
    positive_norm = tl.where(cut == -float("inf"), whole, part)
    positive_loss = tl.where(positives == 0, 0.0, base + positive_norm)
    positive_lead = tl.exp(-base - whole) - tl.exp((peak - base) - whole)
    g = tl.where(keep, -tl.exp((z - base) - positive_norm), 0.0)

    row_loss = negative_loss + positive_loss
    least = tl.where((lead < positive_lead) | (lead != lead), lead, positive_lead)
    many = negatives + positives
    if tl.sum((present & ((o < float("inf")) == 0)).to(tl.int32), 0) > 0:
        row_loss = row_loss * 0.0 + float("nan")  # an infinite positive would cost nothing: NaN, as in cross-entropy
        least = least * 0.0 + float("nan")
        many = many * 0 + classes
        g = tl.where(present, float("nan"), g)
    tl.store(loss + row, row_loss)
    tl.store(margin + row, least)
    tl.store(kept + row, many)
    tl.store(gradient + row * width + at, g, mask=inside)


_launch_finish = Launches(_finish)


def finish(
    state: Scan, settled: Settled, labels: Tensor, delta: Tensor, classes: int, unlisted: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor, SavedSides]:
    """Loss, kept and margin of every row, and what backward needs; ``state.own`` has the labels' logits."""
    rows, width = labels.shape
    loss, margin, lse, norm = (settled.threshold.new_empty(rows) for _ in range(4))
    kept, kept_negatives = (labels.new_empty(rows) for _ in range(2))
    gradient = loss.new_empty(rows, width)
    args = (
        labels, delta, *state, *settled[:3], loss, kept, margin, kept_negatives, lse, norm, gradient,
        width, delta.ndim, classes, ignore_index,
    )  # fmt: skip
    _launch_finish.by_types((rows, 1, 1), args, (triton.next_power_of_2(width),), num_warps=1)
    lists = settled.listed, settled.classes, settled.logits
    saved = SavedSides(settled.threshold, kept_negatives, lse, norm, *lists, torch.tensor(unlisted), gradient)
    return loss, kept, margin, saved


@triton.jit
def _entries(
    factor, label, listed, classes, logits, lse, norm, positives, values, coefficients, keys,
    width, none, LISTED: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read a row's list and its labels' gradient; write both, times its factor, with their classes as keys.

    What does not count, because the row is not listed or its list is shorter, gets the key ``none``.
    """
    row = tl.program_id(0).to(tl.int64)
    times = tl.load(factor + row)
    whole = tl.load(listed + row) != 0
    at = tl.arange(0, ENTRIES)
    of_list = at < LISTED
    j = tl.load(classes + row * LISTED + at, mask=of_list, other=-1)
    x = tl.load(logits + row * LISTED + at, mask=of_list & (j >= 0), other=0.0)
    q = tl.exp((x - tl.load(lse + row)) - tl.load(norm + row)) * times
    place = at - LISTED
    of_labels = (place >= 0) & (place < width)
    t = tl.load(label + row * width + place, mask=of_labels, other=-1).to(tl.int32)
    g = tl.load(positives + row * width + place, mask=of_labels, other=0.0) * times
    used = whole & tl.where(of_list, j >= 0, (t >= 0) & (g != 0.0))
    tl.store(coefficients + row * ENTRIES + at, tl.where(used, tl.where(of_list, q, g), 0.0))
    tl.store(keys + row * ENTRIES + at, tl.where(used, tl.where(of_list, j, t), none))
    lane = tl.arange(0, BLOCK)
    own = tl.load(positives + row * width + lane, mask=lane < width, other=0.0)
    tl.store(values + row * width + lane, own * times, mask=lane < width)


_launch_entries = Launches(_entries)


def list_entries(label: Tensor, factor: Tensor, saved: SavedSides, none: int) -> tuple[Entries, Tensor]:
    """The gradient of the kept classes of listed rows, of both sides; and that of all rows' labels, (rows, labels)."""
    (rows, width), listed = label.shape, saved.classes.shape[1]
    entries = triton.next_power_of_2(listed + width)  # kernels are compiled for few widths
    values = torch.empty_like(saved.positives)
    made = Entries(saved.logits.new_empty(rows, entries), saved.classes.new_empty(rows, entries), none)
    args = (
        factor, label, saved.listed, saved.classes, saved.logits, saved.lse, saved.norm, saved.positives, values,
        made.coefficients, made.keys, width, none,
    )  # fmt: skip
    _launch_entries.by_types((rows, 1, 1), args, (listed, entries, triton.next_power_of_2(width)), num_warps=1)
    return made, values
