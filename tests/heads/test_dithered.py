"""Codes codes: kernels, errors of estimates, intervals, answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm
from torch import Tensor

from softsieve.heads import TopK, dithered
from softsieve.heads.coordinates.hadamard import rotate
from softsieve.heads.dithered import Codes, Dithered, Known, half_widths
from softsieve.heads.engine import Layer, Promise
from softsieve.heads.reader import Reader
from softsieve.kernels import dithered_numba as kernels
from softsieve.kernels.cascade_numba import BLOCK
from softsieve.reference import heads as reference
from tests.heads.instances import KINDS, Maker, gaussian, peaked, plausible, right

N, D, EPS, DELTA = 24, 300, 0.3, 0.2


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def topk(head: Codes, x: Tensor, k: int, *, eps: float = EPS, delta: float = DELTA, bias: Tensor | None = None) -> TopK:
    reader = Reader(head.weight)
    queries = x.to(reader.dtype)
    bias = None if bias is None else bias.to(reader.dtype)
    return TopK(*head.solve(queries, bias, k, Promise(eps, delta)))


def known(head: Codes, x: Tensor, delta: float = DELTA) -> Known:
    """Of one query, all rows from their first codes."""
    dtype, (n, d) = head.index.scale.dtype, head.weight.shape
    return Known(head, x.to(dtype).numpy(), torch.zeros(0, dtype=dtype).numpy(), half_widths(n, d, delta))


def refined(head: Codes, x: Tensor, delta: float = DELTA) -> Known:
    """The same from both."""
    found = known(head, x, delta)
    found.read_further(np.arange(len(head.weight)))
    return found


def rotate_rows(rows: Tensor, signs: Tensor) -> None:
    kernels.rotate_rows(rows.numpy(), signs.double().numpy() / math.sqrt(signs.shape[1]))


# -- kernels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100, 577])
def test_turn(size: int) -> None:
    """An orthogonal matrix: a Hadamard transform of the first coordinates, then one of the last."""
    power = 1 << (size.bit_length() - 1)
    signs = torch.randint(2, (2, power), generator=generator(size)) * 2 - 1
    rows = torch.eye(size, dtype=torch.float64)
    plain = rows.clone()
    plain[:, :power] = rotate(plain[:, :power], signs[0])
    plain[:, size - power :] = rotate(plain[:, size - power :], signs[1])
    rotate_rows(rows, signs)
    torch.testing.assert_close(rows, plain, rtol=0, atol=1e-14)
    torch.testing.assert_close(rows @ rows.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-13)
    assert float(rows.abs().max()) <= 6 / math.sqrt(power)  # no coordinate of a unit vector stands out


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 5), (513, 33), (1100, 17), (1024, 300)])
def test_products(rows: int, size: int) -> None:
    """To the rounding that `half_widths` allows for."""
    rng = np.random.default_rng(rows)
    digits = rng.integers(0, 16, (rows, 2 * size))
    packed = (digits[:, :size] | digits[:, size:] << 4).astype(np.uint8)
    blocks = -(-rows // BLOCK)
    columns = np.zeros((blocks * BLOCK, size), np.uint8)
    columns[:rows] = packed
    columns = np.ascontiguousarray(columns.reshape(blocks, BLOCK, size).transpose(0, 2, 1))
    y = rng.standard_normal((2, size)).astype(np.float32)
    exact = 3 + digits @ y.reshape(-1).astype(np.float64)
    terms = 3 + digits @ np.abs(y.reshape(-1)).astype(np.float64)
    coarse, fine = (2**-24 * (2 * g + size / g + 4) * terms for g in (kernels.GROUP, kernels.STRETCH))
    out = np.full(blocks * BLOCK, np.nan, np.float32)
    kernels.preview(columns, y, np.float32(3), out)
    assert bool((np.abs(out[:rows] - exact) <= coarse).all())
    for count in (0, 1, 64, 65, rows):
        some = rng.integers(0, rows, count)
        found = np.full(count, np.nan, np.float32)
        kernels.refine(packed, y, np.float32(3), some, found)
        assert bool((np.abs(found - exact[some]) <= fine[some]).all())


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [1, 511, 1300])
def test_masses(rows: int, kind: Any) -> None:
    rng = np.random.default_rng(rows)
    low = rng.standard_normal(rows).astype(kind) * 5
    high = low + rng.random(rows).astype(kind)
    doubt = np.full(rows, np.nan, np.float32)
    shift = high.max()
    sums = kernels.sum_exponentials(low, high, shift, doubt)
    least, most = np.exp(low - shift, dtype=np.float64), np.exp(high - shift, dtype=np.float64)
    np.testing.assert_allclose(sums, (least.sum(), most.sum()), rtol=1e-5)
    np.testing.assert_allclose(doubt, most - least, rtol=1e-4, atol=1e-6)
    for allowed in (doubt.sum() * 0.9, doubt.sum() * 0.1, doubt.sum() * 1e-5):
        level = kernels.gap_threshold(doubt, float(allowed))
        assert doubt[doubt <= level].sum() <= allowed * (1 + 1e-5)
        assert doubt[doubt <= level * 1.1].sum() > allowed * (1 - 1e-5)


@pytest.mark.parametrize("rows", [1, 500, 3000])
def test_kth(rows: int) -> None:
    values = np.random.default_rng(rows).integers(0, 1000, rows).astype(np.float32)
    for k in (1, 2, 5, 6, 100, rows):
        if k <= rows:
            assert dithered._kth(values, k) == np.sort(values)[-k]


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "size"), [(5, 7), (3, 1), (600, 12)])
def test_estimates(rows: int, size: int) -> None:
    """Those of the definition."""
    weight, x = gaussian(rows, size, 1, generator(size))
    head = Codes(weight, seed=3)
    index = head.index
    turned = torch.cat([weight.double() - index.centre, x.double()])
    rotate_rows(turned, index.signs)
    y = turned[-1]
    first, second = known(head, x[0]), refined(head, x[0])
    for i in (0, rows // 2, rows - 1):
        scale = float(index.scale[i])
        assert float(turned[i].abs().max()) <= 7.5 * scale <= float(turned[i].abs().max()) * (1 + 1e-6)
        coarse = reference.dithered(turned[i], scale, index.dither[0])
        fine = coarse + reference.dithered(turned[i] - coarse, scale / 15, index.dither[1])
        for found, estimate in ((first, coarse), (second, fine)):
            middle = (float(found.low[i]) + float(found.high[i])) / 2
            assert middle == pytest.approx(float(x[0].double() @ index.centre.double() + estimate @ y), rel=0, abs=1e-5)


def adversarial(size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows that codes might not like, and a query that one of them goes along with."""
    x = torch.randn(size, generator=g)
    rows = torch.randn(8, size, generator=g)
    rows[1] = rows[0]  # tied
    rows[2] = 0.25  # constant
    rows[3] = torch.eye(size)[0] * 1e4  # one huge entry
    rows[4] *= torch.rand(size, generator=g) < 0.02  # sparse
    rows[5] = x * 3
    rows[6] = -x.sign()
    return rows, x


def digits(packed: Tensor, size: int) -> Tensor:
    """(rows, c) to (rows, size)."""
    return torch.cat([packed & 15, packed >> 4], -1)[:, :size]


def test_errors_are_uniform_and_independent() -> None:
    """Over dithers, of every coordinate of every row, also of the worst ones."""
    size, errors = 5, []
    weight, _ = adversarial(size, generator(0))
    for seed in range(400):
        index = Codes(weight, seed=seed).index
        turned = weight.double() - index.centre
        rotate_rows(turned, index.signs)
        units = turned / index.scale[:, None]
        rows = index.coarse.transpose(1, 2).reshape(-1, index.coarse.shape[1])[: len(weight)]
        first = digits(rows, size) - 7.5 - index.dither[0]
        second = digits(index.fine, size) - 7.5 - index.dither[1]
        errors.append(torch.stack([first - units, (first - units) * 15 + second]))
        assert not torch.equal(*index.dither)
    found = torch.stack(errors, -1)  # (2, rows, size, seeds)
    assert float(found.abs().max()) <= 0.5 + 1e-12
    chances = [kstest(values, "uniform", (-0.5, 1)).pvalue for values in found.flatten(0, 2).numpy()]
    assert min(chances) > 1e-5
    assert kstest(chances, "uniform").pvalue > 1e-6 or np.mean(chances) > 0.4
    for row in range(len(weight)):  # coordinates of both codes
        together = np.corrcoef(found[:, row].reshape(2 * size, -1).numpy())
        assert np.abs(together - np.eye(2 * size)).max() < 0.25  # five deviations


def test_half_widths() -> None:
    """The inequality, and some more for rounding."""
    for n, d, delta in ((1, 1, 0.5), (24, 300, 0.2), (49152, 576, 0.01), (10**6, 4096, 1e-6)):
        least = norm.isf(delta / (4 * n * 3.178)) / math.sqrt(12)
        coarse, fine = half_widths(n, d, delta)
        assert least < coarse < least * 1.02
        assert least / 15 < fine < least / 15 * 1.2
        assert coarse < math.sqrt(2 * math.log(4 * n / delta) / 12) * 1.02  # as a plain sub-Gaussian bound would be


def broken(low: np.ndarray[Any, Any], high: np.ndarray[Any, Any], truth: Tensor) -> bool:
    rounding = 1e-5 * (1 + float(truth.abs().max()))
    return bool(((low - rounding > truth.numpy()) | (truth.numpy() > high + rounding)).any())


@pytest.mark.parametrize("size", [1, 2, 33, 300])
def test_intervals_hold(size: int) -> None:
    """All of them at once, over independent rows, queries and dithers; and they are not much wider than need be."""
    failures, ratios, trials = 0, [], 400
    for seed in range(trials):
        g = generator(seed)
        weight, x = adversarial(size, g) if seed % 2 else ((pair := gaussian(8, size, 1, g))[0], pair[1][0])
        head = Codes(weight, seed=1000 + seed)
        truth = weight.double() @ x.double()
        tiers = (known(head, x), refined(head, x))
        failures += any(broken(tier.low, tier.high, truth) for tier in tiers)
        ratios += [float(abs((t.low[7] + t.high[7]) / 2 - float(truth[7])) / (t.high[7] - t.low[7])) for t in tiers]
    assert plausible(failures, trials, DELTA)
    assert np.sqrt(np.mean(np.square(ratios))) > 0.5 / 4 / 1.5


def test_narrower_intervals_would_not_hold() -> None:
    """The test above can fail: half as wide, they break far more often than promised."""
    failures, trials = 0, 60
    for seed in range(trials):
        weight, x = gaussian(8, 33, 1, generator(seed))
        found = known(Codes(weight, seed=1000 + seed), x[0])
        middle, quarter = (found.low + found.high) / 2, (found.high - found.low) / 4
        failures += broken(middle - quarter, middle + quarter, weight.double() @ x[0].double())
    assert not plausible(failures, trials, DELTA)


# -- answers -----------------------------------------------------------------------------------------------------------


def holds(answer: TopK, weight: Tensor, x: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """Whether each answer is right, and its interval of the normaliser too, which is always as narrow as promised."""
    low, high = answer.log_z_interval.double().unbind(-1)
    truth = reference.logits(weight, x, bias)
    rounding = 1e-5 * (1 + truth.abs().amax(-1))
    # Whatever the normaliser is within its interval, probabilities are within eps; without any, it is itself.
    off = low - answer.log_z.double(), high - answer.log_z.double()
    off = off if answer.indices.shape[-1] else (-off[1], -off[0])
    assert bool((math.log1p(-eps) - rounding <= off[0]).all() & (off[1] <= math.log1p(eps) + rounding).all())
    log_z = truth.logsumexp(-1)
    return right(answer, weight, x, eps, bias) & (low - rounding <= log_z) & (log_z <= high + rounding)


def close(n: int, d: int, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """The largest logits are as near to each other as estimates to the truth."""
    weight, x = gaussian(n, d, count, g)
    x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    weight -= weight @ x.T @ x
    return weight + torch.rand(n, 1, generator=g) * 0.8 * x + 5 * x, x


@pytest.mark.parametrize("kind", [*KINDS.values(), close], ids=[*KINDS, "close"])
def test_answers(kind: Maker) -> None:
    for k in (1, 2, 8, N):
        failures, trials = 0, 60
        for trial in range(trials):
            weight, x = kind(N, D, 1, generator(1000 * k + trial))
            answer = topk(Codes(weight, seed=trial), x, k)
            failures += int(~holds(answer, weight, x, EPS))
        assert plausible(failures, trials, DELTA), (k, failures)


@pytest.mark.parametrize("kind", [gaussian, peaked])
def test_answers_of_many_rows(kind: Maker) -> None:
    """From a part of the weight, with a bias that counts."""
    failures, read, trials = 0, 0, 60
    for trial in range(trials):
        g = generator(trial)
        weight, x = kind(1300, 101, 1, g)
        bias = 3 * torch.randn(1300, generator=g)
        answer = topk(Codes(weight, seed=trial), x, 3, bias=bias)
        failures += int(~holds(answer, weight, x, EPS, bias))
        read += int(answer.bytes_read)
        assert not bool(answer.exact)
    assert plausible(failures, trials, DELTA)
    assert read / trials < 0.25 * weight.nbytes


def test_normaliser() -> None:
    failures, trials = 0, 60
    for trial in range(trials):
        weight, x = (peaked if trial % 2 else gaussian)(600, D, 1, generator(trial))
        found = topk(Codes(weight, seed=trial), x, 0)
        off = found.log_z.double() - reference.logits(weight, x).logsumexp(-1)
        failures += not (bool(holds(found, weight, x, EPS)) and abs(off.expm1().item()) <= EPS + 1e-4)
        assert found.indices.shape == (1, 0)
    assert plausible(failures, trials, DELTA)


def test_smaller_eps_and_delta_read_more() -> None:
    weight, x = gaussian(600, D, 4, generator(0))
    head = Codes(weight)
    read = [topk(head, x, 1, eps=eps, delta=delta).bytes_read for eps, delta in ((0.3, 0.2), (0.01, 0.2), (0.01, 1e-9))]
    assert bool((read[0] < read[1]).all() & (read[1] < read[2]).all())


def test_ties() -> None:
    weight = torch.randn(1, 50, generator=generator(0)).repeat(700, 1)
    answer = topk(Codes(weight), weight[:2] / 10, 3)
    torch.testing.assert_close(answer.probs, torch.full((2, 3), 1 / 700), rtol=1e-4, atol=0)
    assert all(len(set(row)) == 3 for row in answer.indices.tolist())


def test_a_query_does_not_depend_on_its_batch() -> None:
    weight, x = peaked(700, 65, 5, generator(0))
    head = Codes(weight)
    together = topk(head, x, 3)
    for number in range(5):
        for field, alone in zip(together, topk(head, x[number : number + 1], 3), strict=True):
            torch.testing.assert_close(field[number : number + 1], alone, rtol=0, atol=0)
    again = topk(Codes(weight), x.T.contiguous().T, 3)
    assert all(torch.equal(one, other) for one, other in zip(together, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["contiguous", "columns", "every other"])
def test_dtypes_and_strides(dtype: torch.dtype, layout: str) -> None:
    weight, x = peaked(40, 64, 4, generator(0))
    weight = weight.to(dtype)
    if layout == "columns":
        weight = weight.T.contiguous().T
    if layout == "every other":
        weight = torch.stack([weight, -weight], -1).flatten(1)[:, ::2]
    before = weight.clone()
    answer = topk(Codes(weight), x, 3)
    assert bool(right(answer, weight, x.to(answer.probs.dtype), EPS).all())
    assert answer.probs.dtype == answer.log_z.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert torch.equal(weight, before)


def test_bytes_and_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was read: codes, scales, rotation, dither, mean row, bias, rows."""
    weight, x = gaussian(600, 33, 1, generator(0))
    weight, bias = weight.bfloat16(), torch.randn(600, generator=generator(1))
    rows = {"refine": 0, "exact_rows": 0}

    def counting(place: Any, name: str, at: int) -> None:
        called = getattr(place, name)

        def call(*arguments: Any) -> None:
            rows[name] += arguments[at].size
            called(*arguments)

        monkeypatch.setattr(place, name, call)

    counting(kernels, "refine", 3)
    counting(dithered, "exact_rows", 2)
    answer = topk(Codes(weight), x, 2, eps=0.05, bias=bias)
    assert 0 < rows["exact_rows"] < rows["refine"] < 600
    fixed = 600 * (17 + 4 + 4) + 33 * 4 + 2 * 32 + 2 * 33 * 8
    assert int(answer.bytes_read) == fixed + rows["refine"] * (17 + 4) + rows["exact_rows"] * 33 * 2
    assert int(answer.coordinates) == (600 + rows["refine"] + rows["exact_rows"]) * 33
    assert not bool(answer.exact)
    assert bool(topk(Codes(weight), x, 600).exact)


# -- numbers at their limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1.0, 1e12, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_magnitudes(magnitude: float, dtype: torch.dtype) -> None:
    """Weight and query far apart, their logits ordinary; a zero row, a zero query and a tie among them."""
    weight, x = peaked(30, 40, 3, generator(0))
    weight[3], weight[5], x[1] = 0, weight[4], 0
    weight, x = weight.to(dtype) * magnitude, x.to(dtype) / magnitude
    answer = topk(Codes(weight), x, 4)
    assert bool(right(answer, weight, x, EPS).all())
    assert bool(answer.log_z.isfinite().all())


@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-20, 1e18])
def test_tiny_and_huge_logits(scale: float) -> None:
    weight, x = peaked(30, 40, 3, generator(0))
    x = x * scale
    assert bool(right(topk(Codes(weight), x, 4), weight, x, EPS).all())
    weight = weight * scale
    assert bool(right(topk(Codes(weight), x, 4), weight, x, EPS).all())


def test_rows_of_all_magnitudes() -> None:
    weight, x = peaked(31, 40, 3, generator(0))
    weight *= torch.logspace(-38, 0, 31)[:, None]
    assert bool(right(topk(Codes(weight), x, 4), weight, x, EPS).all())


def test_nothing_more_is_read_for_a_zero_query() -> None:
    weight, x = gaussian(600, 40, 1, generator(0))
    answer = topk(Codes(weight), x * 0, 3)
    assert int(answer.coordinates) == 603 * 40


def test_beyond_float32() -> None:
    """Where estimates do not fit, rows are read; where logits do not, the answer says so."""
    weight, x = peaked(30, 40, 3, generator(0))
    weight[:, :20] *= 1e30
    x[:, :20] = 0
    weight[:, 20:] *= 1e-10
    x[:, 20:] *= 1e10
    answer = topk(Codes(weight), x, 2)
    assert bool(right(answer, weight, x, EPS).all() & answer.exact.all())
    assert not bool(topk(Codes(weight * 1e8), x + 1, 2).log_z.isfinite().any())


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 9), (2, 1), (513, 1)])
def test_smallest(rows: int, size: int) -> None:
    weight, x = gaussian(rows, size, 2, generator(rows))
    for k in {1, min(2, rows), rows}:
        assert bool(right(topk(Codes(weight), x, k), weight, x, EPS).all())


# -- the engine --------------------------------------------------------------------------------------------------------


def test_the_codes_of_a_changed_weight_are_made_anew() -> None:
    weight, x = peaked(700, 65, 2, generator(0))
    engine, promise = Dithered(Layer(weight)), Promise(EPS, DELTA)
    before = engine.topk(x, 3, promise)
    assert all(torch.equal(one, other) for one, other in zip(before, engine.topk(x, 3, promise), strict=True))
    weight.neg_()
    assert bool(right(TopK(*engine.topk(x, 3, promise)), weight, x, EPS).all())
    index = Codes(weight).index
    assert sum(value.nbytes for value in index) < 1.6 * weight.numel()
