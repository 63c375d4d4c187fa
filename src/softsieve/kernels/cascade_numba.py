"""The cascade on the CPU, in numba: one query through preview, tiers of codes and exact rows. Raw arrays only.

Inner loops run over contiguous slices, which is what the compiler vectorises. Rows are read where they are, never
gathered into a copy. Weights of 16 bits come as raw bits: bfloat16 as uint16, float16 as int16.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

BLOCK = 512  # rows of the preview that are worked on together: their estimates stay in the first cache
SOON, NEXT = 8, 2  # codes and rows of the weight ahead that are asked for
LINE = 64  # bytes that come at a time
SPREADS = 8  # bytes for the spreads of tiers, before the codes of a row
ALONE = 1 << 20  # entries up to which one thread does the work: starting more costs time, on a busy machine much
LOG2E = 1.4426950408889634
TO_BITS = np.uint64(0x0102040810204080)  # times eight bytes of 0 or 1, it has them as the highest bits

numba.get_num_threads()  # starts its threads: a function that comes from numba's cache may not, and crashes then

jit = numba.njit(nogil=True, cache=True, error_model="numpy")
jit_fast = numba.njit(nogil=True, cache=True, fastmath=True)  # sums and largest values vectorise; no infinities in them
jit_parallel = numba.njit(nogil=True, cache=True, fastmath=True, parallel=True)


# -- numbers -----------------------------------------------------------------------------------------------------------


@intrinsic
def _number(typingctx: Any, element: Any) -> Any:
    """An element of the weight as a float."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if element == types.uint16:  # bfloat16
            wide = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
            return builder.bitcast(wide, ir.FloatType())
        if element == types.int16:  # float16
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        return args[0]

    return (element if isinstance(element, types.Float) else types.float32)(element), codegen


@intrinsic
def _power_of_two(typingctx: Any, exponent: Any) -> Any:
    """2 to a whole number in [-126, 127]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.IntType(32)
        biased = builder.add(args[0], ir.Constant(kind, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(kind, 23)), ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def _trailing_zeros(typingctx: Any, word: Any) -> Any:
    """Of a word that is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), codegen


@intrinsic
def _larger(typingctx: Any, one: Any, other: Any) -> Any:
    """The larger of two floats. Unlike with max, a loop of these over a slice vectorises."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = args[0].type
        name = "llvm.maxnum.f32" if kind == ir.FloatType() else "llvm.maxnum.f64"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind, kind]), name)
        return builder.call(function, args, fastmath=("fast",))

    return one(one, one), codegen


@intrinsic
def _fetch(typingctx: Any, array: Any, row: Any, byte: Any) -> Any:
    """Ask for a place in a row of a matrix, which will be read soon."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = context.make_array(signature.args[0])(context, builder, args[0])
        stride = cgutils.unpack_tuple(builder, matrix.strides)[0]
        start = builder.bitcast(matrix.data, ir.IntType(8).as_pointer())
        place = builder.gep(start, [builder.add(builder.mul(stride, args[1]), args[2])])
        kind = ir.FunctionType(ir.VoidType(), [place.type, *[ir.IntType(32)] * 3])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [place, *(ir.Constant(ir.IntType(32), number) for number in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), codegen


@jit_fast
def exp(value: float) -> float:
    """e to a number of at most 80, to 1e-5; what is below e^-80 counts as that. Unlike math.exp, it vectorises."""
    scaled = np.float32(max(value, np.float32(-80.0))) * np.float32(LOG2E)
    whole = np.floor(scaled + np.float32(0.5))
    rest = (scaled - whole) * np.float32(0.6931471805599453)  # within 0.35
    series = np.float32(1 / 120)
    series = series * rest + np.float32(1 / 24)
    series = series * rest + np.float32(1 / 6)
    series = series * rest + np.float32(0.5)
    series = series * rest + np.float32(1.0)
    series = series * rest + np.float32(1.0)
    return series * _power_of_two(np.int32(whole))


# -- products ----------------------------------------------------------------------------------------------------------


@jit_fast
def _exact_row(row: Any, x: Any) -> Any:
    total = x.dtype.type(0)
    for j in range(x.size):
        total += _number(row[j]) * x[j]
    return total


@jit_parallel
def exact_rows(weight: Any, x: Any, rows: Any, bias: Any, out: Any) -> None:
    """``out[r] = weight[rows[r]] @ x + bias[rows[r]]``; an empty bias is none."""
    if rows.size * x.size <= ALONE:
        for r in range(rows.size):
            if r + NEXT < rows.size:
                _fetch(weight, np.intp(rows[r + NEXT]), 0)
            out[r] = _exact_row(weight[rows[r]], x)
    else:
        for r in prange(rows.size):
            out[r] = _exact_row(weight[rows[r]], x)
    if bias.size:
        for r in range(rows.size):
            out[r] += bias[rows[r]]


@jit_parallel
def project(projection: Any, x: Any, low: int, high: int, out: Any) -> None:
    """``out[low:high] = projection[low:high] @ x``."""
    if (high - low) * x.size <= ALONE:
        for j in range(low, high):
            out[j] = _exact_row(projection[j], x)
    else:
        for j in prange(low, high):
            out[j] = _exact_row(projection[j], x)


@jit_fast
def _largest(values: Any) -> Any:
    found = values[0]
    for i in range(values.size):
        found = _larger(found, values[i])
    return found


@jit_fast
def add_columns(codes: Any, y: Any, values: Any) -> None:
    """``values += codes.T @ y`` for a block of rows, four columns at a time."""
    even = y.size - y.size % 4
    for j in range(0, even, 4):
        c0, c1, c2, c3 = codes[j], codes[j + 1], codes[j + 2], codes[j + 3]
        y0, y1, y2, y3 = y[j], y[j + 1], y[j + 2], y[j + 3]
        for i in range(values.size):
            values[i] += y0 * c0[i] + y1 * c1[i] + y2 * c2[i] + y3 * c3[i]
    for j in range(even, y.size):
        c0, y0 = codes[j], y[j]
        for i in range(values.size):
            values[i] += y0 * c0[i]


@jit_fast
def _code_row(row: Any, y: Any) -> Any:
    total = np.float32(0)
    for j in range(y.size):
        total += np.float32(row[j]) * y[j]
    return total


@jit_parallel
def refine(records: Any, tier: int, y: Any, rows: Any, low: int, high: int, out: Any, near: Any) -> None:
    """``out[r] += codes[rows[r], low:high] @ y[low:high]``, and the spreads of these rows in this tier.

    ``y`` has a 0 for each spread before its first number: from its beginning, a record is read in whole cache lines.
    """
    start, stop = SPREADS + low if low else 0, SPREADS + high
    part = y[start:stop]
    if rows.size * (high - low) <= ALONE:
        for r in range(rows.size):
            if r + SOON < rows.size:
                for byte in range(start, stop, LINE):
                    _fetch(records, np.intp(rows[r + SOON]), byte)
            record = records[rows[r]]
            out[r] += _code_row(record[start:stop], part)
            near[r] = np.float32(np.uint8(record[tier]))
    else:
        for r in prange(rows.size):
            record = records[rows[r]]
            out[r] += _code_row(record[start:stop], part)
            near[r] = np.float32(np.uint8(record[tier]))


# -- one query ---------------------------------------------------------------------------------------------------------
#
# Parallel functions get arrays, not tuples of them: what a parallel loop writes to an array in a tuple is lost.


class Index(NamedTuple):
    """What a head keeps for its queries, as arrays."""

    weight: Any  # (n, d), raw bits if 16 wide
    bias: Any  # (n,) or (0,)
    base: Any  # (n,) or (0,): the bias again, unless it is coded; estimates have it exactly
    projection: (
        Any  # (longest, d [+ 1]) bits of bfloat16; the last column, if there is one more, goes with a coded bias
    )
    centre: Any  # (d [+ 1],)
    mean: Any  # (d [+ 1],): the mean query of those that the index was made for, of length 1; 0 if it is not known
    previews: Any  # (previews,) int64: prefixes of the codes that have estimates for all rows
    columns: Any  # (blocks, longest of them, BLOCK) int8: codes for the preview
    spreads: Any  # (previews, n) uint8: predicted deviations of the estimates' errors
    steps: Any  # (previews,): their unit
    tiers: Any  # (tiers,) int64: longer prefixes
    records: Any  # (n, SPREADS + longest) int8: spreads of the tiers (as uint8) and all codes of a row
    tier_steps: Any  # (tiers,)
    probes: Any  # int64: rows that are always read, to measure how large errors are for this query
    samples: Any  # (few, d): what the first of them were when the index was built


class Usual(NamedTuple):
    """What queries like those of the calibration stay within; others are answered exactly."""

    low: float  # the least scale of errors
    high: float  # the largest
    signal: float  # the least size of estimates on the probes, in sizes of their errors
    toward_low: float  # the cosine of the angle to the mean query
    toward_high: float
    survivors: float  # the most of the preview
    flat: float  # log Z less the k-th logit, at most; without a k there is no limit


class Plan(NamedTuple):
    """How to answer, for one k."""

    k: int
    first: int  # which preview
    second: int  # which preview when it leaves many rows
    limit: float  # so many are not many
    width: float  # of margins, in predicted deviations
    correction: float  # what an estimate's predicted variance adds to the logarithm of its mass
    floor: float  # rows with less than this part of the normaliser do not matter, as a logarithm
    doubt: float  # half width of the interval of log Z, for each unit of mass that was corrected
    tolerance: float  # the half width to reach
    usual: Usual  # what queries of the calibration were like
    upper: bool  # all logits are to be upper ends of rows that are left out, instead of their masses


class Scratch(NamedTuple):
    """Memory for one query at a time."""

    estimates: Any  # (blocks * BLOCK,)
    largest: Any  # (blocks,): of the estimates
    reach: Any  # (blocks,): of the estimates with their margins
    masses: Any  # (blocks,)
    doubts: Any  # (blocks,)
    counts: Any  # (blocks,)
    marks: Any  # (blocks * BLOCK,) uint8
    rows: Any  # (blocks * BLOCK,) int32: survivors
    values: Any  # (blocks * BLOCK,): their estimates
    near: Any  # (blocks * BLOCK,): their spreads
    exact: Any  # (blocks * BLOCK,): their logits
    gone: Any  # (blocks * BLOCK,): the last estimates of those that left, corrected
    gone_added: Any  # (blocks * BLOCK,): the correction
    y: Any  # (SPREADS + longest,), whose first SPREADS are 0
    probed: Any  # (probes,): logits of the probes
    known: Any  # (probes,): what these are estimated to be without any code
    previewed: Any  # (probes,): estimates of the probes
    around: Any  # (probes,): spreads of the probes
    tally: Any  # (2,) int64: entries and bytes that were read


class Found(NamedTuple):
    """The answer to one query besides its top k."""

    state: int
    log_z: float
    half: float  # of the interval of log_z
    coordinates: int
    bytes_read: int
    scale: float  # of the errors of the preview
    survivors: int  # of the preview
    finalists: int  # the first so many of the rows in scratch, whose logits are exact
    signal: float  # size of the estimates of the probes, in sizes of their errors
    toward: float  # cosine of the angle to the mean query
    flat: float  # log Z less the k-th logit


ANSWERED, CHANGED, DRIFTED, EXPENSIVE = 0, 1, 2, 3
AHEAD = 8  # rows with the best estimates that are read first, besides k
SHARE = 2  # when more than one in so many rows is to be read in full, all are
CANCELLED = 1e-2  # of all that was estimated may be left in the end: a difference of sums has 1e-6 of that as its error
PATIENCE = 8  # times that more rows are read before the whole weight is


@jit
def _changed(weight: Any, probes: Any, samples: Any) -> bool:
    for r in range(samples.shape[0]):
        row, sample = weight[probes[r]], samples[r]
        for j in range(sample.size):
            if row[j] != sample[j]:
                return True
    return False


@jit
def _scale(logits: Any, estimates: Any, spreads: Any, step: float) -> float:
    """Root of the mean square of errors in predicted deviations."""
    total = 0.0
    for r in range(spreads.size):
        error = (logits[r] - estimates[r]) / (step * spreads[r])
        total += error * error
    return math.sqrt(total / spreads.size)


@jit_fast
def _toward(mean: Any, x: Any) -> float:
    """The cosine of the angle between a query and the mean query."""
    dot, square = np.float32(0), np.float32(0)
    for j in range(x.size):
        dot += np.float32(mean[j] * x[j])
        square += np.float32(x[j] * x[j])
    return dot / max(math.sqrt(square), 1e-30)


@jit
def _kth(values: Any, k: int) -> float:
    """The k-th largest."""
    if k == 1:
        return _largest(values)
    if k > 64:
        return np.partition(values, values.size - k)[values.size - k]
    best = np.sort(values[:k])  # rising
    for i in range(k, values.size):
        if values[i] > best[0]:
            place = 1
            while place < k and best[place] < values[i]:
                best[place - 1] = best[place]
                place += 1
            best[place - 1] = values[i]
    return best[0]


@jit
def _ahead(estimates: Any, largest: Any, n: int, count: int, rows: Any, values: Any) -> int:
    """Rows with the largest estimates: ``count`` of them at least, and not many more; how many."""
    # Blocks below the one whose largest is so far down hold none of them.
    bound = _kth(largest, count) if largest.size >= count else -np.inf
    for _ in range(2):
        found = 0
        for b in range(largest.size):
            if largest[b] >= bound:
                for i in range(b * BLOCK, min((b + 1) * BLOCK, n)):
                    if estimates[i] >= bound:
                        rows[found], values[found] = i, estimates[i]
                        found += 1
        bound = _kth(values[:found], count)
    return found


@jit
def _bend(plan: Plan) -> float:
    """The deviation from which on `_added` goes along its tangent."""
    return plan.width / max(2 * plan.correction, 1e-30)


@jit_fast
def _added(deviation: Any, correction: float, bend: float) -> Any:
    """What is added to an estimate so that its exponential is the expected mass of a row that is left out.

    The mean of ``exp(deviation * Z)`` is ``exp(deviation^2 / 2)``. The errors of a row that is left out end where its
    margin does, at ``width * deviation``; with that, the logarithm of the mean goes on along the tangent from
    ``deviation = bend`` on, where its slope is the width: it stays below the margin, however large the deviation is.
    """
    near = min(deviation, np.float32(bend))
    return np.float32(correction) * near * (deviation + deviation - near)


@jit_fast
def _sum_masses(values: Any, near: Any, unit: float, correction: float, bend: float, shift: float) -> Any:
    """Masses of some rows, and their doubtful part. ``unit``: deviation for a spread of 1."""
    mass, doubt = np.float32(0), np.float32(0)
    for r in range(values.size):
        added = _added(np.float32(unit) * np.float32(near[r]), correction, bend)
        own = exp(min(values[r] + added - np.float32(shift), np.float32(80)))
        mass += own
        doubt += own * min(added, np.float32(1))
    return float(mass), float(doubt)


@jit_fast
def _sum_leaving(
    values: Any, near: Any, unit: float, correction: float, bend: float, shift: float, margin: float, level: float
) -> Any:
    """The same of those among them that do not reach the level. ``margin``: that of a spread of 1."""
    mass, doubt = np.float32(0), np.float32(0)
    for r in range(values.size):
        added = _added(np.float32(unit) * np.float32(near[r]), correction, bend)
        leaves = np.float32(values[r] + np.float32(margin) * np.float32(near[r]) < np.float32(level))
        own = leaves * exp(min(values[r] + added - np.float32(shift), np.float32(80)))
        mass += own
        doubt += own * min(added, np.float32(1))
    return float(mass), float(doubt)


@jit_fast
def _reach(values: Any, near: Any, margin: float) -> Any:
    """The largest of the estimates with their margins."""
    found = values[0]
    for r in range(values.size):
        found = _larger(found, values[r] + np.float32(margin) * np.float32(near[r]))
    return found


@jit_fast
def _add(base: Any, values: Any) -> None:
    for i in range(values.size):
        values[i] += np.float32(base[i])


@jit
def _begin(offset: Any, base: Any, rows: Any, values: Any) -> None:
    """What the estimates of some rows are without any code."""
    for r in range(rows.size):
        values[r] = offset
        if base.size:
            values[r] += np.float32(base[rows[r]])


@jit_fast
def _preview_rows(
    b: int,
    columns: Any,
    known: int,
    spread: Any,
    base: Any,
    y: Any,
    offset: Any,
    unit: float,
    width: float,
    correction: float,
    bend: float,
    estimates: Any,
    largest: Any,
    reach: Any,
    masses: Any,
    doubts: Any,
) -> None:
    stop = min((b + 1) * BLOCK, spread.size)
    values, near = estimates[b * BLOCK : stop], spread[b * BLOCK : stop]
    if known == 0:
        values[:] = offset
        if base.size:
            _add(base[b * BLOCK : stop], values)
    add_columns(columns[b, known : y.size], y[known:], values)
    largest[b] = _largest(values)
    reach[b] = _reach(values, near, width * unit)
    masses[b], doubts[b] = _sum_masses(values, near, unit, correction, bend, largest[b])


@jit_parallel
def _preview(
    columns: Any,
    known: int,
    spread: Any,
    base: Any,
    y: Any,
    offset: Any,
    unit: float,
    width: float,
    correction: float,
    bend: float,
    estimates: Any,
    largest: Any,
    reach: Any,
    masses: Any,
    doubts: Any,
) -> None:
    """Estimates of all rows and, of every block, the largest, its reach, masses over e^largest and their doubt.

    Estimates have the first ``known`` columns, if there are any, and are to have those that ``y`` has.
    """
    blocks = masses.size
    if 4 * blocks * BLOCK * y.size <= ALONE:  # masses take as long as some columns
        for b in range(blocks):
            _preview_rows(
                b, columns, known, spread, base, y, offset, unit, width, correction, bend,
                estimates, largest, reach, masses, doubts,
            )  # fmt: skip
    else:
        for b in prange(blocks):
            _preview_rows(
                b, columns, known, spread, base, y, offset, unit, width, correction, bend,
                estimates, largest, reach, masses, doubts,
            )  # fmt: skip


@jit
def _keep(
    values: Any,
    rows: Any,
    near: Any,
    margin: float,
    level: float,
    unit: float,
    correction: float,
    bend: float,
    gone: Any,
    gone_added: Any,
    many: int,
) -> Any:
    """Move those that reach the level to the front, and what the others are estimated at behind those gone before."""
    kept, slope, bound = 0, np.float32(margin), np.float32(level)
    for r in range(rows.size):
        value, own = values[r], near[r]
        rows[kept], values[kept], near[kept] = rows[r], value, own
        added = _added(np.float32(unit) * own, correction, bend)
        gone[many], gone_added[many] = value + added, added
        stays = value + slope * own >= bound
        kept += stays  # without a branch, which would be mispredicted
        many += not stays
    return kept, many


@jit_fast
def _mark(values: Any, near: Any, margin: float, level: float, marks: Any) -> None:
    """1 for rows that reach the level, else 0."""
    for i in range(values.size):
        marks[i] = values[i] + np.float32(margin) * np.float32(near[i]) >= np.float32(level)


@jit
def _select_block(
    b: int,
    place: int,
    estimates: Any,
    spread: Any,
    margin: float,
    level: float,
    marks: Any,
    rows: Any,
    values: Any,
    near: Any,
) -> int:
    """Rows of a block that reach the level, from ``place`` on; how many."""
    start, stop = b * BLOCK, min((b + 1) * BLOCK, spread.size)
    _mark(estimates[start:stop], spread[start:stop], margin, level, marks[start:stop])
    marks[stop : start + BLOCK] = 0
    words, count = marks[start : start + BLOCK].view(np.uint64), 0
    for w in range(0, BLOCK // 8, 8):
        bits = np.uint64(0)  # of 64 marks
        for part in range(8):
            bits |= ((words[w + part] * TO_BITS) >> np.uint64(56)) << np.uint64(8 * part)
        while bits:
            rows[place + count] = start + 8 * w + np.int64(_trailing_zeros(bits))
            count += 1
            bits &= bits - np.uint64(1)
    for r in range(place, place + count):
        values[r], near[r] = estimates[rows[r]], spread[rows[r]]
    return count


@jit_parallel
def _select(
    estimates: Any,
    spread: Any,
    margin: float,
    level: float,
    reach: Any,
    counts: Any,
    marks: Any,
    rows: Any,
    values: Any,
    near: Any,
) -> int:
    """Rows whose estimate with its margin reaches the level, to the front of ``rows``."""
    bound, total = np.float32(level), 0
    if counts.size * BLOCK <= ALONE:
        for b in range(counts.size):
            if reach[b] >= bound:
                total += _select_block(b, total, estimates, spread, margin, level, marks, rows, values, near)
        return total
    for b in prange(counts.size):
        counts[b] = 0
        if reach[b] >= bound:
            counts[b] = _select_block(b, b * BLOCK, estimates, spread, margin, level, marks, rows, values, near)
    for b in range(counts.size):
        start, stop = b * BLOCK, b * BLOCK + counts[b]
        if total < start:
            for i in range(start, stop):
                rows[total + i - start], values[total + i - start] = rows[i], values[i]
                near[total + i - start] = near[i]
        total += counts[b]
    return total


@jit_fast
def _reaching(values: Any, near: Any, margin: float, level: float) -> int:
    """How many rows reach the level."""
    count = np.int32(0)
    for r in range(values.size):
        count += np.int32(values[r] + np.float32(margin) * np.float32(near[r]) >= np.float32(level))
    return np.int64(count)


@jit
def _count(estimates: Any, spread: Any, margin: float, level: float, reach: Any) -> int:
    """How many rows `_select` would find."""
    total, bound = 0, np.float32(level)
    for b in range(reach.size):
        if reach[b] >= bound:
            start, stop = b * BLOCK, min((b + 1) * BLOCK, spread.size)
            total += _reaching(estimates[start:stop], spread[start:stop], margin, level)
    return total


@jit
def _goal(best: float, sure: float) -> float:
    """What a row must reach to be among the top k: between the k-th best estimate and the logit that k rows have.

    Large logits are larger than their estimates, so the second is the better guess of what it takes, and the first of
    what estimates show of it. Half way reads less than either, with the width that each takes.
    """
    return (best + max(best, sure)) / 2


@jit_fast
def _fill(values: Any, near: Any, unit: float, correction: float, bend: float, dense: Any) -> None:
    """Estimates of all rows as numbers whose exponentials are the estimated masses."""
    for i in range(values.size):
        dense[i] = values[i] + _added(np.float32(unit) * np.float32(near[i]), correction, bend)


@jit_fast
def _fill_upper(values: Any, near: Any, margin: float, dense: Any) -> None:
    """Estimates of all rows with their margins."""
    for i in range(values.size):
        dense[i] = values[i] + np.float32(margin) * np.float32(near[i])


@jit_fast
def _limit(most: float, dense: Any) -> None:
    for i in range(dense.size):
        dense[i] = min(dense[i], dense.dtype.type(most))


@jit_fast
def _highest_left_out(
    values: Any, near: Any, unit: float, correction: float, bend: float, margin: float, level: float
) -> Any:
    """The largest of the estimates of rows that do not reach the level."""
    highest = np.float32(-1e30)
    for r in range(values.size):
        added = _added(np.float32(unit) * np.float32(near[r]), correction, bend)
        leaves = values[r] + np.float32(margin) * np.float32(near[r]) < np.float32(level)
        highest = _larger(highest, values[r] + added if leaves else np.float32(-1e30))
    return highest


@jit
def _excess(
    estimates: Any,
    spread: Any,
    unit: float,
    correction: float,
    bend: float,
    shift: float,
    margin: float,
    level: float,
    reach: Any,
    most: float,
) -> Any:
    """Masses beyond e^most, and their doubtful part, of rows that do not reach the level."""
    mass, doubt = 0.0, 0.0
    for b in range(reach.size):
        start, stop = b * BLOCK, min((b + 1) * BLOCK, spread.size)
        if reach[b] < most:
            continue
        values, near = estimates[start:stop], spread[start:stop]
        if _highest_left_out(values, near, unit, correction, bend, margin, level) <= most:
            continue
        for r in range(values.size):
            added = _added(np.float32(unit) * np.float32(near[r]), correction, bend)
            leaves = values[r] + np.float32(margin) * np.float32(near[r]) < np.float32(level)
            if leaves and values[r] + added > most:
                own = exp(min(values[r] + added - np.float32(shift), np.float32(80))) - math.exp(most - shift)
                mass += own
                doubt += own * min(added, np.float32(1))
    return mass, doubt


@jit
def _excess_of_gone(gone: Any, gone_added: Any, shift: float, most: float) -> Any:
    """The same of rows that left later, whose estimates are known."""
    mass, doubt = 0.0, 0.0
    for r in range(gone.size):
        if gone[r] > most:
            own = exp(min(gone[r] - np.float32(shift), np.float32(80))) - math.exp(most - shift)
            mass += own
            doubt += own * min(gone_added[r], np.float32(1))
    return mass, doubt


@jit
def _sum_left_out(
    estimates: Any, spread: Any, unit: float, correction: float, bend: float, shift: float, margin: float, level: float
) -> Any:
    """`_sum_leaving` of all rows: what a difference of sums leaves of it is lost where survivors have nearly all."""
    mass, doubt = 0.0, 0.0
    for start in range(0, estimates.size, BLOCK):
        stop = min(start + BLOCK, estimates.size)
        own, unsure = _sum_leaving(
            estimates[start:stop], spread[start:stop], unit, correction, bend, shift, margin, level
        )
        mass, doubt = mass + own, doubt + unsure
    return mass, doubt


@jit
def _write(plan: Plan, values: Any, rows: Any, near: Any, unit: float, bend: float, dense: Any) -> None:
    """The same for some rows, as the plan wants them."""
    for r in range(rows.size):
        deviation = np.float32(unit) * near[r]
        more = np.float32(plan.width) * deviation if plan.upper else _added(deviation, plan.correction, bend)
        dense[rows[r]] = values[r] + more


@jit
def _sorted_top(exact: Any, rows: Any, top: Any, logits: Any) -> None:
    """The largest of the finalists, in order; of equal ones any."""
    k = top.size
    least = _kth(exact, k)
    count = 0
    for equal in range(2):
        for r in range(exact.size):
            if count < k and ((exact[r] == least) if equal else (exact[r] > least)):
                top[count], logits[count] = rows[r], exact[r]
                count += 1
    order = np.argsort(-logits)
    top[:], logits[:] = top[order], logits[order]


# -- the steps of one query, as docs/cascade.md has them ---------------------------------------------------------------


class Overview(NamedTuple):
    """What a preview says of all rows."""

    level: int  # which preview it was
    length: int  # of its codes
    unit: float  # deviation of an estimate's error for a spread of 1
    shift: float  # the largest estimate; masses are over e^shift
    mass: float  # of all rows
    doubt: float  # the doubtful part of it
    best: float  # the k-th best estimate
    sure: float  # the k-th largest logit of the rows with the best estimates
    least: float  # a row that matters for the partition function reaches this


class Leaving(NamedTuple):
    """What is left out of an answer, after the preview and all tiers."""

    count: int  # rows that are not: the finalists
    mass: float  # of rows that a tier left out
    doubt: float  # the doubtful part of it
    gone: int  # how many these are
    level: float  # the highest that a row that is left out did not reach


@jit
def _tally(scratch: Scratch, entries: int, read: int) -> None:
    """Count entries and bytes that are read."""
    scratch.tally[0] += entries
    scratch.tally[1] += read


@jit
def read_probes(index: Index, x: Any, extended: Any, scratch: Scratch) -> Any:
    """Read the probes in full, to ``scratch.probed``; what all estimates begin with, besides a bias."""
    offset = np.float32(_exact_row(index.centre, extended))
    exact_rows(index.weight, x, index.probes, index.bias, scratch.probed)
    _begin(offset, index.base, index.probes, scratch.known)
    scratch.previewed[:] = scratch.known
    size = index.probes.size * x.size
    _tally(scratch, size, 2 * extended.size + size * index.weight.itemsize)
    return offset


@jit
def measure_errors(index: Index, level: int, known: int, extended: Any, scratch: Scratch) -> float:
    """How large errors of a preview are on the probes, in predicted deviations.

    Reads its codes of the probes beyond the first ``known``, and turns the query that far.
    """
    length, probes = index.previews[level], index.probes
    project(index.projection, extended, known, length, scratch.y[SPREADS:])
    refine(index.records, 0, scratch.y, probes, known, length, scratch.previewed, scratch.around)
    for r in range(probes.size):
        scratch.around[r] = index.spreads[level][probes[r]]
    more = length - known
    _tally(scratch, probes.size * more, more * extended.size * 2 + probes.size * (more + 1))
    return _scale(scratch.probed, scratch.previewed, scratch.around, index.steps[level])


@jit
def preview(
    index: Index, plan: Plan, level: int, known: int, offset: Any, scale: float, x: Any, scratch: Scratch
) -> Overview:
    """Estimates and masses of all rows, from the codes of a preview beyond the first ``known``.

    With a k, the rows with the best estimates are read in full: the k-th largest of their logits is sure to be reached.
    """
    n, k, length = index.weight.shape[0], plan.k, index.previews[level]
    unit = scale * index.steps[level]
    _preview(
        index.columns,
        known,
        index.spreads[level],
        index.base,
        scratch.y[SPREADS : SPREADS + length],
        offset,
        unit,
        plan.width,
        plan.correction,
        _bend(plan),
        scratch.estimates,
        scratch.largest,
        scratch.reach,
        scratch.masses,
        scratch.doubts,
    )
    _tally(scratch, n * (length - known), n * (length - known + 1) + (0 if known else 4 * index.base.size))
    shift, mass, doubt = _largest(scratch.largest), 0.0, 0.0
    for b in range(scratch.masses.size):
        share = math.exp(scratch.largest[b] - shift)
        mass += scratch.masses[b] * share
        doubt += scratch.doubts[b] * share
    best, sure = np.inf, np.inf
    if k and math.isfinite(unit) and math.isfinite(shift) and math.isfinite(mass):
        count = _ahead(scratch.estimates, scratch.largest, n, min(k + AHEAD, n), scratch.rows, scratch.values)
        best = _kth(scratch.values[:count], k)
        exact_rows(index.weight, x, scratch.rows[:count], index.bias, scratch.exact[:count])
        sure = _kth(scratch.exact[:count], k)
        _tally(scratch, count * x.size, count * x.size * index.weight.itemsize)
    return Overview(level, length, unit, shift, mass, doubt, best, sure, math.log(mass) + shift + plan.floor)


@jit
def count_survivors(index: Index, plan: Plan, seen: Overview, lowered: float, scratch: Scratch) -> Any:
    """How many rows may be among the top k or matter for the partition function, and the level that they reach."""
    spread, margin, slack = index.spreads[seen.level], plan.width * seen.unit, lowered + 1e-6 * abs(seen.shift)
    level = min(_goal(seen.best, seen.sure), seen.least) - slack
    count = _count(scratch.estimates, spread, margin, level, scratch.reach)
    if count < plan.k:  # the k best estimates are sure to
        level = min(seen.best, seen.least) - slack
        count = _count(scratch.estimates, spread, margin, level, scratch.reach)
    return count, level


@jit
def select_survivors(index: Index, plan: Plan, seen: Overview, level: float, scratch: Scratch, dense: Any) -> int:
    """Rows that reach the level, to the front of ``scratch.rows``; all rows' estimates to ``dense``."""
    spread, margin = index.spreads[seen.level], plan.width * seen.unit
    estimates = scratch.estimates[: spread.size]
    if dense.size and plan.upper:
        _fill_upper(estimates, spread, margin, dense)
    elif dense.size:
        _fill(estimates, spread, seen.unit, plan.correction, _bend(plan), dense)
    return _select(
        scratch.estimates,
        spread,
        margin,
        level,
        scratch.reach,
        scratch.counts,
        scratch.marks,
        scratch.rows,
        scratch.values,
        scratch.near,
    )


@jit
def refine_survivors(
    index: Index,
    plan: Plan,
    seen: Overview,
    count: int,
    rest: float,
    level: float,
    lowered: float,
    offset: Any,
    extended: Any,
    scratch: Scratch,
    dense: Any,
) -> Leaving:
    """Longer codes of the rows that are left, tier by tier, and who of them stays.

    A tier is read where that promises to read less than all of these rows in full.

    Args:
        rest: mass of the rows that the preview left out.
        level: what these did not reach.
    """
    k, d, item, probes = plan.k, index.weight.shape[1], index.weight.itemsize, index.probes
    bend, slack = _bend(plan), lowered + 1e-6 * abs(seen.shift)
    mass_left, doubt_left, gone, highest = 0.0, 0.0, 0, level
    known, there = seen.length, 0
    for tier in range(index.tiers.size):
        longer = index.tiers[tier]
        cost = (longer - known) * extended.size * 2 + count * (longer - there + 1)
        if longer < 2 * known or 2 * cost > count * d * item:
            continue
        rows, values, near = scratch.rows[:count], scratch.values[:count], scratch.near[:count]
        project(index.projection, extended, known, longer, scratch.y[SPREADS:])
        if there == 0:
            _begin(offset, index.base, rows, values)
            scratch.previewed[:] = scratch.known
        refine(index.records, tier, scratch.y, rows, there, longer, values, near)
        refine(index.records, tier, scratch.y, probes, there, longer, scratch.previewed, scratch.around)
        _tally(scratch, (count + probes.size) * (longer - there), cost + probes.size * (longer - there + 1))
        known = there = longer
        step = index.tier_steps[tier]
        unit = step * _scale(scratch.probed, scratch.previewed, scratch.around, step)
        if dense.size:
            _write(plan, values, rows, near, unit, bend, dense)
        margin = plan.width * unit
        mass, _ = _sum_masses(values, near, unit, plan.correction, bend, seen.shift)
        bound = math.log(max(rest + mass_left + mass, 1e-300)) + seen.shift + plan.floor
        if k:
            best = _kth(values, k)
            goal = _goal(best, seen.sure)
            if _reaching(values, near, margin, min(bound, goal) - slack) < k:
                goal = best
            bound = min(bound, goal)
        bound -= slack
        highest = max(highest, bound)
        mass, doubt = _sum_leaving(values, near, unit, plan.correction, bend, seen.shift, margin, bound)
        mass_left, doubt_left = mass_left + mass, doubt_left + doubt
        count, gone = _keep(
            values, rows, near, margin, bound, unit, plan.correction, bend, scratch.gone, scratch.gone_added, gone
        )
    return Leaving(count, mass_left, doubt_left, gone, highest)


@jit
def sum_up(
    index: Index, plan: Plan, seen: Overview, left: Leaving, rest: float, rest_doubt: float, level: float,
    scratch: Scratch,
) -> Any:  # fmt: skip
    """log Z, half of its interval and the k-th logit, from the logits of the finalists and the masses of the others.

    Args:
        rest, rest_doubt: mass of the rows that the preview left out, and its doubtful part.
        level: what these did not reach.
    """
    exact = scratch.exact[: left.count]
    spread, margin, bend = index.spreads[seen.level], plan.width * seen.unit, _bend(plan)
    highest, final = seen.shift, 0.0
    for r in range(exact.size):
        highest = max(highest, exact[r])
    for r in range(exact.size):
        final += math.exp(exact[r] - highest)
    share = math.exp(seen.shift - highest)
    kth = _kth(exact, plan.k) if plan.k else np.inf
    below = kth - 1e-6 * abs(kth) if plan.k else np.inf
    later, later_doubt = left.mass, left.doubt
    if CANCELLED * seen.mass * share > final + (rest + later) * share:
        rest, rest_doubt = _sum_left_out(
            scratch.estimates[: spread.size], spread, seen.unit, plan.correction, bend, seen.shift, margin, level
        )
    if below < left.level:  # rows that did not reach a level above the answer are still below the answer
        mass, doubt = _excess(
            scratch.estimates, spread, seen.unit, plan.correction, bend, seen.shift, margin, level, scratch.reach, below
        )
        rest, rest_doubt = max(rest - mass, 0.0), max(rest_doubt - doubt, 0.0)
        mass, doubt = _excess_of_gone(scratch.gone[: left.gone], scratch.gone_added[: left.gone], seen.shift, below)
        later, later_doubt = max(later - mass, 0.0), max(later_doubt - doubt, 0.0)
    total = final + (rest + later) * share
    half = plan.doubt * (rest_doubt + later_doubt) * share / total
    return math.log(total) + highest, half, kth, below


@jit
def ask(index: Index, plan: Plan, x: Any, extended: Any, scratch: Scratch, top: Any, logits: Any, dense: Any) -> Any:
    """Answer one query: its top k to ``top`` and ``logits``.

    Args:
        x: the query times beta. (d,)
        extended: the same, with beta at its end if the bias is coded. (d [+ 1],)
        dense: where all logits go, exact for finalists and elsewhere such that their exponentials are the estimated
            masses, or upper ends. (n,) or, when they are not wanted, (0,).
    """
    n, d = index.weight.shape
    usual, tally = plan.usual, scratch.tally
    tally[:] = 0
    offset = read_probes(index, x, extended, scratch)
    if _changed(index.weight, index.probes, index.samples):
        return Found(CHANGED, 0.0, 0.0, tally[0], tally[1], 0.0, 0, 0, 0.0, 0.0, 0.0)
    scale = measure_errors(index, plan.first, 0, extended, scratch)
    size = _scale(scratch.previewed, scratch.known, scratch.around, index.steps[plan.first])
    signal, toward = size / max(scale, 1e-30), _toward(index.mean, extended)
    inside = usual.low <= scale <= usual.high and usual.toward_low <= toward <= usual.toward_high
    if not (inside and signal >= usual.signal and math.isfinite(scale)):
        return Found(DRIFTED, 0.0, 0.0, tally[0], tally[1], scale, 0, 0, signal, toward, 0.0)

    # When the first preview leaves many rows, a longer one.
    seen = preview(index, plan, plan.first, 0, offset, scale, x, scratch)
    count, level = count_survivors(index, plan, seen, 0.0, scratch)
    if count > plan.limit and plan.second != plan.first:
        again = measure_errors(index, plan.second, seen.length, extended, scratch)
        seen = preview(index, plan, plan.second, seen.length, offset, again, x, scratch)
        count, level = count_survivors(index, plan, seen, 0.0, scratch)
    computed = math.isfinite(seen.unit) and math.isfinite(seen.shift) and math.isfinite(seen.mass)
    if not computed or count > usual.survivors:  # nothing to compare beyond float32
        return Found(DRIFTED, 0.0, 0.0, tally[0], tally[1], scale, count, 0, signal, toward, 0.0)

    lowered, survivors = 0.0, 0
    for _ in range(PATIENCE):
        if lowered:
            count, level = count_survivors(index, plan, seen, lowered, scratch)
        count = select_survivors(index, plan, seen, level, scratch, dense)
        survivors += count
        mass, doubt = _sum_masses(
            scratch.values[:count], scratch.near[:count], seen.unit, plan.correction, _bend(plan), seen.shift
        )
        rest, rest_doubt = max(seen.mass - mass, 0.0), max(seen.doubt - doubt, 0.0)
        left = refine_survivors(index, plan, seen, count, rest, level, lowered, offset, extended, scratch, dense)
        if left.count * SHARE > n:
            break
        rows, exact = scratch.rows[: left.count], scratch.exact[: left.count]
        exact_rows(index.weight, x, rows, index.bias, exact)
        _tally(scratch, left.count * d, left.count * d * index.weight.itemsize)
        log_z, half, kth, below = sum_up(index, plan, seen, left, rest, rest_doubt, level, scratch)
        if half <= plan.tolerance:
            flat = log_z - kth if plan.k else 0.0
            if flat > usual.flat:
                return Found(DRIFTED, 0.0, 0.0, tally[0], tally[1], scale, survivors, 0, signal, toward, flat)
            if plan.k:
                _sorted_top(exact, rows, top, logits)
            if dense.size:
                if below < left.level and not plan.upper:
                    _limit(below, dense)
                for r in range(left.count):
                    dense[rows[r]] = exact[r]
            return Found(ANSWERED, log_z, half, tally[0], tally[1], scale, survivors, left.count, signal, toward, flat)
        lowered += 1.0
    return Found(EXPENSIVE, 0.0, 0.0, tally[0], tally[1], scale, survivors, 0, signal, toward, 0.0)
