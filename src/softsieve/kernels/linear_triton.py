"""Linear layer and AS cross-entropy in one, in Triton: the backend for fp32 and narrower.

`kernels.linear_types.Backend` says what each function does. Runs under Triton's interpreter too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from softsieve.kernels.cross_entropy_triton import _log1p, _logit, reduce_rows
from softsieve.kernels.launches import Launches
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

TILE = 128  # classes whose largest logit is kept
VISITED = 8  # tiles of a row, at most, that are visited again
FEW_ROWS = 2048  # rows of which each has a program, and these leave a GPU idle with few warps
LISTED = 16  # classes of a row, at most, that are listed
_TILE = tl.constexpr(TILE)


@triton.jit
def _at_least_0(x):
    """A NaN stays one, unlike in `tl.maximum`."""
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def _scan(
    products, bias, label, top, total, own, rival, maxima,
    start, width, tiles, cap,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, WHOLE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Read a row of a chunk of products; bring the row's largest logits and its sum of exponentials up to date.

    Also write the largest logit of every tile, without the label's, and, if the label is in the chunk, its logit.
    """
    row = tl.program_id(0).to(tl.int64)
    t = (tl.load(label + row) - start).to(tl.int32)
    products += row * width
    maxima += row * tiles + start // _TILE
    here = (t >= 0) & (t < width)
    o = _logit(tl.load(products + t, mask=here, other=0.0), bias, start + t, here, cap, BIASED, CAPPED)
    tl.store(own + row, o, mask=here)
    before = tl.load(top + row)
    # Each of TILES tiles has sums of its own, so that nothing is passed between the warps before the end.
    highest = tl.where(tl.arange(0, TILES) >= 0, tl.maximum(before, o), 0.0)
    running = tl.zeros((TILES,), tl.float32)
    others = tl.full((TILES,), -float("inf"), tl.float32)
    for begin in range(0, tl.cdiv(width, _TILE), TILES):
        tile = begin + tl.arange(0, TILES)
        at = tile[:, None] * _TILE + tl.arange(0, _TILE)[None, :]
        if WHOLE:  # no lane is beyond the last class
            x = _logit(tl.load(products + at), bias, start + at, None, cap, BIASED, CAPPED)
        else:
            x = tl.load(products + at, mask=at < width, other=0.0)
            x = _logit(x, bias, start + at, at < width, cap, BIASED, CAPPED)
        largest = tl.max(tl.where(at == t, -float("inf"), x), 1)
        tl.store(maxima + tile, largest.to(maxima.dtype.element_ty), mask=tile * _TILE < width)
        others = tl.maximum(others, largest)
        higher = tl.maximum(highest, largest)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        running = running * tl.exp(highest - base) + tl.sum(tl.exp(x - base[:, None]), 1)
        highest = higher
    above = tl.max(highest, 0)
    base = tl.where(above == -float("inf"), 0.0, above)
    sums = tl.sum(running * tl.exp(highest - base), 0)
    tl.store(top + row, above)
    tl.store(total + row, tl.load(total + row) * tl.exp(before - base) + sums)
    tl.store(rival + row, tl.maximum(tl.load(rival + row), tl.max(others, 0)))


@triton.jit
def _settle(
    hidden, weight, bias, label, delta, maxima, allowance, top, total, own,
    threshold, rivals, odds, listed, classes, logits, counts,
    size, vocabulary, labels, tiles, delta_stride, cap, slack,
    VISITED: tl.constexpr, LISTED: tl.constexpr, ALLOWED: tl.constexpr,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decide a row's threshold from its sums, and whether the few classes that reach it can be listed.

    Reads the tiles' largest logits, which may lack the row's allowance. Tiles that reach the threshold are computed
    again from hidden state and weight, and the classes they keep are written to the row's list and added up. A row with
    too many of either is not listed. The three ``counts`` are those of `Settled`.
    """
    row = tl.program_id(0).to(tl.int64)
    o = tl.load(own + row)
    nll = _at_least_0(tl.log(tl.load(total + row)) - (o - tl.load(top + row)))
    ratio = tl.load(delta + row * delta_stride).to(tl.float32) * tl.exp(nll)  # delta / p_t
    cut = tl.where(ratio < 1.0, o + tl.log(1.0 - ratio), -float("inf"))
    tl.store(threshold + row, cut)
    kept = tl.zeros((), tl.int32)
    kept_odds = tl.zeros((), tl.float32)
    complete = ratio < 1.0
    # What was stored is rounded: what nearly reaches the threshold is computed again.
    reach = cut - tl.abs(cut) * slack
    if ALLOWED:
        reach -= tl.load(allowance + row)
    if complete:
        visits = tl.zeros((), tl.int32)
        lane = tl.arange(0, _TILE)
        for begin in range(0, tiles, TILES):
            tile = begin + tl.arange(0, TILES)
            largest = tl.load(maxima + row * tiles + tile, mask=tile < tiles, other=-float("inf")).to(tl.float32)
            waiting = tl.where((largest >= reach) & (tile < tiles), tile, tiles)
            next_tile = tl.min(waiting, 0)
            while (next_tile < tiles) & (visits <= VISITED):
                visits += 1
                if visits <= VISITED:
                    at = next_tile * _TILE + lane
                    inside = at < vocabulary
                    line = at.to(tl.int64)[:, None] * size
                    sums = tl.zeros((_TILE, BLOCK), tl.float32)
                    for low in range(0, size, BLOCK):
                        column = low + tl.arange(0, BLOCK)
                        h = tl.load(hidden + row * size + column, mask=column < size, other=0.0).to(tl.float32)
                        both = inside[:, None] & (column < size)[None, :]
                        w = tl.load(weight + line + column[None, :], mask=both, other=0.0)
                        sums += w.to(tl.float32) * h[None, :]
                    x = tl.sum(sums, 1).to(weight.dtype.element_ty)  # as the product of matrices rounds
                    x = _logit(x, bias, at, inside, cap, BIASED, CAPPED)
                    keep = (x >= cut) & inside
                    for place in range(labels):
                        keep &= at != tl.load(label + row * labels + place)
                    slot = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
                    fits = keep & (slot < LISTED)
                    tl.store(classes + row * LISTED + slot, at, mask=fits)
                    tl.store(logits + row * LISTED + slot, x, mask=fits)
                    kept_odds += tl.sum(tl.where(keep, tl.exp(x - o), 0.0), 0)
                    kept += tl.sum(keep.to(tl.int32), 0)
                waiting = tl.where(waiting == next_tile, tiles, waiting)
                next_tile = tl.min(waiting, 0)
        if (visits > VISITED) | (kept > LISTED):
            complete = ratio >= 1.0
            kept = kept * 0
            kept_odds = kept_odds * 0.0
            tl.atomic_add(counts + 1, 1)
    tl.store(rivals + row, kept)
    tl.store(odds + row, kept_odds)
    tl.store(listed + row, complete)
    if complete == 0:
        tl.atomic_add(counts, 1)
    if kept > 0:
        tl.atomic_add(counts + 2, kept + 1)


@triton.jit
def _finish(
    label, class_weight, row_weight, top, total, own, rival, threshold, rivals, odds,
    loss, kept, lse, norm, share, margin, right,
    rows, first, classes,
    CLASSES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read the sums of a block of rows; write weighted losses before reduction, statistics and backward's numbers.

    A label out of range is written as -1 kept classes, which the reduction reports.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    t = tl.load(label + row, mask=inside, other=0) + first
    valid = (t >= 0) & (t < classes)
    highest = tl.load(top + row, mask=inside, other=0.0)
    log_total = tl.log(tl.load(total + row, mask=inside, other=1.0))
    o = tl.load(own + row, mask=inside, other=0.0)
    nll = _at_least_0(log_total - (o - highest))
    sparse = tl.load(threshold + row, mask=inside, other=0.0) > -float("inf")
    own_loss = tl.where(sparse, tl.minimum(_log1p(tl.load(odds + row, mask=inside, other=0.0)), nll), nll)
    all_log = highest + log_total
    part = tl.full((BLOCK,), 1.0, tl.float32)
    if CLASSES:
        part *= tl.load(class_weight + t, mask=inside & valid, other=0.0).to(tl.float32)
    if ROWS:
        part *= tl.load(row_weight + row, mask=inside, other=0.0).to(tl.float32)
    many = tl.where(sparse, tl.load(rivals + row, mask=inside, other=0) + 1, classes)
    tl.store(loss + row, own_loss * part, mask=inside)
    tl.store(kept + row, tl.where(valid, many, -1), mask=inside)
    tl.store(lse + row, all_log, mask=inside)
    lost = (highest - all_log) + log_total  # in rounding
    tl.store(norm + row, tl.where(sparse, own_loss - nll, 0.0) + lost, mask=inside)
    tl.store(share + row, part, mask=inside)
    rival_log_p = (tl.load(rival + row, mask=inside, other=0.0) - highest) - log_total
    tl.store(margin + row, tl.exp(-nll) - tl.exp(rival_log_p), mask=inside)
    tl.store(right + row, o >= highest, mask=inside)


@triton.jit
def _sum_kept(
    products, bias, rows, label, own, threshold, rivals, odds,
    start, width, cap,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read a row of a chunk; add its kept classes to the row's count, and their exponentials over the label's."""
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + line)
    t = tl.load(label + row) - start
    products += line * width
    o, cut = tl.load(own + row), tl.load(threshold + row)
    kept = tl.load(rivals + row)
    sums = tl.load(odds + row)
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(products + at, mask=at < width, other=0.0)
        x = _logit(x, bias, start + at, at < width, cap, BIASED, CAPPED)
        keep = (x >= cut) & (at != t) & (at < width)
        kept += tl.sum(keep.to(tl.int32), 0)
        sums += tl.sum(tl.where(keep, tl.exp(x - o), 0.0), 0)
    tl.store(rivals + row, kept)
    tl.store(odds + row, sums)


@triton.jit
def _differentiate(
    products, bias, rows, label, factor, threshold, kept, lse, norm,
    start, width, cap,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read a block of a row's products and the row's constants; write the logits' gradient in the products' place."""
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + line)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    products += line * width + at
    x = tl.load(products, mask=at < width, other=0.0)
    x = _logit(x, bias, start + at, at < width, cap, BIASED, CAPPED)
    q = tl.exp((x - tl.load(lse + row)) - tl.load(norm + row))
    own = start + at == tl.load(label + row)  # kept, also if this product rounds its logit otherwise than forward's did
    q = tl.where((x < tl.load(threshold + row)) & (own == 0), 0.0, q)
    q = (q - tl.where(own, 1.0, 0.0)) * tl.load(factor + row)
    q = tl.where(tl.load(kept + row) > 1, q, 0.0)
    if CAPPED:
        q *= 1.0 - (x / cap) * (x / cap)
    tl.store(products, q.to(products.dtype.element_ty), mask=at < width)


@triton.jit
def _entries(
    factor, label, kept, listed, own, lse, norm, classes, logits, coefficients, keys,
    cap, none,
    LISTED: tl.constexpr, CAPPED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Read a row's list; write the gradient of its logits and of the label's, with their classes as keys.

    What does not count, because the row is solved or not listed or its list is shorter, gets the key ``none``.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    last = at == LISTED  # the label
    whole = tl.load(listed + row)
    live = tl.load(kept + row) > 1
    o = tl.load(own + row)
    t = tl.where(o > -float("inf"), tl.load(label + row), -1)
    j = tl.where(last, t, tl.load(classes + row * LISTED + at, mask=at < LISTED, other=-1))
    x = tl.where(last, o, tl.load(logits + row * LISTED + at, mask=at < LISTED, other=0.0))
    q = tl.exp((x - tl.load(lse + row)) - tl.load(norm + row)) - tl.where(last, 1.0, 0.0)
    if CAPPED:
        q *= 1.0 - (x / cap) * (x / cap)
    used = (j >= 0) & (at <= LISTED) & live & whole
    place = row * (LISTED + 1) + at
    tl.store(coefficients + place, tl.where(used, q * tl.load(factor + row), 0.0), mask=at <= LISTED)
    tl.store(keys + place, tl.where(used, j, none), mask=at <= LISTED)


@triton.jit
def _combine(
    coefficients, keys, listed, weight, grad, size, none, ENTRIES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Read a listed row's entries and the weights of their classes; write the gradient of its hidden state."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(listed + row) != 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < size
        total = tl.zeros((BLOCK,), tl.float32)
        for entry in range(ENTRIES):
            j = tl.load(keys + row * ENTRIES + entry)
            if j < none:
                w = tl.load(weight + j.to(tl.int64) * size + column, mask=inside, other=0.0).to(tl.float32)
                total += tl.load(coefficients + row * ENTRIES + entry) * w
        tl.store(grad + row * size + column, total.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def _spread(
    coefficients, keys, order, hidden, grad, grad_bias, count, size,
    ENTRIES: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read the sorted entries of one class and their hidden states; add them in order to its gradients.

    The program of the first entry of a class does the work of all of them, so that no sum depends on chance.
    """
    entry = tl.program_id(0)
    j = tl.load(keys + entry)
    before = tl.load(keys + entry - 1, mask=entry > 0, other=-1)
    if j != before:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < size
        total = tl.zeros((BLOCK,), tl.float32)
        alone = tl.zeros((), tl.float32)
        following = j
        while following == j:
            place = tl.load(order + entry)
            factor = tl.load(coefficients + place)
            h = tl.load(hidden + (place // ENTRIES) * size + column, mask=inside, other=0.0).to(tl.float32)
            total += factor * h
            alone += factor
            entry += 1
            following = tl.load(keys + entry, mask=entry < count, other=-1)
        if WEIGHTED:
            place_of_class = grad + j.to(tl.int64) * size + column
            total += tl.load(place_of_class, mask=inside, other=0.0).to(tl.float32)
            tl.store(place_of_class, total.to(grad.dtype.element_ty), mask=inside)
        if BIASED:  # noqa: SIM102
            if tl.program_id(1) == 0:
                alone += tl.load(grad_bias + j).to(tl.float32)
                tl.store(grad_bias + j, alone.to(grad_bias.dtype.element_ty))


_launch_scan, _launch_sum_kept, _launch_differentiate = Launches(_scan), Launches(_sum_kept), Launches(_differentiate)
_launch_settle, _launch_finish, _launch_entries = Launches(_settle), Launches(_finish), Launches(_entries)
_launch_combine, _launch_spread = Launches(_combine), Launches(_spread)


def _logit_options(chunk: Chunk | Layer) -> tuple[bool, bool]:
    """BIASED and CAPPED."""
    return chunk.bias is not None, chunk.cap > 0


def _block(width: int, most: int) -> int:
    return int(max(TILE, min(triton.next_power_of_2(width), most)))


def make_marks(layer: Layer, state: Scan) -> Tensor:
    """The largest logit of every tile, without the label's. (rows, tiles)"""
    return layer.hidden.new_empty(len(layer.hidden), triton.cdiv(len(layer.weight), TILE))


def scan(chunk: Chunk, label: Tensor, state: Scan, marks: Tensor) -> None:
    """Take in a chunk of logits."""
    products, bias, cap, start = chunk
    rows, width = products.shape
    warps = 4 if rows <= FEW_ROWS else 2
    tiles = min(triton.next_power_of_2(triton.cdiv(width, TILE)), 4 * warps)
    args = (products, products if bias is None else bias, label, *state, marks, start, width, marks.shape[1], cap)
    constants = *_logit_options(chunk), width % (tiles * TILE) == 0, tiles
    _launch_scan.by_types((rows, 1, 1), args, constants, num_warps=warps)


def sum_kept(chunk: Chunk, rows: Tensor, label: Tensor, own: Tensor, settled: Settled) -> None:
    """Count the kept classes of a chunk, without the label, and add up their exponentials."""
    products, bias, cap, start = chunk
    width = products.shape[1]
    args = (products, products if bias is None else bias, rows, label, own, *settled[:3], start, width, cap)
    constants = *_logit_options(chunk), _block(width, 2048)
    _launch_sum_kept.by_types((len(rows), 1, 1), args, constants, num_warps=4)


def differentiate(chunk: Chunk, rows: Tensor, label: Tensor, factor: Tensor, saved: Saved | SavedSides) -> None:
    """Put the gradient in the place of the products."""
    products, bias, cap, start = chunk
    width = products.shape[1]
    block = _block(width, 2048)
    args = (products, products if bias is None else bias, rows, label, factor, *saved[:4], start, width, cap)
    grid = len(rows), triton.cdiv(width, block), 1
    _launch_differentiate.by_types(grid, args, (*_logit_options(chunk), block), num_warps=4)


def settle(layer: Layer, targets: Targets, state: Scan, marks: Tensor, allowance: Tensor | None = None) -> Settled:
    """Thresholds, and the kept classes of rows that have few."""
    hidden, weight, bias, cap = layer
    rows, size = hidden.shape
    threshold, odds = (hidden.new_empty(rows, dtype=torch.float32) for _ in range(2))
    rivals = hidden.new_empty(rows, dtype=torch.int32)
    listed = hidden.new_empty(rows, dtype=torch.bool)
    classes = hidden.new_full((rows, LISTED), -1, dtype=torch.int32)
    logits = hidden.new_empty(rows, LISTED, dtype=torch.float32)
    settled = Settled(threshold, rivals, odds, listed, classes, logits, hidden.new_zeros(3, dtype=torch.int32))
    tiles = marks.shape[1]
    slack = torch.finfo(hidden.dtype).eps if allowance is None else SLACK
    args = (
        hidden, weight, weight if bias is None else bias, targets.label, targets.delta, marks,
        threshold if allowance is None else allowance, *state[:3], *settled,
        size, len(weight), targets.label.numel() // rows, tiles, targets.delta.ndim, cap, slack,
    )  # fmt: skip
    most = min(triton.next_power_of_2(tiles), 2048)
    constants = VISITED, LISTED, allowance is not None, *_logit_options(layer), most, 128
    _launch_settle.by_types((rows, 1, 1), args, constants, num_warps=8)
    return settled


def finish(
    targets: Targets, state: Scan, settled: Settled, first: int, classes: int, reduction: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, from the sums over all classes."""
    label, _, class_weight, row_weight = targets
    rows = len(label)
    loss, lse, norm, share, margin = (settled.threshold.new_empty(rows) for _ in range(5))
    kept, right = label.new_empty(rows), label.new_empty(rows, dtype=torch.bool)
    args = (
        label, loss if class_weight is None else class_weight, loss if row_weight is None else row_weight,
        *state, *settled[:3], loss, kept, lse, norm, share, margin, right, rows, first, classes,
    )  # fmt: skip
    _launch_finish.by_types(
        (triton.cdiv(rows, 256), 1, 1), args, (class_weight is not None, row_weight is not None, 256)
    )
    loss, valid = reduce_rows(loss, kept, share, reduction)
    torch._assert_async(valid, f"target: expected labels in [0, {classes})")
    return loss, kept, lse, norm, share, margin, right


def make_entries(layer: Layer, label: Tensor, factor: Tensor, saved: Saved) -> Entries:
    """Of rows that have a gradient and whose kept classes are listed."""
    rows, width = saved.classes.shape
    made = Entries(saved.logits.new_empty(rows, width + 1), saved.classes.new_empty(rows, width + 1), len(layer.weight))
    args = (
        factor, label, saved.kept, saved.listed, saved.own, saved.lse, saved.norm, saved.classes, saved.logits,
        made.coefficients, made.keys, layer.cap, made.none,
    )  # fmt: skip
    constants = width, layer.cap > 0, triton.next_power_of_2(width + 1)
    _launch_entries.by_types((rows, 1, 1), args, constants, num_warps=1)
    return made


def combine(entries: Entries, listed: Tensor, weight: Tensor, grad: Tensor) -> None:
    """Gradients of the hidden states of listed rows; others are left alone."""
    rows, size = grad.shape
    block = _block(size, 1024)
    args = entries.coefficients, entries.keys, listed, weight, grad, size, entries.none
    _launch_combine.by_types((rows, triton.cdiv(size, block), 1), args, (entries.keys.shape[1], block), num_warps=4)


def spread(entries: SortedEntries, hidden: Tensor, grad: Tensor | None, grad_bias: Tensor | None) -> None:
    """Add to the gradients of weight and bias what is listed."""
    coefficients, keys, order = entries
    if count := len(keys):
        size = hidden.shape[1]
        block = _block(size, 512)
        args = (
            coefficients, keys, order, hidden, hidden if grad is None else grad,
            hidden if grad_bias is None else grad_bias, count, size,
        )  # fmt: skip
        constants = coefficients.shape[1], grad is not None, grad_bias is not None, block
        _launch_spread.by_types((count, triton.cdiv(size, block), 1), args, constants, num_warps=4)
