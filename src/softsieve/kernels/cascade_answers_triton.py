"""The last steps of the cascade in Triton: top k and log Z of the finalists, and queries that fall back to all rows."""

from __future__ import annotations

import triton
import triton.language as tl

from softsieve.kernels.cascade_stages_triton import BLOCK, CHOICE, begin, dot_rows

DRIFTED, EXPENSIVE = 2, 3  # states, as in `cascade_numba`

_BLOCK, _CHOICE, _NO_ROW = tl.constexpr(BLOCK), tl.constexpr(CHOICE), tl.constexpr(2**31 - 1)
_DRIFTED, _EXPENSIVE = tl.constexpr(DRIFTED), tl.constexpr(EXPENSIVE)


@triton.jit
def _next_best(rows, values, refined, count, last, last_row, TIER: tl.constexpr):
    """Return the largest logit after the last one, and its row; tied ones come by their rows, wherever they are."""
    best, chosen = tl.full((), -float("inf"), tl.float32), tl.full((), _NO_ROW, tl.int32)
    for start in range(0, count, 1024):
        at = start + tl.arange(0, 1024)
        value = tl.load(values + at, mask=at < count, other=-float("inf"))
        row = tl.load(rows + at, mask=at < count, other=_NO_ROW)
        after = (value < last) | ((value == last) & (row > last_row))
        if TIER:
            after = after & (tl.load(refined + at, mask=at < count, other=0.0) < 0.0)
        value = tl.where(after, value, -float("inf"))
        here = tl.max(value, 0)
        lowest = tl.min(tl.where(after & (value == here), row, _NO_ROW), 0)
        chosen = tl.where(here > best, lowest, tl.where(here == best, tl.minimum(lowest, chosen), chosen))
        best = tl.maximum(best, here)
    return best, chosen


@triton.jit
def estimate_log_z(
    counts, rows, values, refined, dropped, shifts, scales, signals, towards, unusual, limits,
    whole, numbers, totals,
    size, item, parts, read, entries, code_bytes, doubt, tolerance, survivors, flattest, interval, least, most,
    K: tl.constexpr, TIER: tl.constexpr, PARTS: tl.constexpr, CAPACITY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Answer a query: log Z with its interval, the top k, and what was read. One program a query.

    Reads the logits of the finalists, and the sums of exponentials of rows that were dropped. Decides whether the query
    falls back to all rows: its state, and counters of such queries.
    """
    begin(EARLY)
    b = tl.program_id(0).to(tl.int64)
    rows += b * CAPACITY
    values += b * CAPACITY
    refined += b * CAPACITY
    dropped += b * parts * 3
    selected = tl.load(counts + b)
    count = tl.minimum(selected, CAPACITY)
    every = tl.arange(0, PARTS)
    total = tl.sum(tl.load(dropped + every * 3, mask=every < parts, other=0.0), 0)
    corrected = tl.sum(tl.load(dropped + every * 3 + 1, mask=every < parts, other=0.0), 0)
    highest_dropped = tl.max(tl.load(dropped + every * 3 + 2, mask=every < parts, other=-float("inf")), 0)
    highest = tl.load(shifts + b)
    finalists = tl.zeros((), tl.int32)
    for start in range(0, count, 1024):
        at = start + tl.arange(0, 1024)
        value = tl.load(values + at, mask=at < count, other=-float("inf"))
        higher = tl.maximum(highest, tl.max(value, 0))
        own = tl.exp(value - higher)
        total = total * tl.exp(highest - higher) + tl.sum(own, 0)
        corrected = corrected * tl.exp(highest - higher)
        final = at < count
        if TIER:
            part = tl.load(refined + at, mask=at < count, other=0.0)
            final = part < 0.0
            corrected += tl.sum(tl.where(final, 0.0, own * part), 0)
            highest_dropped = tl.maximum(highest_dropped, tl.max(tl.where(final, -float("inf"), value), 0))
        finalists += tl.sum(final.to(tl.int32), 0)
        highest = higher
    half = doubt * corrected / total
    log_z = tl.log(total) + highest
    state = tl.where(half <= tolerance, 0, _EXPENSIVE)
    state = tl.where(selected <= CAPACITY, state, _EXPENSIVE)
    state = tl.where(finalists >= K, state, _EXPENSIVE)
    state = tl.where((tl.load(unusual + b) == 0) & (selected <= survivors), state, _DRIFTED)
    whole += b * (K + 5)
    numbers += b * (2 * K + 8)
    last, last_row = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
    for place in range(K):
        last, last_row = _next_best(rows, values, refined, count, last, last_row, TIER)
        tl.store(whole + place, last_row.to(tl.int64))
        tl.store(numbers + place, tl.exp(last - log_z))
        tl.store(numbers + K + place, last)
    flat = tl.zeros((), tl.float32)
    limit = tl.full((), float("inf"), tl.float32)
    if K > 0:
        flat = log_z - last
        state = tl.where(flat <= flattest, state, _DRIFTED)
        # Rows that did not reach a threshold above the answer may have estimates above it.
        limit = tl.where(highest_dropped >= last, last, limit)
    tl.store(limits + b, limit)
    promised = tl.minimum(tl.maximum(half * interval, least), most)
    tl.store(numbers + 2 * K, log_z)
    tl.store(numbers + 2 * K + 1, log_z - promised)
    tl.store(numbers + 2 * K + 2, log_z + promised)
    tl.store(numbers + 2 * K + 3, half)
    tl.store(numbers + 2 * K + 4, tl.load(scales + b))
    tl.store(numbers + 2 * K + 5, tl.load(signals + b))
    tl.store(numbers + 2 * K + 6, tl.load(towards + b))
    tl.store(numbers + 2 * K + 7, flat)
    tl.store(whole + K, entries + (count * code_bytes + finalists * size).to(tl.int64))
    tl.store(whole + K + 1, read + (count * code_bytes).to(tl.int64) + finalists.to(tl.int64) * size * item)
    tl.store(whole + K + 2, selected.to(tl.int64))
    tl.store(whole + K + 3, finalists.to(tl.int64))
    tl.store(whole + K + 4, state.to(tl.int64))
    tl.atomic_add(totals, 1)
    if state != 0:
        tl.atomic_add(counts + tl.num_programs(0), 1)
        tl.atomic_add(totals + 1, 1)


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


@triton.jit
def answer_exactly(
    x, weight, bias, counts, arrivals, estimates, largest, limits, whole, numbers, dense,
    n, size, item, blocks, batch, scale, x_stride, weight_stride, below,
    K: tl.constexpr, BIASED: tl.constexpr, DENSE: tl.constexpr, LIMITED: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Read all rows for queries that fall back, and make their answers anew; limit the logits of the others.

    Reads the states of the queries, and for those that fall back the whole weight, some rows for each program. The
    last to be done sums up. Decides nothing.
    """
    begin(EARLY)
    if LIMITED:
        for b in range(batch):
            limit = tl.load(limits + b)
            if (limit < float("inf")) & (tl.load(whole + b * (K + 5) + K + 4) == 0):
                _limit_logits(dense + b * n.to(tl.int64), whole + b * (K + 5), limit, n, below, K)
    if tl.load(counts + batch) > 0:
        for start in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
            row = start + tl.arange(0, ROWS).to(tl.int64)
            for b in range(batch):
                if tl.load(whole + b * (K + 5) + K + 4) != 0:
                    value = dot_rows(weight + row * weight_stride, row < n, x + b * x_stride, size, ROWS, SIZE)
                    value *= scale
                    if BIASED:
                        value += tl.load(bias + row, mask=row < n, other=0.0)
                    place = b * n + row
                    tl.store(estimates + place, value, mask=row < n)
                    if DENSE:
                        tl.store(dense + place, value.to(dense.dtype.element_ty), mask=row < n)
        tl.debug_barrier()
        before = tl.atomic_add(arrivals, 1, sem="acq_rel")
        if before == tl.num_programs(0) - 1:  # the last one to be done sums up
            tl.debug_barrier()
            tl.store(arrivals, 0)
            for b in range(batch):
                if tl.load(whole + b * (K + 5) + K + 4) != 0:
                    _sum_up(
                        estimates + b * n, largest + b * blocks, whole + b * (K + 5),
                        numbers + b * (2 * K + 8), n, size, item, blocks, K, BLOCKS,
                    )  # fmt: skip


@triton.jit
def _sum_up(values, largest, whole, numbers, n, size, item, blocks, K: tl.constexpr, BLOCKS: tl.constexpr):
    """Write the top k and log Z of the logits of all rows, by one program."""
    lane = tl.arange(0, _BLOCK)
    highest = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for first in range(0, blocks, 16):
        block = first + tl.arange(0, 16)
        place = block[:, None] * _BLOCK + lane[None, :]
        some = tl.load(values + place, mask=place < n, other=-float("inf"))
        best = tl.max(some, 1)
        tl.store(largest + block, best, mask=block < blocks)
        higher = tl.maximum(highest, tl.max(best, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.sum(tl.exp(some - higher), 1), 0)
        highest = higher
    # A NaN among the logits is one in their sum, and so in everything.
    log_z = tl.log(total) + highest
    tl.debug_barrier()
    every = tl.arange(0, BLOCKS)
    tops = tl.load(largest + every, mask=every < blocks, other=-float("inf"))
    taken = tl.full((BLOCKS,), -1, tl.int32)  # of tied rows of a block, the last one that was taken
    for place in range(K):
        best = tl.max(tops, 0)
        which = tl.min(tl.where(tops == best, every, BLOCKS - 1), 0)
        row = which * _BLOCK + lane
        own = tl.load(values + row, mask=row < n, other=-float("inf"))
        last = tl.max(tl.where(every == which, taken, -1), 0)
        chosen = tl.min(tl.where((own == best) & (row > last), row, n - 1), 0)
        tl.store(whole + place, chosen.to(tl.int64))
        tl.store(numbers + place, tl.exp(best - log_z))
        tl.store(numbers + K + place, best)
        following = tl.max(tl.where((own < best) | ((own == best) & (row > chosen)), own, -float("inf")), 0)
        taken = tl.where(every == which, tl.where(following == best, chosen, -1), taken)
        tops = tl.where(every == which, following, tops)
    for place in range(3):
        tl.store(numbers + 2 * K + place, log_z)
    tl.store(numbers + 2 * K + 3, 0.0)
    entries = (tl.zeros((), tl.int64) + n) * size
    tl.store(whole + K, entries)
    tl.store(whole + K + 1, tl.load(whole + K + 1) + entries * item)
