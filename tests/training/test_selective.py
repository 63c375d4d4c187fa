"""Selective-Backprop: who is chosen how often, against how many losses, and that a state goes on as it would have."""

from __future__ import annotations

import pytest
import torch

from softsieve.training import SelectiveBackpropSampler
from tests.helpers import default_dtype


def share_chosen(beta: float, *, draws: int = 400) -> torch.Tensor:
    """How often each of 100 rows of increasing loss is chosen."""
    loss = torch.linspace(0, 5, 100)
    times = [SelectiveBackpropSampler(100, beta=beta, seed=seed).choose(loss) for seed in range(draws)]
    return torch.stack(times).double().mean(0)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_a_row_is_chosen_with_a_power_of_its_place_among_the_losses(beta: float) -> None:
    found = share_chosen(beta)
    expected = ((torch.arange(100, dtype=torch.float64) + 0.5) / 100) ** beta
    error = (expected * (1 - expected) / 400).sqrt()
    assert bool(((found - expected).abs() <= 5 * error + 0.005 * (beta > 0)).all())
    assert found.mean() == pytest.approx(1 / (1 + beta), abs=0.02)


def test_equal_losses_are_chosen_half_of_the_time() -> None:
    chosen = SelectiveBackpropSampler(10).choose(torch.zeros(4000))
    assert chosen.double().mean() == pytest.approx(0.5, abs=0.04)


def test_only_the_latest_losses_count() -> None:
    sampler = SelectiveBackpropSampler(500, history=100)
    sampler.choose(torch.full((500,), 9.0))
    assert sampler.latest.tolist() == [9.0] * 100
    sampler.choose(torch.ones(100))
    assert sampler.latest.tolist() == [1.0] * 100
    assert bool(sampler.choose(torch.full((1,), 2.0))) in (True, False)
    hard = [SelectiveBackpropSampler(500, history=100, seed=seed) for seed in range(50)]
    for other in hard:
        other.choose(torch.full((500,), 9.0))
        other.choose(torch.ones(99))
    assert all(bool(other.choose(torch.full((1,), 2.0))) for other in hard)  # 9.0 is forgotten: none was above


def test_no_more_losses_count_than_an_epoch_has() -> None:
    sampler = SelectiveBackpropSampler(60)
    sampler.choose(torch.full((60,), 9.0))
    assert 10 < sampler.choose(torch.ones(60)).sum() < 50  # nothing is left of the epoch before
    assert len(sampler.latest) == 60


def test_every_epoch_visits_every_row_in_another_order() -> None:
    sampler = SelectiveBackpropSampler(50)
    plans = [sampler.next_epoch() for _ in range(3)]
    assert all(plan.sort().values.tolist() == list(range(50)) for plan in plans)
    assert len({tuple(plan.tolist()) for plan in plans}) == 3
    assert torch.equal(SelectiveBackpropSampler(50).next_epoch(), plans[0])
    assert not torch.equal(SelectiveBackpropSampler(50, seed=1).next_epoch(), plans[0])


def test_each_block_is_drawn_anew() -> None:
    sampler, loss = SelectiveBackpropSampler(50), torch.linspace(0, 1, 200)
    assert not torch.equal(sampler.choose(loss), sampler.choose(loss))


def test_state() -> None:
    first, second = SelectiveBackpropSampler(50), SelectiveBackpropSampler(50)
    first.next_epoch()
    first.choose(torch.linspace(0, 1, 40))
    state = first.state_dict()
    second.load_state_dict(state)
    for sampler in (first, second):
        sampler.update(torch.arange(3), torch.zeros(3))  # tells nothing new
    loss = torch.linspace(0, 2, 40)
    assert torch.equal(first.choose(loss), second.choose(loss))
    assert torch.equal(first.next_epoch(), second.next_epoch())
    assert len(state["latest"]) == 40  # a copy
    with pytest.raises(ValueError, match="expected at most 30 numbers in latest, found 40"):
        SelectiveBackpropSampler(50, history=30).load_state_dict(state)
    with pytest.raises(ValueError, match="plan"):
        SelectiveBackpropSampler(49).load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    loss = torch.linspace(0, 1, 300)
    plain = SelectiveBackpropSampler(50).choose(loss)
    with default_dtype(dtype):
        assert torch.equal(SelectiveBackpropSampler(50).choose(loss), plain)


@pytest.mark.parametrize("options", [{"beta": -1.0}, {"history": 0}, {"seed": -1}])
def test_bad_input(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SelectiveBackpropSampler(1, **options)  # type: ignore[arg-type]
