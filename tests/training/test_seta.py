"""SeTa: what an epoch leaves out, the window from easy to hard, the last epochs, and groups of losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softsieve.training import SeTaSampler
from softsieve.training.seta import group_values

LOSS = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(10) + torch.linspace(0, 0.1, 40)  # four groups of ten rows


def plans(epochs: int, **options: Any) -> list[Tensor]:
    """What every epoch visits when losses stay as they are."""
    chosen = {"prune": 0.0, "groups": 4, "window": 0.5, **options}
    sampler, found = SeTaSampler(40, epochs=epochs, **chosen), []
    for _ in range(epochs):
        plan = sampler.next_epoch()
        sampler.update(plan, LOSS[plan])
        found.append(plan)
    return found


def groups_of(plan: Tensor) -> list[int]:
    return sorted({int(loss) for loss in LOSS[plan]})


def test_the_window_goes_from_easy_to_hard_and_starts_again() -> None:
    found = plans(8, anneal=1.0)
    expected = [[0, 1, 2, 3], [0, 1], [1, 2], [2, 3], [0, 1], [1, 2], [2, 3], [0, 1]]
    assert [groups_of(plan) for plan in found] == expected
    assert [len(plan) for plan in found] == [40] + [20] * 7


def test_every_epoch_leaves_out_a_random_share() -> None:
    found = plans(6, prune=0.25, window=1.0)
    assert [len(plan) for plan in found] == [30] * 6
    assert len({tuple(plan.sort().values.tolist()) for plan in found}) == 6
    assert all(len(set(plan.tolist())) == 30 for plan in found)


def test_the_last_epochs_visit_all_groups() -> None:
    found = plans(8, anneal=0.75, prune=0.25)
    assert [len(groups_of(plan)) for plan in found[6:]] == [4, 4]
    assert [len(plan) for plan in found[6:]] == [30, 30]  # without the random share
    assert all(len(plan) < 30 for plan in found[1:6])


def test_rows_never_seen_are_visited() -> None:
    sampler = SeTaSampler(10, epochs=8, prune=0.0, groups=2, window=0.5)
    sampler.next_epoch()
    sampler.update(torch.tensor([0, 1, 2, 3]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert sampler.next_epoch().sort().values.tolist() == [0, 1, 4, 5, 6, 7, 8, 9]


def test_equal_losses_leave_no_epoch_empty() -> None:
    sampler = SeTaSampler(10, epochs=8)
    for _ in range(6):
        plan = sampler.next_epoch()
        assert len(plan) == 9
        sampler.update(plan, torch.ones(len(plan)))


def test_rows_count_alike() -> None:
    sampler = SeTaSampler(40, epochs=8)
    sampler.update(sampler.next_epoch(), torch.rand(36))
    sampler.next_epoch()
    assert sampler.weights.tolist() == [1.0] * 40


def test_the_order_is_random() -> None:
    first, again, other = (SeTaSampler(40, epochs=8, seed=seed).next_epoch() for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.tolist() != sorted(first.tolist())


def test_state() -> None:
    first, second = SeTaSampler(40, epochs=8), SeTaSampler(40, epochs=8)
    plan = first.next_epoch()
    first.update(plan, LOSS[plan])
    first.next_epoch()
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        assert torch.equal(first.next_epoch(), second.next_epoch())


def test_groups_are_those_of_the_nearest_centre() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.randn(n, generator=generator) * 0.1 + at for n, at in ((5, 0), (200, 3), (60, 9))])
    group = group_values(values, 3)
    assert torch.bincount(group).tolist() == [5, 200, 60]
    spread = torch.rand(500, generator=generator) ** 3
    group = group_values(spread, 6)
    centres = torch.stack([spread[group == number].double().mean() for number in range(6)])
    assert torch.equal((spread.double()[:, None] - centres).abs().argmin(1), group)
    assert centres.tolist() == sorted(centres.tolist())
    assert group_values(torch.tensor([1.0]), 5).shape == (1,)


@pytest.mark.parametrize("options", [{"prune": 1.0}, {"groups": 0}, {"window": 0.0}, {"anneal": 2.0}, {"epochs": 0}])
def test_bad_input(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SeTaSampler(**{"num_samples": 5, "epochs": 3, **options})
