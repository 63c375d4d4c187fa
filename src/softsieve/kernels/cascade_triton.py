"""The cascade on a GPU, in Triton: queries through preview, one tier of codes and exact rows. Raw tensors only.

Six launches, seven with a tier, whatever the queries are, and none of them waits for the host: products of the queries
with what is always read, the preview with its maxima and masses, the choice of survivors, their tier, their exact
rows, the answer, and the whole weight for queries that the cascade cannot answer. Runs under Triton's interpreter too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 256  # rows that are estimated together
CHOICE = 1024  # rows of which survivors are chosen together
GROUP = 64  # rows of which the best estimate is kept, to know the k-th best of all
SPREADS = 8  # bytes for the spreads of tiers, before the codes of a row
WARPS = 4
LANES = 16  # numbers for each row that matrix units make together: two for each query
MOST_K = 64
MOST_BATCH = 64
ARRIVALS = 2 * MOST_BATCH  # counters, of which some are used; each call's begin where memory is aligned
MOST_ROWS = 1 << 21  # statistics of so many are looked at at once
CAPACITY = 8192  # the most survivors of a query
ANSWERED, DRIFTED, EXPENSIVE = 0, 2, 3  # states, as in `cascade_numba`

_BLOCK, _CHOICE, _GROUP, _SPREADS = (tl.constexpr(number) for number in (BLOCK, CHOICE, GROUP, SPREADS))
_DRIFTED, _EXPENSIVE = tl.constexpr(DRIFTED), tl.constexpr(EXPENSIVE)


class Index(NamedTuple):
    """What a head keeps for its queries, on the device."""

    weight: Tensor  # (n, d), rows contiguous
    bias: Tensor | None  # (n,) float32, times beta
    coded: bool  # whether it is among the codes, or estimates have it exactly
    projection: Tensor  # (longest, d [+ 1]) bfloat16; the last column, if there is one more, goes with a coded bias
    centre: Tensor  # (d [+ 1],)
    mean: Tensor  # (d [+ 1],): the mean query, of length 1; 0 if it is not known
    records: Tensor  # (n, SPREADS + longest) int8: spreads of the tiers, as uint8, and all codes of a row
    spreads: Tensor  # (tiers, n) uint8: the same spreads
    probes: Tensor  # int64: rows that are always read
    probe_records: Tensor  # (PROBES, SPREADS + longest) int8: their records, filled up with ones
    probe_spreads: Tensor  # (tiers, PROBES) uint8


class Plan(NamedTuple):
    """How to answer, for one k."""

    k: int
    first: int  # the tier that all rows are estimated with
    length: int  # of it
    step: float  # of its spreads
    tier: int  # the tier for those that are left; -1: none
    tier_length: int  # of it; 0: none
    tier_step: float
    width: float  # of margins, in predicted deviations
    correction: float  # what an estimate's predicted variance adds to the logarithm of its mass
    floor: float  # rows with less than this part of the normaliser do not matter, as a logarithm
    doubt: float  # half width of the interval of log Z, for each unit of mass that was corrected
    tolerance: float  # the half width to reach
    low: float  # what queries of the calibration stay within, as `cascade_numba.Usual` has it
    high: float
    signal: float
    toward_low: float
    toward_high: float
    survivors: float
    flat: float
    interval: float  # the promised half of the interval: this times the half width,
    least: float  # not below this
    most: float  # nor above this
    capacity: int  # survivors that there is room for, a power of two
    upper: bool = False  # all logits are to be upper ends of rows that are left out, instead of their masses


class Found(NamedTuple):
    """The answers, in two pieces of memory. ``state`` says why everything was read, where it was."""

    whole: Tensor  # (batch, k + 5) int64: indices, coordinates, bytes_read, survivors, finalists, state
    numbers: (
        Tensor  # (batch, 2 k + 8): probs, logits, log_z, both ends of its interval, half, scale, signal, toward, flat
    )


class Fields(NamedTuple):
    """What `Found` holds."""

    indices: Tensor  # (batch, k)
    probs: Tensor  # (batch, k)
    logits: Tensor  # (batch, k)
    log_z: Tensor  # (batch,)
    interval: Tensor  # (batch, 2)
    half: Tensor  # (batch,): before what is promised is made of it
    scale: Tensor  # (batch,): of the errors of the preview
    signal: Tensor  # (batch,): size of the estimates of the probes, in sizes of their errors
    toward: Tensor  # (batch,): cosine of the angle to the mean query
    flat: Tensor  # (batch,): log Z less the k-th logit
    coordinates: Tensor  # (batch,), as the rest
    bytes_read: Tensor
    survivors: Tensor
    finalists: Tensor
    state: Tensor


def fields(whole: Tensor, numbers: Tensor) -> Fields:
    """Views of what `ask` found."""
    k = whole.shape[1] - 5
    return Fields(
        whole[:, :k],
        numbers[:, :k],
        numbers[:, k : 2 * k],
        numbers[:, 2 * k],
        numbers[:, 2 * k + 1 : 2 * k + 3],
        *(numbers[:, 2 * k + field] for field in range(3, 8)),
        *(whole[:, k + field] for field in range(5)),
    )


@triton.jit
def _begin(EARLY: tl.constexpr):
    """Let the next launch begin, which waits here for this one, and wait for the one before."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


# -- products with what is always read ---------------------------------------------------------------------------------


@triton.jit
def _dot(rows, there, x, size, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Products of rows at these places with a query. (ROWS,)"""
    total = tl.zeros((ROWS, SIZE), tl.float32)
    for start in range(0, size, SIZE):
        at = start + tl.arange(0, SIZE)
        own = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
        inside = there[:, None] & (at < size)[None, :]
        total += tl.load(rows[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32) * own[None, :]
    return tl.sum(total, 1)


@triton.jit
def _toward(x, mean, size, SIZE: tl.constexpr):
    """The product of a query with the mean one, and the square of its length."""
    dots, squares = tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32)
    for start in range(0, size, SIZE):
        at = start + tl.arange(0, SIZE)
        own = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
        dots += own * tl.load(mean + at, mask=at < size, other=0.0)
        squares += own * own
    return tl.sum(dots, 0), tl.sum(squares, 0)


@triton.jit
def _products(
    x, weight, bias, projection, centre, mean, probes, probe_records, probe_spreads, tier_spreads,
    y, offset, probed, digits, tops, scales, signals, towards, strange, units, counts, arrivals,
    size, extended, longest, many, stride, scale, beta, x_stride, weight_stride, step, tier_step,
    low, high, least_signal, toward_low, toward_high,
    BIASED: tl.constexpr, CODED: tl.constexpr, BASED: tl.constexpr, TIER: tl.constexpr,
    WIDTH: tl.constexpr, LONGEST: tl.constexpr, PROBES: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _begin(EARLY)
    part, b = tl.program_id(0), tl.program_id(1)
    # The last program needs these at once; who is the last, nobody knows.
    number, byte = tl.arange(0, PROBES), tl.arange(0, LONGEST)
    inside = (byte < WIDTH)[None, :]
    codes = tl.load(probe_records + number[:, None] * stride + byte[None, :], mask=inside, other=0)
    near = tl.load(probe_spreads + number).to(tl.float32)
    x += b.to(tl.int64) * x_stride
    turned = tl.cdiv(longest, ROWS)
    if part < turned:
        row = part * ROWS + tl.arange(0, ROWS)
        there = row < longest
        places = projection + row.to(tl.int64) * extended
        value = _dot(places, there, x, size, ROWS, SIZE) * scale
        if CODED:
            value += beta * tl.load(places + size, mask=there, other=0.0).to(tl.float32)
        tl.store(y + b * longest + row, value, mask=there)
    elif part < turned + tl.cdiv(PROBES, ROWS):
        probe = (part - turned) * ROWS + tl.arange(0, ROWS)
        there = probe < many
        row = tl.load(probes + probe, mask=there, other=0)
        value = _dot(weight + row * weight_stride, there, x, size, ROWS, SIZE) * scale
        if BIASED:
            value += tl.load(bias + row, mask=there, other=0.0)
        tl.store(probed + b * PROBES + probe, value, mask=there)
    elif part == tl.num_programs(0) - 1:
        dot, square = _toward(x, mean, size, SIZE)
        dot, square = dot * scale, square * scale * scale
        if CODED:
            dot += beta * tl.load(mean + size)
            square += beta * beta
        tl.store(towards + b, dot / tl.maximum(tl.sqrt(square), 1e-30))
    else:
        lane = tl.arange(0, ROWS)
        value = _dot(centre + lane * 0, lane == 0, x, size, ROWS, SIZE) * scale
        if CODED:
            value += beta * tl.load(centre + size + lane * 0, mask=lane == 0, other=0.0)
        tl.store(offset + b + lane, value, mask=lane == 0)
        tl.store(counts + b, 0)  # no survivors yet
        if b == 0:
            tl.store(counts + tl.num_programs(1), 0)  # nor queries to be answered exactly
    tl.debug_barrier()
    before = tl.atomic_add(arrivals + b, 1, sem="acq_rel")
    if before == tl.num_programs(0) - 1:  # the last one to be done has everything
        tl.debug_barrier()
        tl.store(arrivals + b, 0)
        y += b * longest
        own = tl.load(y + byte - _SPREADS, mask=(byte >= _SPREADS) & (byte < WIDTH), other=0.0)
        truth = tl.load(probed + b * PROBES + number, mask=number < many, other=0.0) - tl.load(offset + b)
        if BASED:  # estimates have it exactly
            at = tl.load(probes + number, mask=number < many, other=0)
            truth -= tl.load(bias + at, mask=number < many, other=0.0)
        top = tl.max(tl.abs(own), 0)
        top = tl.where(top > 0.0, top / 127.0, 1.0)
        tl.store(tops + b, top)
        # As whole numbers in [-127, 127], and what these leave, 254 times as large.
        turn = own / top
        coarse = tl.floor(turn + 0.5)
        fine = tl.floor((turn - coarse) * 254.0 + 0.5)
        tl.store(digits + b * 2 * WIDTH + byte, coarse.to(tl.int8), mask=byte < WIDTH)
        tl.store(digits + (b * 2 + 1) * WIDTH + byte, fine.to(tl.int8), mask=byte < WIDTH)
        # How large errors are for this query, from rows whose logits are known.
        toward = tl.load(towards + b)
        estimate = tl.sum(own[None, :] * codes.to(tl.float32), 1)
        truth -= estimate
        error = _scale(truth, near, number, step, many)
        signal = _scale(estimate, near, number, step, many) / tl.maximum(error, 1e-30)
        tl.store(scales + b, error)
        tl.store(signals + b, signal)
        # Comparisons that a NaN fails, too.
        usual = (error >= low) & (error <= high) & (signal >= least_signal)
        usual = usual & (toward >= toward_low) & (toward <= toward_high)
        tl.store(strange + b, tl.where(usual, 0, 1))
        if TIER:
            sums = tl.zeros((PROBES, 64), tl.float32)
            for start in range(WIDTH, longest + _SPREADS, 64):
                sums += _codes(probe_records, y, number, start, stride, longest + _SPREADS)
            near = tl.load(tier_spreads + number).to(tl.float32)
            unit = _scale(truth - tl.sum(sums, 1), near, number, tier_step, many) * tier_step
            tl.store(units + b, unit)


@triton.jit
def _codes(records, y, row, start, stride, width):
    """Products of codes and coordinates, 64 for each row."""
    i = start + tl.arange(0, 64)
    own = tl.load(y + i - _SPREADS, mask=(i >= _SPREADS) & (i < width), other=0.0)
    codes = tl.load(records + row[:, None] * stride + i[None, :], mask=(i < width)[None, :], other=0)
    return own[None, :] * codes.to(tl.float32)


@triton.jit
def _scale(error, near, number, step, many):
    """Root of the mean square of errors in predicted deviations."""
    error = tl.where(number < many, error / (step * near), 0.0)
    return tl.sqrt(tl.sum(error * error, 0) / many)


# -- the preview -------------------------------------------------------------------------------------------------------


@triton.jit
def _added(deviation, correction, bend):
    """What is added to an estimate so that its exponential is the expected mass, as in `cascade_numba`."""
    near = tl.minimum(deviation, bend)
    return correction * near * (deviation + deviation - near)


@triton.jit
def _preview(
    records, spreads, bias, digits, tops, offset, scales, estimates, largest, masses, groups,
    n, blocks, stride, batch, step, correction, bend,
    BASED: tl.constexpr, WIDTH: tl.constexpr, SOME: tl.constexpr, LANES: tl.constexpr, QUERIES: tl.constexpr,
    GROUPED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    b = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    asked = b < batch
    lane = tl.arange(0, LANES)
    query = tl.program_id(1) * QUERIES + lane % (LANES // 2)
    own = digits + (query * 2 + lane // (LANES // 2)) * WIDTH
    row = block * _BLOCK + tl.arange(0, _BLOCK)
    valid = row < n
    places = records + row.to(tl.int64) * stride
    near = tl.load(spreads + row, mask=valid, other=1).to(tl.float32)
    if BASED:
        base = tl.load(bias + row, mask=valid, other=0.0)
    # Whole numbers on matrix units: sums are exact, and codes stay what they are.
    sums = tl.zeros((_BLOCK, LANES), tl.int32)
    for first in tl.static_range(0, WIDTH, SOME):
        j = first + tl.arange(0, SOME)
        codes = tl.load(places[:, None] + j[None, :], mask=valid[:, None] & (j < WIDTH)[None, :], other=0)
        if first == 0:
            _begin(EARLY)  # what comes before does not depend on the query
        there = (query < batch)[:, None] & (j < WIDTH)[None, :]
        some = tl.load(own[:, None] + j[None, :], mask=there, other=0)
        sums = tl.dot(codes, tl.trans(some), sums, out_dtype=tl.int32)
    scale = tl.load(scales + b, mask=asked, other=1.0)
    top = tl.load(tops + query, mask=query < batch, other=1.0)
    share = tl.where(query < batch, tl.where(lane < LANES // 2, top, top / 254.0), 0.0)
    values = sums.to(tl.float32) * share[None, :]
    if QUERIES == 1:  # noqa: SIM108
        values = tl.sum(values, 1)[:, None]
    else:
        values = tl.sum(tl.reshape(values, (_BLOCK, 2, QUERIES)), 1)
    values += tl.load(offset + b, mask=asked, other=0.0)[None, :]
    if BASED:
        values += base[:, None]
    values = tl.where(valid[:, None], values, -float("inf"))
    deviation = (scale * step)[None, :] * near[:, None]
    highest = tl.max(values, 0)
    mass = tl.exp(tl.minimum(values + _added(deviation, correction, bend) - highest[None, :], 80.0))
    tl.store(estimates + b[None, :] * n + row[:, None], values, mask=valid[:, None] & asked[None, :])
    place = b * blocks + block
    tl.store(largest + place, highest, mask=asked)
    tl.store(masses + place, tl.sum(mass, 0), mask=asked)
    if GROUPED:
        best = tl.max(tl.reshape(values, (_BLOCK // _GROUP, _GROUP, QUERIES)), 1)
        group = tl.arange(0, _BLOCK // _GROUP)
        at = place[None, :] * (_BLOCK // _GROUP) + group[:, None]
        tl.store(groups + at, best, mask=(group >= 0)[:, None] & asked[None, :])


# -- survivors ---------------------------------------------------------------------------------------------------------


@triton.jit
def _kth(values, K: tl.constexpr):
    """The k-th largest of a vector."""
    place = tl.arange(0, values.shape[0])
    for _ in range(K - 1):
        values = tl.where(place == tl.argmax(values, 0), -float("inf"), values)
    return tl.max(values, 0)


@triton.jit
def _select(
    estimates, spreads, largest, masses, groups, scales, strange,
    counts, rows, rests, shifts, dense,
    n, blocks, step, width, correction, bend, floor,
    K: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, GROUPED: tl.constexpr, CAPACITY: tl.constexpr,
    DENSE: tl.constexpr, UPPER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _begin(EARLY)
    part, b = tl.program_id(0), tl.program_id(1)
    every = tl.arange(0, BLOCKS)
    tops = tl.load(largest + b * blocks + every, mask=every < blocks, other=-float("inf"))
    shift = tl.max(tops, 0)
    own = tl.load(masses + b * blocks + every, mask=every < blocks, other=0.0)
    mass = tl.sum(own * tl.exp(tops - shift), 0)
    level = tl.log(mass) + shift + floor
    if K > 0:
        if GROUPED:
            group = tl.arange(0, GROUPS)
            count = blocks * (_BLOCK // _GROUP)
            best = tl.load(groups + b * count + group, mask=group < count, other=-float("inf"))
            level = tl.minimum(level, _kth(best, K))
        else:
            level = tl.minimum(level, _kth(tops, K))
    level -= 1e-6 * tl.abs(shift)
    scale = tl.load(scales + b)
    level = tl.where(tl.load(strange + b) != 0, float("inf"), level)  # none stays
    row = part * _CHOICE + tl.arange(0, _CHOICE)
    valid = row < n
    values = tl.load(estimates + b.to(tl.int64) * n + row, mask=valid, other=-float("inf"))
    near = tl.load(spreads + row, mask=valid, other=1).to(tl.float32)
    deviation = scale * step * near
    added = _added(deviation, correction, bend)
    stays = valid & (values + width * deviation >= level)
    rest = tl.where(valid & ~stays, tl.exp(tl.minimum(values + added - shift, 80.0)), 0.0)
    place = (b * tl.num_programs(0) + part) * 3
    tl.store(rests + place, tl.sum(rest, 0))
    tl.store(rests + place + 1, tl.sum(rest * tl.minimum(added, 1.0), 0))
    tl.store(rests + place + 2, tl.max(tl.where(valid & ~stays, values + added, -float("inf")), 0))
    if DENSE:
        if UPPER:
            added = width * deviation
        tl.store(dense + b.to(tl.int64) * n + row, (values + added).to(dense.dtype.element_ty), mask=valid)
    if part == 0:
        tl.store(shifts + b, shift)
    number = stays.to(tl.int32)
    count = tl.sum(number, 0)
    if count > 0:
        start = tl.atomic_add(counts + b, count)
        at = start + tl.cumsum(number, 0) - 1
        tl.store(rows + b * CAPACITY + at, row, mask=stays & (at < CAPACITY))


@triton.jit
def _refine(
    records, bias, y, offset, units, counts, rows, values, deviations,
    stride, longest, length, tier,
    BASED: tl.constexpr, SOME: tl.constexpr, ROWS: tl.constexpr, CAPACITY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _begin(EARLY)
    b = tl.program_id(1)
    count = tl.minimum(tl.load(counts + b), CAPACITY)
    first = tl.program_id(0) * ROWS
    if first < count:
        y += b * longest
        start = tl.load(offset + b)
        unit = tl.load(units + b)
        for begin in range(first, count, tl.num_programs(0) * ROWS):
            at = begin + tl.arange(0, ROWS)
            left = at < count
            row = tl.load(rows + b * CAPACITY + at, mask=left, other=0)
            record = records + row.to(tl.int64) * stride
            sums = tl.zeros((ROWS, SOME), tl.float32)
            for begin_codes in range(0, length, SOME):
                j = begin_codes + tl.arange(0, SOME)
                own = tl.load(y + j, mask=j < length, other=0.0)
                inside = left[:, None] & (j < length)[None, :]
                codes = tl.load(record[:, None] + _SPREADS + j[None, :], mask=inside, other=0)
                sums += own[None, :] * codes.to(tl.float32)
            near = tl.load(record + tier, mask=left, other=1).to(tl.uint8, bitcast=True).to(tl.float32)
            value = start + tl.sum(sums, 1)
            if BASED:
                value += tl.load(bias + row, mask=left, other=0.0)
            tl.store(values + b * CAPACITY + at, value, mask=left)
            tl.store(deviations + b * CAPACITY + at, unit * near, mask=left)


@triton.jit
def _exact(
    x, weight, bias, counts, rows, values, deviations, estimated, rests, shifts, dense,
    n, size, parts, scale, x_stride, weight_stride, width, correction, bend, floor,
    K: tl.constexpr, TIER: tl.constexpr, BIASED: tl.constexpr, DENSE: tl.constexpr, UPPER: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _begin(EARLY)
    b = tl.program_id(1)
    count = tl.minimum(tl.load(counts + b), CAPACITY)
    first = tl.program_id(0) * ROWS
    if first < count:
        level = -float("inf")
        if TIER:
            every = tl.arange(0, PARTS)
            mass = tl.sum(tl.load(rests + (b * parts + every) * 3, mask=every < parts, other=0.0), 0)
            shift = tl.load(shifts + b)
            slot = tl.arange(0, CAPACITY)
            refined = tl.load(values + b * CAPACITY + slot, mask=slot < count, other=-float("inf"))
            around = tl.load(deviations + b * CAPACITY + slot, mask=slot < count, other=0.0)
            mass += tl.sum(tl.exp(tl.minimum(refined + _added(around, correction, bend) - shift, 80.0)), 0)
            level = tl.log(mass) + shift + floor
            if K > 0:
                level = tl.minimum(level, _kth(refined, K))
            level -= 1e-6 * tl.abs(shift)
        x += b.to(tl.int64) * x_stride
        for begin in range(first, count, tl.num_programs(0) * ROWS):
            at = begin + tl.arange(0, ROWS)
            left = at < count
            row = tl.load(rows + b * CAPACITY + at, mask=left, other=0).to(tl.int64)
            final = left
            if TIER:
                found = tl.load(values + b * CAPACITY + at, mask=left, other=-float("inf"))
                deviation = tl.load(deviations + b * CAPACITY + at, mask=left, other=0.0)
                final = left & (found + width * deviation >= level)
            value = _dot(weight + row * weight_stride, final, x, size, ROWS, SIZE) * scale
            if BIASED:
                value += tl.load(bias + row, mask=final, other=0.0)
            if TIER:
                added = _added(deviation, correction, bend)
                logit = value
                value = tl.where(final, logit, found + added)
                # -1 says that a value is a logit: what it leaves in doubt otherwise.
                tl.store(estimated + b * CAPACITY + at, tl.where(final, -1.0, tl.minimum(added, 1.0)), mask=left)
                # Others still read the estimates.
                tl.store(estimated + (tl.num_programs(1) + b) * CAPACITY + at, value, mask=left)
            else:
                tl.store(values + b * CAPACITY + at, value, mask=left)
            if DENSE:
                if TIER and UPPER:
                    value = tl.where(final, logit, found + width * deviation)
                tl.store(dense + b.to(tl.int64) * n + row, value.to(dense.dtype.element_ty), mask=left)


# -- the answer --------------------------------------------------------------------------------------------------------


@triton.jit
def _answer(
    counts, rows, values, estimated, rests, shifts, scales, signals, towards, strange, limits,
    whole, numbers, totals,
    size, item, parts, read, entries, code_bytes, doubt, tolerance, survivors, flattest, interval, least, most,
    K: tl.constexpr, TIER: tl.constexpr, PARTS: tl.constexpr, CAPACITY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _begin(EARLY)
    b = tl.program_id(0).to(tl.int64)
    rows += b * CAPACITY
    values += b * CAPACITY
    estimated += b * CAPACITY
    rests += b * parts * 3
    found = tl.load(counts + b)
    count = tl.minimum(found, CAPACITY)
    every = tl.arange(0, PARTS)
    rest = tl.sum(tl.load(rests + every * 3, mask=every < parts, other=0.0), 0)
    rest_doubt = tl.sum(tl.load(rests + every * 3 + 1, mask=every < parts, other=0.0), 0)
    gone = tl.max(tl.load(rests + every * 3 + 2, mask=every < parts, other=-float("inf")), 0)
    highest = tl.load(shifts + b)
    total, corrected = rest, rest_doubt
    finalists = tl.zeros((), tl.int32)
    for begin in range(0, count, 1024):
        at = begin + tl.arange(0, 1024)
        value = tl.load(values + at, mask=at < count, other=-float("inf"))
        higher = tl.maximum(highest, tl.max(value, 0))
        mass = tl.exp(value - higher)
        total = total * tl.exp(highest - higher) + tl.sum(mass, 0)
        corrected = corrected * tl.exp(highest - higher)
        final = at < count
        if TIER:
            own = tl.load(estimated + at, mask=at < count, other=0.0)
            final = own < 0.0
            corrected += tl.sum(tl.where(final, 0.0, mass * own), 0)
            gone = tl.maximum(gone, tl.max(tl.where(final, -float("inf"), value), 0))
        finalists += tl.sum(final.to(tl.int32), 0)
        highest = higher
    half = doubt * corrected / total
    log_z = tl.log(total) + highest
    scale = tl.load(scales + b)
    state = tl.where(half <= tolerance, 0, _EXPENSIVE)
    state = tl.where(found <= CAPACITY, state, _EXPENSIVE)
    state = tl.where(finalists >= K, state, _EXPENSIVE)
    state = tl.where((tl.load(strange + b) == 0) & (found <= survivors), state, _DRIFTED)
    whole += b * (K + 5)
    numbers += b * (2 * K + 8)
    # In falling order, tied ones by their rows, wherever they are.
    last, last_row = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
    for place in range(K):
        best, chosen = tl.full((), -float("inf"), tl.float32), tl.full((), 2147483647, tl.int32)
        for begin in range(0, count, 1024):
            at = begin + tl.arange(0, 1024)
            value = tl.load(values + at, mask=at < count, other=-float("inf"))
            row = tl.load(rows + at, mask=at < count, other=2147483647)
            left = (value < last) | ((value == last) & (row > last_row))
            if TIER:
                left = left & (tl.load(estimated + at, mask=at < count, other=0.0) < 0.0)
            value = tl.where(left, value, -float("inf"))
            here = tl.max(value, 0)
            lowest = tl.min(tl.where(left & (value == here), row, 2147483647), 0)
            chosen = tl.where(here > best, lowest, tl.where(here == best, tl.minimum(lowest, chosen), chosen))
            best = tl.maximum(best, here)
        last, last_row = best, chosen
        tl.store(whole + place, chosen.to(tl.int64))
        tl.store(numbers + place, tl.exp(best - log_z))
        tl.store(numbers + K + place, best)
    flat = tl.zeros((), tl.float32)
    limit = tl.full((), float("inf"), tl.float32)
    if K > 0:
        flat = log_z - last
        state = tl.where(flat <= flattest, state, _DRIFTED)
        # Rows that did not reach a level above the answer may have estimates above it.
        limit = tl.where(gone >= last, last, limit)
    tl.store(limits + b, limit)
    promised = tl.minimum(tl.maximum(half * interval, least), most)
    tl.store(numbers + 2 * K, log_z)
    tl.store(numbers + 2 * K + 1, log_z - promised)
    tl.store(numbers + 2 * K + 2, log_z + promised)
    tl.store(numbers + 2 * K + 3, half)
    tl.store(numbers + 2 * K + 4, scale)
    tl.store(numbers + 2 * K + 5, tl.load(signals + b))
    tl.store(numbers + 2 * K + 6, tl.load(towards + b))
    tl.store(numbers + 2 * K + 7, flat)
    tl.store(whole + K, entries + (count * code_bytes + finalists * size).to(tl.int64))
    tl.store(whole + K + 1, read + (count * code_bytes).to(tl.int64) + finalists.to(tl.int64) * size * item)
    tl.store(whole + K + 2, found.to(tl.int64))
    tl.store(whole + K + 3, finalists.to(tl.int64))
    tl.store(whole + K + 4, state.to(tl.int64))
    tl.atomic_add(totals, 1)
    if state != 0:
        tl.atomic_add(counts + tl.num_programs(0), 1)
        tl.atomic_add(totals + 1, 1)


@triton.jit
def _everything(
    x, weight, bias, counts, arrivals, estimates, largest, limits, whole, numbers, dense,
    n, size, item, blocks, batch, scale, x_stride, weight_stride, below,
    K: tl.constexpr, BIASED: tl.constexpr, DENSE: tl.constexpr, LIMITED: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _begin(EARLY)
    if LIMITED:
        for b in range(batch):
            limit = tl.load(limits + b)
            if (limit < float("inf")) & (tl.load(whole + b * (K + 5) + K + 4) == 0):
                for start in range(tl.program_id(0) * _CHOICE, n, tl.num_programs(0) * _CHOICE):
                    row = start + tl.arange(0, _CHOICE).to(tl.int64)
                    place = dense + b * n.to(tl.int64) + row
                    value = tl.load(place, mask=row < n, other=-float("inf")).to(tl.float32)
                    above = value >= limit
                    for rank in range(K):
                        above = above & (row != tl.load(whole + b * (K + 5) + rank))
                    lowered = limit - below * tl.maximum(tl.abs(limit), 1e-30)
                    tl.store(place, lowered.to(dense.dtype.element_ty), mask=above & (row < n))
    if tl.load(counts + batch) > 0:
        for start in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
            row = start + tl.arange(0, ROWS).to(tl.int64)
            for b in range(batch):
                if tl.load(whole + b * (K + 5) + K + 4) != 0:
                    value = _dot(weight + row * weight_stride, row < n, x + b * x_stride, size, ROWS, SIZE)
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
    """The top k and log Z of logits that are there, by one program."""
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


# -- launching ---------------------------------------------------------------------------------------------------------


class _Memory(NamedTuple):
    """What launches leave for each other."""

    y: Tensor  # (batch, longest)
    offset: Tensor  # (batch,)
    probed: Tensor  # (batch, PROBES)
    digits: Tensor  # (batch, 2, width) int8: the beginning of y as whole numbers
    tops: Tensor  # (batch,): what 1 of these stands for
    scales: Tensor  # (batch,): of the errors of the preview
    signals: Tensor  # (batch,): size of the probes' estimates, in sizes of their errors
    towards: Tensor  # (batch,): cosine of the angle to the mean query
    strange: Tensor  # (batch,) int32: whether a query is unlike those of the calibration
    limits: Tensor  # (batch,): what no estimate may reach; infinite where none does
    units: Tensor  # (batch,): deviation of the tier's errors for a spread of 1
    estimates: Tensor  # (batch, n)
    largest: Tensor  # (batch, blocks)
    masses: Tensor  # (batch, blocks)
    groups: Tensor  # (batch, blocks, BLOCK / GROUP)
    rests: Tensor  # (batch, parts, 3): mass of the rows that left, the doubtful part of it, their largest estimate
    shifts: Tensor  # (batch,)
    values: Tensor  # (batch, capacity): estimates or logits of survivors
    deviations: Tensor  # (batch, capacity)
    estimated: Tensor  # (2, batch, capacity): with a tier, whether a value is an estimate, and the value
    counts: Tensor  # (batch + 1,) int32: survivors, and queries for which everything is read
    rows: Tensor  # (batch, capacity) int32: survivors


def _memory(index: Index, plan: Plan, batch: int) -> _Memory:
    n, device = len(index.weight), index.weight.device
    blocks, tiered = triton.cdiv(n, BLOCK), plan.tier >= 0

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    return _Memory(
        floats(batch, max(plan.length, plan.tier_length)),
        floats(batch),
        floats(batch, len(index.probe_records)),
        torch.empty(batch, 2, SPREADS + plan.length, dtype=torch.int8, device=device),
        floats(batch),
        floats(batch),
        floats(batch),
        floats(batch),
        torch.empty(batch, dtype=torch.int32, device=device),
        floats(batch),
        floats(batch),
        floats(batch, n),
        floats(batch, blocks),
        floats(batch, blocks),
        floats(batch, blocks, BLOCK // GROUP) if plan.k > 1 else floats(0),
        floats(batch, triton.cdiv(n, CHOICE), 3),
        floats(batch),
        floats(batch, plan.capacity),
        floats(batch, plan.capacity if tiered else 0),
        floats(2, batch, plan.capacity if tiered else 0),
        torch.empty(batch + 1, dtype=torch.int32, device=device),
        torch.empty(batch, plan.capacity, dtype=torch.int32, device=device),
    )


def ask(
    index: Index,
    plan: Plan,
    x: Tensor,
    *,
    scale: float,
    beta: float,
    totals: Tensor,
    arrivals: Tensor,
    dense: Tensor | None = None,
) -> Found:
    """Answer queries (batch, d), of any floating-point dtype up to float32: logits are ``scale * weight @ x + bias``.

    Args:
        beta: what stands for the bias at the end of a query times ``scale``.
        totals: (2,) int64, to which are added the queries, and those of them for which everything was read.
        arrivals: (ARRIVALS,) int32 zeros, which they are again in the end. For one call at a time.
        dense: where all logits go, exact for finalists and elsewhere such that their exponentials are the estimated
            masses. (batch, n)
    """
    (n, size), batch, k = index.weight.shape, len(x), plan.k
    item, biased = index.weight.element_size(), index.bias is not None
    based, bend = biased and not index.coded, plan.width / max(2 * plan.correction, 1e-30)
    probes, many = len(index.probe_records), len(index.probes)
    tiered, extended, stride = plan.tier >= 0, index.projection.shape[1], index.records.stride(0)
    longest, width, capacity = max(plan.length, plan.tier_length), SPREADS + plan.length, plan.capacity
    m = _memory(index, plan, batch)
    whole = torch.empty(batch, k + 5, dtype=torch.int64, device=x.device)
    numbers = torch.empty(batch, 2 * k + 8, dtype=torch.float32, device=x.device)
    wide = min(4096, triton.next_power_of_2(size))
    rows = max(1, 4096 // wide)
    blocks, parts, grouped = triton.cdiv(n, BLOCK), triton.cdiv(n, CHOICE), k > 1
    block_width, part_width = triton.next_power_of_2(blocks), triton.next_power_of_2(parts)
    spreads, filled, out = index.spreads[plan.first], dense is not None, m.scales if dense is None else dense
    # From Hopper on, launches begin before the one before is done, and wait for it themselves.
    early = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    how = {"EARLY": early, "launch_pdl": early} if x.is_cuda else {"EARLY": False}

    _products[(triton.cdiv(longest, rows) + triton.cdiv(probes, rows) + 2, batch)](
        x, index.weight, index.bias, index.projection, index.centre, index.mean, index.probes,
        index.probe_records, index.probe_spreads[plan.first], index.probe_spreads[plan.tier],
        m.y, m.offset, m.probed, m.digits, m.tops, m.scales, m.signals, m.towards, m.strange, m.units,
        m.counts, arrivals,
        size, extended, longest, many, stride, scale, beta, x.stride(0), index.weight.stride(0),
        plan.step, plan.tier_step, plan.low, plan.high, plan.signal, plan.toward_low, plan.toward_high,
        BIASED=biased, CODED=biased and index.coded, BASED=based, TIER=tiered,
        WIDTH=width, LONGEST=triton.next_power_of_2(width), PROBES=probes,
        ROWS=rows, SIZE=wide, num_warps=WARPS, **how,
    )  # fmt: skip
    together = 1 if batch == 1 else LANES // 2
    _preview[(blocks, triton.cdiv(batch, together))](
        index.records, spreads, index.bias, m.digits, m.tops, m.offset, m.scales,
        m.estimates, m.largest, m.masses, m.groups,
        n, blocks, stride, batch, plan.step, plan.correction, bend,
        BASED=based, WIDTH=width, SOME=min(128, max(32, triton.next_power_of_2(width))), LANES=LANES, QUERIES=together,
        GROUPED=grouped, num_warps=WARPS, **how,
    )  # fmt: skip
    _select[(parts, batch)](
        m.estimates, spreads, m.largest, m.masses, m.groups, m.scales, m.strange,
        m.counts, m.rows, m.rests, m.shifts, out,
        n, blocks, plan.step, plan.width, plan.correction, bend, plan.floor,
        K=k, BLOCKS=block_width, GROUPS=block_width * (BLOCK // GROUP), GROUPED=grouped, CAPACITY=capacity,
        DENSE=filled, UPPER=plan.upper, num_warps=WARPS, **how,
    )  # fmt: skip
    programs = max(64, 4096 // batch)
    if tiered:
        _refine[(min(programs, triton.cdiv(capacity, 16)), batch)](
            index.records, index.bias, m.y, m.offset, m.units, m.counts, m.rows, m.values, m.deviations,
            stride, longest, plan.tier_length, plan.tier,
            BASED=based, SOME=64, ROWS=16, CAPACITY=capacity, num_warps=WARPS, **how,
        )  # fmt: skip
    _exact[(min(programs, triton.cdiv(capacity, rows)), batch)](
        x, index.weight, index.bias, m.counts, m.rows, m.values, m.deviations, m.estimated, m.rests, m.shifts, out,
        n, size, parts, scale, x.stride(0), index.weight.stride(0), plan.width, plan.correction, bend, plan.floor,
        K=k, TIER=tiered, BIASED=biased, DENSE=filled, UPPER=plan.upper, PARTS=part_width,
        ROWS=rows, SIZE=wide, CAPACITY=capacity, num_warps=WARPS, **how,
    )  # fmt: skip
    read = many * (size * item + plan.length + 1) + longest * extended * 2 + n * (plan.length + 1 + 4 * based)
    read += 4 * extended + (many * (plan.tier_length + 1) if tiered else 0)
    entries = many * size + (n + many) * plan.length + (many * plan.tier_length if tiered else 0)
    _answer[(batch,)](
        m.counts, m.rows, m.estimated[1] if tiered else m.values, m.estimated,
        m.rests, m.shifts, m.scales, m.signals, m.towards, m.strange, m.limits, whole, numbers, totals,
        size, item, parts, read, entries, plan.tier_length + 1 if tiered else 0,
        plan.doubt, plan.tolerance, plan.survivors, plan.flat, plan.interval, plan.least, plan.most,
        K=k, TIER=tiered, PARTS=part_width, CAPACITY=capacity, num_warps=WARPS, **how,
    )  # fmt: skip
    _everything[(min(264, triton.cdiv(n, 4 * rows)),)](
        x, index.weight, index.bias, m.counts, arrivals[MOST_BATCH:], m.estimates, m.largest, m.limits,
        whole, numbers, out,
        n, size, item, blocks, batch, scale, x.stride(0), index.weight.stride(0), torch.finfo(out.dtype).eps,
        K=k, BIASED=biased, DENSE=filled, LIMITED=filled and k > 0 and not plan.upper,
        BLOCKS=block_width, ROWS=4 * rows, SIZE=wide, num_warps=2 * WARPS, **how,
    )  # fmt: skip
    return Found(whole, numbers)
