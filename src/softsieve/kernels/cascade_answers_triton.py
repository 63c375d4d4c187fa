"""The last steps of the cascade in Triton: finalists, their top k and log Z, and who falls back to all rows."""

from __future__ import annotations

import triton
import triton.language as tl

from softsieve.kernels.cascade_stages_triton import begin, dot_rows

DRIFTED, EXPENSIVE = 2, 3  # states, as in `cascade_numba`

SOME = 1024  # finalists that are looked through at a time

_SOME = tl.constexpr(SOME)
_NO_ROW, _DRIFTED, _EXPENSIVE = tl.constexpr(2**31 - 1), tl.constexpr(DRIFTED), tl.constexpr(EXPENSIVE)


@triton.jit
def _next_best(rows, values, refined, count, last, last_row, TIER: tl.constexpr):
    """Return the largest logit after the last one, and its row; tied ones come by their rows, wherever they are."""
    best, chosen = tl.full((), -float("inf"), tl.float32), tl.full((), _NO_ROW, tl.int32)
    for start in range(0, count, _SOME):
        at = start + tl.arange(0, _SOME)
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
def _answer(
    b, batch, counts, rows, values, refined, dropped, shifts, scales, signals, towards, unusual, limits,
    states, whole, numbers, totals,
    size, item, parts, read, entries, code_bytes, doubt, tolerance, survivors, flattest, interval, least, most,
    K: tl.constexpr, TIER: tl.constexpr, PARTS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Answer query b of the batch from all of its logits and estimates."""
    b = b.to(tl.int64)
    rows += b * CAPACITY
    values += b * CAPACITY
    refined += b * CAPACITY
    dropped += b * parts * 3
    selected = tl.load(counts + b)
    count = tl.where(selected <= CAPACITY, selected, CAPACITY if TIER else 0)
    every = tl.arange(0, PARTS)
    total = tl.sum(tl.load(dropped + every * 3, mask=every < parts, other=0.0), 0)
    corrected = tl.sum(tl.load(dropped + every * 3 + 1, mask=every < parts, other=0.0), 0)
    highest_dropped = tl.max(tl.load(dropped + every * 3 + 2, mask=every < parts, other=-float("inf")), 0)
    highest = tl.load(shifts + b)
    finalists = tl.zeros((), tl.int32)
    for start in range(0, count, _SOME):
        at = start + tl.arange(0, _SOME)
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
        state = tl.where((flat <= flattest) | (selected > CAPACITY), state, _DRIFTED)
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
    tl.store(states + b, state)
    tl.atomic_add(totals, 1)
    if state != 0:
        tl.atomic_add(counts + batch, 1)
        tl.atomic_add(totals + 1, 1)


@triton.jit
def estimate_log_z(
    counts, rows, values, refined, dropped, shifts, scales, signals, towards, unusual, limits,
    states, whole, numbers, totals,
    size, item, parts, read, entries, code_bytes, doubt, tolerance, survivors, flattest, interval, least, most,
    K: tl.constexpr, PARTS: tl.constexpr, CAPACITY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Answer a query that a tier was read for: log Z with its interval, the top k, and what was read. One program each.

    Reads the logits of the finalists, and the sums of exponentials of rows that were dropped. Decides whether the query
    falls back to all rows: its state, and counters of such queries.
    """
    begin(EARLY)
    _answer(
        tl.program_id(0), tl.num_programs(0), counts, rows, values, refined, dropped, shifts, scales, signals, towards,
        unusual, limits, states, whole, numbers, totals, size, item, parts, read, entries, code_bytes,
        doubt, tolerance, survivors, flattest, interval, least, most, K, True, PARTS, CAPACITY,
    )  # fmt: skip


@triton.jit
def read_finalists(
    x, weight, bias, counts, done, rows, values, dropped, shifts, scales, signals, towards, unusual, limits,
    states, whole, numbers, totals, dense,
    n, size, batch, scale, x_stride, weight_stride, item, parts, read, entries,
    doubt, tolerance, survivors, flattest, interval, least, most,
    K: tl.constexpr, BIASED: tl.constexpr, DENSE: tl.constexpr, PARTS: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Read survivors of the preview in full, some rows of a query at a time, and answer it when all of its are read.

    Programs share the survivors of all queries, so that none waits for one that has many.
    """
    begin(EARLY)
    every = tl.arange(0, QUERIES)
    own = tl.load(counts + every, mask=every < batch, other=0)
    own = tl.where(own <= CAPACITY, own, 0)  # a query that falls back has none of its own
    chunks = tl.where(every < batch, tl.maximum((own + ROWS - 1) // ROWS, 1), 0)  # somebody answers without rows, too
    ends = tl.cumsum(chunks, 0)
    total = tl.sum(chunks, 0)
    share = (total + tl.num_programs(0) - 1) // tl.num_programs(0)
    first = tl.program_id(0) * share
    last = tl.minimum(first + share, total)
    pending = 0
    for chunk in range(first, last):
        b = tl.sum((ends <= chunk).to(tl.int32), 0)
        mine = every == b
        count = tl.sum(tl.where(mine, own, 0), 0)
        many = tl.sum(tl.where(mine, chunks, 0), 0)
        end = tl.sum(tl.where(mine, ends, 0), 0)
        at = (chunk - end + many) * ROWS + tl.arange(0, ROWS)
        valid = at < count
        row = tl.load(rows + b * CAPACITY + at, mask=valid, other=0).to(tl.int64)
        value = dot_rows(weight + row * weight_stride, valid, x + b.to(tl.int64) * x_stride, size, ROWS, SIZE) * scale
        if BIASED:
            value += tl.load(bias + row, mask=valid, other=0.0)
        tl.store(values + b * CAPACITY + at, value, mask=valid)
        if DENSE:
            tl.store(dense + b.to(tl.int64) * n + row, value.to(dense.dtype.element_ty), mask=valid)
        pending += 1
        leaves = (chunk + 1 == last) | (chunk + 1 == end)
        if leaves:
            tl.debug_barrier()
            before = tl.atomic_add(done + b, pending, sem="acq_rel")
            if before + pending == many:  # the last one to be done has all logits
                tl.debug_barrier()
                _answer(
                    b, batch, counts, rows, values, values, dropped, shifts, scales, signals, towards,
                    unusual, limits, states, whole, numbers, totals, size, item, parts, read, entries, 0,
                    doubt, tolerance, survivors, flattest, interval, least, most, K, False, PARTS, CAPACITY,
                )  # fmt: skip
        pending = tl.where(leaves, 0, pending)
