"""Kernels of the cascade against numpy, and a whole query against the reference."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from softsieve.heads.cascade.basis import Moments
from softsieve.heads.cascade.cpu import CpuCascade, raw_bits
from softsieve.heads.cascade.index import SPREADS, build, lengths, long_previews
from softsieve.heads.engine import Layer, Options
from softsieve.kernels import base_numba
from softsieve.kernels import cascade_numba as kernels
from softsieve.kernels import estimates_numba as estimates_module
from softsieve.kernels import rows_numba as rows_module
from softsieve.kernels.cascade_numba import ALONE, ANSWERED, BLOCK, CHANGED, DRIFTED, EXPENSIVE, Plan, Usual
from softsieve.kernels.estimates_numba import Errors
from softsieve.reference import heads as reference

Array = Any  # np.ndarray, of any shape and dtype
USUAL = Usual(0.0, math.inf, 0.0, -2.0, 2.0, math.inf, math.inf)
ERRORS = Errors(0.005, 0.01, 0.5, 1e30)  # margins of two deviations
PLAN = Plan(1, 0, 0, math.inf, 2.0, 0.5, math.log(0.15), 0.5, 0.25, USUAL, False)


class Stages:
    """A module of functions that only compiled ones can call, called from here."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return call_compiled(getattr(self._module, name))


@cache
def call_compiled(function: Any) -> Any:
    @numba.njit
    def call(*args: Any) -> Any:
        return function(*args)

    return call


estimates_numba, rows_numba = Stages(estimates_module), Stages(rows_module)


@pytest.fixture(autouse=True, scope="module")
def _all_threads() -> Iterator[None]:
    """Blocks of rows are shared among threads here, whatever the other tests do."""
    before = numba.get_num_threads()
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    yield
    numba.set_num_threads(before)


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def spread_out(*shape: int, seed: int = 0) -> Array:
    return random(seed).standard_normal(shape).astype(np.float32)


# -- numbers and products ----------------------------------------------------------------------------------------------


def test_threads_are_there_before_anything_is_called() -> None:
    """What comes from numba's cache may not start them, and crashes."""
    code = (
        "from numba.np.ufunc import parallel; import softsieve.kernels.cascade_numba, sys; "
        "sys.exit(not parallel._is_initialized)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_caches_notice_changes_of_any_module() -> None:
    """By itself numba compares a function's own file only, and goes on with the old code of what it calls."""
    sources = sorted(Path(base_numba.__file__).parent.glob("*numba*.py"))
    assert len(sources) == 12
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    for function in (kernels.ask, kernels.refine_survivors, rows_module.exact_rows, estimates_module.sum_exponentials):
        assert function._cache._cache_file._source_stamp[1] == digest


def test_threads_of_torch_stay_as_they_are() -> None:
    """Who sets OMP_NUM_THREADS=1, as servers do, keeps that when a head is asked, and numba does with one, too."""
    code = (
        "import numba, torch, sys; before = torch.get_num_threads(); import softsieve.kernels.cascade_numba; "
        "sys.exit(before != 1 or torch.get_num_threads() != 1 or numba.get_num_threads() != 1)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


COMMAND = """
import softsieve.kernels.cascade_numba
from softsieve.cli.head_bench import set_threads
set_threads(1)
"""
COMPARISON = """
from softsieve.comparisons.heads import measure
from softsieve.integrations.hidden_states import Corpus, Head
torch.set_num_threads(1)
states = torch.randn(40, 8)
measure(Head(torch.randn(300, 8), None, 1.0, None, {"x": Corpus(states, states)}), name="x", methods=["cascade, pac"])
"""


@pytest.mark.parametrize("code", [COMMAND, COMPARISON], ids=["command", "comparison"])
def test_who_asks_for_a_thread_has_one(code: str) -> None:
    """Numba starts as many threads as it may. Where both use OpenMP, torch has as many from then on."""
    counts = "import numba; print(torch.get_num_threads(), numba.get_num_threads())"
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"}
    script = "\n".join(["import torch", code, counts])
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "1"]


def test_exp() -> None:
    values = np.concatenate([np.linspace(-80, 80, 4001), spread_out(500), [0.0]]).astype(np.float32)
    exp: Any = base_numba.exp
    computed = np.array([exp(value) for value in values])
    truth = np.exp(values.astype(np.float64))
    np.testing.assert_allclose(computed, truth, rtol=1e-5)  # what rounding of value * log2(e) does
    small = np.abs(values) <= 1
    np.testing.assert_allclose(computed[small], truth[small], rtol=4e-6)
    assert exp(np.float32(-81)) == exp(np.float32(-1e30)) == exp(np.float32(-80)) > 0


LAYOUTS = [
    (torch.float32, "rows"),
    (torch.bfloat16, "rows"),
    (torch.float16, "rows"),
    (torch.float64, "rows"),
    (torch.float32, "every other"),
    (torch.bfloat16, "every other"),
    (torch.float16, "columns"),
]


def laid_out(weight: Tensor, layout: str) -> Tensor:
    """The same numbers, elsewhere in memory."""
    if layout == "columns":
        return weight.T.contiguous().T
    if layout == "every other":
        return torch.stack([weight, -weight], -1).flatten(1)[:, ::2]
    return weight


@pytest.mark.parametrize(("dtype", "layout"), LAYOUTS, ids=str)
def test_exact_rows(dtype: torch.dtype, layout: str) -> None:
    """Of some rows, in any order and more than once, with and without a bias, by one thread and by several."""
    kind: Any = np.float64 if dtype == torch.float64 else np.float32
    weight = laid_out(torch.from_numpy(spread_out(3700, 301)).to(dtype), layout)
    bias = spread_out(3700, seed=1).astype(kind)
    x = spread_out(301, seed=2).astype(kind)
    truth = weight.double().numpy() @ x.astype(np.float64)
    rows = random().integers(0, 3700, 3600)
    assert rows.size * x.size > ALONE > 7 * x.size
    several = np.empty(rows.size, kind)
    rows_numba.exact_rows(raw_bits(weight), x, rows, bias[:0], several)
    rtol = 1e-12 if kind == np.float64 else 1e-5
    np.testing.assert_allclose(several, truth[rows], rtol=rtol, atol=rtol * 10)
    alone = np.empty(7, kind)
    rows_numba.exact_rows(raw_bits(weight), x, rows[:7], bias[:0], alone)
    np.testing.assert_array_equal(alone, several[:7])
    rows_numba.exact_rows(raw_bits(weight), x, rows, bias, several)
    np.testing.assert_allclose(several, truth[rows] + bias[rows], rtol=rtol, atol=rtol * 10)
    rows_numba.exact_rows(raw_bits(weight), x, rows[:0], bias, alone)  # nothing to do


@pytest.mark.parametrize(
    "bits", [np.array([1, 0x0200, 0x03FF, 0x7BFF, -1025, -32768, 0x3C00], np.int16)], ids=["subnormal"]
)
def test_float16_at_its_limits(bits: Array) -> None:
    computed = np.empty(bits.size, np.float32)
    rows_numba.exact_rows(bits[:, None], np.ones(1, np.float32), np.arange(bits.size), computed[:0], computed)
    np.testing.assert_array_equal(computed, bits.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("size", [1, 7, 2500])
def test_project(size: int) -> None:
    """Some of the coordinates; the others stay."""
    projection = torch.from_numpy(spread_out(450, size)).bfloat16()
    x = spread_out(size, seed=1)
    out = np.full(450, np.float32(7))
    rows_numba.project(raw_bits(projection), x, 13, 443, out)
    truth = projection.double().numpy() @ x.astype(np.float64)
    np.testing.assert_allclose(out[13:443], truth[13:443], rtol=1e-5, atol=1e-4)
    assert set(out[:13]) | set(out[443:]) == {7}


@pytest.mark.parametrize("rows", [1, 5, 511, 512])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 6, 12, 27])
def test_add_columns(rows: int, size: int) -> None:
    """Any number of columns, four at a time or not; rows beyond the last are not written."""
    codes = random().integers(-127, 128, (size + 2, BLOCK)).astype(np.int8)
    y, values = spread_out(size), np.full(BLOCK, np.float32(-3))
    rows_numba.add_columns(codes, y, values[:rows])
    truth = codes[:size, :rows].T.astype(np.float64) @ y.astype(np.float64) - 3
    np.testing.assert_allclose(values[:rows], truth, rtol=1e-5, atol=1e-3)
    assert (values[rows:] == -3).all()


@pytest.mark.parametrize(("low", "high"), [(0, 5), (5, 33), (0, 300), (299, 300)])
def test_add_codes(low: int, high: int) -> None:
    records = random().integers(-128, 128, (4000, SPREADS + 300)).astype(np.int8)  # spreads above 127 are negative here
    y, rows = spread_out(SPREADS + 300), random(1).permutation(4000)[:3900].astype(np.int32)
    y[:SPREADS] = 0
    assert (rows.size * (high - low) > ALONE) == (high - low == 300)
    out, spreads = spread_out(3900, seed=2), np.zeros(3900, np.float32)
    before = out.copy()
    rows_numba.add_codes(records, 3, y, rows, low, high, out, spreads)
    some = slice(SPREADS + low, SPREADS + high)
    product = records[rows, some].astype(np.float64) @ y[some].astype(np.float64)
    np.testing.assert_allclose(out, before + product, rtol=1e-5, atol=5e-3)
    np.testing.assert_array_equal(spreads, records[rows, 3].view(np.uint8))
    assert spreads.max() > 127
    alone, around = before[:9].copy(), np.zeros(9, np.float32)
    rows_numba.add_codes(records, 3, y, rows[:9], low, high, alone, around)
    np.testing.assert_array_equal(alone, out[:9])


# -- choosing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 64, 65, 150])
@pytest.mark.parametrize("different", [1, 3, 1000])
def test_kth_largest(size: int, different: int) -> None:
    values = random(size).integers(0, different, size).astype(np.float32) - 1
    ordered = np.sort(values)[::-1]
    kept = values.copy()
    assert [Stages(base_numba).kth_largest(values, k) for k in range(1, size + 1)] == list(ordered)
    np.testing.assert_array_equal(values, kept)


@pytest.mark.parametrize("rows", [1, 5, 511, 512, 513, 2100])
@pytest.mark.parametrize("different", [2, 100_000])
def test_find_best(rows: int, different: int) -> None:
    """The rows with the largest estimates, and those that are tied with the last of them."""
    blocks = -(-rows // BLOCK)
    estimates = np.full(blocks * BLOCK, np.float32(1e9))  # what is beyond the last row is not looked at
    estimates[:rows] = -random(rows).integers(0, different, rows)
    largest = np.array([estimates[b * BLOCK : min((b + 1) * BLOCK, rows)].max() for b in range(blocks)])
    ordered = np.sort(estimates[:rows])[::-1]
    for count in {1, 2, 3, 4, 5, 6, 8, 64, 65, 600, rows - 1, rows}:
        if 1 <= count <= rows:
            best, values = np.empty(blocks * BLOCK, np.int32), np.empty(blocks * BLOCK, np.float32)
            size = estimates_numba.find_best(estimates, largest, rows, count, best, values)
            np.testing.assert_array_equal(best[:size], np.flatnonzero(estimates[:rows] >= ordered[count - 1]))
            np.testing.assert_array_equal(values[:size], estimates[best[:size]])


class Estimates(NamedTuple):
    """Estimates of all rows and what there is to choose with."""

    estimates: Array
    spread: Array
    upper: Array
    ends: Array
    marks: Array
    rows: Array
    values: Array
    spreads: Array


def estimated(rows: int, margin: float) -> Estimates:
    blocks = -(-rows // BLOCK)
    estimates, spread = spread_out(blocks * BLOCK), random(1).integers(1, 256, rows).astype(np.uint8)
    upper = np.full(blocks, np.float32(-np.inf))
    np.maximum.at(upper, np.arange(rows) // BLOCK, estimates[:rows] + np.float32(margin) * spread)
    room = np.full((2, blocks * BLOCK), np.float32(-1))
    marks = np.ones(blocks * BLOCK, np.uint8)
    ends = np.full(blocks, -1)
    return Estimates(estimates, spread, upper, ends, marks, np.full(blocks * BLOCK, -1, np.int32), *room)


def choose(case: Estimates, threshold: float, alone: int = ALONE) -> int:
    """Count the rows that reach a threshold and write them, as the cascade does; how many."""
    counted = estimates_numba.count_rows(case.estimates, case.spread, ERRORS, threshold, case.upper, case.ends, alone)
    count: int = estimates_numba.select_rows(case.estimates, case.spread, ERRORS, threshold, *case[3:], alone)
    assert count == counted
    return count


@pytest.mark.parametrize("rows", [1, 5, 511, 512, 513, 3000, ALONE + 1500])
@pytest.mark.parametrize("threshold", [-1e9, 0.5, 1.5, 2.5, 1e9], ids=["all", "most", "some", "few", "none"])
@pytest.mark.parametrize("alone", [0, ALONE], ids=["threads", "one thread or threads"])
def test_select_rows(rows: int, threshold: float, alone: int) -> None:
    """In order, whatever blocks are left out, and whoever chooses them."""
    case = estimated(rows, 0.01)
    count = choose(case, threshold, alone)
    wanted = np.flatnonzero(case.estimates[:rows] + np.float32(0.01) * case.spread >= np.float32(threshold))
    assert (wanted.size == rows, wanted.size == 0) == (threshold == -1e9, threshold == 1e9) or rows == 1
    assert count == wanted.size
    np.testing.assert_array_equal(case.rows[:count], wanted)
    np.testing.assert_array_equal(case.values[:count], case.estimates[wanted])
    np.testing.assert_array_equal(case.spreads[:count], case.spread[wanted])


def test_select_rows_passes_over_whole_blocks() -> None:
    case = estimated(5 * BLOCK, 0.01)
    case.estimates[:BLOCK] -= 100
    case.estimates[2 * BLOCK : 4 * BLOCK] -= 100
    case.upper[[0, 2, 3]] -= 100
    count = choose(case, 0.0)
    wanted = np.flatnonzero(case.estimates + np.float32(0.01) * case.spread >= 0)
    assert set(wanted // BLOCK) == {1, 4}
    np.testing.assert_array_equal(case.rows[:count], wanted)
    np.testing.assert_array_equal(case.spreads[:count], case.spread[wanted])


@pytest.mark.parametrize("threshold", [-1e9, 0.5, 1e9])
def test_keep_rows(threshold: float) -> None:
    values, rows = spread_out(700), np.arange(700)[::-1].copy()
    spreads = random().integers(1, 256, 700).astype(np.float32)
    wanted = values + np.float32(0.01) * spreads >= np.float32(threshold)
    expected = rows[wanted], values[wanted], spreads[wanted]
    added = 0.5 * (0.005 * spreads[~wanted].astype(np.float64)) ** 2
    expected_dropped = values[~wanted] + added, added
    dropped, excesses = np.zeros((2, 703), np.float32)
    count, many = estimates_numba.keep_rows(values, rows, spreads, ERRORS, threshold, dropped, excesses, 2)
    for own, right in zip((rows, values, spreads), expected, strict=True):
        np.testing.assert_array_equal(own[:count], right)
    assert many == 2 + 700 - count
    for own, right in zip((dropped, excesses), expected_dropped, strict=True):
        np.testing.assert_allclose(own[2:many], right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("length", "known"), [(1, 0), (4, 0), (9, 0), (9, 6), (400, 0), (400, 399)])
@pytest.mark.parametrize("based", [False, True])
def test_estimate_rows(length: int, known: int, based: bool) -> None:
    """Everything that is kept of a block, whether one thread does it or several, from the beginning or further."""
    rows, blocks = 3000, 6
    assert (4 * blocks * BLOCK * length > ALONE) == (length == 400)
    columns = random().integers(-127, 128, (blocks, length + 1, BLOCK)).astype(np.int8)
    spread, y = random(1).integers(1, 256, rows).astype(np.uint8), spread_out(length) / (30 * math.sqrt(length))
    estimates, (largest, upper, totals, corrected) = (
        np.zeros(blocks * BLOCK, np.float32),
        np.zeros((4, blocks), np.float32),
    )
    y = y.astype(np.float32)
    base = spread_out(rows if based else 0, seed=3)
    for low, high in ((0, known), (known, length)) if known else ((0, length),):
        estimates_numba.estimate_rows(
            columns, low, spread, base, y[:high], np.float32(3), Errors(0.01, 0.02, 0.5, 1.5),
            estimates, largest, upper, totals, corrected,
        )  # fmt: skip
    codes = columns[:, :length].transpose(0, 2, 1).reshape(-1, length)[:rows]
    truth = codes.astype(np.float64) @ y + 3 + (base if based else 0)
    np.testing.assert_allclose(estimates[:rows], truth, rtol=1e-5, atol=1e-4)
    deviation = 0.01 * spread
    added = np.where(deviation < 1.5, 0.5 * deviation**2, 0.5 * 1.5 * (2 * deviation - 1.5))
    for b in range(blocks):
        some = slice(b * BLOCK, min((b + 1) * BLOCK, rows))
        own = np.exp(truth[some] + added[some] - truth[some].max())
        assert largest[b] == pytest.approx(truth[some].max(), rel=1e-5)
        assert upper[b] == pytest.approx((truth[some] + 0.02 * spread[some]).max(), rel=1e-5)
        assert totals[b] == pytest.approx(own.sum(), rel=1e-4)
        assert corrected[b] == pytest.approx((own * np.minimum(added[some], 1)).sum(), rel=1e-4)
    assert added.max() > 1 > added.min()


def test_sums_beyond_float32() -> None:
    """Corrections without limit, and estimates far below: neither infinity nor nothing."""

    def sums(values: Any, spreads: Any, unit: float) -> Any:
        errors = Errors(unit, 2 * unit, 0.5, 1e30)
        return estimates_numba.sum_exponentials(values.astype(np.float32), spreads.astype(np.float32), errors, 0.0)

    total, corrected = sums(np.zeros(3), np.full(3, 255), 10.0)
    assert total == corrected == pytest.approx(3 * math.exp(80), rel=1e-5)
    total, corrected = sums(np.full(3, -500), np.ones(3), 1.0)
    assert total == pytest.approx(3 * math.exp(-80), rel=1e-5)
    assert sums(np.zeros(0), np.zeros(0), 1.0) == (0, 0)


def test_sums_of_dropped_rows() -> None:
    """With a threshold only rows whose upper ends are below it count, in all blocks together, too."""
    values, spreads = spread_out(2000), random(1).integers(1, 256, 2000).astype(np.uint8)
    excess = 0.5 * (0.005 * spreads.astype(np.float64)) ** 2
    own = np.where(values + np.float32(0.01) * spreads < 1.5, np.exp(values + excess - 2), 0)
    total, corrected = estimates_numba.sum_dropped(values, spreads, ERRORS, 2.0, 1.5)
    assert 0 < total == pytest.approx(own.sum(), rel=1e-4)
    assert corrected == pytest.approx((own * np.minimum(excess, 1)).sum(), rel=1e-4)


def test_rows_above_a_bound() -> None:
    """What rows below the threshold have above a bound, whatever blocks are passed over."""
    values, spreads = spread_out(2000), random(1).integers(1, 256, 2000).astype(np.uint8)
    excess = 0.5 * (0.005 * spreads.astype(np.float64)) ** 2
    upper = np.array([(values + np.float32(0.01) * spreads)[b : b + BLOCK].max() for b in range(0, 2000, BLOCK)])
    wanted = (values + np.float32(0.01) * spreads < 3.0) & (values + excess > 1.0)
    dropped, excesses = np.zeros((2, 2001), np.float32)
    count = estimates_numba.gather_above(values, spreads, ERRORS, 3.0, upper, 1.0, dropped, excesses)
    assert 0 < count == wanted.sum() < (values > 1).sum()
    np.testing.assert_allclose(dropped[:count], (values + excess)[wanted], rtol=1e-5)
    np.testing.assert_allclose(excesses[:count], excess[wanted], rtol=1e-5)
    own = np.exp((values + excess)[wanted] - 2) - np.exp(-1.0)
    total, corrected = estimates_numba.sum_above(dropped[: count + 1], excesses[: count + 1], 2.0, 1.0)
    assert total == pytest.approx(own.sum(), rel=1e-4)
    assert corrected == pytest.approx((own * np.minimum(excess[wanted], 1)).sum(), rel=1e-4)


@pytest.mark.parametrize("k", [1, 3, 64, 65, 100])
def test_sort_top(k: int) -> None:
    """In falling order, equal ones by their rows, none twice."""
    exact = random().integers(0, 30, 100).astype(np.float32)
    rows = np.sort(random(1).permutation(1000)[:100]).astype(np.int32)
    top, logits = np.zeros(k, np.int64), np.zeros(k, np.float32)
    estimates_numba.sort_top(exact, rows, top, logits)
    np.testing.assert_array_equal(logits, np.sort(exact)[::-1][:k])
    np.testing.assert_array_equal(top, rows[np.argsort(-exact, kind="stable")[:k]])


# -- one query, by hand ------------------------------------------------------------------------------------------------


def by_hand() -> tuple[kernels.Index, kernels.Scratch]:
    """Six rows of two coordinates that are not 0. The first is the preview, both are the only tier; codes are exact."""
    rows = np.array([[20, 1], [10, -1], [0, 1], [-10, 1], [19, 0], [14, 0]], np.int8)
    weight = np.zeros((6, 4), np.float32)
    weight[:, :2] = rows
    records = np.zeros((6, SPREADS + 2), np.int8)
    records[:, 0], records[:, SPREADS:] = 1, rows
    columns = np.zeros((1, 1, BLOCK), np.int8)
    columns[0, 0, :6] = rows[:, 0]
    index = kernels.Index(
        weight,
        np.zeros(0, np.float32),
        np.zeros(0, np.float32),
        raw_bits(torch.eye(4)[:2].bfloat16()),
        np.zeros(4, np.float32),
        np.array([1, 0, 0, 0], np.float32),
        np.array([1]),
        columns,
        np.ones((1, 6), np.uint8),
        np.ones(1, np.float32),
        np.array([2]),
        records,
        np.ones(1, np.float32),
        np.array([0, 1], np.int32),
        weight[[0]].copy(),
        16,
    )
    sizes = {
        "largest": 1,
        "upper_ends": 1,
        "sums": 1,
        "corrected": 1,
        "ends": 1,
        "y": SPREADS + 2,
        "summed": 4,
        "tally": 2,
    }
    sizes |= dict.fromkeys(("probe_logits", "probe_starts", "probe_estimates", "probe_spreads"), 2)
    kinds = {"ends": np.int64, "tally": np.int64, "marks": np.uint8, "rows": np.int32}
    kinds |= {"spreads": np.uint8, "probe_spreads": np.uint8}
    names = kernels.Scratch._fields[:-1]
    memory: dict[str, Any] = {name: np.zeros(sizes.get(name, BLOCK), kinds.get(name, np.float32)) for name in names}
    return index, kernels.Scratch(**memory)


ONES = np.array([1, 1, 0, 0], np.float32)


def test_bytes_and_entries_by_hand() -> None:
    index, scratch = by_hand()
    top, logits, dense = np.zeros(1, np.int64), np.zeros(1, np.float32), np.zeros(6, np.float32)
    plan = PLAN._replace(width=1.0)
    answer = kernels.Found(*kernels.ask(index, plan, ONES, ONES, scratch, top, logits, dense, 0))
    # Errors of both probes are 1, as predicted. All six rows are read ahead. The preview keeps rows 0 and 4, as 19 + 1
    # reaches 20 + 1/2 with what floor allows. In the tier errors are 0, so that row 4 has to reach
    # log(e^21 + e^19 + ...) + floor = 19.2.
    assert answer.state == ANSWERED
    assert answer.scale == 1
    assert (top.tolist(), logits.tolist(), answer.finalists) == ([0], [21.0], 1)
    preview = 2 * 4 * 2 + 2 * (4 * 4 + 2) + 6 * 2  # projection and centre, two probes with codes and spreads, all rows
    ahead = 6 * 4 * 4
    tier = 1 * 4 * 2 + 2 * 3 + 2 * 3  # a longer projection, two rows and two probes of two codes and a spread
    assert answer.bytes_read == preview + ahead + tier + 1 * 4 * 4 == 196
    assert answer.coordinates == 2 * (4 + 1) + 6 * 1 + 6 * 4 + (2 + 2) * 2 + 4 == 52
    np.testing.assert_allclose(dense, [21, 10.5, 0.5, -9.5, 19, 14.5], rtol=1e-6)
    assert answer.log_z == pytest.approx(np.logaddexp.reduce(dense.astype(np.float64)), rel=1e-6)
    gone = 0.5 * (np.exp([10.5, 0.5, -9.5, 14.5])).sum()  # half of the mass is doubtful; row 4 is known
    assert answer.half == pytest.approx(0.5 * gone / np.exp(dense.astype(np.float64)).sum(), rel=1e-4)


def test_a_tier_that_does_not_pay_is_left_out() -> None:
    """With one row left, the longer projection costs more than the row."""
    index, scratch = by_hand()
    index.weight[4, 0], index.records[4, SPREADS], index.columns[0, 0, 4] = 12, 12, 12
    answer = kernels.Found(*kernels.ask(index, PLAN._replace(width=1.0), ONES, ONES, scratch, *nowhere(1), 0))
    assert (answer.state, answer.finalists) == (ANSWERED, 1)
    assert answer.bytes_read == 64 + 6 * 16 + 4 * 4
    assert answer.coordinates == 16 + 6 * 4 + 4


def nowhere(k: int, rows: int = 0, kind: Any = np.float32) -> tuple[Array, Array, Array]:
    return np.zeros(k, np.int64), np.zeros(k, kind), np.zeros(rows, kind)


def test_states() -> None:
    index, scratch = by_hand()

    def ask(**change: Any) -> kernels.Found:
        return kernels.Found(*kernels.ask(index, PLAN._replace(**change), ONES, ONES, scratch, *nowhere(1), 0))

    def usually(**change: float) -> kernels.Found:
        return ask(width=1.0, usual=USUAL._replace(**change))

    seen = ask(width=1.0)
    assert seen.signal == pytest.approx(math.sqrt((20**2 + 10**2) / 2))  # of errors of 1
    assert seen.toward == pytest.approx(math.sqrt(0.5))
    assert seen.flat == pytest.approx(seen.log_z - 21)
    inside = {"low": 0.99, "high": 1.01, "signal": 15.8, "toward_low": 0.7, "toward_high": 0.71, "survivors": 2.0}
    assert usually(**inside, flat=seen.flat).state == ANSWERED
    before = {"low": 1.01, "high": 0.99, "signal": 15.9, "toward_low": 0.71, "toward_high": 0.7}
    for outside, value in before.items():
        answer = usually(**{outside: value})
        assert (answer.state, answer.scale) == (DRIFTED, 1), outside
        assert (answer.bytes_read, answer.coordinates) == (52, 10)  # projection, centre and probes
    assert usually(survivors=1.0).state == DRIFTED
    assert usually(flat=seen.flat - 1e-6).state == DRIFTED
    assert ask(floor=-100.0).state == EXPENSIVE  # every row matters
    assert ask(width=1.0, doubt=1e9, tolerance=0.1).state == EXPENSIVE  # however many rows are read
    index.samples[0, 3] += 1
    assert ask(width=1.0).state == CHANGED
    index.samples[0, 3] -= 1
    assert ask(width=1.0).state == ANSWERED
    index.weight[0, 2] = 1e-30
    assert ask(width=1.0).state == CHANGED


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_no_number_has_drifted(value: float) -> None:
    index, scratch = by_hand()
    x = np.array([1, value, 0, 0], np.float32)
    assert kernels.Found(*kernels.ask(index, PLAN, x, x, scratch, *nowhere(1), 0)).state == DRIFTED


def test_patience() -> None:
    """Rows are lowered to until the doubt is small enough: eight times, and what is read for that counts."""
    index, scratch = by_hand()
    answer = kernels.Found(
        *kernels.ask(index, PLAN._replace(width=1.0, doubt=1e3, tolerance=0.4), ONES, ONES, scratch, *nowhere(1), 0)
    )
    assert (answer.state, answer.finalists) == (ANSWERED, 2)
    once = 64 + 6 * 16 + 20 + 16
    assert answer.bytes_read > once


# -- one query, against the reference ----------------------------------------------------------------------------------


class Made(NamedTuple):
    """A head with its index."""

    engine: CpuCascade
    weight: Tensor
    bias: Tensor | None
    beta: float

    def ask(self, x: Tensor, plan: Plan, *, dense: bool = False) -> tuple[kernels.Found, Array, Array, Array, Array]:
        """What the kernel finds, the top k, their logits, all logits, and the finalists."""
        scaled = (x * self.beta).to(self.engine.layer.reader.dtype)
        scratch, kind = self.engine._scratch(), scaled.numpy().dtype
        top, logits, everywhere = nowhere(plan.k, len(self.weight) if dense else 0, kind)
        answer = kernels.ask(
            self.engine._arrays_for([plan]), plan, scaled.numpy(), scaled.numpy(), scratch, top, logits, everywhere, 0
        )
        return kernels.Found(*answer), top, logits, everywhere, np.sort(scratch.rows[: answer[7]])

    def reference(self, x: Tensor, plan: Plan) -> reference.CascadeAnswer:
        index, some = self.engine.index, (plan.first, plan.second)
        _, tiers = lengths(len(index.centre))
        spreads = index.records[:, : len(tiers)].view(torch.uint8).T
        longer = [tiers.index(length) for length in long_previews(len(index.centre))]
        of_previews = torch.cat([index.spreads, spreads[longer]])
        steps = torch.cat([index.steps, index.tier_steps[longer]])
        return reference.cascade(
            self.weight,
            x,
            self.bias,
            beta=self.beta,
            index=reference.CascadeIndex(
                centre=index.centre,
                projection=index.project,
                codes=index.records[:, SPREADS:],
                lengths=[*(self.engine.lengths[which] for which in some), *tiers],
                deviations=torch.cat(
                    [
                        *(steps[which] * of_previews[which][None] for which in some),
                        index.tier_steps[:, None] * spreads,
                    ]
                ),
                probes=index.probes,
                mean=index.mean,
            ),
            plan=reference.CascadePlan(
                k=plan.k,
                limit=plan.limit,
                width=plan.width,
                correction=plan.correction,
                floor=plan.floor,
                doubt=plan.doubt,
                tolerance=plan.tolerance,
                usual=reference.Usual(*plan.usual),
                upper=plan.upper,
                level=plan.level,
            ),
        )


def made(
    n: int, d: int, *, bias: bool = False, beta: float = 1.0, dtype: torch.dtype = torch.float32, layout: str = "rows"
) -> tuple[Made, Tensor]:
    """A head whose rows have a decaying spectrum, and queries that are about some of them."""
    g = torch.Generator().manual_seed(1000 * n + d)
    scale = 1 / torch.arange(1, d + 1).sqrt()
    weight = laid_out((torch.randn(n, d, generator=g) * scale).to(dtype), layout)
    x = torch.randn(8, d, generator=g) * scale + 1.5 * weight[:8].float().repeat(8, 1)[:8]
    own = torch.randn(n, generator=g) if bias else None
    moments = Moments(d)
    moments.update((x * beta).float())
    return Made(CpuCascade(Layer(weight, own, Options(beta)), build(weight, own, moments)), weight, own, beta), x


def compare(head: Made, x: Tensor, plan: Plan) -> str | None:
    """Refuse what is not the reference's; its state, or None where rounding may decide."""
    answer, top, logits, dense, finalists = head.ask(x, plan, dense=True)
    right = head.reference(x, plan)
    if right.closest < 3e-5:
        return None
    assert answer.state == {"answered": ANSWERED, "drifted": DRIFTED, "expensive": EXPENSIVE}[right.state]
    if len(head.weight) > 1:  # errors of the only row are nothing but rounding
        assert answer.scale == pytest.approx(right.scale, rel=1e-3, abs=1e-4)
        assert answer.signal == pytest.approx(right.signal, rel=1e-3, abs=1e-4)
    assert answer.toward == pytest.approx(right.toward, abs=1e-5)
    assert (answer.coordinates, answer.bytes_read) == (right.entries, right.bytes_read)
    if right.state == "answered":
        np.testing.assert_array_equal(finalists, right.finalists)
        np.testing.assert_allclose(logits, right.logits, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(right.dense[torch.from_numpy(top)], right.logits, rtol=1e-5, atol=1e-5)
        assert len(set(top)) == plan.k
        np.testing.assert_allclose(dense, right.dense, rtol=1e-4, atol=2e-4)
        assert answer.log_z == pytest.approx(right.log_z, rel=1e-5, abs=1e-4)
        assert answer.half == pytest.approx(right.half, rel=1e-2, abs=1e-5 + 5e-6 * plan.doubt)  # sums in float32
    return right.state


WIDTHS = (0.0, 0.7, 2.0, 3.0, 5.0, 1e6)


@pytest.mark.parametrize("n", [1, 5, 511, 513, 3000])
@pytest.mark.parametrize("d", [1, 3, 17, 64, 200, 500])  # of 500, tiers of 56 and 120 are previews, too
@pytest.mark.parametrize(("bias", "beta"), [(False, 1.0), (True, 0.7)], ids=["plain", "bias"])
def test_ask(n: int, d: int, bias: bool, beta: float) -> None:
    head, x = made(n, d, bias=bias, beta=beta)
    states = []
    previews = head.engine.previews
    for first, second in {(0, previews - 1), *((level, level) for level in range(previews))}:
        for k in sorted({0, 1, min(2, n), min(8, n), n}):
            for width in WIDTHS:
                plan = PLAN._replace(k=k, first=first, second=second, limit=float(n // 50), width=width)
                states += [compare(head, query, plan) for query in x[: 3 if n < 3000 else 1]]
    assert states.count(None) <= 0.5 * len(states) or d == 1  # a basis of one coordinate makes estimates exact
    if n >= 511 and d >= 17:
        assert "answered" in states
        assert "expensive" in states


@pytest.mark.parametrize(("bias", "beta"), [(False, 1.0), (True, -0.7)], ids=["plain", "bias"])
def test_ask_for_rows_above_a_level(bias: bool, beta: float) -> None:
    """As the reference does it; the finalists are rows in order, with their logits, and all that are above it."""
    head, x = made(3000, 200, bias=bias, beta=beta)
    exact, states = reference.logits(head.weight, x, head.bias, beta=beta), []
    last = head.engine.previews - 1
    for query, logits in zip(x[:4], exact, strict=False):
        for level in (-math.inf, *logits.quantile(torch.tensor([0.1, 0.9, 0.99], dtype=torch.float64)).tolist(), 1e3):
            for width in (1.0, 3.0, 12.0):
                plan = PLAN._replace(k=0, second=last, limit=60.0, width=width, level=level)
                states.append(compare(head, query, plan))
                answer, *_, finalists = head.ask(query, plan)
                if width == 12.0 and level > -math.inf and answer.state == ANSWERED:
                    above = (logits > level + 1e-4).nonzero()[:, 0]
                    assert np.isin(above, finalists).all()
                    assert (np.diff(finalists) > 0).all()
    assert {"answered", "expensive"} <= set(states)
    assert states.count(None) <= 0.3 * len(states)


@pytest.mark.parametrize("limit", [0.0, 40.0, math.inf])
def test_a_longer_preview_is_made_for_queries_that_leave_many_rows(limit: float) -> None:
    """By how many rows are read further: as with the first preview alone, or with the second."""
    head, x = made(3000, 200)
    last, kinds = head.engine.previews - 1, []
    for query in x:
        short, long, either = (
            head.ask(query, PLAN._replace(first=first, second=second, limit=limit))[0]
            for first, second in ((0, 0), (last, last), (0, last))
        )
        kinds.append(short.survivors <= limit)
        assert either.survivors == (short if kinds[-1] else long).survivors
        assert either.scale == short.scale  # drift is that of the first
        assert compare(head, query, PLAN._replace(second=last, limit=limit)) in ("answered", None)
    assert set(kinds) == {0: {False}, 40: {False, True}, math.inf: {True}}[limit]


@pytest.mark.parametrize("k", [1, 2, 8, 64, 65, 200])
def test_an_answer_has_k_rows(k: int) -> None:
    """Different ones with their own logits, whatever the width: a wrong answer is not made up, either."""
    head, x = made(513, 64)
    exact = reference.logits(head.weight, x)
    for width in (0.0, 0.3, 0.7, 1.5):
        for query, logits in zip(x, exact, strict=True):
            answer, top, values, _, _ = head.ask(query, PLAN._replace(k=k, width=width))
            if answer.state == ANSWERED:
                assert len(set(top)) == k
                np.testing.assert_allclose(values, logits[torch.from_numpy(top)], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("d", [64, 200])
def test_ask_with_other_plans(d: int) -> None:
    """No correction, none of the mass forgiven, much and little doubt: rows are lowered to, and patience ends."""
    head, x = made(513, d, bias=True, beta=1.3)
    states = []
    for query in x:
        changes: tuple[dict[str, Any], ...] = (
            {"correction": 0.0},
            {"floor": math.log(1e-3)},
            {"floor": -0.01},
            {"doubt": 3.0, "tolerance": 0.05},
            {"doubt": 30.0, "tolerance": 0.01},
            {"doubt": 1e6, "tolerance": 0.0},
            {"usual": USUAL._replace(low=0.9)},
            {"usual": USUAL._replace(high=0.9)},
            {"usual": USUAL._replace(signal=1.0)},
            {"usual": USUAL._replace(toward_low=0.3)},
            {"usual": USUAL._replace(toward_high=0.3)},
            {"usual": USUAL._replace(survivors=60.0)},
            {"usual": USUAL._replace(flat=1.0)},
            {"upper": True},
            {"upper": True, "width": 4.0},
        )
        states += [compare(head, query, PLAN._replace(k=3, **change)) for change in changes]
    assert {"answered", "drifted", "expensive"} <= set(states)
    assert states.count(None) <= 0.2 * len(states)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [(torch.bfloat16, "rows"), (torch.float16, "rows"), (torch.float64, "rows"), (torch.float32, "every other")],
    ids=str,
)
def test_ask_dtypes_and_strides(dtype: torch.dtype, layout: str) -> None:
    head, x = made(1100, 130, bias=True, beta=0.7, dtype=dtype, layout=layout)
    states = [compare(head, query, PLAN._replace(k=k, width=w)) for query in x for k in (0, 3) for w in (0.7, 2.0)]
    assert states.count("answered") >= 0.5 * len(states)


def test_ask_with_many_rows() -> None:
    """So many that several threads look at blocks, refine and read rows; fewer of them with a narrow width."""
    head, x = made(140_000, 130)
    length = lengths(130)[0][-1]
    assert 4 * head.engine.index.columns.shape[0] * BLOCK * length > ALONE
    finalists = []
    for width, part in ((0.3, 1e-3), (3.0, 1e-6)):
        plan = PLAN._replace(
            k=5, second=head.engine.previews - 1, limit=0.0, width=width, floor=math.log(part), doubt=0.0
        )
        answer, top, _, _, rows = head.ask(x[0], plan)
        right = head.reference(x[0], plan)
        assert answer.state == ANSWERED
        # Rounding decides on a row or two of so many.
        assert len(set(rows.tolist()) ^ set(right.finalists.tolist())) <= 3
        assert answer.log_z == pytest.approx(right.log_z, abs=1e-3)
        finalists.append(len(rows))
        exact = reference.topk_softmax(head.weight, x[0], 5)
        assert set(top) == set(exact.indices.tolist())
    assert finalists[0] * 130 < ALONE < finalists[1] * 130
