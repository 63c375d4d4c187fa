"""Every class above a threshold: as the reference has it, and nothing is missing as often as promised."""

from __future__ import annotations

import copy
import math
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve.heads import Above, CascadeCalibration, DriftWarning, WeightChanged
from softsieve.heads import above as module
from softsieve.heads import engine as engines
from softsieve.heads.cascade.cpu import CpuCascade
from softsieve.reference import heads as reference
from tests.heads.instances import KINDS, Maker, common, gaussian, language, plausible, spectral

D, DELTA = 64, 0.1


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def level_of(weight: Tensor, x: Tensor, share: float = 0.01, bias: Tensor | None = None) -> float:
    """A threshold that this share of the logits is above."""
    return float(reference.logits(weight, x, bias).flatten().quantile(1 - share))


def check(found: Above, head: AdaptiveSoftmax, x: Tensor, threshold: float) -> Tensor:
    """Refuse what is not above or not in order; which queries miss something, up to rounding. (queries,)"""
    truth = reference.logits(head.weight, x, head.bias, beta=head.beta).reshape(-1, len(head.weight))
    rounding = 1e-5 * (1 + truth.abs())
    assert found.counts.shape == found.exact.shape == found.bytes_read.shape == x.shape[:-1]
    assert found.counts.dtype == found.indices.dtype == torch.int64
    missing = []
    for (rows, logits), exact, close in zip(found.per_query(), truth, rounding, strict=True):
        assert len(set(rows.tolist())) == len(rows)
        assert (logits > threshold).all()
        torch.testing.assert_close(logits.double(), exact[rows], rtol=0, atol=1e-5 * (1 + float(exact.abs().max())))
        ordered = sorted(zip((-logits).tolist(), rows.tolist(), strict=True))
        assert [row for _, row in ordered] == rows.tolist()
        sure = (exact > threshold + close).nonzero()[:, 0]
        missing.append(not bool(torch.isin(sure, rows).all()))
    return torch.tensor(missing)


# -- the exact product -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1.0, -0.5])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (1, 2, 1)])
def test_exact(beta: float, biased: bool, shape: tuple[int, ...]) -> None:
    """As the reference, in whole numbers, so that logits tie with each other and with the threshold."""
    g = generator(len(shape))
    weight, x = (torch.randint(-2, 3, (*some, 5), generator=g).double() for some in ((40,), shape))
    bias = torch.randint(-2, 3, (40,), generator=g).double() if biased else None
    head = AdaptiveSoftmax(weight, bias, beta=beta, method="exact")
    for threshold in (-1e9, -math.inf, -2, 0.0, 2.0, 1e9, math.inf):
        found, right = head.above(x, threshold), reference.above(weight, x, threshold, bias, beta=beta)
        assert found.counts.shape == x.shape[:-1]
        assert [(rows.tolist(), logits.tolist()) for rows, logits in found.per_query()] == right
        assert found.exact.all()
        assert found.bytes_read.eq(weight.numel() * 8).all()


def test_none_and_all() -> None:
    head = AdaptiveSoftmax(torch.eye(3), torch.zeros(3))
    none, everything = head.above(torch.zeros(2, 3)), head.above(torch.zeros(2, 3), -0.5)
    assert none.counts.tolist() == [0, 0]
    assert none.indices.numel() == none.logits.numel() == 0
    assert everything.indices.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_blocks(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Whatever is worked on at a time, rows and queries are those of the whole."""
    weight, x = gaussian(50, 7, 11, generator())
    head = AdaptiveSoftmax(weight.to(dtype), method="exact")
    whole = head.above(x)
    monkeypatch.setattr(engines, "AT_ONCE", 20)
    monkeypatch.setattr(engines, "QUERIES", 4)
    torch.testing.assert_close(head.above(x), whole, rtol=1e-5, atol=1e-6)
    assert not check(whole, head, x, 0.0).any()


def test_memory_is_that_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "AT_ONCE", 64)
    largest = 0

    def blocks(self: Any, queries: Tensor) -> Any:
        nonlocal largest
        for start, logits in original(self, queries):
            largest = max(largest, logits.numel())
            yield start, logits

    original = engines.Layer.blocks
    monkeypatch.setattr(engines.Layer, "blocks", blocks)
    AdaptiveSoftmax(torch.randn(100, 3)).above(torch.randn(30, 3))
    assert 0 < largest <= 64


def test_logits_beyond_their_dtype_are_refused() -> None:
    for method in ("exact", "auto"):
        with pytest.raises(ValueError, match="x: expected logits"):
            AdaptiveSoftmax(torch.full((3, 2), 1e30), method=method).above(torch.tensor([1e20, -1e20]))


@pytest.mark.parametrize("threshold", [math.nan, "0", None, True, 1j, torch.zeros(())])
def test_thresholds_that_are_none(threshold: Any) -> None:
    head = AdaptiveSoftmax(torch.eye(2))
    with pytest.raises((TypeError, ValueError), match="threshold: expected a number"):
        head.above(torch.ones(2), threshold)
    if threshold is not None:
        with pytest.raises((TypeError, ValueError), match="threshold: expected a number"):
            head.calibrate(torch.ones(9, 2), threshold=threshold)


@pytest.mark.parametrize("x", [torch.tensor([1.0, math.nan]), torch.ones(3), torch.ones(0, 2), torch.ones(2).int()])
def test_queries_that_are_none(x: Tensor) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^x: expected"):
        AdaptiveSoftmax(torch.eye(2)).above(x)


def test_other_methods() -> None:
    """Coordinates answer by the exact product, and so does what is not calibrated where the choice is left."""
    weight, x = gaussian(30, 8, 5, generator())
    for method in ("coordinates", "auto"):
        head = AdaptiveSoftmax(weight, method=method)
        assert not check(head.above(x), head, x, 0.0).any()
        assert head.above(x).exact.all()
    with pytest.raises(RuntimeError, match="not calibrated"):
        AdaptiveSoftmax(weight, method="cascade").above(x)
    with pytest.raises(ValueError, match="threshold: expected method='cascade'"):
        AdaptiveSoftmax(weight, method="coordinates").calibrate(x, threshold=0.0)


# -- the cascade -------------------------------------------------------------------------------------------------------


def fitted(
    kind: Maker = language, seed: int = 0, *, rows: int = 2000, by: str = "level", **options: Any
) -> tuple[AdaptiveSoftmax, Tensor, float]:
    """A head that answers from a part, queries that it has not seen, and the threshold that it was calibrated for."""
    g = generator(seed)
    weight, x = kind(rows, D, 600, g)
    threshold = level_of(weight, x[:200])
    head = AdaptiveSoftmax(weight, method="cascade", delta=DELTA, **options)
    head.build(x[:200])
    if by == "level":
        head.calibrate(x[200:400], [], threshold=threshold, generator=g)
    else:
        head.calibrate(x[200:400], 3, generator=g)
    return head, x[400:], threshold


@pytest.fixture(scope="module")
def made() -> tuple[AdaptiveSoftmax, Tensor, float]:
    return fitted()


@pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning", "ignore:queries. no width of margins")
@pytest.mark.parametrize("by", ["level", "ends"])
@pytest.mark.parametrize("kind", [language, spectral, gaussian, common])
def test_nothing_is_missing_as_often_as_promised(kind: Maker, by: str) -> None:
    """Over independent heads and queries; from a part of the weight where there is something to save."""
    missed = trials = 0
    read = []
    for seed in range(4):
        head, x, threshold = fitted(kind, seed, by=by)
        for higher in (0.0, 0.3) if by == "level" else (0.0, -0.3):
            found = head.above(x, threshold + higher)
            missed += int(check(found, head, x, threshold + higher).sum())
            trials += len(x)
            read.append(float(found.bytes_read.double().mean()) / head._layer.bytes)
    assert plausible(missed, trials, DELTA), (missed, trials)
    if kind in (language, spectral):
        assert sum(read) / len(read) < 0.8, read


@pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")
@pytest.mark.parametrize("by", ["level", "ends"])
def test_masked_classes_are_none_of_the_others(by: str) -> None:
    """Whoever masks classes by their bias gets the same promise about the rest."""
    g = generator(5)
    weight, x = language(2000, D, 600, g)
    bias = torch.zeros(2000)
    bias[::10] = -1e9
    threshold = level_of(weight, x[:200])
    head = AdaptiveSoftmax(weight, bias, method="cascade", delta=DELTA)
    head.build(x[:200])
    if by == "level":
        head.calibrate(x[200:400], [], threshold=threshold, generator=g)
    else:
        head.calibrate(x[200:400], 3, generator=g)
    found = head.above(x[400:], threshold)
    assert plausible(int(check(found, head, x[400:], threshold).sum()), 200, DELTA)
    assert not (found.indices % 10 == 0).any()


def test_it_reads_less_than_upper_ends_do(made: tuple[AdaptiveSoftmax, Tensor, float]) -> None:
    by_ends, x, threshold = fitted(by="ends")
    own, other = (float(head.above(x, threshold).bytes_read.double().mean()) for head in (made[0], by_ends))
    assert own < other


def test_a_calibration_of_too_narrow_margins_misses(made: tuple[AdaptiveSoftmax, Tensor, float]) -> None:
    """The judge sees it."""
    head, x, threshold = copy.deepcopy(made[0]), *made[1:]
    engine = head._engine
    assert isinstance(engine, CpuCascade)
    fit = engine.levels[threshold]
    assert fit.delta == DELTA
    assert fit.level == threshold
    engine.levels = {threshold: fit._replace(width=fit.width / 4)}
    missed = int(check(head.above(x, threshold), head, x, threshold).sum())
    assert not plausible(missed, len(x), DELTA)


def test_lower_thresholds_need_another_calibration(made: tuple[AdaptiveSoftmax, Tensor, float]) -> None:
    head, x, threshold = made
    found = head.above(x, threshold - 1)
    assert found.exact.all()  # nothing was fitted that serves
    assert not check(found, head, x, threshold - 1).any()
    head = copy.deepcopy(head)
    head.calibrate(x, 1, generator=generator())
    assert set(head.thresholds) == {threshold}  # a k says nothing of it
    assert check(head.above(x, threshold - 1), head, x, threshold - 1).double().mean() <= DELTA
    head.calibrate(x, [], threshold=threshold - 1, generator=generator())
    assert set(head.thresholds) == {threshold, threshold - 1}
    between = head.above(x[:9], threshold - 0.5)
    assert torch.equal(between.bytes_read, head.above(x[:9], threshold - 1).bytes_read)


def test_another_delta_needs_another_calibration() -> None:
    head, x, threshold = fitted(rows=600)
    head.delta = 0.2
    with pytest.raises(RuntimeError, match=r"calibrated for delta 0.1, which is now 0.2"):
        head.above(x, threshold)


def test_auto_takes_what_was_measured(made: tuple[AdaptiveSoftmax, Tensor, float]) -> None:
    state = made[0].__getstate__()
    head = AdaptiveSoftmax.from_copy({**state, "settings": {**state["settings"], "method": "auto"}})
    x, threshold, engine = made[1], made[2], head._engine
    assert isinstance(engine, CpuCascade)
    for batch in (0, 4):
        engine.levels = {threshold: engine.levels[threshold]._replace(batch=batch)}
        assert head.above(x[:5], threshold).exact.all()
    assert not head.above(x[:4], threshold).exact.all()
    assert head.above(x[:4], threshold - 1).exact.all()  # nothing was fitted for that


def test_drifted_queries_are_answered_exactly(made: tuple[AdaptiveSoftmax, Tensor, float]) -> None:
    head, x, threshold = made
    strange = torch.randn(20, D, generator=generator(7)) * 30
    with pytest.warns(DriftWarning, match="were answered exactly") as seen:
        found = head.above(torch.cat([strange, x[:5]]), threshold)
    assert seen[0].filename == __file__
    assert found.exact[:20].all()
    assert not check(found, head, torch.cat([strange, x[:5]]), threshold)[:20].any()
    with pytest.warns(DriftWarning):
        zero = head.above(torch.zeros(D), threshold)
    assert zero.exact
    assert zero.counts == 0


def test_too_few_queries() -> None:
    weight, x = language(500, D, 40, generator())
    head = AdaptiveSoftmax(weight, method="cascade", delta=DELTA)
    with pytest.warns(UserWarning, match="too few"):
        head.calibrate(x, [], threshold=1.0)
    found = head.above(x, 1.0)
    assert found.exact.all()
    assert not check(found, head, x, 1.0).any()


def test_nothing_to_save_is_said() -> None:
    """When all rows are above, all are read."""
    weight, x = language(500, D, 400, generator())
    head = AdaptiveSoftmax(weight, method="cascade", delta=DELTA)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head.calibrate(x, [], threshold=-1e6)
    found = head.above(x[:3], -1e6)
    assert found.exact.all()
    assert found.counts.eq(500).all()


def test_updated_rows_are_seen() -> None:
    head, x, threshold = fitted(rows=1200)
    query = x[0]
    before = head.above(query, threshold).indices
    row = next(row for row in range(1200) if row not in before.tolist())
    head.weight[row] = query * ((threshold + 5) / query.square().sum())
    with pytest.raises(WeightChanged):
        head.above(query, threshold)
    head.update_rows([row])
    assert head.thresholds
    found = head.above(query, threshold)
    assert row in found.indices
    assert not check(found, head, query, threshold).any()


def test_copies_files_and_devices(made: tuple[AdaptiveSoftmax, Tensor, float], tmp_path: Path) -> None:
    head, x, threshold = made
    head.save(tmp_path / "whole")
    head.save(tmp_path / "part", weight=False)
    for other in (
        copy.deepcopy(head),
        pickle.loads(pickle.dumps(head)),
        head.to("cpu"),
        AdaptiveSoftmax.load(tmp_path / "whole"),
        AdaptiveSoftmax.load(tmp_path / "part", weight=head.weight),
    ):
        assert other.thresholds == head.thresholds
        assert isinstance(other.thresholds[threshold], CascadeCalibration)
        for one, same in zip(other.above(x, threshold), head.above(x, threshold), strict=True):
            assert torch.equal(one, same)


@pytest.mark.parametrize(
    "change", [{"level": 1.0}, {"level": math.inf}, {"level": math.nan}, {"k": 1}, {"capacity": 8}, {"first": 99}]
)
def test_levels_of_another_head_are_refused(
    made: tuple[AdaptiveSoftmax, Tensor, float], change: dict[str, float]
) -> None:
    state = made[0].__getstate__()
    levels = {name: {**fit, **change} for name, fit in state["settings"]["levels"].items()}
    with pytest.raises((TypeError, ValueError)):
        AdaptiveSoftmax.from_copy({**state, "settings": {**state["settings"], "levels": levels}})


def test_modes(made: tuple[AdaptiveSoftmax, Tensor, float]) -> None:
    head, x, threshold = made
    exact, right = AdaptiveSoftmax(head.weight, method="exact"), head.above(x[:20], threshold)
    with torch.autocast("cpu", torch.bfloat16):
        found, all_of_it = head.above(x[:20], threshold), exact.above(x[:20], threshold)
    with torch.inference_mode():
        inside = head.above(x[:20], threshold)
    for one, other, same in zip(found, inside, right, strict=True):
        assert torch.equal(one, same)
        assert torch.equal(other, same)
    assert not check(all_of_it, exact, x[:20], threshold).any()


def test_threads(made: tuple[AdaptiveSoftmax, Tensor, float]) -> None:
    head, x, threshold = made
    right, found = [head.above(query, threshold) for query in x[:40]], [[] for _ in range(4)]  # type: ignore[var-annotated]

    def ask(answers: list[Above]) -> None:
        answers.extend(head.above(query, threshold) for query in x[:40])

    threads = [threading.Thread(target=ask, args=(answers,)) for answers in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answers in found:
        for answer, same in zip(answers, right, strict=True):
            assert torch.equal(answer.indices, same.indices)
            assert torch.equal(answer.logits, same.logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_bias_and_beta(dtype: torch.dtype) -> None:
    g = generator(3)
    weight, x = language(1500, D, 500, g)
    bias = torch.randn(1500, generator=g)
    threshold = -0.5 * level_of(weight, x[:200], 0.99, bias)
    head = AdaptiveSoftmax(weight.to(dtype), bias.to(dtype), beta=-0.5, method="cascade", delta=DELTA)
    head.build(x[:150])
    head.calibrate(x[150:300], [], threshold=threshold, generator=g)
    found = head.above(x[300:].to(dtype), threshold)
    missed = check(found, head, x[300:].to(dtype), threshold)
    assert plausible(int(missed.sum()), 200, DELTA)
    assert found.exact.double().mean() < 0.5


# -- without sample queries --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_pac(kind: Maker) -> None:
    """Never misses anything, whatever weight and queries are."""
    for seed in range(4):
        weight, x = kind(700, 300, 5, generator(seed))
        bias = torch.randn(700, generator=generator(seed)) if seed % 2 else None
        head = AdaptiveSoftmax(weight, bias, method="cascade", guarantee="pac", beta=(1.0, -0.3)[seed // 2])
        for threshold in (0.0, level_of(weight, x, bias=bias), 1e9, -1e9, math.inf):
            assert not check(head.above(x, threshold), head, x, threshold).any()


def test_pac_reads_a_part() -> None:
    weight, x = gaussian(2000, 1024, 5, generator())
    head = AdaptiveSoftmax(weight, method="cascade", guarantee="pac")
    found = head.above(x, level_of(weight, x))
    assert found.bytes_read.double().mean() < 0.4 * weight.nbytes
    assert not found.exact.any()
    assert head.above(x, -1e9).exact.all()


def test_joining() -> None:
    parts = [
        module.RowsAbove(*map(torch.tensor, part))
        for part in (([0, 1], [3, 4], [1.0, 2.0], [5, 6], [True, False]), ([0], [9], [7.0], [8], [True]))
    ]
    whole = module.RowsAbove.join(parts)
    assert whole.query.tolist() == [0, 1, 2]
    assert whole.ordered((3,)).indices.tolist() == [3, 4, 9]
    assert whole.exact.tolist() == [True, False, True]
