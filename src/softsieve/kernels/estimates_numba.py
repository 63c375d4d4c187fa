"""Estimates of the cascade in numba: sums of their exponentials, and rows whose upper ends reach a threshold.

An estimate has a spread, one byte. `Errors` says what a spread of 1 stands for in this query. The upper end of a row is
its estimate and its margin.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from softsieve.kernels.base_numba import (
    ALONE,
    BLOCK,
    exp,
    jit_fast_stage,
    jit_stage,
    kth_largest,
    larger,
    largest_of,
    prefetch_row,
    trailing_zeros,
)
from softsieve.kernels.parts_numba import in_parts
from softsieve.kernels.rows_numba import add_columns

COLUMNS = 4  # of the next block that are asked for at once, while as many of this one are multiplied
CHOICE = 8  # what choosing takes for a row, in entries of a code
LARGEST = 255  # spread
_TO_BITS = np.uint64(0x0102040810204080)  # times eight bytes of 0 or 1, it has them as the highest bits


class Errors(NamedTuple):
    """How large the errors of one preview or tier are, for a spread of 1."""

    unit: float  # their deviation
    margin: float  # half of a row's interval
    correction: float  # what the square of a deviation adds to an estimate, see `expected_excess`
    bend: float  # the deviation from which on it adds less


@jit_fast_stage
def expected_excess(spread: Any, errors: Errors) -> Any:
    """Return what makes the exponential of an estimate that of a dropped row in the mean.

    The mean of ``exp(deviation * Z)`` is ``exp(deviation^2 / 2)``. The errors of a dropped row end where its margin
    does, at ``width * deviation``; with that, the logarithm of the mean goes on along the tangent from ``deviation =
    bend`` on, where its slope is the width: it stays below the margin, however large the deviation is.
    """
    deviation = np.float32(errors.unit) * np.float32(spread)
    bent = min(deviation, np.float32(errors.bend))
    return np.float32(errors.correction) * bent * (deviation + deviation - bent)


@jit_fast_stage
def upper_end(value: Any, spread: Any, errors: Errors) -> Any:
    """Return an estimate with its margin."""
    return value + np.float32(errors.margin) * np.float32(spread)


# -- sums of exponentials ----------------------------------------------------------------------------------------------


@jit_fast_stage
def sum_exponentials(values: Any, spreads: Any, errors: Errors, shift: float, threshold: float | None = None) -> Any:
    """Sum up ``exp(estimate + excess - shift)``, and the corrected part of that.

    With a threshold, only of rows whose upper ends do not reach it.
    """
    total, corrected = np.float32(0), np.float32(0)
    for r in range(values.size):
        excess = expected_excess(spreads[r], errors)
        if threshold is None:
            own = exp(min(values[r] + excess - np.float32(shift), np.float32(80)))
        else:
            drops = np.float32(upper_end(values[r], spreads[r], errors) < np.float32(threshold))
            own = drops * exp(min(values[r] + excess - np.float32(shift), np.float32(80)))
        total += own
        corrected += own * min(excess, np.float32(1))
    return float(total), float(corrected)


@jit_stage
def sum_dropped(estimates: Any, spreads: Any, errors: Errors, shift: float, threshold: float) -> Any:
    """Sum up as `sum_exponentials` with a threshold, block by block, over all rows.

    The difference of the sums over all rows and over the survivors loses this where survivors have nearly all.
    """
    total, corrected = 0.0, 0.0
    for start in range(0, estimates.size, BLOCK):
        stop = min(start + BLOCK, estimates.size)
        own, own_corrected = sum_exponentials(estimates[start:stop], spreads[start:stop], errors, shift, threshold)
        total, corrected = total + own, corrected + own_corrected
    return total, corrected


@jit_fast_stage
def _highest_dropped(values: Any, spreads: Any, errors: Errors, threshold: float) -> Any:
    highest = np.float32(-1e30)
    for r in range(values.size):
        drops = upper_end(values[r], spreads[r], errors) < np.float32(threshold)
        highest = larger(highest, values[r] + expected_excess(spreads[r], errors) if drops else np.float32(-1e30))
    return highest


@jit_stage
def gather_above(
    estimates: Any, spreads: Any, errors: Errors, threshold: float, upper: Any, bound: float,
    dropped: Any, excesses: Any,
) -> int:  # fmt: skip
    """Find rows that do not reach the threshold, but whose corrected estimates are above a bound; return how many.

    Their corrected estimates go to ``dropped``, what of these was added to ``excesses``. Blocks whose ``upper`` end is
    below the bound have none of them.
    """
    count = 0
    for b in range(upper.size):
        if upper[b] < bound:
            continue
        start, stop = b * BLOCK, min((b + 1) * BLOCK, spreads.size)
        if _highest_dropped(estimates[start:stop], spreads[start:stop], errors, threshold) <= bound:
            continue
        for r in range(start, stop):
            excess = expected_excess(spreads[r], errors)
            if upper_end(estimates[r], spreads[r], errors) < np.float32(threshold) and estimates[r] + excess > bound:
                dropped[count], excesses[count] = estimates[r] + excess, excess
                count += 1
    return count


@jit_stage
def sum_above(dropped: Any, excesses: Any, shift: float, bound: float) -> Any:
    """Sum up what the exponentials of corrected estimates have beyond that of a bound, and the corrected part of it."""
    total, corrected = 0.0, 0.0
    for r in range(dropped.size):
        if dropped[r] > bound:
            own = exp(min(dropped[r] - np.float32(shift), np.float32(80))) - math.exp(bound - shift)
            total += own
            corrected += own * min(excesses[r], np.float32(1))
    return total, corrected


# -- estimates of all rows ---------------------------------------------------------------------------------------------


@jit_stage
def start_estimates(offset: Any, base: Any, rows: Any, values: Any) -> None:
    """Write what the estimates of some rows are without any code."""
    for r in range(rows.size):
        values[r] = offset
        if base.size:
            values[r] += np.float32(base[rows[r]])


@jit_fast_stage
def _highest_upper(values: Any, spreads: Any, errors: Errors) -> Any:
    highest = values[0]
    for r in range(values.size):
        highest = larger(highest, upper_end(values[r], spreads[r], errors))
    return highest


@jit_fast_stage
def start_block(offset: Any, base: Any, values: Any) -> None:
    """Write what the estimates of a block are without any code."""
    values[:] = offset
    for i in range(base.size):
        values[i] += np.float32(base[i])


@jit_fast_stage
def _estimate_block(
    b: int, columns: Any, known: int, all_spreads: Any, all_base: Any, y: Any, offset: Any, errors: Errors,
    estimates: Any, largest: Any, upper: Any, totals: Any, corrected: Any,
) -> None:  # fmt: skip
    own, following = columns[b], columns[min(b + 1, columns.shape[0] - 1)]
    start, stop = b * BLOCK, min((b + 1) * BLOCK, all_spreads.size)
    values, spreads, base = estimates[start:stop], all_spreads[start:stop], all_base[start:stop]
    if known == 0:
        start_block(offset, base, values)
    for j in range(known, y.size, COLUMNS):
        some = slice(j, min(j + COLUMNS, y.size))
        for column in range(some.start, some.stop):
            prefetch_row(following, column, np.int64(0), np.int64(BLOCK))
        add_columns(own[some], y[some], values)
    largest[b] = largest_of(values)
    upper[b] = _highest_upper(values, spreads, errors)
    totals[b], corrected[b] = sum_exponentials(values, spreads, errors, largest[b])


@jit_stage
def estimate_rows(
    columns: Any, known: int, spreads: Any, base: Any, y: Any, offset: Any, errors: Errors,
    estimates: Any, largest: Any, upper: Any, totals: Any, corrected: Any, alone: int = ALONE,
) -> None:  # fmt: skip
    """Estimate all rows; of every block keep the largest estimate and upper end, and the sums over e^largest.

    Estimates have the first ``known`` columns, if there are any, and are to have those that ``y`` has. One thread does
    the work up to ``alone`` entries.
    """
    in_parts(
        _estimate_block, totals.size, 4 * totals.size * BLOCK * y.size <= alone,  # sums take as long as some columns
        (columns, known, spreads, base, y, offset, errors, estimates, largest, upper, totals, corrected),
    )  # fmt: skip


@jit_stage
def has_sums(summed: Any, length: int, errors: Errors, ready: int) -> bool:
    """Tell whether sums of exponentials that another plan left for the same query are those of this one.

    They are the same for all widths, but where a deviation is beyond the bend. Where estimates have more columns than
    those of a preview, another one follows, and what is said of this one is no matter.
    """
    if summed.size == 0 or ready < length:
        return False
    if ready > length:
        return True
    unit, bend = np.float32(errors.unit), min(np.float32(errors.bend), summed[3])
    same = summed[0] == length and summed[1] == unit and summed[2] == np.float32(errors.correction)
    return same and LARGEST * unit <= bend


@jit_stage
def update_upper_ends(estimates: Any, spreads: Any, errors: Errors, upper: Any) -> None:
    """Do of `estimate_rows` what the width decides, where the rest is there."""
    for b in range(upper.size):
        start, stop = b * BLOCK, min((b + 1) * BLOCK, spreads.size)
        upper[b] = _highest_upper(estimates[start:stop], spreads[start:stop], errors)


@jit_fast_stage
def fill_logits(values: Any, spreads: Any, errors: Errors, upper: bool, dense: Any) -> None:
    """Write corrected estimates of all rows, or their upper ends."""
    for i in range(values.size):
        corrected = values[i] + expected_excess(spreads[i], errors)
        dense[i] = upper_end(values[i], spreads[i], errors) if upper else corrected


@jit_stage
def limit_below(kth: float, gap: Any) -> float:
    """Return what estimates are at most: so far below the k-th logit, relatively and absolutely."""
    return kth - gap[0] * abs(kth) - gap[1]


@jit_fast_stage
def limit_logits(most: float, dense: Any) -> None:
    """Lower what is above ``most`` to it."""
    for i in range(dense.size):
        dense[i] = min(dense[i], dense.dtype.type(most))


# -- choice of rows ----------------------------------------------------------------------------------------------------


@jit_stage
def find_best(estimates: Any, largest: Any, n: int, count: int, rows: Any, values: Any) -> int:
    """Find rows with the largest estimates: ``count`` of them at least, and not many more; return how many."""
    # Blocks below the one whose largest is so far down hold none of them.
    bound = kth_largest(largest, count) if largest.size >= count else -np.inf
    for _ in range(2):
        size = 0
        for b in range(largest.size):
            if largest[b] >= bound:
                for i in range(b * BLOCK, min((b + 1) * BLOCK, n)):
                    if estimates[i] >= bound:
                        rows[size], values[size] = i, estimates[i]
                        size += 1
        bound = kth_largest(values[:size], count)
    return size


@jit_fast_stage
def count_reaching(values: Any, spreads: Any, errors: Errors, threshold: float) -> int:
    """Count rows whose upper ends reach the threshold."""
    count = np.int32(0)
    for r in range(values.size):
        count += np.int32(upper_end(values[r], spreads[r], errors) >= np.float32(threshold))
    return np.int64(count)


@jit_stage
def _count_block(
    b: int, estimates: Any, spreads: Any, errors: Errors, threshold: float, upper: Any, counts: Any
) -> None:
    start, stop = b * BLOCK, min((b + 1) * BLOCK, spreads.size)
    passed = upper[b] < np.float32(threshold)
    counts[b] = 0 if passed else count_reaching(estimates[start:stop], spreads[start:stop], errors, threshold)


@jit_stage
def count_rows(
    estimates: Any, spreads: Any, errors: Errors, threshold: float, upper: Any, ends: Any, alone: int = ALONE
) -> int:
    """Count rows whose upper ends reach the threshold; ``ends`` get how many there are up to the end of each block.

    Blocks whose ``upper`` end does not reach it are passed over. One thread does the work for rows that stand for up
    to ``alone`` entries.
    """
    in_parts(
        _count_block, upper.size, CHOICE * spreads.size <= alone, (estimates, spreads, errors, threshold, upper, ends)
    )
    total = np.int64(0)
    for b in range(upper.size):
        total += ends[b]
        ends[b] = total
    return total


@jit_fast_stage
def _mark(values: Any, spreads: Any, errors: Errors, threshold: float, marks: Any) -> None:
    for i in range(values.size):
        marks[i] = upper_end(values[i], spreads[i], errors) >= np.float32(threshold)


@jit_stage
def _select_block(
    b: int, estimates: Any, all_spreads: Any, errors: Errors, threshold: float, ends: Any,
    marks: Any, rows: Any, values: Any, spreads: Any,
) -> None:  # fmt: skip
    place = ends[b - 1] if b else 0
    if place == ends[b]:
        return
    start, stop = b * BLOCK, min((b + 1) * BLOCK, all_spreads.size)
    _mark(estimates[start:stop], all_spreads[start:stop], errors, threshold, marks[start:stop])
    marks[stop : start + BLOCK] = 0
    words = marks[start : start + BLOCK].view(np.uint64)
    for w in range(0, BLOCK // 8, 8):
        bits = np.uint64(0)  # of 64 marks
        for part in range(8):
            bits |= ((words[w + part] * _TO_BITS) >> np.uint64(56)) << np.uint64(8 * part)
        while bits:
            rows[place] = start + 8 * w + np.int64(trailing_zeros(bits))
            place += 1
            bits &= bits - np.uint64(1)
    for r in range(ends[b - 1] if b else 0, place):
        values[r], spreads[r] = estimates[rows[r]], all_spreads[rows[r]]


@jit_stage
def select_rows(
    estimates: Any, all_spreads: Any, errors: Errors, threshold: float, ends: Any,
    marks: Any, rows: Any, values: Any, spreads: Any, alone: int = ALONE,
) -> int:  # fmt: skip
    """Write rows whose upper ends reach the threshold to the front of ``rows``, in order; return how many.

    Where rows of a block go is what `count_rows` has left in ``ends``, asked for the same threshold before.
    """
    in_parts(
        _select_block, ends.size, CHOICE * all_spreads.size <= alone,
        (estimates, all_spreads, errors, threshold, ends, marks, rows, values, spreads),
    )  # fmt: skip
    return ends[-1]


@jit_stage
def keep_rows(
    values: Any, rows: Any, spreads: Any, errors: Errors, threshold: float, dropped: Any, excesses: Any, count: int
) -> Any:
    """Move rows that reach the threshold to the front; return how many stay, and how many are dropped in all.

    Corrected estimates of the others, and what of these was added, go behind the ``count`` rows dropped before.
    """
    kept, bound = 0, np.float32(threshold)
    for r in range(rows.size):
        value, own = values[r], spreads[r]
        rows[kept], values[kept], spreads[kept] = rows[r], value, own
        excess = expected_excess(own, errors)
        dropped[count], excesses[count] = value + excess, excess
        stays = upper_end(value, own, errors) >= bound
        kept += stays  # without a branch, which would be mispredicted
        count += not stays
    return kept, count


@jit_stage
def sort_top(exact: Any, rows: Any, top: Any, logits: Any) -> None:
    """Write the largest of the finalists, in falling order, equal ones by their rows."""
    k = top.size
    least = kth_largest(exact, k)
    count = 0
    for equal in range(2):
        for r in range(exact.size):
            if count < k and ((exact[r] == least) if equal else (exact[r] > least)):
                top[count], logits[count] = rows[r], exact[r]
                count += 1
    gap = k // 2
    while gap:  # a shell sort, which the compiler is done with ten times sooner than with np.argsort
        for i in range(gap, k):
            row, logit, place = top[i], logits[i], i
            while place >= gap and (
                logits[place - gap] < logit or (logits[place - gap] == logit and top[place - gap] > row)
            ):
                top[place], logits[place] = top[place - gap], logits[place - gap]
                place -= gap
            top[place], logits[place] = row, logit
        gap //= 2


@jit_stage
def root_mean_square(ones: Any, others: Any, spreads: Any, step: float) -> float:
    """Return that of differences in predicted deviations."""
    total = 0.0
    for r in range(spreads.size):
        error = (ones[r] - others[r]) / (step * spreads[r])
        total += error * error
    return math.sqrt(total / spreads.size)


@jit_fast_stage
def cosine(mean: Any, x: Any) -> float:
    """Return the cosine of the angle between a query and the mean query."""
    dot, square = np.float32(0), np.float32(0)
    for j in range(x.size):
        dot += np.float32(mean[j] * x[j])
        square += np.float32(x[j] * x[j])
    return dot / max(math.sqrt(square), 1e-30)
