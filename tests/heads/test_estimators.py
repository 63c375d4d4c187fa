"""Unbiased, with the variance they say they have; exact when everything is read."""

from __future__ import annotations

import pytest
import torch

from softsieve.heads.coordinates.estimators import (
    ESTIMATORS,
    arrivals,
    importance,
    importance_without,
    inclusion,
    prefix,
)
from softsieve.reference.heads import horvitz_thompson
from tests.heads.instances import heavy_tailed

WEIGHT, X = (made.double() for made in heavy_tailed(6, 40, 1, torch.Generator().manual_seed(3)))
MANY = X.expand(40_000, -1)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_mean_and_variance(name: str) -> None:
    found = ESTIMATORS[name](WEIGHT, MANY, 12, generator=torch.Generator().manual_seed(0))
    exact = X @ WEIGHT.T
    spread = found.value.var(0)
    assert ((found.value.mean(0) - exact).abs() < 5 * (spread / len(MANY)).sqrt()).all()
    torch.testing.assert_close(found.variance.mean(0), spread, rtol=0.1, atol=0)


@pytest.mark.parametrize("name", ["uniform-without", "importance-without"])
def test_everything_is_exact(name: str) -> None:
    found = ESTIMATORS[name](WEIGHT, X.expand(3, -1), 40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.value, (X @ WEIGHT.T).expand(3, -1))
    assert float(found.variance.abs().max()) < 1e-12


def test_importance_without_is_best_here() -> None:
    spread = {
        name: float(f(WEIGHT, MANY[:4000], 12, generator=torch.Generator().manual_seed(0)).value.var(0).sum())
        for name, f in ESTIMATORS.items()
    }
    assert min(spread, key=lambda name: spread[name]) == "importance-without"


@pytest.mark.parametrize("name", ESTIMATORS)
def test_zero_query(name: str) -> None:
    found = ESTIMATORS[name](WEIGHT, torch.zeros_like(X), 5, generator=torch.Generator().manual_seed(0))
    assert found.value.eq(0).all()
    assert found.variance.eq(0).all()


def test_against_the_reference() -> None:
    found = importance_without(WEIGHT, X, 7, generator=torch.Generator().manual_seed(5))
    weights = importance(WEIGHT, X)
    arrived = arrivals(weights, generator=torch.Generator().manual_seed(5))
    order = arrived.argsort(-1)
    pi = prefix(weights, arrived, order, 7)[0]
    for row in range(6):
        value, variance = horvitz_thompson(WEIGHT[row], X[0], order[0, :7].tolist(), pi)
        assert float(found.value[0, row]) == pytest.approx(value)
        assert float(found.variance[0, row]) == pytest.approx(variance)


def test_arrivals_are_gumbel_keys() -> None:
    """The first to arrive is j with probability w_j / sum w; of weight 0, never."""
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    times = arrivals(weights.expand(200_000, -1), generator=g)
    first = torch.bincount(times.argmin(-1), minlength=4) / 200_000
    torch.testing.assert_close(first.double(), weights / 8, rtol=0, atol=5e-3)
    assert times[:, 0].isinf().all()
    there = (times <= 0.3).double().mean(0)
    torch.testing.assert_close(there[1:], inclusion(weights, torch.tensor(0.3))[1:], rtol=0, atol=5e-3)
