"""Conformal quantiles and what depends on them."""

from __future__ import annotations

import warnings

import pytest
import torch

from softsieve import AdaptiveSoftmax
from softsieve.heads.coordinates.calibration import needed
from tests.heads.instances import gaussian, peaked, right


@pytest.mark.parametrize("delta", [0.01, 0.05, 0.1, 0.25, 0.5, 0.9])
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
        answer = head.topk(x[:3])
        assert answer.exact.all()
        assert right(answer, weight, x[:3], 0.3).all()


def test_smaller_delta_wider_intervals() -> None:
    weight, x = gaussian(20, 400, 200, torch.Generator().manual_seed(0))
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
    assert right(head.topk(x), weight, x, 0.3).double().mean() > 0.8


@pytest.mark.parametrize("options", [{"method": "exact"}, {"method": "coordinates", "guarantee": "pac"}], ids=str)
def test_nothing_to_calibrate(options: dict[str, str]) -> None:
    head = AdaptiveSoftmax(torch.zeros(5, 3), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="calibrate: expected guarantee='calibrated' and a method"):
        head.calibrate(torch.zeros(9, 3))


def test_refused_samples_leave_the_calibration() -> None:
    weight, x = peaked(20, 400, 60, torch.Generator().manual_seed(0))
    head = AdaptiveSoftmax(weight, delta=0.1, method="coordinates")
    before = head.calibrate(x)
    x[3, 3] = torch.nan
    with pytest.raises(ValueError, match="queries: expected finite numbers"):
        head.calibrate(x)
    assert head.calibrations == {1: before}


def test_every_k_has_its_own() -> None:
    weight, x = peaked(20, 400, 60, torch.Generator().manual_seed(0))
    head = AdaptiveSoftmax(weight, delta=0.1, method="coordinates")
    head.calibrate(x, 3)
    with pytest.raises(RuntimeError, match=r"not calibrated for k = 1, found calibrations for k = 3: call calibrate"):
        head.topk(x)
    with pytest.raises(RuntimeError, match="not calibrated for k = 0"):
        head.log_partition(x)
    head.calibrate(x, 0)
    assert sorted(head.calibrations) == [0, 3]
    assert right(head.topk(x, 3), weight, x, 0.3).double().mean() > 0.8
    assert head.log_partition(x).log_z.shape == (60,)
    with pytest.raises(ValueError, match=r"k: expected an int in \[0, 20\], found 21"):
        head.calibrate(x, 21)
