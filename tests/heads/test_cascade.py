"""The cascade: its index, heads of all kinds, rows that change, threads."""

from __future__ import annotations

import math
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve.data.synthetic_heads import make_head
from softsieve.heads import TopK, WeightChanged
from softsieve.heads.cascade import basis, crossover
from softsieve.heads.cascade import index as cascade
from softsieve.heads.cascade.basis import Moments, joint_basis, second_moment
from softsieve.heads.cascade.cpu import SAMPLES, CpuCascade
from softsieve.heads.cascade.index import BLOCK, PROBES, SPREADS, Index, lengths
from softsieve.heads.engine import Layer
from softsieve.heads.watching import checksums
from softsieve.kernels.cascade_numba import ALONE, Plan, Usual
from softsieve.reference import heads as reference
from tests.heads.instances import gaussian, plausible, right

# A query or two of the same kind are taken for another one.
pytestmark = pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")

N, D, DELTA, EPS = 1100, 130, 0.1, 0.3


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrations do not measure how long a batch takes."""
    monkeypatch.setattr(crossover, "measured_batch", lambda *_: 0)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def instance(n: int = N, d: int = D, count: int = 200, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weight and queries as of a language model."""
    weight, x, _ = make_head(n, d, rank=max(1, d // 4), calibration=count, test=1, seed=seed)
    return weight.float(), x


def index_of(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Index:
    moments = Moments(weight.shape[1])
    moments.update(x)
    return cascade.build(weight, bias, moments)


def fitted(weight: Tensor, x: Tensor, k: int = 8, bias: Tensor | None = None, **options: Any) -> AdaptiveSoftmax:
    """Built with a half of the queries, calibrated with the other."""
    head = AdaptiveSoftmax(weight, bias, **{"eps": EPS, "delta": DELTA, "method": "cascade", **options})
    head.build(x[: len(x) // 2])
    head.calibrate(x[len(x) // 2 :], k, generator=generator())
    return head


# -- the basis ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 17, 60])
def test_basis(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products stay what they are, queries come out alike in all directions, and prefixes are the best there are."""
    monkeypatch.setattr(basis, "RIDGE", 1e-9)
    g = generator(size)
    scale = torch.logspace(0, -1, size)
    rows, queries = (torch.randn(count, size, generator=g) * scale @ mixed(size, g) for count in (300, 400))
    found = joint_basis(second_moment([queries], size), second_moment(torch.split(rows, 70), size))
    expand, project = found.expand.double(), found.project.double()
    torch.testing.assert_close(expand @ project, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-4)
    y, turned = queries.double() @ project.T, rows.double() @ expand
    torch.testing.assert_close(y.T @ y / 400, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-3)
    exact = rows.double() @ queries.double().T
    values = torch.linalg.svdvals(exact)[:size].square()
    torch.testing.assert_close(turned.square().sum(0) * 400, values, rtol=1e-2, atol=1e-4 * float(values[0]))
    for m in range(1, size, 7):
        left = (exact - turned[:, :m] @ y[:, :m].T).square().sum()
        assert float(left) == pytest.approx(float(values[m:].sum()), rel=1e-2, abs=1e-5 * float(values[0]))


def mixed(size: int, g: torch.Generator) -> Tensor:
    turned: Tensor = torch.linalg.qr(torch.randn(size, size, generator=g)).Q
    return turned


def test_basis_of_nothing() -> None:
    """The ridge makes one where queries say nothing."""
    zero = torch.zeros(5, 5, dtype=torch.float64)
    for query_moment, row_moment in ((zero, zero), (zero, torch.eye(5)), (torch.eye(5), zero)):
        found = joint_basis(query_moment, row_moment)
        torch.testing.assert_close(found.expand @ found.project, torch.eye(5), rtol=0, atol=1e-5)


def test_moments() -> None:
    x = torch.randn(50, 3, generator=generator())
    moments = Moments(3)
    for part in torch.split(x, [1, 20, 29]):
        moments.update(part)
    assert moments.count == 50
    torch.testing.assert_close(moments.mean, x.T.double() @ x.double() / 50, rtol=1e-6, atol=1e-6)


# -- the index ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [*range(1, 140), 200, 576, 577, 2048, 4096, 30_000])
def test_lengths(size: int) -> None:
    previews, tiers = lengths(size)
    assert previews[-1] == max(1, size // 16)
    assert previews == sorted(set(previews))
    assert all(longer <= 1.5 * shorter for shorter, longer in pairwise(previews))
    assert 1 <= len(tiers) <= SPREADS
    assert tiers == sorted(set(tiers))
    assert max(1, previews[-1]) <= tiers[-1] <= max(1, size // 2)
    if size >= 112:  # with the spreads before it, a tier fills whole cache lines
        assert [tier + SPREADS for tier in tiers] == [64 << number for number in range(len(tiers))]
        assert 2 * (tiers[-1] + SPREADS) - SPREADS > size // 2 or len(tiers) == SPREADS


def turned(index: Index, weight: Tensor) -> Tensor:
    """The rows in the basis of an index, in float64."""
    return (weight.double() - index.centre.double()) @ index.expand.double()


def decoded(index: Index) -> Tensor:
    return index.records[:, SPREADS:].double() * index.unit.double()


def spreads_of(index: Index) -> tuple[Tensor, Tensor]:
    """Predicted deviations of previews and tiers, and their steps; (levels, n) and (levels, 1)."""
    tiers = index.records[:, : len(index.tier_steps)].view(torch.uint8).T
    steps = torch.cat([index.steps, index.tier_steps]).double()[:, None]
    return torch.cat([index.spreads, tiers]) * steps, steps


def lacking(index: Index, rows: Tensor) -> Tensor:
    """What estimates lack of rows in the basis: beyond the prefix all, before it the errors of coding. (levels, n)"""
    previews, tiers = lengths(len(index.centre))
    errors = rows[:, : len(index.unit)] - decoded(index)
    return torch.stack(
        [
            (errors[:, :m].square().sum(-1) + rows[:, m:].square().sum(-1)).sqrt()
            for m in [*previews, *tiers]  # each as long as its own
        ]
    )


SHAPES = [(1, 1), (5, 3), (63, 17), (513, 64), (1100, 200), (2000, 33)]


@pytest.mark.parametrize(("n", "d"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_codes(n: int, d: int, with_bias: bool) -> None:
    """To half a step or at their limit, the same by rows and by columns."""
    weight, x = gaussian(n, d, 50, generator(n))
    bias = torch.randn(n, generator=generator(1)) if with_bias else None
    index = index_of(weight, x, bias)
    cascade.check(index, weight, bias)
    rows, codes = turned(index, weight)[:, : len(index.unit)], index.records[:, SPREADS:]
    assert int(codes.min()) >= -127
    error = (rows / index.unit.double() - codes).abs()
    assert bool((error[codes.abs() < 127] <= 0.5 + 1e-3).all())
    by_columns = index.columns.transpose(1, 2).reshape(-1, index.columns.shape[1])
    assert torch.equal(by_columns[:n], codes[:, : index.columns.shape[1]])
    assert not bool(by_columns[n:].any())
    if n > 100:  # as fine as rows are wide, with room for the widest
        assert 8 < float(codes.float().std()) < 13
        assert int((codes.abs() == 127).sum()) == 0


def test_codes_at_their_limit() -> None:
    weight, x = gaussian(1100, 64, 50, generator())
    weight[7] *= 30
    index = index_of(weight, x)
    codes, rows = index.records[:, SPREADS:], turned(index, weight)[:, :32]
    assert {-127, 127} & set(codes[7].tolist())
    assert int(codes.int().abs().max()) == 127
    over = rows[7].abs() > 127.5 * index.unit
    assert bool((codes[7][over] == 127 * rows[7][over].sign()).all())


@pytest.mark.parametrize(("n", "d"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_spreads(n: int, d: int, with_bias: bool) -> None:
    """What estimates lack of a row, rounded up by less than a step."""
    weight, x = gaussian(n, d, 50, generator(n))
    bias = torch.randn(n, generator=generator(1)) if with_bias else None
    index = index_of(weight, x, bias)
    rows = turned(index, weight)
    found, steps = spreads_of(index)
    exact = lacking(index, rows)
    rounding = 1e-3 * rows.norm(dim=-1) + 1e-6
    assert bool((found >= exact - rounding).all())
    assert bool((found <= (exact + rounding + steps)).all())
    if n > 1:
        assert bool((found.amax(-1) / steps[:, 0] == 255).all())
        assert float((found - exact).mean() / steps.mean()) == pytest.approx(0.5, abs=0.25) or n < 500


def test_predicted_deviations_are_those_of_errors() -> None:
    """Over queries like those of `build`, for all rows and levels."""
    weight, x = instance(count=4000)
    index = index_of(weight, x[:3000])
    found, _ = spreads_of(index)
    queries = x[3000:].double()
    y, exact = queries @ index.project.double().T, queries @ weight.double().T
    previews, tiers = lengths(D)
    for deviation, m in zip(found, [*previews, *tiers], strict=True):
        codes = index.records[:, SPREADS : SPREADS + m].double()
        estimates = (queries @ index.centre.double())[:, None] + y[:, :m] @ codes.T
        ratio = (estimates - exact).square().mean(0).sqrt() / deviation
        assert float(ratio.median()) == pytest.approx(1, abs=0.15), m
        assert float(ratio.min()) > 0.5
        assert float(ratio.max()) < 2


def test_probes() -> None:
    weight, x = gaussian(500, 9, 50, generator())
    index = index_of(weight, x)
    assert len(set(index.probes.tolist())) == PROBES
    few = index_of(weight[:40], x)
    assert sorted(few.probes.tolist()) == list(range(40))
    moments = Moments(9)
    moments.update(x)
    seeds = [cascade.build(weight, None, moments, seed=seed).probes for seed in (1, 1, 2)]
    assert torch.equal(seeds[0], seeds[1])
    assert not torch.equal(seeds[0], seeds[2])


def test_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows are worked on at a time, the index is the same; progress adds up."""
    weight, x = gaussian(1100, 40, 50, generator())
    bias = torch.randn(1100, generator=generator(1))
    whole, told = index_of(weight, x, bias), []
    monkeypatch.setattr(cascade, "CACHED", 40 * 100)
    moments = Moments(40)
    moments.update(x)
    parts = cascade.build(weight, bias, moments, progress=lambda _, share: told.append(share))
    for name, one, other in zip(Index._fields, whole, parts, strict=True):
        if one.is_floating_point():
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-4, msg=name)
        elif name not in ("columns", "records", "spreads"):
            assert torch.equal(one, other), name
    assert (whole.records.int() - parts.records.int()).abs().double().mean() < 0.1  # but for rounding of the basis
    assert len(told) > 20
    assert sum(told) == pytest.approx(1, abs=0.1)


# -- heads of all kinds ------------------------------------------------------------------------------------------------


def constant(n: int, d: int, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    weight, x = gaussian(1, d, count, g)
    return weight.expand(n, d).clone(), x


def zero_weight(n: int, d: int, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    weight, x = gaussian(n, d, count, g)
    return weight * 0, x


def duplicated(n: int, d: int, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    weight, x = gaussian(-(-n // 3), d, count, g)
    return weight.repeat(3, 1)[:n].clone(), x


def one_huge_row(n: int, d: int, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    weight, x = gaussian(n, d, count, g)
    weight[n // 2] *= 1e4
    return weight, x


def zero_queries(n: int, d: int, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    weight, x = gaussian(n, d, count, g)
    return weight, x * 0


def some_zero_queries(n: int, d: int, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    weight, x = gaussian(n, d, count, g)
    return weight, x * (torch.rand(count, 1, generator=g) < 0.6)


def sparse_queries(n: int, d: int, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    weight, x = gaussian(n, d, count, g)
    return weight, 3 * x * (torch.rand(count, d, generator=g) < 0.1)


def few_rows_not_zero(n: int, d: int, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """As of a vocabulary that is padded; large logits."""
    weight, x = gaussian(n, d, count, g)
    return weight * (torch.arange(n) % 200 == 0)[:, None], 100 * x


def large_logits(n: int, d: int, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    weight, x = gaussian(n, d, count, g)
    return weight, 1000 * x


def small_weight(n: int, d: int, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    weight, x = gaussian(n, d, count, g)
    return weight * 1e-15, x * 1e15


def large_weight(n: int, d: int, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    weight, x = gaussian(n, d, count, g)
    return weight * 1e15, x * 1e-15


def small_logits(n: int, d: int, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    weight, x = gaussian(n, d, count, g)
    return weight * 1e-20, x


def huge_logits(n: int, d: int, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    weight, x = gaussian(n, d, count, g)
    return weight * 1e15, x


ILL = [
    constant,
    zero_weight,
    duplicated,
    one_huge_row,
    zero_queries,
    some_zero_queries,
    sparse_queries,
    few_rows_not_zero,
    large_logits,
    small_weight,
    large_weight,
    small_logits,
    huge_logits,
]


def close(found: Tensor, exact: Tensor) -> Tensor:
    """Whether log Z is right to eps, up to the rounding of logits."""
    off = found.double() - exact
    rounding = 1e-5 * (1 + exact.abs())
    return (math.log1p(-EPS) - rounding <= off) & (off <= math.log1p(EPS) + rounding)


@pytest.mark.parametrize("kind", ILL)
@pytest.mark.parametrize(("n", "d"), [(600, 32), (50, 17), (1, 5), (700, 1)])
def test_ill_heads(kind: Any, n: int, d: int) -> None:
    weight, x = kind(n, d, 260, generator(n))
    ks = sorted({0, 1, min(2, n), min(8, n)})
    head = AdaptiveSoftmax(weight, eps=EPS, delta=DELTA, method="cascade")
    head.build(x[:100])
    head.calibrate(x[100:200], ks, generator=generator())
    cascade.check(head.index, weight, None)  # type: ignore[arg-type]
    new = x[200:]
    exact = reference.logits(weight, new).logsumexp(-1)
    for k in ks:
        answer = head.topk(new, k) if k else head.log_partition(new)
        assert bool(answer.log_z.isfinite().all())
        fine = close(answer.log_z, exact)
        if isinstance(answer, TopK):
            fine = right(answer, weight, new, EPS)
        assert plausible(int((~fine).sum()), len(new), DELTA), (k, int((~fine).sum()))
    assert bool(head.logits(new).isfinite().all())


def test_a_zero_query_with_too_few_to_calibrate() -> None:
    """Everything is exact, so this is."""
    weight, x = gaussian(600, 32, 40, generator())
    head = AdaptiveSoftmax(weight, delta=DELTA, method="cascade")
    with pytest.warns(UserWarning, match="too few"):
        head.calibrate(x, 3)
    x[0] = 0
    answer = head.topk(x, 3)
    assert answer.exact.all()
    assert right(answer, weight, x, EPS).all()


def test_beyond_float32() -> None:
    """Predicted variances are beyond float32, so nothing is predicted, and everything is read."""
    weight, x = gaussian(600, 32, 200, generator())
    weight, x = weight * 1e15, x * 1e15
    head = fitted(weight, x, 2)
    answer = head.topk(x[:9], 2)
    assert answer.exact.all()
    assert right(answer, weight, x[:9], EPS).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, "same"], ids=str)
def test_dtypes(dtype: torch.dtype, bias_dtype: Any) -> None:
    """Of the weight and of the bias, with a beta; most of the weight is not read."""
    weight, x = instance(count=400)
    weight = weight.to(dtype)
    own = dtype if bias_dtype == "same" else bias_dtype
    bias = None if own is None else torch.randn(N, generator=generator(3)).to(own)
    head = fitted(weight, x[:300], 3, bias, beta=0.7)
    answer = head.topk(x[300:].to(torch.float64), 3)
    assert answer.logits.dtype == answer.probs.dtype == (dtype if dtype == torch.float64 else torch.float32)
    fine = right(answer, weight, x[300:], EPS, bias, 0.7)
    assert plausible(int((~fine).sum()), 100, DELTA)
    assert float(answer.exact.double().mean()) < 0.2
    assert float(answer.bytes_read.double().mean()) < 0.6 * N * D * weight.element_size()


@pytest.mark.parametrize("layout", ["every other", "every other row", "columns"])
def test_strided_weights_are_not_copied(layout: str) -> None:
    plain, x = instance(count=300)
    if layout == "columns":
        weight = plain.T.contiguous().T
    elif layout == "every other":
        weight = torch.stack([plain, -plain], -1).flatten(1)[:, ::2]
    else:
        weight = torch.stack([plain, -plain], 1).flatten(0, 1)[::2]
    assert not weight.is_contiguous()
    head, other = fitted(weight, x[:200], 3), fitted(plain, x[:200], 3)
    assert head.weight.data_ptr() == weight.data_ptr()
    assert isinstance(head._engine, CpuCascade)
    assert np.shares_memory(head._engine._arrays.weight, weight.numpy())
    one, two = head.topk(x[200:], 3), other.topk(x[200:], 3)
    torch.testing.assert_close(one.logits, two.logits, rtol=1e-4, atol=1e-4)
    assert float((one.indices == two.indices).double().mean()) > 0.95


def test_a_gradient_is_no_matter() -> None:
    weight, x = instance(count=200)
    head = fitted(weight.requires_grad_(), x.clone().requires_grad_(), 1)
    answer = head.topk(x[:2].clone().requires_grad_())
    assert not answer.probs.requires_grad


# -- rows that change --------------------------------------------------------------------------------------------------


@pytest.fixture
def changeable() -> tuple[AdaptiveSoftmax, Tensor]:
    """A head with a bias, and queries it has not seen."""
    weight, x = instance(count=300)
    return fitted(weight, x[:200], 3, torch.randn(N, generator=generator(1))), x[200:]


def copied(index: Index | None) -> Index:
    assert index is not None
    return Index(*(value.clone() for value in index))


def same(one: Index | None, other: Index | None) -> bool:
    assert one is not None
    assert other is not None
    return all(map(torch.equal, one, other))


def test_update_is_a_fresh_coding(changeable: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, x = changeable
    before = copied(head.index)
    rows = torch.tensor([0, 5, 511, 512, N - 1])
    head.weight[rows] = torch.randn(5, D, generator=generator(2)) * head.weight.std()
    head.bias[rows] += 1  # type: ignore[index]
    head.update_rows([512, 0, 5, 5, 511, N - 1])  # in any order, and more than once
    index = copied(head.index)
    exact = turned(index, head.weight)[rows]
    units = exact[:, : len(index.unit)] / index.unit.double()
    assert bool((index.records[rows, SPREADS:] - units.clamp(-127, 127)).abs().le(0.5 + 1e-3).all())
    assert torch.equal(
        index.columns[rows // BLOCK, :, rows % BLOCK], index.records[rows, SPREADS:][:, : lengths(D)[0][-1]]
    )
    found, steps = spreads_of(index)
    lacks = lacking(index, turned(index, head.weight))
    rounding = 1e-3 * exact.norm(dim=-1)
    assert bool((found[:, rows] >= lacks[:, rows] - rounding).all())
    assert bool((found[:, rows] <= lacks[:, rows] + rounding + steps).all())
    assert torch.equal(index.checksums, checksums(head.weight, head.bias))
    others = torch.ones(N, dtype=torch.bool).index_fill_(0, rows, False)
    for name in ("centre", "expand", "project", "unit", "probes"):
        assert torch.equal(getattr(index, name), getattr(before, name)), name
    assert torch.equal(index.records[others, SPREADS:], before.records[others, SPREADS:])
    fine = right(head.topk(x, 3), head.weight, x, EPS, head.bias)
    assert plausible(int((~fine).sum()), len(x), DELTA)


def test_update_equals_build_for_the_same_rows(changeable: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, _ = changeable
    before = copied(head.index)
    head.update_rows(torch.arange(N))
    assert same(before, head.index)
    head.update_rows([3, 700])
    assert same(before, head.index)


def test_a_row_beyond_all_others_makes_steps_coarser(changeable: tuple[AdaptiveSoftmax, Tensor]) -> None:
    """Predicted deviations of the other rows are still no less than before, and at most a step more."""
    head, x = changeable
    before, _ = spreads_of(copied(head.index))
    head.weight[9] *= 50
    head.update_rows([9])
    after, steps = spreads_of(copied(head.index))
    others = torch.arange(N) != 9
    assert bool((after >= before - 1e-6)[:, others].all())
    assert bool((after <= before + steps + 1e-6)[:, others].all())
    assert bool((after[:, 9] / steps[:, 0] == 255).all())
    top = reference.topk_softmax(head.weight, x, 1, head.bias)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # of numbers that no answer rests on
        assert float((head.topk(x, 1).indices == top.indices).double().mean()) > 0.85


@pytest.mark.parametrize(
    "rows", [[], [[1]], 3, [N], [-1], [1.0], torch.tensor([True]), torch.zeros(2, 1, dtype=torch.int64)], ids=str
)
def test_rows_that_are_none(rows: Any, changeable: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, _ = changeable
    before = copied(head.index)
    with pytest.raises(ValueError, match="rows: expected"):
        head.update_rows(rows)
    assert same(before, head.index)


def test_update_refuses_what_is_not_finite(changeable: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, _ = changeable
    before = copied(head.index)
    head.weight[4, 2] = math.nan
    with pytest.raises(ValueError, match="weight: expected finite"):
        head.update_rows([4])
    assert same(before, head.index)


def test_update_refuses_a_bias_that_is_not_finite(changeable: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, _ = changeable
    before = copied(head.index)
    head.bias[4] = math.nan  # type: ignore[index]
    with pytest.raises(ValueError, match="bias: expected finite"):
        head.update_rows([4])
    assert same(before, head.index)


def test_no_index() -> None:
    head = AdaptiveSoftmax(torch.zeros(5, 3), method="cascade")
    with pytest.raises(RuntimeError, match="no index yet: call build"):
        head.update_rows([1])
    with pytest.raises(RuntimeError, match="not calibrated for k = 1, found none"):
        head.topk(torch.zeros(3))


def test_refused_queries_leave_the_index(changeable: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, x = changeable
    before, fits = copied(head.index), dict(head.calibrations)
    for queries in (x[:, :3], [], [x, x[:, :3]], x * math.nan):
        with pytest.raises(ValueError, match="queries: expected"):
            head.build(queries)
        assert same(before, head.index)
        assert head.calibrations == fits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_checksums_notice_every_bit(dtype: torch.dtype) -> None:
    weight, bias = (
        torch.randn(12, 7, generator=generator()).to(dtype),
        torch.randn(12, generator=generator(1)).to(dtype),
    )
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    before = checksums(weight, bias)
    for row in range(12):
        for bit in range(8 * weight.element_size()):
            mask = torch.tensor(1).to(kind) << bit
            for place in (weight[row, (row + bit) % 7], bias[row]):
                bits = place.view(kind)
                bits ^= mask
                assert (checksums(weight, bias) != before).nonzero()[:, 0].tolist() == [row]
                bits ^= mask
    assert torch.equal(checksums(weight, bias), before)
    swapped = weight.clone()
    swapped[:, [0, 1]] = weight[:, [1, 0]]
    assert bool((checksums(swapped, bias) != before).all())


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_changed_row_is_refused_until_updated(part: str, changeable: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, x = changeable
    index = copied(head.index)
    row = next(row for row in range(N) if row not in index.probes)
    getattr(head, part)[row] += 0.5
    for ask in (head.topk, head.logits, head.sample, lambda x: head.coverage(x, 3)):
        with pytest.raises(WeightChanged, match=f"weight: rows {row} have changed since the index was built"):
            ask(x)
    head.update_rows([row])
    fine = right(head.topk(x, 3), head.weight, x, EPS, head.bias)
    assert plausible(int((~fine).sum()), len(x), DELTA)


@pytest.mark.parametrize("number", range(SAMPLES))
def test_a_change_behind_the_back_of_torch(number: int, changeable: tuple[AdaptiveSoftmax, Tensor]) -> None:
    """Is noticed in some of the rows that are always read."""
    head, x = changeable
    row = int(copied(head.index).probes[number])
    version = head.weight._version
    head.weight.numpy()[row, D - 1] += 0.5
    assert head.weight._version == version
    with pytest.raises(WeightChanged, match="weight: not the one that the index was built of"):
        head.topk(x)
    head.update_rows([row])
    fine = right(head.topk(x, 3), head.weight, x, EPS, head.bias)
    assert plausible(int((~fine).sum()), len(x), DELTA)


def test_a_change_that_is_undone(changeable: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, x = changeable
    before = head.topk(x, 3)
    kept = head.weight[4].clone()
    head.weight[4] = 0
    head.weight[4] = kept
    assert all(map(torch.equal, before, head.topk(x, 3)))


def test_nothing_is_updated_when_other_rows_have_changed(changeable: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, x = changeable
    before = copied(head.index)
    head.weight[[3, 4, 5, 6, 7, 8, 9, 10]] += 0.5
    with pytest.raises(WeightChanged, match="other rows have changed, too: 4, 5, 7, 8, 9 and 1 more"):
        head.update_rows([3, 6])
    assert same(before, head.index)
    with pytest.raises(WeightChanged, match="weight: rows 3, 4, 5, 6, 7 and 3 more have changed"):
        head.topk(x)
    head.update_rows(range(3, 11))
    head.topk(x)


def test_another_index_forgets_calibrations(changeable: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, x = changeable
    head.weight *= 1.5
    head.build(x)
    assert head.calibrations == {}
    with pytest.raises(RuntimeError, match="not calibrated"):
        head.topk(x)


# -- batches, threads, memory ------------------------------------------------------------------------------------------


def test_a_query_does_not_depend_on_its_batch(changeable: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, x = changeable
    together, dense = head.topk(x, 3), head.logits(x)
    backwards = head.topk(x.flip(0), 3)
    alone = [(head.topk(query, 3), head.logits(query)) for query in x]
    answered = ~together.exact
    assert int(answered.sum()) > 80
    for number in answered.nonzero()[:, 0].tolist():
        answer, logits = alone[number]
        for field, one, other in zip(together, answer, backwards, strict=True):
            assert torch.equal(field[number], one)
            assert torch.equal(field[number], other[len(x) - 1 - number])
        assert torch.equal(dense[number], logits)
    shaped = head.topk(x[:12].view(3, 2, 2, D), 3)
    assert shaped.indices.shape == (3, 2, 2, 3)
    assert torch.equal(shaped.indices.reshape(12, 3), together.indices[:12])


def test_threads_that_are_parallel_themselves() -> None:
    """Eight ask one engine at the same time, each with several threads of numba for a query."""
    weight, x = gaussian(135_000, 128, 16, generator())
    engine = CpuCascade(Layer(weight), index_of(weight, x))
    length = lengths(128)[0][-1]
    assert len(engine.index.columns) * BLOCK * length > ALONE
    last, anything = engine.previews - 1, Usual(0.0, math.inf, 0.0, -2.0, 2.0, math.inf, math.inf)
    chosen = Plan(8, last, last, math.inf, 2.0, 0.5, math.log(0.01), 0.0, 1.0, anything, upper=False)
    alone = engine._run(x, chosen)
    assert not alone[2][:, 0].any()
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda _: engine._run(x, chosen), range(16)))
    assert all(np.array_equal(one, other) for run in together for one, other in zip(alone, run, strict=True))


def test_threads(changeable: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, x = changeable
    alone = [head.topk(query, 3) for query in x]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda query: head.topk(query, 3), list(x) * 8))
    for number, answer in enumerate(together):
        assert all(map(torch.equal, answer, alone[number % len(x)]))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_stays_flat() -> None:
    """Over 2000 queries; the memory of one would add up to gigabytes."""
    weight, x = instance(20_000, 32, 300)
    head = fitted(weight, x[:260], 8)

    def pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    for number in range(100):
        head.topk(x[number % 300], 8)
    before = pages()
    for number in range(2000):
        head.topk(x[number % 300], 8)
    grown = (pages() - before) * os.sysconf("SC_PAGE_SIZE")
    assert grown < 4_000_000
