"""InfoBatch: what an epoch leaves out, and that its weighted sum has the whole data set's as expectation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from softsieve.training import InfoBatchSampler
from tests.helpers import default_dtype


def losses(rows: int, below: int) -> Tensor:
    """So many of them below the mean, each different."""
    loss = torch.linspace(0, 0.1, rows)
    loss[below:] += 1
    return loss[torch.randperm(rows, generator=torch.Generator().manual_seed(3))]


def second_epoch(loss: Tensor, **settings: float) -> InfoBatchSampler:
    chosen = {"epochs": 100, **settings}
    sampler = InfoBatchSampler(len(loss), **chosen)  # type: ignore[arg-type]
    plan = sampler.next_epoch()
    sampler.update(plan, loss[plan])
    sampler.next_epoch()
    return sampler


def test_first_epoch_visits_every_row_once() -> None:
    sampler = InfoBatchSampler(50, epochs=3)
    assert sampler.next_epoch().sort().values.tolist() == list(range(50))
    assert sampler.weights.tolist() == [1.0] * 50


def test_only_rows_below_the_mean_are_left_out_and_weighted_up() -> None:
    loss = losses(50, 20)
    sampler = second_epoch(loss, prune=0.75)
    below = loss < loss.mean()
    assert len(sampler.plan) == len(set(sampler.plan.tolist())) == 30 + 5
    assert set((~below).nonzero().flatten().tolist()) <= set(sampler.plan.tolist())
    assert torch.equal(sampler.weights, torch.where(below, 4.0, 1.0))


@pytest.mark.parametrize(
    ("below", "prune"),
    [
        (20, 0.5),
        (20, 0.25),
        (40, 0.9),
        (21, 0.5),
    ],
)
def test_expected_gradient_is_that_of_all_rows(below: int, prune: float) -> None:
    loss = losses(50, below)
    gradient = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) + 1
    sums = []
    for seed in range(400):
        sampler = second_epoch(loss, prune=prune, seed=seed)
        assert sampler.weights[sampler.plan].sum() == pytest.approx(50)
        sums.append((sampler.weights.double() * gradient)[sampler.plan].sum())
    found = torch.stack(sums)
    error = found.std() / len(found) ** 0.5
    assert abs(found.mean() - gradient.sum()) <= 4 * error + 1e-5
    assert error < 0.05 * gradient.sum()


def test_the_last_epochs_visit_everything() -> None:
    sampler = InfoBatchSampler(40, epochs=8, anneal=0.75)
    loss, visited = losses(40, 20), []
    for _ in range(8):
        visited.append(len(sampler.next_epoch()))
        sampler.update(torch.arange(40), loss)
    assert visited == [40] + [30] * 5 + [40] * 2
    assert sampler.weights.tolist() == [1.0] * 40


def test_rows_never_seen_are_visited() -> None:
    sampler = InfoBatchSampler(10, epochs=100)
    sampler.next_epoch()
    sampler.update(torch.tensor([0, 1, 2, 3]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert {2, 3, 4, 5, 6, 7, 8, 9} < set(sampler.next_epoch().tolist())


def test_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = InfoBatchSampler(50, epochs=3, seed=seed)
        return [sampler.next_epoch() for _ in range(epoch + 1)][-1].tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(2) for epoch in range(2)}) == 4


def test_state() -> None:
    first, second = second_epoch(losses(50, 20)), InfoBatchSampler(50, epochs=100)
    second.load_state_dict(first.state_dict())
    assert second.epoch == 1
    assert torch.equal(second.plan, first.plan)
    assert torch.equal(second.weights, first.weights)
    for sampler in (first, second):
        sampler.update(torch.arange(25), torch.full((25,), 0.5))
    assert torch.equal(first.next_epoch(), second.next_epoch())
    with pytest.raises(ValueError, match="state: expected 49 samples, found 50"):
        InfoBatchSampler(49, epochs=100).load_state_dict(first.state_dict())


def test_state_is_a_copy() -> None:
    sampler = second_epoch(losses(50, 20))
    state = sampler.state_dict()
    sampler.update(torch.arange(50), torch.zeros(50))
    assert state["loss"].max() > 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    loss = losses(50, 20)
    plain = second_epoch(loss)
    with default_dtype(dtype):
        found = second_epoch(loss)
        again = InfoBatchSampler(50, epochs=100)
        again.load_state_dict(plain.state_dict())
    assert torch.equal(found.plan, plain.plan)
    assert torch.equal(found.weights, plain.weights)
    assert torch.equal(again.loss, found.loss)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="num_samples"):
        InfoBatchSampler(0, epochs=1)
    with pytest.raises(ValueError, match="epochs"):
        InfoBatchSampler(1, epochs=0)
    with pytest.raises(ValueError, match="prune"):
        InfoBatchSampler(1, epochs=1, prune=1)
    with pytest.raises(ValueError, match="anneal"):
        InfoBatchSampler(1, epochs=1, anneal=1.5)
