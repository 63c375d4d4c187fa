"""What is promised, over independent instances and seeds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve.heads.bounds import Bounds, Calibrated, Computed, Declared
from softsieve.heads.calibration import calibrate
from softsieve.heads.reader import Reader
from tests.heads.instances import KINDS, Maker, gaussian, heavy_tailed, peaked, plausible, right

N, D, EPS, DELTA = 24, 300, 0.3, 0.2
TRIALS = 30


def hoeffding(weight: Tensor, x: Tensor) -> float:
    """A declared noise that is true: pulls within a range are sub-Gaussian with a quarter of its square."""
    pulls = weight[None] * x[:, None] * weight.shape[1]
    return float((pulls.amax(-1) - pulls.amin(-1)).max()) ** 2 / 4


def made(kind: Maker, mode: str, seed: int) -> tuple[AdaptiveSoftmax, Tensor, torch.Generator]:
    """A head and a query of its own."""
    g = torch.Generator().manual_seed(seed)
    weight, x = kind(N, D, 31, g)
    options: dict[str, object] = {"eps": EPS, "delta": DELTA, "method": "coordinates", "guarantee": "pac"}
    if mode == "declared":
        options["noise"] = hoeffding(weight, x)
    if mode == "calibrated":
        options["guarantee"] = "calibrated"
    if mode == "estimated":
        options["read_chosen"] = False
    if mode == "rotated":
        options["rotate"] = True
    head = AdaptiveSoftmax(weight, **options)  # type: ignore[arg-type]
    if mode == "calibrated":
        head.calibrate(x[1:], generator=g)
    return head, x[:1], g


@pytest.mark.parametrize("mode", ["computed", "declared", "calibrated", "estimated", "rotated"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_answers(kind: Maker, mode: str) -> None:
    for k in (1, 2, 8, N):
        failures = 0
        for trial in range(TRIALS):
            head, x, g = made(kind, mode, 1000 * k + trial)
            answer = head.topk(x, k, generator=g)
            assert int(answer.coordinates) <= N * D * (3 if mode == "rotated" else 1)
            failures += int(~right(answer, head.weight, x, EPS))
        assert plausible(failures, TRIALS, DELTA), (k, failures)


@pytest.mark.parametrize("mode", ["computed", "declared", "calibrated"])
def test_normaliser(mode: str) -> None:
    failures = 0
    for trial in range(60):
        head, x, g = made(peaked if trial % 2 else gaussian, mode, trial)
        found = head.log_partition(x, generator=g)
        truth = (x.double() @ head.weight.double().T).logsumexp(-1)
        low, high = found.log_z_interval.double().unbind(-1)
        inside = bool((low - 1e-4 <= truth) & (truth <= high + 1e-4))
        failures += not (inside and abs(float((found.log_z - truth).exp()) - 1) <= EPS + 1e-4)
    assert plausible(failures, 60, DELTA)


# -- the intervals themselves, which a failure of theirs must not hide behind answers that are right all the same ------


def worst(bounds: Bounds, reader: Reader, x: Tensor, g: torch.Generator) -> Tensor:
    """Largest error over rows and rounds in half widths, for every query."""
    exact = x @ reader.weight.T
    found = torch.zeros(len(x))
    query, row = (at.flatten() for at in torch.meshgrid(torch.arange(len(x)), torch.arange(reader.rows), indexing="ij"))
    for round in bounds.rounds(x, g):
        value, squares = reader.entries(query, row, round.coords, round.factor, round.square)
        value = value + round.offset[query]
        error = (value.view(exact.shape) - exact).abs()
        half = round.half(query, row, squares).view(exact.shape)
        found = torch.maximum(found, (error / half.clamp_min(1e-4)).amax(-1))
    return found


@pytest.mark.parametrize("kind", [gaussian, peaked, heavy_tailed])
def test_computed_intervals(kind: Maker) -> None:
    """They hold, and are no wider than they have to be by an order of magnitude."""
    broken, sizes = 0, []
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        weight, x = kind(N, 2000, 5, g)
        reader = Reader(weight)
        ratio = worst(Computed(reader, DELTA), reader, x, g)
        broken += int((ratio > 1).any())
        sizes.append(ratio)
    assert plausible(broken, 40, 5 * DELTA if 5 * DELTA < 1 else 0.999)
    assert float(torch.cat(sizes).median()) > 0.1


def test_declared_intervals() -> None:
    broken = 0
    for seed in range(200):
        g = torch.Generator().manual_seed(seed)
        weight, x = gaussian(N, 2000, 1, g)
        reader = Reader(weight)
        variance = float((weight * x * 2000).var(-1, correction=0).max())
        broken += int((worst(Declared(reader, variance, DELTA), reader, x, g) > 1).any())
    assert plausible(broken, 200, DELTA)


def test_calibrated_intervals_hold_as_often_as_promised() -> None:
    """Not less, and not much more: on average 1 - delta and up to one query of the sample above."""
    broken = trials = 0
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        weight, x = peaked(N, 400, 90, g)
        reader = Reader(weight)
        sample, later = x[:60], x[60:]
        found = calibrate(reader, reader, sample, sample, DELTA, generator=g)
        broken += int((worst(Calibrated(reader, found.scale), reader, later, g) > 1).sum())
        trials += len(later)
    share = broken / trials  # correlated within a head, so no binomial test here
    assert DELTA - 1 / 40 - 0.05 < share < DELTA + 0.04


# -- ties --------------------------------------------------------------------------------------------------------------


def test_ties_end_and_have_the_right_probability() -> None:
    weight = torch.randn(1, 500, generator=torch.Generator().manual_seed(0)).repeat(50, 1)
    head = AdaptiveSoftmax(weight, method="coordinates", guarantee="pac")
    answer = head.topk(weight[:2] / 100, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(answer.probs, torch.full((2, 3), 1 / 50), rtol=1e-4, atol=0)
    assert all(len(set(row)) == 3 for row in answer.indices.tolist())
