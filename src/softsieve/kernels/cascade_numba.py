"""The cascade on the CPU, in numba: one query through the steps of docs/cascade.md. Raw arrays only.

`ask` goes through them: `measure_errors`, `preview_rows`, `select_survivors`, `refine_survivors`, `read_rows` of the
finalists, `estimate_log_z`. Those that get no weight are compiled once for all its dtypes and layouts.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np

from softsieve.kernels import estimates_numba as estimates
from softsieve.kernels.base_numba import ALONE, BLOCK, jit_holding, jit_stage, kth_largest, largest_of
from softsieve.kernels.estimates_numba import Errors
from softsieve.kernels.quantised_numba import exact_row, has_changed
from softsieve.kernels.rows_numba import SPREADS, add_codes, exact_rows, project

__all__ = ["ALONE", "BLOCK", "SPREADS", "Found", "Index", "Plan", "Scratch", "Usual", "ask", "exact_rows"]

ANSWERED, CHANGED, DRIFTED, EXPENSIVE = 0, 1, 2, 3
GAP = (1e-6, 0.0)  # what is at least between the k-th logit and estimates: relatively and absolutely
AHEAD = 8  # rows with the best estimates that are read first, besides k
SHARE = 2  # when more than one in so many rows is to be read in full, all are
CANCELLED = 1e-2  # of all that was estimated may remain in the end: a difference of sums has 1e-6 of that as its error
PATIENCE = 8  # times that more rows are read before the whole weight is


class Index(NamedTuple):
    """What a head keeps for its queries, as arrays."""

    weight: Any  # (n, d), raw bits if 16 wide; or `Quantised`
    bias: Any  # (n,) or (0,)
    base: Any  # (n,) or (0,): the bias again, unless it is coded; estimates have it exactly
    projection: Any  # (longest, d [+ 1]) bits of bfloat16; a last column, if there is one more, is for a coded bias
    centre: Any  # (d [+ 1],)
    mean: Any  # (d [+ 1],): the mean query of those that the index was made for, of length 1; 0 when it is unknown
    previews: Any  # (previews,) int64: prefixes of the codes that have estimates for all rows
    columns: Any  # (blocks, longest of them, BLOCK) int8: codes for the preview
    spreads: Any  # (previews, n) uint8: predicted deviations of the estimates' errors
    steps: Any  # (previews,): their unit
    tiers: Any  # (tiers,) int64: longer prefixes
    records: Any  # (n, SPREADS + longest) int8: spreads of the tiers (as uint8) and all codes of a row
    tier_steps: Any  # (tiers,)
    probes: Any  # int32: rows that are always read, to measure how large errors are for this query
    samples: Any  # like the weight, few rows: what the first of them were when the index was built
    row_bytes: int  # of the weight


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
    correction: float  # what an estimate's predicted variance adds to it, see `expected_excess`
    floor: float  # the logarithm of the share of the partition function that a row must have to matter
    doubt: float  # half-width of the interval of log Z, over the corrected share of the partition function
    tolerance: float  # the half-width to reach
    usual: Usual  # what queries of the calibration were like
    upper: bool  # all logits are to be upper ends for dropped rows, instead of corrected estimates
    level: float = -math.inf  # all rows whose logits may be above this are finalists, and nothing else is asked (k = 0)
    gap: tuple[float, float] = GAP  # between the k-th logit and all estimates among the logits, as there


class Scratch(NamedTuple):
    """Memory for one query at a time."""

    estimates: Any  # (blocks * BLOCK,)
    largest: Any  # (blocks,): of the estimates
    upper_ends: Any  # (blocks,): the largest upper ends, estimates with their margins
    sums: Any  # (blocks,): sums of exponentials, over e^largest
    corrected: Any  # (blocks,): the corrected part of these
    ends: Any  # (blocks,) int64: survivors up to the end of each block
    marks: Any  # (blocks * BLOCK,) uint8
    rows: Any  # (blocks * BLOCK,) int32: survivors
    values: Any  # (blocks * BLOCK,): their estimates
    spreads: Any  # (blocks * BLOCK,) uint8: their spreads
    exact: Any  # (blocks * BLOCK,): their logits
    dropped: Any  # (blocks * BLOCK,): corrected estimates of rows that were dropped
    excesses: Any  # (blocks * BLOCK,): what the correction added
    y: Any  # (SPREADS + longest,), whose first SPREADS are 0
    probe_logits: Any  # (probes,): logits of the probes
    probe_starts: Any  # (probes,): what these are estimated to be without any code
    probe_estimates: Any  # (probes,): estimates of the probes
    probe_spreads: Any  # (probes,) uint8: spreads of the probes
    tally: Any  # (2,) int64: entries and bytes that were read
    summed: Any  # (4,) columns, unit, correction and bend that the sums were made with; (0,): they are never kept
    alone: int = ALONE  # entries up to which one thread does the work; those of all rows where others answer, too


class Found(NamedTuple):
    """The answer to one query besides its top k."""

    state: int
    log_z: float
    half: float  # half-width of the interval of log_z
    coordinates: int
    bytes_read: int
    scale: float  # of the errors of the preview
    survivors: int  # of the preview
    finalists: int  # the first so many of the rows in scratch, rising, whose logits are exact
    signal: float  # size of the estimates of the probes, in sizes of their errors
    toward: float  # cosine of the angle to the mean query
    flat: float  # log Z less the k-th logit


# The index without what depends on the dtype of the weight.
Codes = namedtuple("Codes", Index._fields[2:14])


class Preview(NamedTuple):
    """What a preview says of all rows."""

    which: int  # of the previews
    length: int  # of its codes
    errors: Errors
    shift: float  # the largest estimate
    total: float  # the sum of exponentials of all rows, over e^shift
    corrected: float  # the corrected part of it
    floor: float  # what a row that matters for the partition function reaches
    ahead: int  # rows with the best estimates, which are to be read at once
    best: float  # the k-th best estimate


class Survivors(NamedTuple):
    """Rows that are still in play, the first in scratch, and what the others were estimated at."""

    count: int
    threshold: float  # the highest that a dropped row did not reach
    total: float  # the sum of exponentials of the rows that this step dropped, over e^shift
    corrected: float  # the corrected part of it
    dropped: int  # of them, those whose estimates are in scratch


@jit_stage
def _tally(tally: Any, entries: int, size: int) -> None:
    """Count entries and bytes that are read."""
    tally[0] += entries
    tally[1] += size


@jit_stage
def _errors(plan: Plan, unit: float) -> Errors:
    return Errors(unit, plan.width * unit, plan.correction, plan.width / max(2 * plan.correction, 1e-30))


@jit_stage
def _aim(best: float, attained: float) -> float:
    """Return what a row must reach to be among the top k: between the k-th best estimate and what k logits attain.

    Large logits are larger than their estimates, so the second is the better guess of what it takes, and the first of
    what estimates show of it. Half way reads less than either, with the width that each takes.
    """
    return (best + max(best, attained)) / 2


# -- reading the weight ------------------------------------------------------------------------------------------------


@jit_stage
def read_rows(weight: Any, bias: Any, row_bytes: int, x: Any, rows: Any, exact: Any, tally: Any, alone: int) -> None:
    """Read rows in full: their logits go to ``exact``."""
    exact_rows(weight, x, rows, bias, exact, alone)
    _tally(tally, rows.size * x.size, rows.size * row_bytes)


# -- the steps of one query, as docs/cascade.md has them ---------------------------------------------------------------


@jit_stage
def measure_errors(codes: Codes, which: int, known: int, extended: Any, scratch: Scratch) -> float:
    """Measure how large errors of a preview are on the probes, in predicted deviations.

    Reads its codes of the probes beyond the first ``known``, and turns the query that far. The scale that it returns
    decides whether the query is like those of the calibration, and goes into the margins of all rows.
    """
    length, probes = codes.previews[which], codes.probes
    project(codes.projection, extended, known, length, scratch.y[SPREADS:])
    estimated, spreads = scratch.probe_estimates, scratch.probe_spreads
    add_codes(codes.records, np.int64(0), scratch.y, probes, known, length, estimated, spreads, scratch.alone)
    for r in range(probes.size):
        scratch.probe_spreads[r] = codes.spreads[which][probes[r]]
    more = length - known
    _tally(scratch.tally, probes.size * more, more * extended.size * 2 + probes.size * (more + 1))
    return estimates.root_mean_square(
        scratch.probe_logits, scratch.probe_estimates, scratch.probe_spreads, codes.steps[which]
    )


@jit_stage
def preview_rows(
    codes: Codes, plan: Plan, which: int, known: int, ready: int, offset: Any, scale: float, scratch: Scratch
) -> Preview:
    """Estimate all rows, from the columns of a preview beyond the first ``known``.

    Columns that estimates in scratch are ``ready`` with are not read again, but count as if they were. Decides what a
    row must reach to matter for the partition function; with a k, also which rows have the best estimates and are to be
    read at once.
    """
    n, k, length = codes.spreads.shape[1], plan.k, codes.previews[which]
    errors = _errors(plan, scale * codes.steps[which])
    y = scratch.y[SPREADS : SPREADS + length]
    if estimates.has_sums(scratch.summed, length, errors, ready):
        estimates.update_upper_ends(scratch.estimates, codes.spreads[which], errors, scratch.upper_ends)
    else:
        estimates.estimate_rows(
            codes.columns, max(known, ready), codes.spreads[which], codes.base, y, offset, errors,
            scratch.estimates, scratch.largest, scratch.upper_ends, scratch.sums, scratch.corrected, scratch.alone,
        )  # fmt: skip
        if scratch.summed.size:
            scratch.summed[0], scratch.summed[1] = length, errors.unit
            scratch.summed[2], scratch.summed[3] = errors.correction, errors.bend
    _tally(scratch.tally, n * (length - known), n * (length - known + 1) + (0 if known else 4 * codes.base.size))
    shift, total, corrected = largest_of(scratch.largest), 0.0, 0.0
    for b in range(scratch.sums.size):
        factor = math.exp(scratch.largest[b] - shift)
        total += scratch.sums[b] * factor
        corrected += scratch.corrected[b] * factor
    ahead, best = 0, np.inf
    if k and math.isfinite(errors.unit) and math.isfinite(shift) and math.isfinite(total):
        ahead = estimates.find_best(
            scratch.estimates, scratch.largest, n, min(k + AHEAD, n), scratch.rows, scratch.values
        )
        best = kth_largest(scratch.values[:ahead], k)
    return Preview(which, length, errors, shift, total, corrected, math.log(total) + shift + plan.floor, ahead, best)


@jit_stage
def count_survivors(
    codes: Codes, plan: Plan, preview: Preview, attained: float, lowered: float, scratch: Scratch
) -> Any:
    """Count rows that may be among the top k or matter for the partition function; return the threshold they reach.

    Args:
        attained: the k-th largest logit of the rows with the best estimates.
        lowered: by how much the threshold is lower than it would have to be.
    """
    spreads, slack = codes.spreads[preview.which], lowered + 1e-6 * abs(preview.shift)
    aim = plan.level if plan.level > -np.inf else min(_aim(preview.best, attained), preview.floor)
    threshold = aim - slack
    count = estimates.count_rows(
        scratch.estimates, spreads, preview.errors, threshold, scratch.upper_ends, scratch.ends, scratch.alone
    )
    if count < plan.k:  # the k best estimates are sure to
        threshold = min(preview.best, preview.floor) - slack
        count = estimates.count_rows(
            scratch.estimates, spreads, preview.errors, threshold, scratch.upper_ends, scratch.ends, scratch.alone
        )
    return count, threshold


@jit_stage
def select_survivors(
    codes: Codes, plan: Plan, preview: Preview, threshold: float, scratch: Scratch, dense: Any
) -> Survivors:
    """Drop rows whose upper ends, by the estimates of the preview, do not reach the threshold.

    The others go to the front of ``scratch.rows``, corrected estimates or upper ends of all rows to ``dense``.
    """
    spreads, errors = codes.spreads[preview.which], preview.errors
    if dense.size:
        estimates.fill_logits(scratch.estimates[: spreads.size], spreads, errors, plan.upper, dense)
    count = estimates.select_rows(
        scratch.estimates, spreads, errors, threshold, scratch.ends,
        scratch.marks, scratch.rows, scratch.values, scratch.spreads, scratch.alone,
    )  # fmt: skip
    total, corrected = estimates.sum_exponentials(
        scratch.values[:count], scratch.spreads[:count], errors, preview.shift
    )
    total, corrected = max(preview.total - total, 0.0), max(preview.corrected - corrected, 0.0)
    return Survivors(count, threshold, total, corrected, 0)


@jit_stage
def _tier_threshold(
    plan: Plan, values: Any, spreads: Any, errors: Errors, floor: float, attained: float, slack: float
) -> float:
    """Return what survivors must reach with the estimates of a tier."""
    if plan.level > -np.inf:
        return plan.level - slack
    if plan.k == 0:
        return floor - slack
    best = kth_largest(values, plan.k)
    aim = _aim(best, attained)
    if estimates.count_reaching(values, spreads, errors, min(floor, aim) - slack) < plan.k:
        aim = best
    return min(floor, aim) - slack


@jit_stage
def refine_survivors(
    codes: Codes, plan: Plan, preview: Preview, survivors: Survivors, attained: float, lowered: float,
    row_bytes: int, offset: Any, extended: Any, scratch: Scratch, dense: Any,
) -> Survivors:  # fmt: skip
    """Read longer codes of the survivors and of the probes, tier by tier, and decide each time who of them stays.

    A tier is read where that promises to read less than all of these rows in full, ``row_bytes`` each.
    """
    probes, slack = codes.probes, lowered + 1e-6 * abs(preview.shift)
    count, dropped = survivors.count, np.int64(0)
    highest, dropped_total, dropped_corrected = survivors.threshold, 0.0, 0.0
    known, read, probed = preview.length, np.int64(0), np.int64(0)  # codes that query, rows and probes are estimated by
    for length in codes.tiers:
        if length == known:  # the preview ended with whole cache lines of the records: estimates go on from there
            read = known
    for tier in range(codes.tiers.size):
        length = codes.tiers[tier]
        cost = (length - known) * extended.size * 2 + count * (length - read + 1)
        if length < 2 * known or 2 * cost > count * row_bytes:
            continue
        rows, values, spreads = scratch.rows[:count], scratch.values[:count], scratch.spreads[:count]
        project(codes.projection, extended, known, length, scratch.y[SPREADS:])
        if read == 0:
            estimates.start_estimates(offset, codes.base, rows, values)
        if probed == 0:
            estimates.start_estimates(offset, codes.base, probes, scratch.probe_estimates)
        add_codes(codes.records, tier, scratch.y, rows, read, length, values, spreads, scratch.alone)
        add_codes(
            codes.records, tier, scratch.y, probes, probed, length, scratch.probe_estimates, scratch.probe_spreads,
            scratch.alone,
        )  # fmt: skip
        _tally(
            scratch.tally, count * (length - read) + probes.size * (length - probed),
            cost + probes.size * (length - probed + 1),
        )  # fmt: skip
        known = read = probed = length
        step = codes.tier_steps[tier]
        errors = _errors(
            plan,
            step
            * estimates.root_mean_square(scratch.probe_logits, scratch.probe_estimates, scratch.probe_spreads, step),
        )
        if dense.size:
            _write_logits(plan, values, rows, spreads, errors, dense)
        total, _ = estimates.sum_exponentials(values, spreads, errors, preview.shift)
        floor = math.log(max(survivors.total + dropped_total + total, 1e-300)) + preview.shift + plan.floor
        threshold = _tier_threshold(plan, values, spreads, errors, floor, attained, slack)
        highest = max(highest, threshold)
        total, corrected = estimates.sum_exponentials(values, spreads, errors, preview.shift, threshold)
        dropped_total, dropped_corrected = dropped_total + total, dropped_corrected + corrected
        count, dropped = estimates.keep_rows(
            values, rows, spreads, errors, threshold, scratch.dropped, scratch.excesses, dropped
        )
    return Survivors(count, highest, dropped_total, dropped_corrected, dropped)


@jit_stage
def _write_logits(plan: Plan, values: Any, rows: Any, spreads: Any, errors: Errors, dense: Any) -> None:
    """Do for some rows what `fill_logits` does for all."""
    for r in range(rows.size):
        margin = np.float32(plan.width) * (np.float32(errors.unit) * spreads[r])
        dense[rows[r]] = values[r] + (margin if plan.upper else estimates.expected_excess(spreads[r], errors))


@jit_stage
def _write_exact(rows: Any, exact: Any, dense: Any) -> None:
    """Write logits of rows that were read in full, if all are wanted."""
    if dense.size:
        for r in range(rows.size):
            dense[rows[r]] = exact[r]


@jit_stage
def estimate_log_z(
    codes: Codes, plan: Plan, preview: Preview, survivors: Survivors, finalists: Survivors, scratch: Scratch
) -> Any:
    """Return log Z, the half-width of its interval, and the k-th logit.

    Sums up the exponentials of the finalists' logits, in ``scratch.exact``, and those of the rows that the preview
    and the tiers dropped. Decides whether these have to be limited by the k-th logit.
    """
    exact = scratch.exact[: finalists.count]
    spreads, errors, shift = codes.spreads[preview.which], preview.errors, preview.shift
    highest, final = shift, 0.0
    for r in range(exact.size):
        highest = max(highest, exact[r])
    for r in range(exact.size):
        final += math.exp(exact[r] - highest)
    factor = math.exp(shift - highest)
    kth = kth_largest(exact, plan.k) if plan.k else np.inf
    below = estimates.limit_below(kth, GAP) if plan.k else np.inf
    first, first_corrected = survivors.total, survivors.corrected
    later, later_corrected = finalists.total, finalists.corrected
    if CANCELLED * preview.total * factor > final + (first + later) * factor:
        first, first_corrected = estimates.sum_dropped(
            scratch.estimates[: spreads.size], spreads, errors, shift, survivors.threshold
        )
    if below < finalists.threshold:  # rows that did not reach a threshold above the answer are still below the answer
        dropped, excesses = scratch.dropped[finalists.dropped :], scratch.excesses[finalists.dropped :]
        count = estimates.gather_above(
            scratch.estimates, spreads, errors, survivors.threshold, scratch.upper_ends, below, dropped, excesses
        )
        total, corrected = estimates.sum_above(dropped[:count], excesses[:count], shift, below)
        first, first_corrected = max(first - total, 0.0), max(first_corrected - corrected, 0.0)
        dropped, excesses = scratch.dropped[: finalists.dropped], scratch.excesses[: finalists.dropped]
        total, corrected = estimates.sum_above(dropped, excesses, shift, below)
        later, later_corrected = max(later - total, 0.0), max(later_corrected - corrected, 0.0)
    total = final + (first + later) * factor
    half = plan.doubt * (first_corrected + later_corrected) * factor / total
    return math.log(total) + highest, half, kth


@jit_holding
def ask(
    index: Index, plan: Plan, x: Any, extended: Any, scratch: Scratch, top: Any, logits: Any, dense: Any, ready: int
) -> Any:
    """Answer one query: its top k to ``top`` and ``logits``; with a level, rows that may be above it to ``scratch``.

    Args:
        x: the query times beta. (d,)
        extended: the same, with beta at its end if the bias is coded. (d [+ 1],)
        dense: where all logits go, exact for finalists and elsewhere such that their exponentials are the estimated
            ones, or upper ends. (n,) or, when they are not wanted, (0,).
        ready: columns that the estimates in scratch have, when the last question was the same query with another plan;
            else 0. A plan whose first preview is shorter may only be asked for the answer of its second.
    """
    n, usual, tally = index.spreads.shape[1], plan.usual, scratch.tally
    codes = Codes(*index[2:14])
    offset = np.float32(exact_row(index.centre, extended))
    tally[0], tally[1] = 0, 2 * extended.size
    read_rows(index.weight, index.bias, index.row_bytes, x, codes.probes, scratch.probe_logits, tally, scratch.alone)
    estimates.start_estimates(offset, index.base, codes.probes, scratch.probe_starts)
    estimates.start_estimates(offset, index.base, codes.probes, scratch.probe_estimates)
    if has_changed(index.weight, codes.probes, index.samples):
        return Found(CHANGED, 0.0, 0.0, tally[0], tally[1], 0.0, 0, 0, 0.0, 0.0, 0.0)
    scale = measured = measure_errors(codes, plan.first, np.int64(0), extended, scratch)
    size = estimates.root_mean_square(
        scratch.probe_estimates, scratch.probe_starts, scratch.probe_spreads, index.steps[plan.first]
    )
    signal, toward = size / max(scale, 1e-30), estimates.cosine(index.mean, extended)
    inside = usual.low <= scale <= usual.high and usual.toward_low <= toward <= usual.toward_high
    if not (inside and signal >= usual.signal and math.isfinite(scale)):
        return Found(DRIFTED, 0.0, 0.0, tally[0], tally[1], scale, 0, 0, signal, toward, 0.0)

    known = np.int64(0)
    for which in (plan.first, plan.second):  # when the first preview leaves many rows, a longer one
        if known:
            measured = measure_errors(codes, which, known, extended, scratch)
        preview = preview_rows(codes, plan, which, known, ready, offset, measured, scratch)
        exact = scratch.exact[: preview.ahead]
        read_rows(
            index.weight, index.bias, index.row_bytes, x, scratch.rows[: preview.ahead], exact, tally, scratch.alone
        )
        attained = kth_largest(exact, plan.k) if preview.ahead else np.inf
        count, threshold = count_survivors(codes, plan, preview, attained, 0.0, scratch)
        known = preview.length
        if count <= plan.limit or plan.second == plan.first:
            break
    computed = math.isfinite(preview.errors.unit) and math.isfinite(preview.shift) and math.isfinite(preview.total)
    if not computed or count > usual.survivors:  # nothing to compare beyond float32
        return Found(DRIFTED, 0.0, 0.0, tally[0], tally[1], scale, count, 0, signal, toward, 0.0)

    tried = 0
    for lowered in range(PATIENCE):
        if lowered:
            _, threshold = count_survivors(codes, plan, preview, attained, float(lowered), scratch)
        survivors = select_survivors(codes, plan, preview, threshold, scratch, dense)
        tried += survivors.count
        finalists = refine_survivors(
            codes, plan, preview, survivors, attained, float(lowered), index.row_bytes,
            offset, extended, scratch, dense,
        )  # fmt: skip
        if finalists.count * SHARE > n:
            break
        rows, exact = scratch.rows[: finalists.count], scratch.exact[: finalists.count]
        read_rows(index.weight, index.bias, index.row_bytes, x, rows, exact, tally, scratch.alone)
        if plan.level > -np.inf:
            _write_exact(rows, exact, dense)
            return Found(ANSWERED, 0.0, 0.0, tally[0], tally[1], scale, tried, rows.size, signal, toward, 0.0)
        log_z, half, kth = estimate_log_z(codes, plan, preview, survivors, finalists, scratch)
        if half <= plan.tolerance:
            flat = log_z - kth if plan.k else 0.0
            if flat > usual.flat:
                return Found(DRIFTED, 0.0, 0.0, tally[0], tally[1], scale, tried, 0, signal, toward, flat)
            if plan.k:
                estimates.sort_top(exact, rows, top, logits)
            if dense.size:
                limit = estimates.limit_below(kth, plan.gap) if plan.k else np.inf
                if limit < finalists.threshold and not plan.upper:
                    estimates.limit_logits(limit, dense)
                _write_exact(rows, exact, dense)
            return Found(ANSWERED, log_z, half, tally[0], tally[1], scale, tried, rows.size, signal, toward, flat)
    return Found(EXPENSIVE, 0.0, 0.0, tally[0], tally[1], scale, tried, 0, signal, toward, 0.0)
