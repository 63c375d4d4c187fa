"""Labels in chunks of logits in Triton: what `kernels.linear_multilabel` takes out of them and puts back.

Runs under Triton's interpreter too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from softsieve.kernels.cross_entropy_triton import _logit
from softsieve.kernels.linear_types import Chunk


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


def take_labels(chunk: Chunk, label: Tensor, own: Tensor) -> None:
    """Write the logits of labels that are in the chunk to ``own``, and -inf in their place. Both (rows, labels)."""
    products, bias, _, start = chunk
    rows, labels = label.shape
    _take[(rows,)](
        products, products if bias is None else bias, label, own, start, products.shape[1], labels,
        BIASED=bias is not None, BLOCK=triton.next_power_of_2(labels), num_warps=1,
    )  # fmt: skip


def put_labels(chunk: Chunk, rows: Tensor, label: Tensor, values: Tensor | None) -> None:
    """Put values (rows of all, labels) in the place of labels, -inf for None; the chunk is of ``rows`` alone."""
    labels = label.shape[1]
    _put[(len(rows),)](
        chunk.products, rows, label, label if values is None else values, chunk.start, chunk.products.shape[1], labels,
        VALUED=values is not None, BLOCK=triton.next_power_of_2(labels), num_warps=1,
    )  # fmt: skip
