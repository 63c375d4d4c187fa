"""What is promised, over independent instances and seeds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve.heads.coordinates.bounds import Bounds, Computed, Declared
from softsieve.heads.reader import Reader
from tests.heads.instances import KINDS, Maker, common, gaussian, heavy_tailed, peaked, plausible, right

N, D, EPS, DELTA = 24, 300, 0.3, 0.2
TRIALS = {"calibrated": 8}  # a calibration each, which takes long; the others 30


def hoeffding(weight: Tensor, x: Tensor) -> float:
    """A declared noise that is true: pulls within a range are sub-Gaussian with a quarter of its square."""
    pulls = weight[None] * x[:, None] * weight.shape[1]
    return float((pulls.amax(-1) - pulls.amin(-1)).max()) ** 2 / 4


def made(kind: Maker, mode: str, k: int | list[int], seed: int) -> tuple[AdaptiveSoftmax, Tensor, torch.Generator]:
    """A head and a query of its own."""
    g = torch.Generator().manual_seed(seed)
    weight, x = kind(N, D, 25, g)
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
        head.calibrate(x[1:], k, generator=g)
    return head, x[:1], g


@pytest.mark.parametrize("mode", ["computed", "declared", "calibrated", "estimated", "rotated"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_answers(kind: Maker, mode: str) -> None:
    trials = TRIALS.get(mode, 30)
    failures = dict.fromkeys((1, 8) if mode == "calibrated" else (1, 2, 8, N), 0)
    for trial in range(trials):
        head, x, g = made(kind, mode, list(failures), trial)  # one for all k, each of which is judged by itself
        for k in failures:
            answer = head.topk(x, k, generator=g)
            assert int(answer.coordinates) <= N * D * (3 if mode == "rotated" else 1)
            failures[k] += int(~right(answer, head.weight, x, EPS))
    assert all(plausible(count, trials, DELTA) for count in failures.values()), failures


@pytest.mark.parametrize("mode", ["computed", "declared", "calibrated"])
def test_normaliser(mode: str) -> None:
    failures, trials = 0, 16 if mode == "calibrated" else 40
    for trial in range(trials):
        head, x, g = made(peaked if trial % 2 else gaussian, mode, 0, trial)
        found = head.log_partition(x, generator=g)
        truth = (x.double() @ head.weight.double().T).logsumexp(-1)
        low, high = found.log_z_interval.double().unbind(-1)
        inside = bool((low - 1e-4 <= truth) & (truth <= high + 1e-4))
        failures += not (inside and abs(float((found.log_z - truth).exp()) - 1) <= EPS + 1e-4)
    assert plausible(failures, trials, DELTA)


# -- the intervals themselves, which a failure of theirs must not hide behind answers that are right all the same ------


def worst(bounds: Bounds, reader: Reader, x: Tensor, g: torch.Generator) -> Tensor:
    """Largest error over rows and rounds in half widths, for every query."""
    exact = x @ reader.weight.T
    found = torch.zeros(len(x))
    query, row = (at.flatten() for at in torch.meshgrid(torch.arange(len(x)), torch.arange(reader.rows), indexing="ij"))
    for round in bounds.rounds(x, g):
        value, squares = reader.entries(query, row, round.coords, round.factor, round.root)
        value = value + round.offset[query]
        error = (value.view(exact.shape) - exact).abs()
        half = round.half(query, row, squares).view(exact.shape)
        found = torch.maximum(found, (error / half.clamp_min(1e-4)).amax(-1))
    return found


@pytest.mark.parametrize("kind", [gaussian, peaked, common, heavy_tailed])
def test_computed_intervals(kind: Maker) -> None:
    """They hold, and are no wider than they have to be by an order of magnitude."""
    broken, sizes = 0, []
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        weight, x = kind(N, 2000, 1, g)
        reader = Reader(weight)
        ratio = worst(Computed(reader, 0.05), reader, x, g)
        broken += int((ratio > 1).any())
        sizes.append(ratio)
    assert plausible(broken, 60, 0.05)
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


@pytest.mark.parametrize("read_chosen", [True, False])
def test_calibrated_answers_are_right_as_often_as_promised(read_chosen: bool) -> None:
    """Not less, and not much more where reading less is possible: widths are no wider than they have to be."""
    wrong = trials = 0
    for seed in range(15):
        g = torch.Generator().manual_seed(seed)
        weight, x = gaussian(N, 600, 100, g)
        head = AdaptiveSoftmax(weight, eps=EPS, delta=DELTA, method="coordinates", read_chosen=read_chosen)
        head.calibrate(x[:60], 2, generator=g)
        answer = head.topk(x[60:], 2, generator=g)
        low, high = answer.log_z_interval.unbind(-1)
        log_z = (x[60:].double() @ weight.double().T).logsumexp(-1)
        fine = right(answer, weight, x[60:], EPS) & (low - 1e-4 <= log_z) & (log_z <= high + 1e-4)
        wrong += int((~fine).sum())
        trials += 40
    share = wrong / trials  # correlated within a head, so no binomial test here
    assert 0.04 < share < DELTA + 0.03, share


# -- ties --------------------------------------------------------------------------------------------------------------


def test_ties_end_and_have_the_right_probability() -> None:
    weight = torch.randn(1, 500, generator=torch.Generator().manual_seed(0)).repeat(50, 1)
    head = AdaptiveSoftmax(weight, method="coordinates", guarantee="pac")
    answer = head.topk(weight[:2] / 100, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(answer.probs, torch.full((2, 3), 1 / 50), rtol=1e-4, atol=0)
    assert all(len(set(row)) == 3 for row in answer.indices.tolist())
