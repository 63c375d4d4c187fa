"""All logits of a calibrated cascade go with its top k: the same largest, the same partition function."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve.heads.cascade import crossover
from softsieve.reference import heads as reference
from tests.heads.instances import KINDS, Maker, language, plausible, right, spectral

pytestmark = pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")

EPS = 0.3


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrations do not measure how long a batch takes."""
    monkeypatch.setattr(crossover, "measured_batch", lambda *_: 0)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check_agreement(head: AdaptiveSoftmax, x: Tensor, k: int) -> float:
    """Compare all logits with the top k; the share of rows that are only estimated, of queries that are not exact."""
    found, answer, exact = head.logits(x).double(), head.topk(x, k), reference.logits(head.weight, x)
    rounding = 1e-5 * (1 + exact.abs().amax(-1))
    first, best = found.argmax(-1), answer.indices[:, 0]
    lead = exact.gather(-1, best[:, None]) - exact.gather(-1, first[:, None])
    assert bool(((first == best) | (lead[:, 0].abs() <= rounding)).all())  # of tied rows any
    top = found.topk(k, -1).values
    assert bool(((top - answer.logits).abs() <= rounding[:, None]).all())

    off = (found.logsumexp(-1) - answer.log_z).abs()
    assert bool((off <= -math.log1p(-EPS)).all())
    assert bool((off <= 0.05 + rounding).all()), float(off.max())

    estimated = (found - exact).abs() > rounding[:, None]
    assert not bool(estimated.gather(-1, answer.indices).any())
    assert not bool((estimated & (found >= answer.logits[:, -1:])).any())
    return float(estimated[~answer.exact].double().mean()) if not answer.exact.all() else 0.0


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("kind", [*KINDS.values(), language, spectral], ids=lambda kind: kind.__name__)
def test_of_every_kind(kind: Maker, k: int) -> None:
    for seed in range(2):
        weight, x = kind(1200, 64, 500, generator(seed))
        head = AdaptiveSoftmax(weight, eps=EPS, delta=0.1, method="cascade")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "queries: no width")
            head.calibrate(x[:300], k, generator=generator(seed))
        share = check_agreement(head, x[300:], k)
        assert share > 0.5 or kind.__name__ in ("all_equal", "zero_query")  # which have no row to leave out


def test_estimates_of_queries_of_very_different_lengths() -> None:
    """None is above what the answer rests on, though squares of deviations go far beyond."""
    weight, x = spectral(5000, 64, 4000, generator())
    head = AdaptiveSoftmax(weight, method="cascade")
    head.calibrate(x[:2500], generator=generator())
    new = x[2500:]
    assert check_agreement(head, new, 1) > 0.9
    exact, answer, found = reference.logits(weight, new), head.topk(new), head.logits(new)
    wrong = int((~right(answer, weight, new, EPS)).sum())
    assert plausible(wrong, len(new), 0.01)
    assert int((found.argmax(-1) != exact.argmax(-1)).sum()) <= wrong
    assert plausible(int(((found.double().logsumexp(-1) - exact.logsumexp(-1)).abs() > 0.4).sum()), len(new), 0.01)
