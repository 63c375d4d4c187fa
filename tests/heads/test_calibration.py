"""Conformal quantiles and what depends on them."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from softsieve import AdaptiveSoftmax
from softsieve.heads.calibration import conformal_quantile, needed
from tests.heads.instances import peaked, right


@pytest.mark.parametrize("delta", [0.01, 0.05, 0.1, 0.3])
def test_quantile_covers_one_more(delta: float) -> None:
    """Of N + 1 exchangeable scores the last exceeds the quantile of the others with probability delta at most."""
    g = torch.Generator().manual_seed(0)
    scores = torch.rand(4000, 120, generator=g)
    exceeded = sum(float(row[-1]) > conformal_quantile(row[:-1], delta) for row in scores) / len(scores)
    assert delta - 1 / 120 - 0.02 < exceeded < delta + 0.02


def test_quantile_of_too_few() -> None:
    scores = torch.arange(98.0)
    assert conformal_quantile(scores, 0.01) == math.inf
    assert conformal_quantile(torch.arange(99.0), 0.01) == 98
    assert conformal_quantile(torch.arange(1000.0), 0.01) == 990


@pytest.mark.parametrize("delta", [0.003, 0.01, 0.05, 0.1, 0.25, 0.5, 0.9])
def test_needed_is_just_enough(delta: float) -> None:
    fewest = needed(delta)
    weight, x = peaked(10, 200, max(2, fewest), torch.Generator().manual_seed(0))
    head = AdaptiveSoftmax(weight, delta=delta, method="coordinates")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert head.calibrate(x[:fewest]).scale.isfinite().all()
    if fewest > 1:
        with pytest.warns(UserWarning, match=f"too few for delta {delta:g}, which takes {fewest}"):
            assert head.calibrate(x[: fewest - 1]).scale.isinf().all()
        answer = head.topk(x[:3], 2)
        assert answer.exact.all()
        assert right(answer, weight, x[:3], 0.3).all()


def test_smaller_delta_wider_intervals() -> None:
    weight, x = peaked(20, 400, 300, torch.Generator().manual_seed(0))
    widths = []
    for delta in (0.3, 0.1, 0.02):
        head = AdaptiveSoftmax(weight, delta=delta, method="coordinates")
        widths.append(float(head.calibrate(x, generator=torch.Generator().manual_seed(1)).scale.sum()))
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]


def test_degenerate_samples() -> None:
    """Zero and sparse queries, which a prefix reads in full, count as exactly right."""
    weight, x = peaked(20, 400, 60, torch.Generator().manual_seed(0))
    x[::3] = 0
    x[1::3, 10:] = 0
    head = AdaptiveSoftmax(weight, delta=0.1, method="coordinates")
    assert head.calibrate(x, generator=torch.Generator().manual_seed(1)).scale.isfinite().all()
    assert right(head.topk(x, 2), weight, x, 0.3).double().mean() > 0.8


@pytest.mark.parametrize("options", [{}, {"method": "exact"}, {"method": "coordinates", "guarantee": "pac"}], ids=str)
def test_nothing_to_calibrate(options: dict[str, str]) -> None:
    head = AdaptiveSoftmax(torch.zeros(5, 3), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="calibrate: expected method='coordinates' and guarantee='calibrated'"):
        head.calibrate(torch.zeros(9, 3))


def test_refused_samples_leave_the_calibration() -> None:
    weight, x = peaked(20, 400, 60, torch.Generator().manual_seed(0))
    head = AdaptiveSoftmax(weight, delta=0.1, method="coordinates")
    before = head.calibrate(x)
    x[3, 3] = torch.nan
    with pytest.raises(ValueError, match="queries: expected finite numbers"):
        head.calibrate(x)
    assert head.calibration is before
