"""Histograms count every value once, and the terms are those of the expansion."""

from __future__ import annotations

import pytest
import torch

from experiments import histograms
from experiments.variance import instances
from softsieve.errors import InputError
from softsieve.heads.coordinates.estimators import ESTIMATORS, Estimate


def test_all_values_are_counted_where_they_are() -> None:
    values = torch.randn(3, 500)
    bins = histograms.histogram(values, 20)
    assert [bins[0][0], bins[-1][1]] == pytest.approx([values.min().item(), values.max().item()])
    assert sum(count for _, _, count in bins) == 1500
    low, high, count = bins[7]
    assert count == ((values >= low) & (values < high)).sum()


def test_logarithmic_bins_are_in_equal_ratios_and_keep_zeros() -> None:
    bins = histograms.histogram(torch.tensor([0.0, 1e-6, 1.0]), 2, logarithmic=True)
    assert [count for _, _, count in bins] == [1, 2]
    assert [end for _, end, _ in bins] == pytest.approx([1e-6, 1.0])
    assert sum(count for _, _, count in histograms.histogram(torch.zeros(5), 3, logarithmic=True)) == 5


def test_the_terms_are_those_of_the_expansion(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = instances(n=7, d=10, queries=5)[0]
    off = 1e-2 * torch.randn(5, 7, dtype=torch.float64)

    def estimate(weight: torch.Tensor, x: torch.Tensor, size: int, **_: object) -> Estimate:
        return Estimate(x.double() @ weight.double().T + off, torch.zeros(5, 7))

    monkeypatch.setitem(ESTIMATORS, histograms.ESTIMATOR, estimate)
    first, second = histograms.order_terms(instance, 3, generator=torch.Generator())
    exact = instance.queries.double() @ instance.weight.double().T
    ratio = ((exact + off).logsumexp(-1) - exact.logsumexp(-1)).exp()
    torch.testing.assert_close(1 + first + second, ratio, rtol=0, atol=2e-6)
    assert (1 + first - ratio).abs().max() > 1e-5  # so the second-order term is what is left of it
    assert second.gt(0).all()


def test_rows_are_bins_of_four_histograms() -> None:
    found = instances(n=20, d=64, queries=30)
    shares: list[float] = []
    rows = histograms.run(found, share=0.5, bins=11, progress=lambda _, share: shares.append(share))
    assert sum(shares) == pytest.approx(1)
    assert len(rows) == 2 * 4 * 11
    for name in ("gaussian", "heavy-tailed"):
        for what, values in {"A": 20 * 64, "x": 30 * 64, "first order": 30, "second order": 30}.items():
            here = [row for row in rows if row["data"] == name and row["what"] == what]
            assert sum(row["count"] for row in here) == values
            assert {row["size"] for row in here} == {32}
    assert len(histograms.draw(rows).axes) == 8


def test_more_coordinates_make_the_second_order_term_smaller() -> None:
    instance = instances(n=20, d=64, queries=30)[0]
    few, many, everything = (
        histograms.order_terms(instance, size, generator=torch.Generator().manual_seed(0))[1].mean()
        for size in (8, 32, 64)
    )
    assert few > 3 * many
    assert everything < 1e-9


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_a_share_that_cannot_be_is_refused(share: float) -> None:
    with pytest.raises(InputError, match="share: expected"):
        histograms.run([], share=share)
