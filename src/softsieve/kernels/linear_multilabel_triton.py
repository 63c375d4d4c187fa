"""The first pass of `kernels.linear_multilabel` in Triton, and what it takes out of chunks of logits and puts back.

In 16 bits the first pass is one launch, in which logits leave no multiprocessor: a launch a chunk takes a host longer
than a GPU needs for the chunk. In fp32, where products are the vendor's, it goes chunk by chunk. Runs under Triton's
interpreter too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from softsieve.kernels.cross_entropy_triton import _logit
from softsieve.kernels.launches import Launches
from softsieve.kernels.linear_triton import TILE
from softsieve.kernels.linear_types import Chunk, Layer, Scan

STRIP = 16  # tiles of classes of a program
ROWS, DEPTH = 128, 64  # rows and columns that a program of the first pass takes at a time
WARPS, STAGES = 4, 3  # of such a program, as Triton has them
_TILE = tl.constexpr(TILE)


@triton.jit
def _take(products, bias, label, own, start, width, labels, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    """Read the labels of a row; of those in the chunk write the logits, and -inf in their place."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    t = (tl.load(label + row * labels + at, mask=at < labels, other=-1) - start).to(tl.int32)
    here = (t >= 0) & (t < width) & (at < labels)
    products += row * width + t
    x = _logit(tl.load(products, mask=here, other=0.0), bias, start + t, here, 0.0, BIASED, False)
    tl.store(own + row * labels + at, x, mask=here)
    gone = tl.full((BLOCK,), -float("inf"), tl.float32)
    tl.store(products, gone.to(products.dtype.element_ty), mask=here)


@triton.jit
def _put(products, rows, label, values, start, width, labels, VALUED: tl.constexpr, BLOCK: tl.constexpr):
    """Read the labels of a row; write values, or -inf, in the place of those that are in the chunk."""
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + line)
    at = tl.arange(0, BLOCK)
    t = (tl.load(label + row * labels + at, mask=at < labels, other=-1) - start).to(tl.int32)
    here = (t >= 0) & (t < width) & (at < labels)
    value = tl.full((BLOCK,), -float("inf"), tl.float32)
    if VALUED:
        value = tl.load(values + row * labels + at, mask=here, other=0.0)
    tl.store(products + line * width + t, value.to(products.dtype.element_ty), mask=here)


@triton.jit
def _scan_layer(
    hidden, weight, bias, label, own, tops, totals, maxima,
    rows, classes, size, labels, tiles,
    BIASED: tl.constexpr, EVEN: tl.constexpr, STRIP: tl.constexpr,
    ROWS: tl.constexpr, LABELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Read a block of hidden states and the weights of a strip of tiles; write what a pass over its logits shows.

    That is the largest logit of each tile and of the strip, and the sum of exponentials over the latter, all without
    the rows' labels, whose logits are written by themselves.
    """
    blocks = tl.cdiv(rows, ROWS)
    row = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    strip = tl.program_id(0) // blocks
    present = row < rows
    place = tl.minimum(row, rows - 1).to(tl.int64)
    lane = tl.arange(0, LABELS)
    t = tl.load(label + place[:, None] * labels + lane[None, :], mask=(lane < labels)[None, :], other=-1).to(tl.int32)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    running = tl.zeros((ROWS,), tl.float32)
    for tile in range(strip * STRIP, tl.minimum(strip * STRIP + STRIP, tiles)):
        first = tile * _TILE
        at = first + tl.arange(0, _TILE)
        line = tl.minimum(at, classes - 1).to(tl.int64)
        x = tl.zeros((ROWS, _TILE), tl.float32)
        for low in range(0, size, DEPTH):
            column = low + tl.arange(0, DEPTH)
            if EVEN:
                h = tl.load(hidden + place[:, None] * size + column[None, :])
                w = tl.load(weight + line[:, None] * size + column[None, :])
            else:
                h = tl.load(hidden + place[:, None] * size + column[None, :], mask=(column < size)[None, :], other=0.0)
                w = tl.load(weight + line[:, None] * size + column[None, :], mask=(column < size)[None, :], other=0.0)
            x = tl.dot(h, tl.trans(w), x)
        x = x.to(weight.dtype.element_ty).to(tl.float32)  # as the product of matrices rounds
        if BIASED:
            x += tl.load(bias + line).to(tl.float32)[None, :]
        x = tl.where((at < classes)[None, :], x, -float("inf"))
        here = (t >= first) & (t < first + _TILE)
        if tl.sum(tl.sum(here.to(tl.int32), 1), 0) > 0:
            for number in range(labels):
                mine = tl.load(label + place * labels + number).to(tl.int32)
                hit = mine[:, None] == at[None, :]
                inside = (mine >= first) & (mine < first + _TILE) & present
                tl.store(own + place * labels + number, tl.max(tl.where(hit, x, -float("inf")), 1), mask=inside)
                x = tl.where(hit, -float("inf"), x)
        largest = tl.max(x, 1)
        tl.store(maxima + place * tiles + tile, largest.to(maxima.dtype.element_ty), mask=present)
        higher = tl.maximum(highest, largest)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        running = running * tl.exp(highest - base) + tl.sum(tl.exp(x - base[:, None]), 1)
        highest = higher
    tl.store(tops + strip * rows + row, highest, mask=present)
    tl.store(totals + strip * rows + row, running, mask=present)


_launch_take, _launch_put, _launch_scan_layer = Launches(_take), Launches(_put), Launches(_scan_layer)


def scans_layer(layer: Layer) -> bool:
    """Whether `scan_layer` is for this layer."""
    return layer.hidden.dtype in (torch.bfloat16, torch.float16)


def scan_layer(layer: Layer, label: Tensor, own: Tensor) -> tuple[Scan, Tensor]:
    """A pass over the negatives of all rows, with the threshold of logit 0 in ``top`` alone; and the tiles' largest.

    Writes to ``own`` the logits of the labels, both (rows, labels).
    """
    hidden, weight, bias, _ = layer
    (rows, size), (_, labels) = hidden.shape, label.shape
    tiles = triton.cdiv(len(weight), TILE)
    strips = triton.cdiv(tiles, STRIP)
    maxima = hidden.new_empty(rows, tiles)
    tops, totals = (hidden.new_empty(strips, rows, dtype=torch.float32) for _ in range(2))
    block = max(16, min(ROWS, triton.next_power_of_2(rows)))
    depth = max(16, min(DEPTH, triton.next_power_of_2(size)))
    args = (
        hidden, weight, weight if bias is None else bias, label, own, tops, totals, maxima,
        rows, len(weight), size, labels, tiles,
    )  # fmt: skip
    constants = bias is not None, size % depth == 0, STRIP, block, triton.next_power_of_2(labels), depth
    grid = triton.cdiv(rows, block) * strips, 1, 1
    _launch_scan_layer.by_types(grid, args, constants, num_warps=WARPS, num_stages=STAGES)
    rival = tops.amax(0)
    top = rival.clamp_min(0)  # a NaN stays one
    total = totals.mul_(tops.sub_(top).exp_()).sum(0)
    return Scan(top, total, top, rival), maxima


def take_labels(chunk: Chunk, label: Tensor, own: Tensor) -> None:
    """Write the logits of labels that are in the chunk to ``own``, and -inf in their place. Both (rows, labels)."""
    products, bias, _, start = chunk
    rows, labels = label.shape
    args = products, products if bias is None else bias, label, own, start, products.shape[1], labels
    constants = bias is not None, triton.next_power_of_2(labels)
    _launch_take.by_types((rows, 1, 1), args, constants, num_warps=1)


def put_labels(chunk: Chunk, rows: Tensor, label: Tensor, values: Tensor | None) -> None:
    """Put values (rows of all, labels) in the place of labels, -inf for None; the chunk is of ``rows`` alone."""
    labels = label.shape[1]
    products, put = chunk.products, label if values is None else values
    args = products, rows, label, put, chunk.start, products.shape[1], labels
    constants = values is not None, triton.next_power_of_2(labels)
    _launch_put.by_types((len(rows), 1, 1), args, constants, num_warps=1)
