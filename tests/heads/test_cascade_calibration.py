"""Calibration of the cascade: how many queries it takes, what it promises, what it notices, files."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve.errors import InputError
from softsieve.heads import DriftWarning, TopK, WeightChanged, index_file
from softsieve.heads.cascade import calibration as cascade_calibration
from softsieve.heads.cascade import crossover
from softsieve.heads.cascade.calibration import Trial, Truth, allowed, needed, useful
from softsieve.heads.cascade.cpu import CpuCascade, cheapest, plan_of
from softsieve.heads.cascade.cpu_trials import Asked, answer_all
from softsieve.heads.cascade.fit import CascadeCalibration, half_width
from softsieve.heads.cascade.index import Index
from softsieve.kernels import base_numba
from softsieve.kernels.cascade_numba import Found, Plan, Usual
from softsieve.reference import heads as reference
from tests.heads.instances import Made, Maker, common, gaussian, heavy_tailed, language, peaked, plausible, right

DELTA, EPS = 0.1, 0.3
FIT = CascadeCalibration(2, EPS, DELTA, 99, 1.0, 0.5, 0, 0, math.inf, 3.0, 0.5, 1.0, 2.0, 0.0, math.inf, 4)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fitted(weight: Tensor, x: Tensor, k: int | list[int] = 8, **options: Any) -> AdaptiveSoftmax:
    """Built with the first third of the queries, calibrated with the others."""
    head = AdaptiveSoftmax(weight, **{"eps": EPS, "delta": DELTA, "method": "cascade", **options})
    head.build(x[: len(x) // 3])
    head.calibrate(x[len(x) // 3 :], k, generator=generator())
    return head


def fit_of(head: AdaptiveSoftmax, k: int) -> CascadeCalibration:
    found = head.calibrations[k]
    assert isinstance(found, CascadeCalibration)
    return found


# -- counting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.9])
def test_allowed(delta: float) -> None:
    for count in (*range(1, 60), 65, 99, 459, 460, 1000, 4603, 20_000):
        errors = allowed(count, delta)
        assert -1 <= errors < count
        assert errors < 0 or binom.cdf(errors, count, delta) <= 0.01 * (1 + 1e-9)
        assert binom.cdf(errors + 1, count, delta) > 0.01 * (1 - 1e-9), count


@pytest.mark.parametrize("delta", [0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.9, 0.99])
def test_needed(delta: float) -> None:
    """The fewest of which enough are left, after those that shape, to allow no error."""
    fewest = needed(delta)
    for count in (fewest - 1, fewest):
        deciding = count - min(count // 3, 256)
        assert (binom.cdf(0, deciding, delta) <= 0.01 * (1 + 1e-9)) == (count == fewest)


@pytest.mark.parametrize("delta", [0.05, 0.1])
def test_needed_is_just_enough(delta: float) -> None:
    fewest = needed(delta)
    weight, x = language(900, 32, 400, generator())
    head = AdaptiveSoftmax(weight, delta=delta, method="cascade")
    head.build(x[200:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head.calibrate(x[:fewest], [0, 1], generator=generator())
    assert fit_of(head, 0).width < math.inf
    assert fit_of(head, 0).queries == fewest
    with pytest.warns(UserWarning, match=rf"{fewest - 1} are too few for delta {delta:g}, which takes {fewest}:"):
        head.calibrate(x[: fewest - 1], [0, 1])
    assert fit_of(head, 1).width == math.inf
    answer = head.topk(x[200:210])
    assert answer.exact.all()
    assert right(answer, weight, x[200:210], 1e-5).all()
    assert head.log_partition(x[200:210]).exact.all()
    torch.testing.assert_close(head.logits(x[200:210]), x[200:210] @ weight.T)


def test_twice_as_many_without_an_index() -> None:
    """A half of them is for that."""
    weight, x = language(900, 32, 400, generator())
    fewest = 2 * needed(DELTA)
    for count in (fewest - 1, fewest):
        head = AdaptiveSoftmax(weight, delta=DELTA, method="cascade")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            head.calibrate(x[:count], generator=generator())
        assert [f"which takes {fewest}" in str(one.message) for one in said] == [True] * (count < fewest)
        assert fit_of(head, 1).queries == math.ceil(count / 2)


def test_the_generator_decides() -> None:
    weight, x = language(600, 32, 300, generator())
    fits = []
    for seed in (1, 1, 2):
        head = AdaptiveSoftmax(weight, delta=DELTA, method="cascade")
        head.calibrate(x, [1, 8], generator=generator(seed))
        fits.append([fit_of(head, k)._replace(batch=0) for k in (1, 8)])
    assert fits[0] == fits[1]
    assert fits[0] != fits[2]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_first_calibration_says_that_it_compiles(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_numba, "is_compiled", lambda _: compiled)
    weight, x = language(600, 32, 200, generator())
    told: list[str] = []
    head = AdaptiveSoftmax(weight, delta=DELTA, method="cascade")
    head.calibrate(x, 1, progress=lambda what, _: told.append(what))
    assert told.count("compiling kernels, once per machine") == (not compiled)


def test_progress_adds_up() -> None:
    weight, x = language(600, 32, 300, generator())
    for build in (True, False):
        for count in (200, 10):
            told: list[float] = []
            head = AdaptiveSoftmax(weight, delta=DELTA, method="cascade")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if build:
                    head.build(x)
                head.calibrate(x[:count], [1, 8], progress=lambda _, share, told=told: told.append(share))  # type: ignore[misc]
            assert sum(told) == pytest.approx(1, abs=0.02)


# -- who is right ------------------------------------------------------------------------------------------------------


def asked(logits: list[float], log_z: float, half: float = 1.0, state: int = 0) -> Trial:
    one = torch.zeros(1, dtype=torch.int64)
    return Trial(
        torch.tensor([state]),
        torch.zeros(1, len(logits), dtype=torch.int64),
        torch.tensor([logits]),
        torch.tensor([log_z], dtype=torch.float64),
        torch.tensor([half], dtype=torch.float64),
        one,
        one,
        torch.ones(1, dtype=torch.float64),
        one,
        torch.ones(1, dtype=torch.float64),
        torch.ones(1, dtype=torch.float64),
        torch.ones(1, dtype=torch.float64),
    )


TRUTH = Truth(torch.tensor([[5.0, 3.0]]), torch.tensor([6.0]))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (asked([5.0, 3.0], 6.0), True),
        (asked([5.0, 3.0 + 5e-6], 6.0), True),  # rounding
        (asked([5.0, 3.0 - 1e-3], 6.0), False),
        (asked([5.0, 2.0], 6.0), False),
        (asked([5.0, 2.0], 6.0, state=2), True),  # will be answered exactly
        (asked([5.0, 2.0], 6.0, state=3), True),
        (asked([5.0, 3.0], 6.0 - math.log(1.299)), True),  # probabilities are 1.299 times what they should be
        (asked([5.0, 3.0], 6.0 - math.log(1.301)), False),
        (asked([5.0, 3.0], 6.0 - math.log(0.701)), True),
        (asked([5.0, 3.0], 6.0 - math.log(0.699)), False),
        (asked([5.0, 3.0], 6.2, half=0.101), True),  # the interval is twice as wide
        (asked([5.0, 3.0], 6.2, half=0.099), False),
        (asked([5.0, 3.0], 5.8, half=0.099), False),
        (asked([5.0, 3.0], 6.08, half=0.0), True),  # and a quarter of what eps allows at least
        (asked([5.0, 3.0], 6.1, half=0.0), False),
        (asked([5.0, 3.0], math.nan), False),
    ],
)
def test_right(answer: Trial, expected: bool) -> None:
    assert cascade_calibration.right(answer, TRUTH, FIT).tolist() == [expected]


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.299, True), (1.301, False), (0.701, True), (0.699, False), (1.0, True)]
)
def test_right_without_rows(factor: float, expected: bool) -> None:
    """The sum itself is within eps, not its inverse."""
    truth, fit = Truth(torch.zeros(1, 0), torch.tensor([6.0])), FIT._replace(k=0)
    assert cascade_calibration.right(asked([], 6.0 + math.log(factor)), truth, fit).tolist() == [expected]


def test_right_in_float64() -> None:
    """Rounding is that of the weight's dtype."""
    exact = Truth(TRUTH.best.double(), TRUTH.log_z.double())
    off = asked([5.0, 3.0], 6.0)._replace(logits=torch.tensor([[5.0, 3.0 + 1e-9]], dtype=torch.float64))
    assert not cascade_calibration.right(off, exact, FIT)
    assert cascade_calibration.right(off, TRUTH, FIT)


def test_half_width_is_no_wider_than_eps_and_no_narrower_than_a_quarter() -> None:
    doubt = torch.tensor([0.0, 0.1, 9.0], dtype=torch.float64)
    assert half_width(doubt, FIT).tolist() == pytest.approx([-math.log(0.7) / 4, 0.2, -math.log(0.7)])
    assert half_width(doubt, FIT._replace(interval=math.inf)).tolist() == pytest.approx([-math.log(0.7)] * 3)


def test_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = gaussian(50, 7, 20, generator())
    bias = torch.randn(50, generator=generator(1))
    head = AdaptiveSoftmax(weight, bias)
    monkeypatch.setattr(cascade_calibration, "_CACHED", 150)
    found = cascade_calibration.truth(head._layer.reader, x, bias, 3)
    expected = reference.topk_softmax(weight, x, 3, bias)
    torch.testing.assert_close(found.best, expected.logits.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.log_z, expected.log_z.float(), rtol=1e-5, atol=1e-5)


def test_one_truth_for_all_k() -> None:
    weight, x = gaussian(50, 7, 20, generator())
    reader = AdaptiveSoftmax(weight)._layer.reader
    largest = cascade_calibration.truth(reader, x, None, 8)
    for k in (0, 1, 3):
        own = cascade_calibration.truth(reader, x, None, k)
        assert torch.equal(largest.top(k).best, own.best)
        assert torch.equal(largest.top(k).log_z, own.log_z)
        assert torch.equal(largest.top(k).rounding, own.rounding)


# -- how many queries are used -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [1e-4, 0.001, 0.01, 0.1, 0.5])
def test_useful_are_more_than_needed(delta: float) -> None:
    """So many that more than half of delta may be wrong."""
    for rows in (100, 50_000, 10**7):
        deciding = useful(delta, rows) - cascade_calibration.SHAPING
        assert useful(delta, rows) > needed(delta)
        assert allowed(deciding, delta) > 0.5 * delta * deciding


def test_more_queries_than_are_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are not used, at random, and that is said."""
    weight, x = language(600, 32, 400, generator())
    monkeypatch.setattr(cascade_calibration, "ANYWAY", 50)
    monkeypatch.setattr(cascade_calibration, "DECIDING", (4.6, 4.6))
    monkeypatch.setattr(cascade_calibration, "SHAPING", 30)
    head = AdaptiveSoftmax(weight, delta=DELTA, method="cascade")
    head.build(x[:100])
    told: list[str] = []
    head.calibrate(x[100:], 1, generator=generator(), progress=lambda what, _: told.append(what))
    assert fit_of(head, 1).queries == 80
    assert "using 80 of 300 queries" in told
    drawn = cascade_calibration.draw(x[100:], DELTA, 600, generator(), lambda *_: None)
    assert drawn.shape == (80, 32)
    assert len(torch.unique(drawn, dim=0)) == 80
    assert not torch.equal(drawn, x[100:180])
    told.clear()
    head.calibrate(x[100:180], 1, generator=generator(), progress=lambda what, _: told.append(what))
    assert not any("using" in what for what in told)


# -- many answers from one preview -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_trials_are_what_single_questions_get(seed: int) -> None:
    """To the last bit, though the preview is made once: with widths, corrections, and second previews or none."""
    weight, x = language(3000, 256, 120, generator(seed))
    head = AdaptiveSoftmax(weight, delta=DELTA, method="cascade")
    head.build(x[:80])
    engine = head._engine
    assert isinstance(engine, CpuCascade)
    start = FIT._replace(k=3, correction=0.4)
    survivors = engine.trials(x[80:], [start._replace(width=3.0)])[0].survivors
    limit = float(survivors.double().quantile(0.3))
    both: dict[str, Any] = {"first": 0, "second": 2, "limit": limit}
    fits = [start._replace(width=width, **both) for width in (8.0, 4.0, 3.0, 1.0)]
    fits += [start._replace(width=4.0, correction=0.9, **both), start._replace(width=4.0, **{**both, "limit": -1.0})]
    for fit, trial in zip(fits, engine.trials(x[80:], fits), strict=True):
        rows, logits, answers = engine._run(x[80:], plan_of(fit))
        assert torch.equal(trial.indices, torch.from_numpy(rows))
        assert torch.equal(trial.logits, torch.from_numpy(logits))
        for name, field in {"fallback": "state", "flat": "flat"}.items() | {(one, one) for one in SAME}:
            own = torch.from_numpy(answers[:, Found._fields.index(field)])
            assert torch.equal(getattr(trial, name).double(), own), (fit, name)
    assert 0 < int((survivors > limit).sum()) < len(survivors)  # of some queries, the second preview is asked


def test_widths_that_are_given_up_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fitted does not depend on how many queries and widths are tried together; fewer answers are asked for."""
    weight, x = language(900, 64, 700, generator())
    fits, asked = [], list[int]()

    def counted(engine: CpuCascade, queries: Tensor, fits: list[CascadeCalibration], **options: Any) -> list[Trial]:
        asked[-1] += len(queries) * len(fits)
        return ask(engine, queries, fits, **options)

    ask = CpuCascade.trials
    monkeypatch.setattr(CpuCascade, "trials", counted)
    for part, together in ((1000, 1000), (40, 1000), (40, 3)):
        monkeypatch.setattr(cascade_calibration, "PART", part)
        monkeypatch.setattr(cascade_calibration, "TOGETHER", together)
        asked.append(0)
        fits.append(fit_of(fitted(weight, x, 2), 2)._replace(batch=0))
    assert fits[0] == fits[1] == fits[2]
    assert math.isfinite(fits[0].width)
    assert asked[2] < asked[1] < asked[0]


SAME = ("log_z", "half", "coordinates", "bytes_read", "scale", "survivors", "signal", "toward")


def test_a_thread_that_fails_ends_the_trials(several: tuple[AdaptiveSoftmax, Tensor]) -> None:
    engine, x = several[0]._engine, several[1].numpy()
    assert isinstance(engine, CpuCascade)
    asked, plans = [], [plan_of(fit_of(several[0], 2))]

    def fail(*_: object) -> None:
        asked.append(1)
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        answer_all(
            Asked(engine._ask, engine._arrays_for(plans), engine.lengths, x, x, engine._make_scratch),
            plans, lambda *_: (np.zeros(2, np.int64), *NOWHERE), fail,
        )  # fmt: skip
    assert len(asked) <= numba.get_num_threads()


NOWHERE = np.zeros(2, np.float32), np.zeros(0, np.float32)


# -- the promise -------------------------------------------------------------------------------------------------------


def judged(head: AdaptiveSoftmax, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Whether answers are right, by the exact logits in float64, and what they read."""
    truth = reference.logits(head.weight, x).logsumexp(-1)
    answer = head.topk(x, k) if k else head.log_partition(x)
    rounding = 1e-5 * (1 + truth.abs())
    low, high = answer.log_z_interval.double().unbind(-1)
    fine = (low - rounding <= truth) & (truth <= high + rounding)
    if isinstance(answer, TopK):
        fine &= right(answer, head.weight, x, head.eps)
    else:
        fine &= (answer.log_z.double() - truth).expm1().abs() <= head.eps + rounding
    return fine, answer.bytes_read / head.weight.nbytes


@pytest.fixture
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrations do not measure how long a batch takes."""
    monkeypatch.setattr(crossover, "measured_batch", lambda *_: 0)


@pytest.mark.parametrize(
    ("kind", "n", "d"),
    [(language, 600, 32), (language, 1500, 64), (peaked, 600, 48), (gaussian, 600, 32), (common, 600, 32)],
)
@pytest.mark.usefixtures("_untimed")
@pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")
def test_answers_are_right_as_often_as_promised(kind: Maker, n: int, d: int) -> None:
    """Over heads, calibrations and queries that are new each time.

    A calibration keeps its promise for new queries with confidence 0.99. Of those that do, answers to 100 queries have
    significantly many errors, at one in a thousand, with that probability at most.
    """
    instances, count = 12, 100
    for k in (0, 1, 8):
        wrong, broken, read = 0, 0, 0
        for number in range(instances):
            g = generator(1000 * k + number)
            weight, x = kind(n, d, 220 + count, g)
            order = torch.randperm(len(x), generator=g)
            head = AdaptiveSoftmax(weight, eps=EPS, delta=DELTA, method="cascade", seed=number)
            head.build(x[order[:100]])
            head.calibrate(x[order[100:220]], k, generator=g)
            fine, share = judged(head, x[order[220:]], k)
            errors = int((~fine).sum())
            wrong += errors
            broken += bool(binom.sf(errors - 1, count, DELTA) < 1e-3)
            read += bool(share.double().mean() < 0.9)
        assert plausible(wrong, instances * count, DELTA), (k, wrong)
        assert plausible(broken, instances, 0.011), (k, broken)
        if kind is language:
            assert read >= 0.8 * instances, (k, read)
            assert wrong > 0  # widths are no wider than they have to be


@pytest.mark.usefixtures("_untimed")
@pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")
def test_one_new_query_each() -> None:
    """The same for a single query of heads that are all different."""
    wrong = trials = 0
    for number in range(25):
        for kind in (language, heavy_tailed):
            weight, x = kind(600, 32, 180, generator(number))
            fine, _ = judged(fitted(weight, x[1:], 2), x[:1], 2)
            wrong += int(~fine)
            trials += 1
    assert plausible(wrong, trials, DELTA), wrong


def test_a_narrower_width_would_break_the_promise() -> None:
    """The tests above can fail: with margins half as wide, answers are wrong far more often."""
    weight, x = language(600, 32, 900, generator())
    head = fitted(weight, x[:400], 8)
    fit = fit_of(head, 8)
    head.calibrations[8] = fit._replace(width=fit.width / 2, low=0.0, high=math.inf)
    fine, _ = judged(head, x[400:], 8)
    assert not plausible(int((~fine).sum()), 500, DELTA)


@pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")
def test_small_eps_and_delta() -> None:
    """The exact answers, or said to be."""
    weight, x = language(400, 32, 6000, generator())
    head = AdaptiveSoftmax(weight, eps=1e-3, delta=1e-3, method="cascade")
    head.build(x[:500])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head.calibrate(x[500:5500], 1, generator=generator())
    answer = head.topk(x[5500:], 1)
    fine = right(answer, weight, x[5500:], 1e-3)
    assert plausible(int((~fine).sum()), 500, 1e-3)
    exact = reference.topk_softmax(weight, x[5500:], 1)
    assert float((answer.logits - exact.logits).abs()[fine].max()) < 1e-4
    assert fine[answer.exact].all()


def test_wider_for_smaller_delta() -> None:
    weight, x = language(600, 32, 1500, generator())
    widths, read = [], []
    for delta in (0.3, 0.05, 0.01):
        head = fitted(weight, x, 8, delta=delta)
        widths.append(fit_of(head, 8).width)
        read.append(fit_of(head, 8).read)
    assert widths == sorted(widths)
    assert read == sorted(read)
    assert widths[0] < widths[-1]


# -- which k -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several() -> tuple[AdaptiveSoftmax, Tensor]:
    """A head for k = 0, 2 and 8, and queries it has not seen. Not to be changed."""
    weight, x = language(900, 64, 700, generator(5))
    return fitted(weight, x[:600], [0, 2, 8]), x[600:]


def copied(head: AdaptiveSoftmax) -> AdaptiveSoftmax:
    """The same, to be changed."""
    other = AdaptiveSoftmax(head.weight, eps=head.eps, delta=head.delta, method=head.method)
    assert head.index is not None
    other._engine = CpuCascade(other._layer, Index(*(value.clone() for value in head.index)))
    other._engine.calibrations = dict(head.calibrations)
    return other


@pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")
def test_a_larger_k_serves(several: tuple[AdaptiveSoftmax, Tensor]) -> None:
    """The least that is large enough."""
    head, x = several
    for k, serves in ((1, 2), (2, 2), (3, 8), (7, 8), (8, 8)):
        answer, larger = head.topk(x, k), head.topk(x, serves)
        assert answer.indices.shape == answer.probs.shape == answer.logits.shape == (len(x), k)
        assert torch.equal(answer.indices, larger.indices[:, :k])
        assert torch.equal(answer.probs, larger.probs[:, :k])
        assert torch.equal(answer.logits, larger.logits[:, :k])
        assert torch.equal(answer.bytes_read, larger.bytes_read)
        fine = right(answer, head.weight, x, EPS)
        assert plausible(int((~fine).sum()), len(x), DELTA)
    assert bool((head.topk(x, 2).bytes_read < head.topk(x, 3).bytes_read).any())


def test_what_is_not_calibrated(several: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, x = several
    with pytest.raises(RuntimeError, match="not calibrated for k = 9, found calibrations for k = 0, 2, 8: call"):
        head.topk(x, 9)
    other = copied(head)
    del other.calibrations[0]
    with pytest.raises(RuntimeError, match="not calibrated for k = 0, found calibrations for k = 2, 8"):
        other.log_partition(x)


@pytest.mark.parametrize("change", [{"eps": 0.2}, {"delta": 0.05}], ids=str)
def test_another_promise(change: dict[str, float], several: tuple[AdaptiveSoftmax, Tensor]) -> None:
    """Was not calibrated for."""
    head, x = copied(several[0]), several[1]
    for name, value in change.items():
        setattr(head, name, value)
    for ask in (head.topk, head.log_partition, head.logits, head.sample, head.coverage):
        with pytest.raises(
            RuntimeError, match=r"calibrated for eps 0\.3 and delta 0\.1, which are now .*: call calibrate"
        ):
            ask(x)


@pytest.mark.parametrize("k", [-1, 901, 1.0, True, [1, -1], "8"])
def test_refused_k(k: Any, several: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, x = copied(several[0]), several[1]
    with pytest.raises((TypeError, ValueError), match="k: expected an int"):
        head.calibrate(x, k)
    assert head.calibrations == several[0].calibrations


# -- drift -------------------------------------------------------------------------------------------------------------


def shuffled(x: Tensor) -> Tensor:
    return x[:, torch.randperm(x.shape[1], generator=generator(3))]


def outlying(n: int, d: int, count: int, g: torch.Generator) -> Made:
    """A few coordinates of the queries are far larger than the others, as in language models."""
    weight, x = gaussian(n, d, count, g)
    return weight, x * torch.where(torch.arange(d) < d // 16, 4.0, 0.1)


@pytest.fixture(scope="module")
def drifting() -> tuple[AdaptiveSoftmax, Tensor]:
    weight, x = outlying(900, 64, 700, generator())
    return fitted(weight, x[:600], [0, 8]), x[600:]


@pytest.mark.parametrize("change", [shuffled, lambda x: 10 * x, lambda x: 0.1 * x], ids=["shuffled", "10", "0.1"])
@pytest.mark.parametrize("k", [0, 8])
def test_queries_of_another_kind(
    change: Callable[[Tensor], Tensor], k: int, drifting: tuple[AdaptiveSoftmax, Tensor]
) -> None:
    """Are noticed, and answered exactly."""
    head, x = drifting
    assert fit_of(head, k).width < math.inf
    x = change(x)
    with pytest.warns(DriftWarning, match=f"x: {len(x)} of {len(x)} queries are unlike those of the calibration"):
        answer = head.topk(x, k) if k else head.log_partition(x)
    assert answer.exact.all()
    assert answer.bytes_read.ge(head.weight.nbytes).all()
    assert answer.coordinates.eq(head.weight.numel()).all()
    exact = reference.topk_softmax(head.weight, x, k)
    torch.testing.assert_close(answer.log_z, exact.log_z.float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(answer.log_z_interval, answer.log_z[:, None].expand(-1, 2), rtol=1e-5, atol=1e-4)
    if isinstance(answer, TopK):
        torch.testing.assert_close(answer.probs, exact.probs.float(), rtol=1e-3, atol=1e-6)
        assert right(answer, head.weight, x, 1e-5).all()


def test_some_of_another_kind(several: tuple[AdaptiveSoftmax, Tensor]) -> None:
    """Each query by itself."""
    head, x = several
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = head.topk(x, 8)
    usual = x[~plain.exact]
    x = usual.repeat_interleave(2, 0)
    x[::2] *= 10
    with pytest.warns(DriftWarning, match=f"{len(usual)} of {len(x)} queries"):
        answer = head.topk(x, 8)
    assert answer.exact[::2].all()
    assert not answer.exact[1::2].any()
    assert torch.equal(answer.logits[1::2], plain.logits[~plain.exact])
    assert right(answer, head.weight, x, EPS)[::2].all()


def test_queries_of_the_same_kind_are_not_of_another() -> None:
    """But for a few."""
    drifted = 0
    for number in range(6):
        weight, x = language(600, 64, 900, generator(number))
        head = fitted(weight, x[:700], 8)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            answer = head.topk(x[700:], 8)
        assert len(said) <= 1
        drifted += int(answer.exact.sum())
    assert drifted < 0.05 * 1200


# -- auto --------------------------------------------------------------------------------------------------------------


def test_auto_takes_what_is_faster(several: tuple[AdaptiveSoftmax, Tensor]) -> None:
    fit = fit_of(several[0], 8)
    x = several[1][~several[0].topk(several[1], 8).exact]
    head = AdaptiveSoftmax(several[0].weight, eps=EPS, delta=DELTA)
    assert head.topk(x, 8).exact.all()
    assert head.log_partition(x).exact.all()
    head._engine = CpuCascade(head._layer, several[0].index)  # type: ignore[arg-type]
    assert head.topk(x, 8).exact.all()  # not calibrated yet
    head.calibrations[8] = fit._replace(batch=4)
    for batch in (1, 3, 4):
        assert not head.topk(x[:batch], 8).exact.any()
        assert not head.topk(x[:batch], 3).exact.any()
    for batch in (5, 8, len(x)):
        assert head.topk(x[:batch], 8).exact.all()
    assert head.topk(x[:1], 9).exact.all()
    assert head.log_partition(x[:1]).exact.all()
    assert torch.equal(head.topk(x[0], 8).indices, several[0].topk(x[0], 8).indices)
    assert head.coverage(x, 8).exact == 0  # one at a time
    head.calibrations[8] = fit._replace(batch=0)
    assert head.topk(x[:1], 8).exact.all()


@pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")
def test_auto_calibrates() -> None:
    weight, x = language(600, 32, 300, generator())
    head = AdaptiveSoftmax(weight, delta=DELTA)
    fit = head.calibrate(x, 2, generator=generator())
    assert isinstance(fit, CascadeCalibration)
    assert fit.batch in (0, *crossover.BATCHES)
    assert head.calibrations == {2: fit}
    head.calibrations[2] = fit._replace(batch=1)
    assert not bool(head.topk(x[0], 2).exact)


@pytest.mark.parametrize(("cost", "expected"), [(1.0, 8), (0.01, 64), (100.0, 0), (10.0, 1)])
def test_measured_batch(cost: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as queries one by one cost no more than all of them at once, which costs 10."""
    sizes: list[int] = []

    def seconds(calls: list[Callable[[Tensor], float]], queries: list[Tensor], **_: Any) -> list[float]:
        sizes.extend(map(len, queries))
        return [call(queries[0]) for call in calls]

    monkeypatch.setattr(crossover, "_seconds", seconds)
    for count in (3, 200):
        x = torch.zeros(count, 2)
        known: dict[int, float] = {}
        assert crossover.measured_batch(lambda x: cost * len(x), lambda x: 10.0, x, known) == expected
        assert len(known) == {8: 2, 64: 1, 0: 1, 1: 2}[expected]  # where the time of one query does not tell
        again = crossover.measured_batch(lambda x: cost * len(x), lambda x: pytest.fail("known"), x, known)
        assert again == expected
    assert set(sizes) <= set(crossover.BATCHES)


class Clock:
    """A machine whose time passes by calls that take so many seconds, and what else is done there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, noise: Callable[[float], float] = float) -> None:
        self.now, self.noise = 0.0, noise
        self.calls: list[tuple[str, Tensor]] = []
        monkeypatch.setattr(crossover, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def call(self, name: str, seconds: Callable[[Tensor], float]) -> Callable[[Tensor], None]:
        def called(x: Tensor) -> None:
            self.calls.append((name, x))
            self.now += self.noise(seconds(x))

        return called


def test_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in turns, for all queries, again and again; the median of the shortest times."""
    clock, queries = Clock(monkeypatch), [torch.tensor([[value]]) for value in (3e-3, 1e-3, 2e-3, 5e-3, 4e-3)]
    one, other = clock.call("one", float), clock.call("other", lambda x: 1.5 * float(x))
    seconds, rounds = crossover._seconds, crossover._ROUNDS
    assert seconds([one, other], queries) == pytest.approx([3e-3, 4.5e-3])
    assert [name for name, _ in clock.calls] == ["one", "other"] * len(queries) * rounds
    assert all(x is queries[number // 2 % 5] for number, (_, x) in enumerate(clock.calls))

    def asked(*calls: Callable[[Tensor], None], **options: Any) -> int:
        """In rounds."""
        clock.calls.clear()
        assert seconds(calls, queries, **options)[0] > 0
        return len(clock.calls) // (len(queries) * len(calls))

    assert asked(one, enough=3.1e-3) == 1
    assert asked(one, enough=2.9e-3) == rounds
    assert asked(one, enough=2.9e-3, rounds=2) == 2
    assert asked(clock.call("slow", lambda x: 0.08)) == 2  # then time is up


@pytest.mark.parametrize(("cost", "expected"), [(0.3e-3, 8), (0.03e-3, 64), (40e-3, 0)])
def test_a_busy_machine_changes_nothing(cost: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though every other call waits for a core, the short ones as long as others."""
    for seed in range(50):
        g = torch.Generator().manual_seed(seed)

        def waiting(seconds: float, g: torch.Generator = g) -> float:
            return seconds + (8e-3 if float(torch.rand((), generator=g)) < 0.5 else 0.0)

        clock = Clock(monkeypatch, waiting)
        ask, exact = clock.call("ask", lambda x: cost * len(x)), clock.call("exact", lambda x: 3.6e-3)
        known: dict[int, float] = {}
        for _ in range(2):  # for another k, with what is known of the first
            assert crossover.measured_batch(ask, exact, torch.zeros(200, 2), known) == expected


# -- coverage ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")
@pytest.mark.parametrize("k", [0, 1, 8])
def test_coverage(k: int, several: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, x = several
    x = torch.cat([x, 10 * x[:20]])
    found = head.coverage(x, k)
    answer = head.topk(x, k) if k else head.log_partition(x)
    fine, read = judged(head, x, k)
    assert found.queries == len(x)
    assert found.right == pytest.approx(float(fine.double().mean()), abs=0.011)
    assert found.read == pytest.approx(float(read.double().mean()), rel=1e-6)
    assert found.exact == pytest.approx(float(answer.exact.double().mean()))
    assert found.exact >= 20 / len(x)


@pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")
def test_coverage_sees_what_is_wrong(several: tuple[AdaptiveSoftmax, Tensor]) -> None:
    head, x = copied(several[0]), several[1]
    fit = fit_of(head, 8)
    head.calibrations[8] = fit._replace(width=fit.width / 2)
    found, before = head.coverage(x, 8), several[0].coverage(x, 8)
    assert found.right < before.right - 0.05
    assert found.read < before.read
    with pytest.raises(ValueError, match="k: expected an int"):
        head.coverage(x, 901)


# -- files -------------------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    weight, x = language(700, 64, 500, generator())
    bias = torch.randn(700, generator=generator(1))
    head = AdaptiveSoftmax(weight.bfloat16(), bias, delta=DELTA, beta=0.9, method="cascade", seed=4)
    head.build(x[:150])
    head.calibrate(x[150:400], [0, 1, 8], generator=generator())
    head.save(tmp_path / "head")
    again = AdaptiveSoftmax.load(tmp_path / "head")
    assert repr(again) == repr(head)
    assert again.calibrations == head.calibrations
    assert head.index is not None
    assert again.index is not None
    for name, one, other in zip(Index._fields, head.index, again.index, strict=True):
        assert torch.equal(one, other), name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in (0, 1, 5, 8):
            pair = [h.topk(x[400:], k) if k else h.log_partition(x[400:]) for h in (head, again)]
            assert all(map(torch.equal, *pair))
        assert torch.equal(head.logits(x[400:]), again.logits(x[400:]))
    again.weight[3] += 1  # its own, and watched
    with pytest.raises(WeightChanged):
        again.topk(x[400:])
    again.update_rows([3])
    again.topk(x[400:410])
    assert torch.equal(head.weight[3], weight[3].bfloat16())


def test_a_width_without_end_comes_back(tmp_path: Path) -> None:
    weight, x = language(100, 32, 30, generator())
    head = AdaptiveSoftmax(weight, delta=DELTA, method="cascade")
    with pytest.warns(UserWarning, match="too few"):
        head.calibrate(x)
    head.save(tmp_path / "head")
    again = AdaptiveSoftmax.load(tmp_path / "head")
    assert again.calibrations == head.calibrations
    assert again.topk(x).exact.all()


Content = tuple[dict[str, Tensor], dict[str, Any]]


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Content:
    """What a file of a small head holds."""
    weight, x = language(300, 32, 300, generator())
    head = AdaptiveSoftmax(weight, torch.randn(300, generator=generator(1)), delta=DELTA, method="cascade")
    head.calibrate(x, 2, generator=generator())
    path = tmp_path_factory.mktemp("head") / "head"
    head.save(path)
    return index_file.read(path)


def refused(path: Path, tensors: dict[str, Tensor], settings: dict[str, Any], says: str) -> None:
    index_file.write(path, tensors, settings)
    with pytest.raises(InputError, match=says):
        AdaptiveSoftmax.load(path)


@pytest.mark.parametrize("name", Index._fields)
def test_damaged_tensors(name: str, content: Content, tmp_path: Path) -> None:
    """Of another shape or dtype, not numbers, or missing."""
    tensors, settings = content
    whole, path = f"index.{name}", tmp_path / "head"
    value = tensors[whole]
    for wrong in (value[:-1], value[None], value.flatten()[:0], torch.cat([value, value])):
        refused(path, {**tensors, whole: wrong}, settings, rf"broken: index.{name}: expected .*, found ")
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.int32):
        if dtype != value.dtype:
            refused(path, {**tensors, whole: value.to(dtype)}, settings, rf"broken: index.{name}: expected .*, found ")
    missing = {other: tensors[other] for other in tensors if other != whole}
    if name == "mean":  # as in files of version 0.1
        index_file.write(path, missing, settings)
        assert not AdaptiveSoftmax.load(path).index.mean.any()  # type: ignore[union-attr]
    else:
        refused(path, missing, settings, "broken: ")
    if value.is_floating_point():
        for number in (math.nan, math.inf, -math.inf):
            wrong = value.clone()
            wrong.view(-1)[-1] = number
            refused(path, {**tensors, whole: wrong}, settings, f"broken: index.{name}: expected finite")


@pytest.mark.parametrize("row", [-1, 300, 2**62])
def test_probes_that_are_no_rows(row: int, content: Content, tmp_path: Path) -> None:
    tensors, settings = content
    probes = tensors["index.probes"].clone()
    probes[5] = row
    refused(
        tmp_path / "head", {**tensors, "index.probes": probes}, settings, r"index.probes: expected rows in \[0, 299\]"
    )


@pytest.mark.parametrize(
    ("k", "change", "says"),
    [
        ("3", {}, "calibrations.3: made for another head"),
        ("2", {"k": 3}, "calibrations.2: made for another head"),
        ("2", {"second": 9}, "calibrations.2: made for another head"),
        ("2", {"first": 1, "second": 0}, "calibrations.2: made for another head"),
        ("2", {"width": None}, "calibrations.2: width: expected a number, found None"),
        ("2", {"width": "3"}, "calibrations.2: width: expected a number"),
        ("2", {"width": True}, "calibrations.2: width: expected a number"),
        ("2", {"width": math.nan}, "calibrations.2: width: expected a number of at least 0"),
        ("2", {"low": -1.0}, "calibrations.2: low: expected a number of at least 0"),
        ("2", {"first": 0.0}, "calibrations.2: first: expected a number"),
        ("2", {"more": 1}, r"calibrations.2: expected \["),
        ("x", {}, "broken"),
        ("301", {"k": 301}, "broken"),
    ],
)
def test_foreign_calibrations(k: str, change: dict[str, Any], says: str, content: Content, tmp_path: Path) -> None:
    tensors, settings = content
    own = {**settings["calibrations"]["2"], **change}
    refused(tmp_path / "head", tensors, {**settings, "calibrations": {k: own}}, says)


def test_a_calibration_that_lacks_something(content: Content, tmp_path: Path) -> None:
    tensors, settings = content
    own = dict(settings["calibrations"]["2"])
    del own["low"]
    refused(tmp_path / "head", tensors, {**settings, "calibrations": {"2": own}}, r"calibrations.2: expected \[")


def test_a_calibration_without_an_index(content: Content, tmp_path: Path) -> None:
    tensors, settings = content
    plain = {name: value for name, value in tensors.items() if not name.startswith("index.")}
    refused(tmp_path / "head", plain, settings, "broken")


@pytest.mark.parametrize("change", [{"method": "exact"}, {"method": "coordinates"}, {"guarantee": "pac"}], ids=str)
def test_an_index_of_another_method(change: dict[str, str], content: Content, tmp_path: Path) -> None:
    tensors, settings = content
    refused(tmp_path / "head", tensors, {**settings, **change}, "broken: index: expected method='cascade'")


def test_an_index_of_another_weight(content: Content, tmp_path: Path) -> None:
    tensors, settings = content
    weight = torch.randn(301, 32, generator=generator())
    refused(tmp_path / "head", {**tensors, "weight": weight, "bias": torch.zeros(301)}, settings, "broken: index")
    without = {name: value for name, value in tensors.items() if name != "bias"}
    refused(tmp_path / "head", without, settings, "broken: weight: rows 0, 1, 2, 3, 4 and 295 more have changed")


def test_settings_are_plain(content: Content) -> None:
    _, settings = content
    assert json.loads(json.dumps(settings)) == settings
    fields = {*CascadeCalibration._fields} - {"level"}  # which one for a k has not
    assert settings["calibrations"]["2"].keys() == {*fields, "tier", "capacity"}  # of both devices


@pytest.mark.parametrize("name", ["steps", "tier_steps", "spreads", "unit", "project", "centre", "columns", "records"])
@pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")
def test_values_that_cannot_be(name: str, content: Content, tmp_path: Path) -> None:
    """A clear error, or a head that answers; never anything else."""
    tensors, settings = content
    whole = f"index.{name}"
    x = torch.randn(20, 32, generator=generator())
    for wrong in (tensors[whole] * 0, -tensors[whole]):
        index_file.write(tmp_path / "head", {**tensors, whole: wrong}, settings)
        try:
            head = AdaptiveSoftmax.load(tmp_path / "head")
        except InputError:
            continue
        assert head.topk(x, 2).log_z.isfinite().all()


def test_plan() -> None:
    anything = Usual(0.0, math.inf, 0.0, -2.0, 2.0, math.inf, math.inf)
    assert plan_of(FIT) == Plan(2, 0, 0, math.inf, 3.0, 0.5, math.log(0.15), 1.0, math.log(1.3), anything, upper=False)
    fit = FIT._replace(low=0.1, high=0.2, signal=0.3, toward_low=-0.4, toward_high=0.5, most=6.0, flat=0.7)
    assert plan_of(fit).usual == (0.1, 0.2, 0.3, -0.4, 0.5, 6.0, 0.7)
    assert plan_of(FIT, math.inf).tolerance == math.inf
    assert plan_of(FIT, upper=True).upper


def test_previews_are_those_that_cost_least() -> None:
    """A short one for the queries that it leaves few rows of, a longer one for the others."""
    levels = [
        (5.0, torch.tensor([10, 20, 900, 950]), torch.tensor([1.0, 2.0, 90.0, 95.0])),
        (4.0, torch.tensor([3, 4, 50, 60]), torch.tensor([9.0, 9.0, 9.0, 9.0])),
    ]
    found = cheapest(FIT, levels, again=3)
    assert (found.first, found.second, found.limit, found.width) == (0, 1, 20, 5.0)
    alone = cheapest(FIT, levels, again=1000)
    assert (alone.first, alone.second, alone.limit, alone.width) == (1, 1, math.inf, 4.0)
