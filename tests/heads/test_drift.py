"""Queries from elsewhere: of the answers that would be wrong, few go unnoticed; and others are not suspected."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve.heads import DriftWarning
from softsieve.heads.cascade import calibration as cascade_calibration
from softsieve.heads.cascade import crossover
from softsieve.heads.cascade.cpu import CpuCascade
from softsieve.heads.cascade.fit import CascadeCalibration, Fallback
from tests.heads.instances import Made, Maker, common, language, peaked, plausible, right, spectral

N, D, DELTA = 2000, 64, 0.01
CALIBRATION, NEW = 1600, 1000


@pytest.fixture(autouse=True, scope="module")
def _untimed() -> Iterator[None]:
    """Calibrations do not measure how long a batch takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossover, "measured_batch", lambda *_: 0)
        yield


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def of_one_length(n: int, d: int, count: int, g: torch.Generator) -> Made:
    """As `spectral`, but that lengths of queries are alike."""
    scale = torch.arange(1, d + 1) ** -0.5
    return torch.randn(n, d, generator=g) * scale, torch.randn(count, d, generator=g) * scale * 8


def around_a_mean(n: int, d: int, count: int, g: torch.Generator) -> Made:
    """Queries on one side of the origin."""
    weight, x = of_one_length(n, d, count, g)
    return weight, x + 3 * torch.randn(1, d, generator=g)


def topics(n: int, d: int, count: int, g: torch.Generator) -> Made:
    """Four rows win by far, each by a direction of its own. Queries without these are a contest of all others."""
    weight, directions = torch.randn(n, d, generator=g), torch.linalg.qr(torch.randn(d, 4, generator=g)).Q.T
    weight[:4] += 30 * directions
    x = torch.randn(count, d, generator=g) * (10 / d**0.5)
    return weight, x + 30 * directions[torch.randint(4, (count,), generator=g)]


class Known(NamedTuple):
    """A calibrated head, the same without detection, and queries."""

    head: AdaptiveSoftmax
    fit: CascadeCalibration
    credulous: CascadeCalibration
    sample: Tensor
    new: Tensor


@functools.cache
def calibrated(kind: Maker, seed: int, k: int = 1) -> Known:
    g = generator(seed)
    weight, x = kind(N, D, CALIBRATION + NEW, g)
    head = AdaptiveSoftmax(weight, delta=DELTA, method="cascade")
    fit = head.calibrate(x[:CALIBRATION], k, generator=g)
    assert fit.width < math.inf
    credulous = fit._replace(
        low=0.0, high=math.inf, signal=0.0, toward_low=-2.0, toward_high=2.0, most=math.inf, flat=math.inf
    )
    return Known(head, fit, credulous, x[:CALIBRATION], x[CALIBRATION:])


def judged(known: Known, x: Tensor) -> tuple[Tensor, Tensor]:
    """Which answers would be wrong without detection, and which queries it sends to the exact product."""
    engine = known.head._engine
    assert isinstance(engine, CpuCascade)
    truth = cascade_calibration.truth(engine.layer.reader, x, None, known.fit.k)
    wrong = ~cascade_calibration.right(engine.trials(x, [known.credulous])[0], truth, known.credulous)
    return wrong, engine.trials(x, [known.fit])[0].fallback == Fallback.DRIFTED


def drifts(x: Tensor, sample: Tensor) -> dict[str, Tensor]:
    """Queries that are no longer like the sample."""
    turn = torch.linalg.qr(torch.randn(D, D, generator=generator(9))).Q
    main = torch.linalg.eigh(sample.T @ sample).eigenvectors.flip(1)
    changed = {"rotated": x @ turn, "negated": -x, "a tenth": x / 10, "ten times": 10 * x}
    for count in (D // 16, D // 8, D // 4):
        kept = main[:, count:]
        changed[f"without {count} directions"] = x @ kept @ kept.T
    return {name: value.contiguous() for name, value in changed.items()}


FAMILIES = [spectral, of_one_length, around_a_mean, language, common, peaked, topics]


@pytest.mark.parametrize("kind", FAMILIES, ids=lambda kind: kind.__name__)
def test_wrong_answers_come_after_a_fallback(kind: Maker) -> None:
    """At least 95 % of them, or no more than delta of all answers are wrong without one."""
    known = calibrated(kind, 0)
    for name, x in drifts(known.new[:400], known.sample).items():
        wrong, fallback = judged(known, x)
        missed = wrong & (fallback.cumsum(0) == 0)
        few = int(missed.sum()) <= 0.05 * int(wrong.sum())
        assert few or plausible(int((wrong & ~fallback).sum()), len(x), DELTA), (name, int(wrong.sum()))


def test_queries_of_the_same_kind_are_not_suspected() -> None:
    """Of exchangeable ones, no more than half of delta, over heads and calibrations."""
    suspected = trials = 0
    for kind in FAMILIES:
        for seed in range(2):
            known = calibrated(kind, seed)
            _, fallback = judged(known, known.new)
            assert plausible(int(fallback.sum()), len(fallback), DELTA / 2), kind.__name__
            suspected, trials = suspected + int(fallback.sum()), trials + len(fallback)
    assert plausible(suspected, trials, DELTA / 2), suspected


@pytest.mark.parametrize("change", ["negated", "without 4 directions"])
def test_they_are_answered_exactly_with_a_warning(change: str) -> None:
    """Whatever is asked."""
    known = calibrated(topics, 0)
    head, x = known.head, drifts(known.new[:50], known.sample)[change]
    with pytest.warns(DriftWarning, match="50 of 50 queries are unlike those of the calibration"):
        answer = head.topk(x)
    assert answer.exact.all()
    assert right(answer, head.weight, x, 1e-5).all()
    with pytest.warns(DriftWarning):
        torch.testing.assert_close(head.logits(x), x @ head.weight.T, rtol=1e-5, atol=1e-4)
