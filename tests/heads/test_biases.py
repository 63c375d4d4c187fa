"""Biases far from the others', as of padding tokens: they decide neither the margins nor what is read."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve.heads.cascade import crossover
from softsieve.heads.cascade.calibration import needed
from softsieve.heads.cascade.fit import CascadeCalibration
from softsieve.reference import heads as reference
from tests.heads.instances import Maker, language, plausible, right, spectral

pytestmark = pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")

N, D, EPS, DELTA = 4000, 64, 0.3, 0.05


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrations do not measure how long a batch takes."""
    monkeypatch.setattr(crossover, "measured_batch", lambda *_: 0)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


Fitted = tuple[AdaptiveSoftmax, CascadeCalibration]


def fitted(weight: Tensor, bias: Tensor | None, x: Tensor, k: int) -> Fitted:
    head = AdaptiveSoftmax(weight, bias, eps=EPS, delta=DELTA, method="cascade")
    return head, head.calibrate(x, k, generator=generator())


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("kind", [spectral, language], ids=lambda kind: kind.__name__)
def test_a_few_low_ones_cost_nothing(kind: Maker, k: int) -> None:
    """Rows that can never win are read no more than without them."""
    weight, x = kind(N, D, 1200, generator())
    sample, new = x[:800], x[800:]
    rows = torch.randperm(N, generator=generator(1))[:10]
    _, without = fitted(weight, torch.zeros(N), sample, k)
    assert without.read < 0.35
    for low in (-10.0, -100.0, -1e30):
        bias = torch.zeros(N).index_fill(0, rows, low)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            head, fit = fitted(weight, bias, sample, k)
        assert fit.width < math.inf
        assert fit.read <= 1.3 * without.read, low
        answer = head.topk(new, k)
        wrong = int((~right(answer, weight, new, EPS, bias)).sum())
        assert plausible(wrong, len(new), DELTA), low
        assert not bool(torch.isin(answer.indices, rows).any()) or low == -10
        found = head.coverage(new, k)
        assert found.read <= 1.4 * without.read, low
        if low == -1e30:  # a bias counts exactly, whatever is estimated beside it
            exact = reference.logits(weight, new, bias)[:, rows]
            torch.testing.assert_close(head.logits(new)[:, rows].double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("high", [1e30, 1e5])
def test_one_that_always_wins(high: float) -> None:
    weight, x = language(N, D, 900, generator())
    bias = torch.zeros(N)
    bias[7] = high
    head, fit = fitted(weight, bias, x[:800], 1)
    assert fit.read < 0.1
    answer = head.topk(x[800:])
    assert not answer.exact.any()
    assert answer.indices.eq(7).all()
    assert answer.probs.eq(1).all()
    assert head.logits(x[800:]).argmax(-1).eq(7).all()
    assert head.sample(x[800:]).eq(7).all()


def test_biases_of_all_sizes() -> None:
    """Some decide, many do not."""
    weight, x = language(N, D, 1200, generator())
    bias = 2 * torch.randn(N, generator=generator(1))
    head, fit = fitted(weight, bias, x[:800], 8)
    answer = head.topk(x[800:], 8)
    assert plausible(int((~right(answer, weight, x[800:], EPS, bias)).sum()), 400, DELTA)
    assert fit.read < 0.3


# -- a calibration that ends up exact ----------------------------------------------------------------------------------


def test_a_calibration_that_ends_up_exact_says_so() -> None:
    """With queries enough, and no width that would do; the warning names the line that called."""
    weight, x = language(600, 32, 2 * needed(DELTA), generator())
    head = AdaptiveSoftmax(weight * 0 + weight[:1], eps=EPS, delta=DELTA, method="cascade")
    with pytest.warns(
        UserWarning, match="queries: no width of margins gives right answers .* for k = 3: every"
    ) as said:
        fit = head.calibrate(x, 3)
    assert [one.filename for one in said] == [__file__]
    assert fit.width == math.inf
    assert fit.read == 1
    assert head.topk(x, 3).exact.all()


def test_too_few_queries_are_said_to_be_that_alone() -> None:
    weight, x = language(600, 32, 2 * needed(DELTA) - 2, generator())
    head = AdaptiveSoftmax(weight, delta=DELTA, method="cascade")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        head.calibrate(x, 3)
    assert ["too few" in str(one.message) for one in said] == [True]
    assert [one.filename for one in said] == [__file__]
