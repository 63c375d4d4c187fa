"""The steps of docs/cascade.md in Triton: each kernel is one launch for a batch of queries, made by `cascade_triton`.

Pointers are named as in `cascade_triton.Index` and its memory. Runs under Triton's interpreter, too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 256  # rows that are estimated together
GROUP = 64  # rows of which the best estimate is kept, to know the k-th best of all
SPREADS = 8  # bytes for the spreads of tiers, before the codes of a row
LEADING, STEP = 8, 5  # of packed codes: those of eight bits, and what one of four bits stands for

_BLOCK, _GROUP, _SPREADS = (tl.constexpr(number) for number in (BLOCK, GROUP, SPREADS))
_LEADING, _SHARE = tl.constexpr(LEADING), tl.constexpr(STEP / 16)


@triton.jit
def begin(EARLY: tl.constexpr):
    """Let the next launch begin, which waits here for this one, and wait for the one before."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def dot_rows(rows, valid, x, size, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return the products of rows at these addresses with a query. (ROWS,)"""
    total = tl.zeros((ROWS, SIZE), tl.float32)
    for start in range(0, size, SIZE):
        at = start + tl.arange(0, SIZE)
        own = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
        inside = valid[:, None] & (at < size)[None, :]
        total += tl.load(rows[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32) * own[None, :]
    return tl.sum(total, 1)


@triton.jit
def _expected_excess(deviation, correction, bend):
    """Return what makes the exponential of an estimate that of a dropped row in the mean, as in `estimates_numba`."""
    bent = tl.minimum(deviation, bend)
    return correction * bent * (deviation + deviation - bent)


@triton.jit
def _kth_largest(values, K: tl.constexpr):
    """Return the k-th largest of a vector."""
    place = tl.arange(0, values.shape[0])
    for _ in range(K - 1):
        values = tl.where(place == tl.argmax(values, 0), -float("inf"), values)
    return tl.max(values, 0)


# -- errors ------------------------------------------------------------------------------------------------------------


@triton.jit
def _dot_mean(x, mean, size, SIZE: tl.constexpr):
    """Return the product of a query with the mean one, and the square of its length."""
    dots, squares = tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32)
    for start in range(0, size, SIZE):
        at = start + tl.arange(0, SIZE)
        own = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
        dots += own * tl.load(mean + at, mask=at < size, other=0.0)
        squares += own * own
    return tl.sum(dots, 0), tl.sum(squares, 0)


@triton.jit
def _dot_codes(records, y, row, start, stride, width):
    """Return products of codes and coordinates, 64 for each row."""
    i = start + tl.arange(0, 64)
    own = tl.load(y + i - _SPREADS, mask=(i >= _SPREADS) & (i < width), other=0.0)
    codes = tl.load(records + row[:, None] * stride + i[None, :], mask=(i < width)[None, :], other=0)
    return own[None, :] * codes.to(tl.float32)


@triton.jit
def _root_mean_square(error, spread, number, step, many):
    """Return that of errors in predicted deviations."""
    error = tl.where(number < many, error / (step * spread), 0.0)
    return tl.sqrt(tl.sum(error * error, 0) / many)


@triton.jit
def _turned_at(y, byte, WIDTH: tl.constexpr, PACKED: tl.constexpr):
    """Return the coordinates of a query that codes of the preview are multiplied with, in the order of these.

    With codes of four bits these are the high ones of PACKED bytes, then the low ones.
    """
    if PACKED:
        high = byte < PACKED
        place = tl.where(high, byte, byte - PACKED)
        leading = place < _LEADING  # both halves of one code
        coordinate = tl.where(leading, place, 2 * place - _LEADING + high.to(tl.int32))
        share = tl.where(leading, tl.where(high, 1.0, 0.0625), _SHARE)  # of what a code that counts 16 times is
        return tl.load(y + coordinate, mask=byte < WIDTH, other=0.0) * share
    return tl.load(y + byte - _SPREADS, mask=(byte >= _SPREADS) & (byte < WIDTH), other=0.0)


@triton.jit
def _round_query(own, byte, tops, digits, b, WIDTH: tl.constexpr):
    """Write a turned query as whole numbers in [-127, 127], and what these leave, 254 times as large."""
    top = tl.max(tl.abs(own), 0)
    top = tl.where(top > 0.0, top / 127.0, 1.0)
    tl.store(tops + b, top)
    turned = own / top
    coarse = tl.floor(turned + 0.5)
    fine = tl.floor((turned - coarse) * 254.0 + 0.5)
    tl.store(digits + b * 2 * WIDTH + byte, coarse.to(tl.int8), mask=byte < WIDTH)
    tl.store(digits + (b * 2 + 1) * WIDTH + byte, fine.to(tl.int8), mask=byte < WIDTH)


@triton.jit
def measure_errors(
    x, weight, bias, projection, centre, mean, probes, probe_codes, probe_spreads, probe_records, tier_spreads,
    y, offset, probed, digits, tops, scales, signals, towards, unusual, units, counts, done, arrivals,
    size, extended, longest, many, code_stride, stride, scale, beta, x_stride, weight_stride, step, tier_step,
    low, high, least_signal, toward_low, toward_high,
    BIASED: tl.constexpr, CODED: tl.constexpr, BASED: tl.constexpr, TIER: tl.constexpr,
    WIDTH: tl.constexpr, PACKED: tl.constexpr, LONGEST: tl.constexpr, PROBES: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Turn the queries, and measure how large errors are for them on the probes.

    Reads the projection, the centre, the mean query and the probes with their codes. Programs (parts, batch) take some
    rows each; the last of a query to be done has all its products. Decides whether a query is unlike those of the
    calibration: ``unusual``.
    """
    begin(EARLY)
    part, b = tl.program_id(0), tl.program_id(1)
    # The last program needs these at once; who is the last, nobody knows.
    number, byte = tl.arange(0, PROBES), tl.arange(0, LONGEST)
    inside = (byte < WIDTH)[None, :]
    codes = tl.load(probe_codes + number[:, None] * code_stride + byte[None, :], mask=inside, other=0)
    spread = tl.load(probe_spreads + number).to(tl.float32)
    x += b.to(tl.int64) * x_stride
    turned = tl.cdiv(longest, ROWS)
    if part < turned:
        row = part * ROWS + tl.arange(0, ROWS)
        valid = row < longest
        places = projection + row.to(tl.int64) * extended
        value = dot_rows(places, valid, x, size, ROWS, SIZE) * scale
        if CODED:
            value += beta * tl.load(places + size, mask=valid, other=0.0).to(tl.float32)
        tl.store(y + b * longest + row, value, mask=valid)
    elif part < turned + tl.cdiv(PROBES, ROWS):
        probe = (part - turned) * ROWS + tl.arange(0, ROWS)
        valid = probe < many
        row = tl.load(probes + probe, mask=valid, other=0)
        value = dot_rows(weight + row * weight_stride, valid, x, size, ROWS, SIZE) * scale
        if BIASED:
            value += tl.load(bias + row, mask=valid, other=0.0)
        tl.store(probed + b * PROBES + probe, value, mask=valid)
    elif part == tl.num_programs(0) - 1:
        dot, square = _dot_mean(x, mean, size, SIZE)
        dot, square = dot * scale, square * scale * scale
        if CODED:
            dot += beta * tl.load(mean + size)
            square += beta * beta
        tl.store(towards + b, dot / tl.maximum(tl.sqrt(square), 1e-30))
    else:
        lane = tl.arange(0, ROWS)
        value = dot_rows(centre + lane * 0, lane == 0, x, size, ROWS, SIZE) * scale
        if CODED:
            value += beta * tl.load(centre + size + lane * 0, mask=lane == 0, other=0.0)
        tl.store(offset + b + lane, value, mask=lane == 0)
        tl.store(counts + b, 0)  # no survivors yet, of which some are read
        tl.store(done + b, 0)
        if b == 0:
            tl.store(counts + tl.num_programs(1), 0)  # nor queries to be answered exactly
    tl.debug_barrier()
    before = tl.atomic_add(arrivals + b, 1, sem="acq_rel")
    if before == tl.num_programs(0) - 1:  # the last one to be done has everything
        tl.debug_barrier()
        tl.store(arrivals + b, 0)
        y += b * longest
        own = _turned_at(y, byte, WIDTH, PACKED)
        truth = tl.load(probed + b * PROBES + number, mask=number < many, other=0.0) - tl.load(offset + b)
        if BASED:  # estimates have it exactly
            at = tl.load(probes + number, mask=number < many, other=0)
            truth -= tl.load(bias + at, mask=number < many, other=0.0)
        _round_query(own, byte, tops, digits, b, WIDTH)
        toward = tl.load(towards + b)
        estimate = tl.sum(own[None, :] * codes.to(tl.float32), 1)
        truth -= estimate
        error = _root_mean_square(truth, spread, number, step, many)
        signal = _root_mean_square(estimate, spread, number, step, many) / tl.maximum(error, 1e-30)
        tl.store(scales + b, error)
        tl.store(signals + b, signal)
        # Comparisons that a NaN fails, too.
        usual = (error >= low) & (error <= high) & (signal >= least_signal)
        usual = usual & (toward >= toward_low) & (toward <= toward_high)
        tl.store(unusual + b, tl.where(usual, 0, 1))
        if TIER:
            sums = tl.zeros((PROBES, 64), tl.float32)
            first: tl.constexpr = 0 if PACKED else WIDTH  # codes of the tier that the preview does not have
            if PACKED:
                truth += estimate
            for start in range(first, longest + _SPREADS, 64):
                sums += _dot_codes(probe_records, y, number, start, stride, longest + _SPREADS)
            spread = tl.load(tier_spreads + number).to(tl.float32)
            unit = _root_mean_square(truth - tl.sum(sums, 1), spread, number, tier_step, many) * tier_step
            tl.store(units + b, unit)


# -- the preview -------------------------------------------------------------------------------------------------------


@triton.jit
def _high_codes(codes, WORDS: tl.constexpr):
    """Return 16 times the codes of four bits that are the high ones of their bytes, four bytes at once with WORDS."""
    if WORDS:
        return tl.inline_asm_elementwise("and.b32 $0, $1, 0xF0F0F0F0;", "=r,r", [codes], tl.int8, is_pure=True, pack=4)
    return codes & -16


@triton.jit
def _low_codes(codes, WORDS: tl.constexpr):
    """Return the same of the low ones."""
    if WORDS:
        shift: tl.constexpr = "{ .reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xF0F0F0F0; }"
        return tl.inline_asm_elementwise(shift, "=r,r", [codes], tl.int8, is_pure=True, pack=4)
    return codes << 4


@triton.jit
def preview_rows(
    records, spreads, bias, digits, tops, offset, scales, estimates, largest, sums, groups,
    n, blocks, stride, batch, step, correction, bend,
    BASED: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, SOME: tl.constexpr, LANES: tl.constexpr,
    QUERIES: tl.constexpr, GROUPED: tl.constexpr, WORDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Estimate a block of rows for some queries, from the first codes of their records, or of PACKED bytes of them.

    Writes the estimates and, of each block, the largest, the sum of exponentials over e^largest and, if GROUPED, the
    largest of each group of rows. Decides nothing.
    """
    block = tl.program_id(0)
    b = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    asked = b < batch
    lane = tl.arange(0, LANES)
    query = tl.program_id(1) * QUERIES + lane % (LANES // 2)
    own = digits + (query * 2 + lane // (LANES // 2)) * WIDTH
    row = block * _BLOCK + tl.arange(0, _BLOCK)
    valid = row < n
    places = records + row.to(tl.int64) * stride
    spread = tl.load(spreads + row, mask=valid, other=1).to(tl.float32)
    if BASED:
        base = tl.load(bias + row, mask=valid, other=0.0)
    # Whole numbers on matrix units: sums are exact, and codes stay what they are.
    products = tl.zeros((_BLOCK, LANES), tl.int32)
    ends: tl.constexpr = PACKED if PACKED else WIDTH
    for first in tl.static_range(0, ends, SOME):
        j = first + tl.arange(0, SOME)
        codes = tl.load(places[:, None] + j[None, :], mask=valid[:, None] & (j < ends)[None, :], other=0)
        if first == 0:
            begin(EARLY)  # what comes before does not depend on the query
        inside = (query < batch)[:, None] & (j < ends)[None, :]
        some = tl.load(own[:, None] + j[None, :], mask=inside, other=0)
        if PACKED:
            low = tl.load(own[:, None] + PACKED + j[None, :], mask=inside, other=0)
            products = tl.dot(_low_codes(codes, WORDS), tl.trans(low), products, out_dtype=tl.int32)
            codes = _high_codes(codes, WORDS)
        products = tl.dot(codes, tl.trans(some), products, out_dtype=tl.int32)
    scale = tl.load(scales + b, mask=asked, other=1.0)
    top = tl.load(tops + query, mask=query < batch, other=1.0)
    share = tl.where(query < batch, tl.where(lane < LANES // 2, top, top / 254.0), 0.0)
    values = products.to(tl.float32) * share[None, :]
    if QUERIES == 1:  # noqa: SIM108
        values = tl.sum(values, 1)[:, None]
    else:
        values = tl.sum(tl.reshape(values, (_BLOCK, 2, QUERIES)), 1)
    values += tl.load(offset + b, mask=asked, other=0.0)[None, :]
    if BASED:
        values += base[:, None]
    values = tl.where(valid[:, None], values, -float("inf"))
    deviation = (scale * step)[None, :] * spread[:, None]
    highest = tl.max(values, 0)
    total = tl.exp(tl.minimum(values + _expected_excess(deviation, correction, bend) - highest[None, :], 80.0))
    tl.store(estimates + b[None, :] * n + row[:, None], values, mask=valid[:, None] & asked[None, :])
    place = b * blocks + block
    tl.store(largest + place, highest, mask=asked)
    tl.store(sums + place, tl.sum(total, 0), mask=asked)
    if GROUPED:
        best = tl.max(tl.reshape(values, (_BLOCK // _GROUP, _GROUP, QUERIES)), 1)
        group = tl.arange(0, _BLOCK // _GROUP)
        at = place[None, :] * (_BLOCK // _GROUP) + group[:, None]
        tl.store(groups + at, best, mask=(group >= 0)[:, None] & asked[None, :])


# -- survivors ---------------------------------------------------------------------------------------------------------


@triton.jit
def select_survivors(
    estimates, spreads, largest, sums, groups, scales, unusual,
    counts, rows, dropped, shifts, dense,
    n, blocks, step, width, correction, bend, floor,
    K: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, GROUPED: tl.constexpr, CHOICE: tl.constexpr,
    CAPACITY: tl.constexpr, DENSE: tl.constexpr, UPPER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Decide which rows of a part survive the preview, and sum up the exponentials of those that it drops.

    Reads the estimates, and of all blocks what the preview wrote of them: a row survives if its upper end reaches the
    k-th best estimate, or the share of the partition function that matters. Of an unusual query none does.
    """
    begin(EARLY)
    part, b = tl.program_id(0), tl.program_id(1)
    every = tl.arange(0, BLOCKS)
    tops = tl.load(largest + b * blocks + every, mask=every < blocks, other=-float("inf"))
    shift = tl.max(tops, 0)
    own = tl.load(sums + b * blocks + every, mask=every < blocks, other=0.0)
    total = tl.sum(own * tl.exp(tops - shift), 0)
    threshold = tl.log(total) + shift + floor
    if K > 0:
        if GROUPED:
            group = tl.arange(0, GROUPS)
            count = blocks * (_BLOCK // _GROUP)
            best = tl.load(groups + b * count + group, mask=group < count, other=-float("inf"))
            threshold = tl.minimum(threshold, _kth_largest(best, K))
        else:
            threshold = tl.minimum(threshold, _kth_largest(tops, K))
    threshold -= 1e-6 * tl.abs(shift)
    scale = tl.load(scales + b)
    threshold = tl.where(tl.load(unusual + b) != 0, float("inf"), threshold)
    row = part * CHOICE + tl.arange(0, CHOICE)
    valid = row < n
    values = tl.load(estimates + b.to(tl.int64) * n + row, mask=valid, other=-float("inf"))
    spread = tl.load(spreads + row, mask=valid, other=1).to(tl.float32)
    deviation = scale * step * spread
    excess = _expected_excess(deviation, correction, bend)
    stays = valid & (values + width * deviation >= threshold)
    own = tl.where(valid & ~stays, tl.exp(tl.minimum(values + excess - shift, 80.0)), 0.0)
    place = (b * tl.num_programs(0) + part) * 3
    tl.store(dropped + place, tl.sum(own, 0))
    tl.store(dropped + place + 1, tl.sum(own * tl.minimum(excess, 1.0), 0))
    tl.store(dropped + place + 2, tl.max(tl.where(valid & ~stays, values + excess, -float("inf")), 0))
    if DENSE:
        if UPPER:
            excess = width * deviation
        tl.store(dense + b.to(tl.int64) * n + row, (values + excess).to(dense.dtype.element_ty), mask=valid)
    if part == 0:
        tl.store(shifts + b, shift)
    number = stays.to(tl.int32)
    count = tl.sum(number, 0)
    if count > 0:
        start = tl.atomic_add(counts + b, count)
        at = start + tl.cumsum(number, 0) - 1
        tl.store(rows + b * CAPACITY + at, row, mask=stays & (at < CAPACITY))


@triton.jit
def refine_survivors(
    records, bias, y, offset, units, counts, rows, values, deviations,
    stride, longest, length, tier,
    BASED: tl.constexpr, SOME: tl.constexpr, ROWS: tl.constexpr, CAPACITY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Estimate survivors from longer codes, those of the tier; who of them stays, `read_refined` decides."""
    begin(EARLY)
    b = tl.program_id(1)
    count = tl.minimum(tl.load(counts + b), CAPACITY)
    first = tl.program_id(0) * ROWS
    if first < count:
        y += b * longest
        start = tl.load(offset + b)
        unit = tl.load(units + b)
        for start_row in range(first, count, tl.num_programs(0) * ROWS):
            at = start_row + tl.arange(0, ROWS)
            valid = at < count
            row = tl.load(rows + b * CAPACITY + at, mask=valid, other=0)
            record = records + row.to(tl.int64) * stride
            products = tl.zeros((ROWS, SOME), tl.float32)
            for begin_codes in range(0, length, SOME):
                j = begin_codes + tl.arange(0, SOME)
                own = tl.load(y + j, mask=j < length, other=0.0)
                inside = valid[:, None] & (j < length)[None, :]
                codes = tl.load(record[:, None] + _SPREADS + j[None, :], mask=inside, other=0)
                products += own[None, :] * codes.to(tl.float32)
            spread = tl.load(record + tier, mask=valid, other=1).to(tl.uint8, bitcast=True).to(tl.float32)
            value = start + tl.sum(products, 1)
            if BASED:
                value += tl.load(bias + row, mask=valid, other=0.0)
            tl.store(values + b * CAPACITY + at, value, mask=valid)
            tl.store(deviations + b * CAPACITY + at, unit * spread, mask=valid)


@triton.jit
def read_refined(
    x, weight, bias, counts, rows, values, deviations, refined, dropped, shifts, dense,
    n, size, parts, scale, x_stride, weight_stride, width, correction, bend, floor,
    K: tl.constexpr, BIASED: tl.constexpr, DENSE: tl.constexpr, UPPER: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Read survivors of a tier in full: those whose upper ends reach the threshold, which it decides on anew.

    Reads their rows of the weight, and the estimates of all survivors for the threshold. Writes logits of finalists and
    corrected estimates of the others to the second half of ``refined``: other programs still read the estimates. Its
    first half has -1 for a logit, else how much of the exponential was corrected.
    """
    begin(EARLY)
    b = tl.program_id(1)
    count = tl.minimum(tl.load(counts + b), CAPACITY)
    first = tl.program_id(0) * ROWS
    if first < count:
        every = tl.arange(0, PARTS)
        total = tl.sum(tl.load(dropped + (b * parts + every) * 3, mask=every < parts, other=0.0), 0)
        shift = tl.load(shifts + b)
        slot = tl.arange(0, CAPACITY)
        estimates = tl.load(values + b * CAPACITY + slot, mask=slot < count, other=-float("inf"))
        around = tl.load(deviations + b * CAPACITY + slot, mask=slot < count, other=0.0)
        total += tl.sum(tl.exp(tl.minimum(estimates + _expected_excess(around, correction, bend) - shift, 80.0)), 0)
        threshold = tl.log(total) + shift + floor
        if K > 0:
            threshold = tl.minimum(threshold, _kth_largest(estimates, K))
        threshold -= 1e-6 * tl.abs(shift)
        x += b.to(tl.int64) * x_stride
        for start_row in range(first, count, tl.num_programs(0) * ROWS):
            at = start_row + tl.arange(0, ROWS)
            valid = at < count
            row = tl.load(rows + b * CAPACITY + at, mask=valid, other=0).to(tl.int64)
            estimate = tl.load(values + b * CAPACITY + at, mask=valid, other=-float("inf"))
            deviation = tl.load(deviations + b * CAPACITY + at, mask=valid, other=0.0)
            final = valid & (estimate + width * deviation >= threshold)
            logit = dot_rows(weight + row * weight_stride, final, x, size, ROWS, SIZE) * scale
            if BIASED:
                logit += tl.load(bias + row, mask=final, other=0.0)
            excess = _expected_excess(deviation, correction, bend)
            value = tl.where(final, logit, estimate + excess)
            tl.store(refined + b * CAPACITY + at, tl.where(final, -1.0, tl.minimum(excess, 1.0)), mask=valid)
            tl.store(refined + (tl.num_programs(1) + b) * CAPACITY + at, value, mask=valid)
            if DENSE:
                if UPPER:
                    value = tl.where(final, logit, estimate + width * deviation)
                tl.store(dense + b.to(tl.int64) * n + row, value.to(dense.dtype.element_ty), mask=valid)
