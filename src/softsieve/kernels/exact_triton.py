"""Exact answers of a linear head in Triton: all rows for those queries of a batch that need them, in one pass.

Two launches: `multiply_rows` reads the weight once for all of these queries together, on matrix units, and keeps of
every block of rows the largest logit and sum of exponentials; `sum_up` makes the answers of them. Of few queries the
last program of the first launch makes them. Logits themselves are written only where somebody asks for them. When no
query needs it, all return at once, so that they can follow any rule that finds out on the device. Runs under Triton's
interpreter, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from softsieve.kernels.cascade_stages_triton import begin

FEW = 16  # queries that matrix units multiply as fast as one
MOST = 64  # queries of a call
CHOICE = 1024  # rows whose logits are limited together
TOGETHER = 8  # queries, at most, of which those that fall back are summed up in the launch of the product


class Shape(NamedTuple):
    """How the product is launched."""

    rows: int  # of the weight that are multiplied together
    size: int  # numbers of each at a time
    stages: int  # times ahead that they are loaded
    warps: int
    programs: int  # that a multiprocessor has room for


SMALL = Shape(64, 128, 3, 4, 3)  # for up to FEW queries
LARGE = Shape(128, 64, 3, 4, 3)  # for more
OTHER = Shape(128, 32, 2, 4, 2)  # for weights of float32

_FEW, _CHOICE, _NO_ROW = tl.constexpr(FEW), tl.constexpr(CHOICE), tl.constexpr(2**31 - 1)


class Partials(NamedTuple):
    """What the launches leave for each other, for each block of rows."""

    largest: Tensor  # (batch, blocks): of the logits
    sums: Tensor  # (batch, blocks): of exponentials, over e^largest
    best: Tensor  # (batch, blocks) int32: the first row that has the largest
    values: Tensor  # (batch, n): logits, of queries that are answered exactly; not written if only one row is asked for


def shape_for(weight: Tensor, batch: int) -> Shape:
    """The launch that takes least time."""
    return OTHER if weight.dtype.itemsize > 2 else SMALL if batch <= FEW else LARGE


def partials(weight: Tensor, batch: int, k: int) -> Partials:
    """Memory for these, not filled."""
    n, device = len(weight), weight.device
    shape = (batch, triton.cdiv(n, shape_for(weight, batch).rows))
    return Partials(
        torch.empty(shape, device=device),
        torch.empty(shape, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(batch, n if k > 1 else 0, device=device),
    )


def options(x: Tensor) -> dict[str, Any]:
    """How kernels are launched: from Hopper on before the one before is done, for which they wait themselves."""
    early = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"EARLY": early} | ({"launch_pdl": early} if x.is_cuda else {})


def ask(x: Tensor, weight: Tensor, bias: Tensor | None, *, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Answer all queries (batch, d), MOST at most, from all rows.

    Returns the tensors of `cascade_triton.Found`, of which the survivors, the finalists, the state and whatever follows
    the half-width are not written.
    """
    whole = torch.empty(len(x), k + 5, dtype=torch.int64, device=x.device)
    numbers = torch.empty(len(x), 2 * k + 8, device=x.device)
    kept = partials(weight, len(x), k)
    answer(x, weight, bias, None, None, kept, whole, numbers, k=k, scale=scale)
    return whole, numbers


def answer(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor | None, count: Tensor | None, kept: Partials,
    whole: Tensor, numbers: Tensor, *, k: int, scale: float, dense: Tensor | None = None,
    limits: Tensor | None = None, below: float = 0.0, arrivals: Tensor | None = None,
) -> None:  # fmt: skip
    """Answer those queries (batch, d) whose state is not 0, of which there are ``count``: both on the device.

    Args:
        states, count: None: all queries are answered.
        whole, numbers: as in `cascade_triton.Found`, where answers go. To the bytes read there are added those that all
            rows take, unless all queries are answered.
        dense: (batch, n), where all logits of these queries go, if anywhere.
        limits: (batch,): logits of the other queries in ``dense`` are lowered to below it, but for their top k.
        below: how far below, relatively.
        arrivals: zeros of int32, which they are again in the end: then the last program to be done makes all answers,
            one after the other, and there is no other launch.
    """
    (n, size), batch, every = weight.shape, len(x), states is None
    shape, how = shape_for(weight, batch), options(x)
    blocks, out = triton.cdiv(n, shape.rows), kept.largest if dense is None else dense
    many = 4
    if x.is_cuda:
        many = torch.cuda.get_device_properties(x.device).multi_processor_count * shape.programs
    multiply_rows[(min(blocks, many),)](
        x, weight, bias, count, states, kept.largest, kept.sums, kept.best, kept.values, limits, whole, numbers,
        arrivals, out, n, size, weight.element_size(), blocks, batch, scale, x.stride(0), weight.stride(0), below,
        K=k, ALL=every, LAST=arrivals is not None, BLOCKS=triton.next_power_of_2(blocks),
        BIASED=bias is not None, DENSE=dense is not None, LIMITED=limits is not None,
        QUERIES=max(FEW, triton.next_power_of_2(batch)), ROWS=shape.rows, SIZE=shape.size,
        num_warps=shape.warps, num_stages=shape.stages, **how,
    )  # fmt: skip
    if arrivals is not None:
        return
    sum_up[(batch,)](
        states, kept.largest, kept.sums, kept.best, kept.values, whole, numbers, n, size, weight.element_size(), blocks,
        K=k, ALL=every, BLOCKS=triton.next_power_of_2(blocks), ROWS=shape.rows, num_warps=8, **how,
    )  # fmt: skip


# -- the product -------------------------------------------------------------------------------------------------------


@triton.jit
def _dot(rows, own, total):
    """Add the products of rows with queries, as exact as float32 is, whatever dtypes they have."""
    if rows.dtype == own.dtype and rows.dtype != tl.float32:
        return tl.dot(rows, own, total)
    if rows.dtype == tl.bfloat16:
        # A float32 is the sum of three bfloat16.
        rest = own.to(tl.float32)
        for _ in tl.static_range(3):
            part = rest.to(tl.bfloat16)
            total = tl.dot(rows, part, total)
            rest -= part.to(tl.float32)
        return total
    return tl.dot(rows.to(tl.float32), own.to(tl.float32), total, input_precision="ieee")


@triton.jit
def _multiply(
    x, weight, bias, states, largest, sums, best, values, dense,
    n, size, blocks, batch, scale, x_stride, weight_stride,
    K: tl.constexpr, ALL: tl.constexpr, BIASED: tl.constexpr, DENSE: tl.constexpr, QUERIES: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Multiply blocks of rows with up to LANES of the queries, those that need it.

    One loop over all parts of all blocks of a program: loads of a block begin while the one before is summed up.
    """
    lane = tl.arange(0, LANES)
    if ALL:
        asked, query = lane < batch, lane.to(tl.int64)
    else:
        every = tl.arange(0, QUERIES)
        needs = tl.load(states + every, mask=every < batch, other=0) != 0
        place = tl.cumsum(needs.to(tl.int32), 0) - 1
        mine = needs[:, None] & (place[:, None] == lane[None, :])
        asked = tl.sum(mine.to(tl.int32), 0) > 0
        query = tl.sum(tl.where(mine, every[:, None], 0), 0).to(tl.int64)
    steps = tl.cdiv(size, SIZE)
    mine = tl.cdiv(blocks - tl.program_id(0), tl.num_programs(0)) * steps
    total = tl.zeros((ROWS, LANES), tl.float32)
    for number in range(mine):
        step = number % steps
        block = tl.program_id(0) + number // steps * tl.num_programs(0)
        row = block * ROWS + tl.arange(0, ROWS)
        valid = row < n
        places = weight + row.to(tl.int64) * weight_stride
        at = step * SIZE + tl.arange(0, SIZE)
        inside = at < size
        codes = tl.load(places[:, None] + at[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        own = tl.load(x + query[None, :] * x_stride + at[:, None], mask=asked[None, :] & inside[:, None], other=0.0)
        total = _dot(codes, own, total)
        if step == steps - 1:
            value = total * scale
            if BIASED:
                value += tl.load(bias + row, mask=valid, other=0.0)[:, None]
            value = tl.where(valid[:, None], value, -float("inf"))
            top = tl.max(value, 0)
            kept = query * blocks + block
            tl.store(largest + kept, top, mask=asked)
            tl.store(sums + kept, tl.sum(tl.exp(value - top[None, :]), 0), mask=asked)
            if K == 1:
                first = tl.min(tl.where(value == top[None, :], row[:, None], n - 1), 0)
                tl.store(best + kept, first, mask=asked)
            if (K > 1) or DENSE:
                to, written = query[None, :] * n + row[:, None], valid[:, None] & asked[None, :]
                if K > 1:
                    tl.store(values + to, value, mask=written)
                if DENSE:
                    tl.store(dense + to, value.to(dense.dtype.element_ty), mask=written)
            total = tl.zeros((ROWS, LANES), tl.float32)


@triton.jit
def multiply_rows(
    x, weight, bias, count, states, largest, sums, best, values, limits, whole, numbers, arrivals, dense,
    n, size, item, blocks, batch, scale, x_stride, weight_stride, below,
    K: tl.constexpr, ALL: tl.constexpr, LAST: tl.constexpr, BLOCKS: tl.constexpr,
    BIASED: tl.constexpr, DENSE: tl.constexpr, LIMITED: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Read all rows once for the queries that need it, and limit the logits of the others. Decides nothing."""
    begin(EARLY)
    if LIMITED:
        for b in range(batch):
            limit = tl.load(limits + b)
            if (limit < float("inf")) & (tl.load(states + b) == 0):
                _limit_logits(dense + b * n.to(tl.int64), whole + b * (K + 5), limit, n, below, K)
    needed = batch
    if not ALL:
        needed = tl.load(count)
    if (QUERIES <= _FEW) or not ALL:  # noqa: SIM102 (what is known when it is compiled stays apart)
        if (needed > 0) & (needed <= _FEW):
            _multiply(
                x, weight, bias, states, largest, sums, best, values, dense, n, size, blocks, batch, scale, x_stride,
                weight_stride, K, ALL, BIASED, DENSE, QUERIES, _FEW, ROWS, SIZE,
            )  # fmt: skip
    if QUERIES > _FEW:  # noqa: SIM102
        if needed > _FEW:
            _multiply(
                x, weight, bias, states, largest, sums, best, values, dense, n, size, blocks, batch, scale, x_stride,
                weight_stride, K, ALL, BIASED, DENSE, QUERIES, QUERIES, ROWS, SIZE,
            )  # fmt: skip
    if LAST:  # noqa: SIM102
        if needed > 0:
            tl.debug_barrier()
            before = tl.atomic_add(arrivals, 1, sem="acq_rel")
            if before == tl.num_programs(0) - 1:
                tl.debug_barrier()
                tl.store(arrivals, 0)
                for b in range(batch):
                    if tl.load(states + b) != 0:
                        _sum_up(
                            b, largest, sums, best, values, whole, numbers, n, size, item, blocks, K, ALL, BLOCKS, ROWS
                        )


@triton.jit
def _limit_logits(dense, whole, limit, n, below, K: tl.constexpr):
    """Lower the estimates of a query that reach the k-th logit of its answer to just below it."""
    for start in range(tl.program_id(0) * _CHOICE, n, tl.num_programs(0) * _CHOICE):
        row = start + tl.arange(0, _CHOICE).to(tl.int64)
        value = tl.load(dense + row, mask=row < n, other=-float("inf")).to(tl.float32)
        above = value >= limit
        for rank in range(K):
            above = above & (row != tl.load(whole + rank))
        lowered = limit - below * tl.maximum(tl.abs(limit), 1e-30)
        tl.store(dense + row, lowered.to(dense.dtype.element_ty), mask=above & (row < n))


# -- answers -----------------------------------------------------------------------------------------------------------


@triton.jit
def _sum_up(
    b, largest, sums, best, values, whole, numbers, n, size, item, blocks,
    K: tl.constexpr, ALL: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Make the answer of query b: log Z and the top k."""
    whole += b * (K + 5)
    numbers += b * (2 * K + 8)
    values += b * n
    every = tl.arange(0, BLOCKS)
    tops = tl.load(largest + b * blocks + every, mask=every < blocks, other=-float("inf"))
    own = tl.load(sums + b * blocks + every, mask=every < blocks, other=0.0)
    highest = tl.max(tops, 0)
    # A NaN among the logits is one in their sum, and so in everything.
    log_z = tl.log(tl.sum(own * tl.exp(tops - highest), 0)) + highest
    if K == 1:
        rows = tl.load(best + b * blocks + every, mask=every < blocks, other=_NO_ROW)
        chosen = tl.minimum(tl.min(tl.where(tops == highest, rows, _NO_ROW), 0), n - 1)
        tl.store(whole, chosen.to(tl.int64))
        tl.store(numbers, tl.exp(highest - log_z))
        tl.store(numbers + 1, highest)
    else:
        _take_largest(values, whole, numbers, tops, log_z, n, K, BLOCKS, ROWS)
    for place in range(3):
        tl.store(numbers + 2 * K + place, log_z)
    tl.store(numbers + 2 * K + 3, 0.0)
    entries = (tl.zeros((), tl.int64) + n) * size
    tl.store(whole + K, entries)
    read = entries * item
    if not ALL:
        read += tl.load(whole + K + 1)
    tl.store(whole + K + 1, read)


@triton.jit
def sum_up(
    states, largest, sums, best, values, whole, numbers,
    n, size, item, blocks,
    K: tl.constexpr, ALL: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Make the answers of queries that all rows were read for. One program a query."""
    begin(EARLY)
    b = tl.program_id(0).to(tl.int64)
    needed = 1
    if not ALL:
        needed = tl.load(states + b)
    if needed != 0:
        _sum_up(b, largest, sums, best, values, whole, numbers, n, size, item, blocks, K, ALL, BLOCKS, ROWS)


@triton.jit
def _take_largest(
    values, whole, numbers, tops, log_z, n, K: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Write the k largest of all logits, one after the other, of tied ones the first row first."""
    every, lane = tl.arange(0, BLOCKS), tl.arange(0, ROWS)
    taken = tl.full((BLOCKS,), -1, tl.int32)  # of tied rows of a block, the last one that was taken
    for place in range(K):
        best = tl.max(tops, 0)
        which = tl.min(tl.where(tops == best, every, BLOCKS - 1), 0)
        row = which * ROWS + lane
        own = tl.load(values + row, mask=row < n, other=-float("inf"))
        last = tl.max(tl.where(every == which, taken, -1), 0)
        chosen = tl.min(tl.where((own == best) & (row > last), row, n - 1), 0)
        tl.store(whole + place, chosen.to(tl.int64))
        tl.store(numbers + place, tl.exp(best - log_z))
        tl.store(numbers + K + place, best)
        following = tl.max(tl.where((own < best) | ((own == best) & (row > chosen)), own, -float("inf")), 0)
        taken = tl.where(every == which, tl.where(following == best, chosen, -1), taken)
        tops = tl.where(every == which, following, tops)
