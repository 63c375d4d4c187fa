"""From intervals to answers: arithmetic, so it is checked against all logits that the intervals allow."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from softsieve.heads.coordinates import algorithm
from softsieve.heads.coordinates.algorithm import Problem
from softsieve.heads.reader import Reader


def corners(low: Tensor, high: Tensor) -> Tensor:
    """All logits at ends of the intervals (n,), (2 ** n, n)."""
    return torch.tensor(list(itertools.product(*zip(low.tolist(), high.tolist(), strict=True))), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_probabilities(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    low = torch.randn(1, 6, generator=g).double()
    high = low + torch.rand(1, 6, generator=g) * 2
    p = corners(low[0], high[0]).softmax(-1)
    exponentials = algorithm._exponentials(low, high)
    least, greatest = algorithm._probabilities(
        low, high, exponentials, algorithm._sums(exponentials), torch.arange(6)[None]
    )
    torch.testing.assert_close(least[0], p.amin(0))
    torch.testing.assert_close(greatest[0], p.amax(0))


def unsettled(low: Tensor, high: Tensor, k: int, eps: float = 0.3, read_chosen: bool = False) -> tuple[Tensor, Tensor]:
    """Of one query."""
    reader = Reader(torch.zeros(len(low), 1))
    problem = Problem(reader, reader, torch.zeros(1, 1), torch.zeros(1, 1), None, k, eps, read_chosen)
    wanted, chosen = algorithm._unsettled(problem, low[None], high[None], low[None] == high[None])
    return wanted[0], chosen[0]


@pytest.mark.parametrize("k", [0, 1, 2, 4])
@pytest.mark.parametrize("read_chosen", [False, True])
def test_settled_means_right(k: int, read_chosen: bool) -> None:
    """When nothing is wanted any more, every logit that the intervals allow has the same answer."""
    settled = 0
    for seed in range(400):
        g = torch.Generator().manual_seed(seed)
        low = torch.randn(5, generator=g).double() * 4
        high = low + torch.rand(5, generator=g) * float(torch.rand(1, generator=g))
        known = torch.rand(5, generator=g) < 0.7
        high = torch.where(known, low, high)
        wanted, chosen = unsettled(low, high, k, read_chosen=read_chosen)
        if wanted.any() or chosen.any():
            continue
        settled += 1
        logits = corners(low, high)
        if k == 0:
            z = logits.exp().sum(-1)
            assert (z.max() - z.min()) <= 0.3 * (z.max() + z.min()) * (1 + 1e-9)
            continue
        index = low.topk(k).indices
        assert (logits[:, index].amin(-1) >= logits.topk(k).values[:, -1] - 1e-9).all()
        p = logits.softmax(-1)[:, index]
        assert (p.amax(0) - p.amin(0) <= 0.3 * (p.amax(0) + p.amin(0)) * (1 + 1e-9)).all()
        assert not read_chosen or known[index].all()
    assert settled > 5


def test_against_the_kth_not_the_best() -> None:
    """The second and third are not told apart, though the first is far above both."""
    low, high = torch.tensor([9.0, 2.0, 1.5, -9.0]), torch.tensor([9.0, 2.2, 2.1, -8.0])
    wanted, chosen = unsettled(low, high, 2)
    assert wanted.tolist() == [False, True, True, False]
    assert not chosen.any()


def test_tied_rows_that_are_known_are_settled() -> None:
    low = torch.tensor([1.0, 1.0, 1.0, 0.0])
    wanted, chosen = unsettled(low, low.clone(), 2)
    assert not wanted.any()
    assert not chosen.any()


def test_chosen_rows_are_read_once_they_are_decided() -> None:
    low, high = torch.tensor([3.0, 1.0, 0.0]), torch.tensor([3.5, 2.0, 0.5])
    wanted, chosen = unsettled(low, high, 1, read_chosen=True)
    assert chosen.tolist() == [True, False, False]
    assert not wanted.any()


def test_effort_goes_where_the_mass_is() -> None:
    low = torch.tensor([5.0, 4.0, -20.0, -20.0])
    high = torch.tensor([5.9, 4.9, -10.0, -10.0])
    assert unsettled(low, high, 0, eps=0.1)[0].tolist() == [True, True, False, False]
