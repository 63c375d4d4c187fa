"""SolvedSampler: whom it visits, what it knows of relapses and slips, and how far it trusts that."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from softsieve import as_cross_entropy
from softsieve.training import SolvedSampler
from softsieve.training.sampler import ABOVE, BANDS, BELOW, LEADING, LOWEST, SAFEST, UNSEEN
from tests.helpers import default_dtype
from tests.training.helpers import Net, points

HIGHEST = BANDS - 1
UNKNOWN = [1.0] * LEADING + [0.5] * (BANDS - LEADING)  # rates before anything was seen


def visit(sampler: SolvedSampler, margins: Tensor) -> set[int]:
    """One epoch over the plan, in batches, in which rows have these margins, or are solved."""
    plan = sampler.next_epoch()
    for rows in torch.split(plan, 1 + len(plan) // 100):
        sampler.update(rows, margins[rows])
    return set(plan.tolist())


def where(flags: Tensor) -> set[int]:
    return set(flags.nonzero().flatten().tolist())


def picked(sampler: SolvedSampler) -> Tensor:
    """Which rows are screened in this epoch whatever is known of them."""
    chosen, sampler.screen_above = sampler.screen_above, 1.0
    rows = sampler.worth_screening(torch.arange(sampler.num_samples))
    sampler.screen_above = chosen
    return rows


def band(margin: float, delta: float = 0.1) -> int:
    """Of a row that was seen, by definition."""
    edges = [delta + step for step in BELOW] + [delta + share * (1 - delta) for share in ABOVE]
    return LOWEST + int((margin >= torch.tensor(edges, dtype=torch.float32)).sum())


# -- which rows --------------------------------------------------------------------------------------------------------


def test_first_epoch_visits_every_row_once() -> None:
    assert sorted(SolvedSampler(57)) == list(range(57))


MARGINS = st.sampled_from([-1.0, -0.15, 0.05, 0.125, 0.25, 0.5, 0.75, 0.875, 1.0])  # of which float32 loses nothing


@given(
    shown=st.lists(st.lists(MARGINS, min_size=23, max_size=23), min_size=1, max_size=5),
    tolerance=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    recheck=st.sampled_from([1e-6, 0.1, 0.5, 1.0]),
    margin=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 5),
)
def test_plans(shown: list[list[float]], tolerance: float, recheck: float, margin: float | None, seed: int) -> None:
    sampler = SolvedSampler(23, margin=margin, tolerance=tolerance, recheck=recheck, seed=seed)
    least = margin or 0.1
    known, seen_in = torch.full((23,), UNSEEN), torch.full((23,), -1)
    for epoch, margins in enumerate(shown):
        plan = sampler.next_epoch()
        rows = set(plan.tolist())
        assert len(plan) == len(rows) == len(sampler) > 0
        assert where(known < least) <= rows  # what does not lead is always visited
        bands = [band(value, least) if value > UNSEEN else 0 for value in known.tolist()]
        assert sampler.bands(known).tolist() == bands
        for number in range(LEADING, BANDS):  # and a share of what does, however safely
            kind = where(torch.tensor(bands) == number)
            assert len(rows & kind) >= recheck * len(kind) - 1e-9
            visited, left_out = ({int(seen_in[row]) for row in some} for some in (rows & kind, kind - rows))
            assert not visited or not left_out or max(visited) <= min(left_out)  # not seen for longest first
        if tolerance == 0 or recheck == 1:
            assert len(rows) == 23
        values = torch.tensor(margins)
        sampler.update(plan, values[plan])
        known[plan], seen_in[plan] = values[plan], epoch
    assert torch.equal(sampler.margins, known)
    assert torch.equal(sampler.solved, known >= least)


@given(st.integers(1, 40), st.integers(1, 5), st.lists(MARGINS, min_size=40, max_size=40))
def test_shares_of_replicas(rows: int, replicas: int, shown: list[float]) -> None:
    margins = torch.tensor(shown)[:rows]
    whole = SolvedSampler(rows, tolerance=1.0, recheck=0.5)
    parts = [SolvedSampler(rows, tolerance=1.0, recheck=0.5, num_replicas=replicas, rank=r) for r in range(replicas)]
    for _ in range(3):
        order = list(whole)
        shares = [list(part) for part in parts]
        size = -(-len(order) // replicas)
        assert [len(share) for share in shares] == [len(part) for part in parts] == [size] * replicas
        together = [row for share in shares for row in share]
        assert together[: len(order)] == order
        assert set(together) == set(order)  # filled up with rows of the plan
        for sampler in (whole, *parts):
            sampler.update(torch.tensor(order), margins[order])


def test_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        sampler = SolvedSampler(50, seed=seed)
        return [tuple(sampler) for _ in range(epoch + 1)][-1]

    assert order(0, 1) == order(0, 1)
    assert len({order(seed, epoch) for seed in range(2) for epoch in range(2)}) == 4


def test_left_out_rows_take_turns() -> None:
    sampler = SolvedSampler(100, tolerance=1.0, recheck=0.1)
    visit(sampler, torch.full((100,), 0.9))
    for _ in range(3):  # in ten epochs everybody is visited once: those not seen for longest come first
        visited = [visit(sampler, torch.full((100,), 0.9)) for _ in range(10)]
        assert [len(rows) for rows in visited] == [10] * 10
        assert set().union(*visited) == set(range(100))


def test_a_margin_of_ones_own() -> None:
    """Only rows from it on are left out, whatever the delta of the loss."""
    margins = torch.arange(1000) / 1000
    for delta in (None, 0.1, 0.7, 1.0):
        sampler = SolvedSampler(1000, margin=0.8, delta=0.3, tolerance=1.0, recheck=0.1)
        sampler.update(sampler.next_epoch(), margins[sampler.plan], delta=delta)
        assert sampler.skip_margin == pytest.approx(0.8)
        left_out = set(range(1000)) - set(sampler.next_epoch().tolist())
        assert min(left_out) >= 800
        assert len(left_out) == pytest.approx(0.9 * 200, abs=len(ABOVE))


# -- what is known -----------------------------------------------------------------------------------------------------


def test_latest_update_of_an_epoch_wins() -> None:
    sampler, rows = SolvedSampler(4, tolerance=1.0), torch.arange(4)
    sampler.next_epoch()
    sampler.update(rows, torch.tensor([0.9, 0.9, -0.5, -0.5]))
    risk = sampler.risk.clone()
    sampler.update(rows, torch.tensor([-0.5, -0.5, 0.5, -0.5]))
    assert torch.equal(sampler.risk, risk)  # a second pass in an epoch says nothing about relapse
    assert sampler.solved.tolist() == [False, False, True, False]
    sampler.next_epoch()
    assert sampler.margins.tolist() == [-0.5, -0.5, 0.5, -0.5]


def test_flags_climb_a_band_each_time() -> None:
    sampler = SolvedSampler(4)
    for rows, solved, bands in (
        ([0, 1, 2, 3], [True, False, True, False], [LEADING, LOWEST, LEADING, LOWEST]),
        ([0, 1], [True, True], [LEADING + 1, LEADING, LEADING, LOWEST]),  # those not seen stay where they were
        ([0], [False], [LOWEST, LEADING, LEADING, LOWEST]),
        ([0], [True], [LEADING, LEADING, LEADING, LOWEST]),
    ):
        sampler.next_epoch()
        sampler.update(torch.tensor(rows), torch.tensor(solved))
        assert sampler.bands(sampler.margins).tolist() == bands
    for climbed in range(1, BANDS):
        sampler.update(torch.tensor([0]), torch.tensor([True]))
        assert int(sampler.bands(sampler.margins)[0]) == min(LEADING + climbed, LEADING + SAFEST)


def test_margins_are_those_of_a_loss_with_another_delta() -> None:
    """A schedule moves delta: a row leads when it is above that of its time."""
    margins = torch.tensor([0.35, 0.45, 0.75, -0.9, 1.0])
    for method in ("update", "screened"):
        sampler = SolvedSampler(5, delta=0.2)
        getattr(sampler, method)(torch.arange(5), margins, delta=0.4)
        torch.testing.assert_close(sampler.margins, torch.tensor([0.15, 0.25, 0.55, -1.0, 0.8]))
        assert sampler.solved.tolist() == [False, True, True, False, True]
        getattr(sampler, method)(torch.arange(5), margins, delta=1.0)
        assert sampler.solved.tolist() == [False] * 5 if method == "screened" else sampler.solved[:4].sum() == 0
        with pytest.raises(ValueError, match=r"delta: expected a number in \[0, 1\], found 1.5"):
            getattr(sampler, method)(torch.arange(5), margins, delta=1.5)


def test_risk_is_the_share_of_relapses() -> None:
    sampler = SolvedSampler(100_000, tolerance=0.0)
    assert sampler.risk.tolist() == UNKNOWN
    generator = torch.Generator().manual_seed(1)
    rows = torch.arange(100_000)
    margins = torch.where(rows % 2 == 0, 0.3, 0.5)
    visit(sampler, margins)
    assert float(sampler.risk[0]) < 0.001  # all led when first seen
    rate = torch.where(rows % 2 == 0, 0.4, 0.2)
    visit(sampler, torch.where(torch.rand(100_000, generator=generator) < rate, 0.05, margins))
    risk, lower, upper = sampler.risk.tolist(), band(0.3), band(0.5)
    assert risk[lower] == pytest.approx(0.4, abs=0.03)
    assert risk[upper] == pytest.approx(0.2, abs=0.03)
    assert risk[lower + 1 : upper] == pytest.approx([risk[lower]] * (upper - lower - 1))  # not known: as those below
    assert risk[upper + 1 :] == pytest.approx([risk[upper]] * (HIGHEST - upper))


def test_risk_follows_a_change() -> None:
    sampler, margins = SolvedSampler(8000, tolerance=0.0), torch.full((8000,), 0.95)
    for _ in range(3):
        visit(sampler, margins)
    assert float(sampler.risk[HIGHEST]) < 0.02
    plan = sampler.next_epoch()
    for rows in torch.split(plan[:2000], 80):
        sampler.update(rows, margins[: len(rows)])
    assert float(sampler.risk[HIGHEST]) < 0.02
    for rows in torch.split(plan[2000:4000], 80):  # a quarter of the data, and all of it has relapsed
        sampler.update(rows, -margins[: len(rows)])
    assert float(sampler.risk[HIGHEST]) > 0.9


def test_few_rows_do_not_change_a_rate_at_once() -> None:
    sampler, margins = SolvedSampler(500, tolerance=0.0), torch.full((500,), 0.95)
    for _ in range(3):
        visit(sampler, margins)
    rows = sampler.next_epoch()[:30]  # nearly a sixteenth of the data
    sampler.update(rows, -margins[rows])
    assert 0.02 < float(sampler.risk[HIGHEST]) < 0.2


# -- screening ---------------------------------------------------------------------------------------------------------


def test_worth_screening() -> None:
    rows = torch.arange(1000)
    sampler, margins = SolvedSampler(1000, tolerance=0.0, screen_above=0.9), torch.where(rows < 500, 0.9, 0.0)
    some = torch.tensor([[0, 999], [500, 499]])
    assert torch.equal(sampler.worth_screening(rows), picked(sampler))  # nothing is known
    shares = []
    for _ in range(4):
        visit(sampler, margins)
        shares.append(where(picked(sampler)))
    sampler.next_epoch()
    assert where(sampler.worth_screening(rows)) == set(range(500)) | where(picked(sampler))
    assert torch.equal(sampler.worth_screening(some), sampler.worth_screening(rows)[some])
    assert all(25 < len(share) < 80 for share in shares)  # a twentieth, others in every epoch
    assert len(set().union(*shares)) > 150


def test_picked_rows_are_trained_although_they_lead() -> None:
    """Or nobody would know whether rows that lead slip."""
    sampler, rows = SolvedSampler(1000, recheck=0.2), torch.arange(1000)
    sampler.next_epoch()
    assert torch.equal(sampler.screened(rows, torch.ones(1000)), ~picked(sampler))
    assert 150 < int(picked(sampler).sum()) < 250
    assert not sampler.screened(rows, torch.zeros(1000)).any()  # what does not lead is trained anyway
    some = torch.tensor([[3, 1], [2, 0]])
    assert sampler.screened(some, torch.ones(2, 2)).shape == (2, 2)


class Screening(NamedTuple):
    skip_margins: list[float]  # of every block
    left_out: Tensor  # margins of rows that were, in the second half


def screen(slip: Any, *, rows: int = 20_000, epochs: int = 4, **options: Any) -> Screening:
    """A loop that screens: margins are drawn anew each time, and training lowers them at a rate by their size."""
    sampler, generator = SolvedSampler(rows, **options), torch.Generator().manual_seed(3)
    skip_margins, left_out = [], []
    for epoch in range(epochs):
        for block in torch.split(sampler.next_epoch(), rows // 16):
            margins = torch.rand(len(block), generator=generator)
            worth = sampler.worth_screening(block)
            leave = torch.zeros(len(block), dtype=torch.bool)
            leave[worth] = sampler.screened(block[worth], margins[worth])
            skip_margins.append(sampler.skip_margin)
            slipped = torch.rand(len(block), generator=generator) < slip(margins)
            sampler.update(block[~leave], torch.where(slipped, -0.5, margins)[~leave])
            if 2 * epoch >= epochs:
                left_out.append(margins[leave])
    return Screening(skip_margins, torch.cat(left_out))


@pytest.mark.parametrize("share", [0, 3 / 16, 1 / 2, 3 / 4])
@pytest.mark.parametrize("delta", [0.1, 0.5])
def test_skip_margin_settles_where_slips_are_few(share: float, delta: float) -> None:
    edge = delta + share * (1 - delta)
    options: dict[str, Any] = {"delta": delta, "recheck": 0.2, "screen_above": 0.0}
    found = screen(lambda margins: torch.where(margins < edge, 0.3, 0.01), **options)
    assert found.skip_margins[0] == pytest.approx(delta + 0.75 * (1 - delta))  # nothing is known: only the safest
    settled = found.skip_margins[len(found.skip_margins) // 2 :]
    assert median(settled) == pytest.approx(edge)
    assert min(settled) >= edge - 1e-6  # chance errs on the safe side
    assert len(found.left_out) > 1000
    assert float(found.left_out.min()) >= edge - 1e-6


def test_chance_in_a_narrow_band_leaves_few_rows_out_that_slip() -> None:
    settled: list[float] = []
    for seed in range(3):
        margins = screen(lambda margins: torch.where(margins < 0.55, 0.3, 0.02), rows=1000, epochs=8, seed=seed)[0]
        settled += margins[len(margins) // 2 :]
    assert sum(margin < 0.54 for margin in settled) <= 0.03 * len(settled)
    assert sum(margin > 0.56 for margin in settled) <= 0.1 * len(settled)


def test_where_everything_slips_only_the_safest_are_left_out() -> None:
    found = screen(lambda margins: torch.full_like(margins, 0.5))
    assert found.skip_margins == pytest.approx([0.1 + 0.75 * 0.9] * len(found.skip_margins))


def test_a_margin_of_ones_own_does_not_follow_slips() -> None:
    for rate in (0.0, 0.9):
        found = screen(lambda margins, rate=rate: torch.full_like(margins, rate), margin=0.3)
        assert found.skip_margins == pytest.approx([0.3] * len(found.skip_margins))
        assert float(found.left_out.min()) == pytest.approx(0.3, abs=0.01)


def test_training_after_screening_does_not_lower_a_margin() -> None:
    """Dropout does that. A row that was not screened may have risen."""
    sampler, rows = SolvedSampler(4), torch.arange(4)
    sampler.next_epoch()
    sampler.screened(rows[:2], torch.tensor([0.5, 0.05]))
    passes = sampler.risk.clone()
    sampler.update(rows, torch.tensor([0.0, 0.9, 0.25, -0.75]))
    assert sampler.margins.tolist() == pytest.approx([0.5, 0.05, 0.25, -0.75])
    assert torch.equal(sampler.risk, passes)  # only screening says who relapsed
    sampler.next_epoch()
    sampler.update(rows, torch.tensor([0.0, 0.9, 0.0, -0.5]))
    assert sampler.margins.tolist() == pytest.approx([0.5, 0.9, 0.25, -0.5])


# -- how far it is trusted ---------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    missed: float  # share of rows that have relapsed and were left out
    visited: float


def simulate(relapse: float, tolerance: float, *, by: str, rows: int = 20_000, epochs: int = 40) -> Outcome:
    """Rows that a visit solves nine times in ten and that relapse at a known rate, visited or not.

    Told by flags; or by margins, of which the larger ones relapse less: at twice the rate down to not at all.
    """
    sampler = SolvedSampler(rows, tolerance=tolerance)
    generator = torch.Generator().manual_seed(3)
    solved, lead = torch.zeros(rows, dtype=torch.bool), torch.zeros(rows)
    missed, visited = [], []
    for _ in range(epochs):
        plan = sampler.next_epoch()
        left_out = torch.ones(rows, dtype=torch.bool)
        left_out[plan] = False
        missed.append(int((left_out & ~solved).sum()))
        visited.append(len(plan))
        for part in torch.split(plan, rows // 40):
            sampler.update(part, solved[part] if by == "flags" else torch.where(solved, lead, -0.1)[part])
        learnt = torch.rand(len(plan), generator=generator) < 0.9
        lead[plan] = torch.where(solved[plan], lead[plan], 0.1 + 0.9 * torch.rand(len(plan), generator=generator))
        solved[plan] |= learnt
        rate = relapse if by == "flags" else 2 * relapse * (1 - lead) / 0.9
        solved &= torch.rand(rows, generator=generator) >= rate
    settled = slice(epochs // 4, None)
    return Outcome(*(sum(found[settled]) / len(found[settled]) / rows for found in (missed, visited)))


@pytest.mark.parametrize("by", ["flags", "margins"])
@pytest.mark.parametrize("tolerance", [0.01, 0.05])
@pytest.mark.parametrize("relapse", [0.0, 0.001, 0.01, 0.05, 0.2, 0.5])
def test_relapsed_rows_left_out_stay_within_tolerance(relapse: float, tolerance: float, by: str) -> None:
    found = simulate(relapse, tolerance, by=by)
    # Rates are those of the epoch before, and rows left out twice have had twice the time: two thirds more are missed.
    assert found.missed <= 1.7 * tolerance
    if relapse == 0:
        assert found.missed == 0
    if relapse >= 0.05:  # the allowance is used
        assert found.missed >= 0.5 * tolerance


@pytest.mark.parametrize("by", ["flags", "margins"])
@pytest.mark.parametrize("relapse", [0.01, 0.05, 0.2])
def test_of_few_rows_rates_are_rough(relapse: float, by: str) -> None:
    assert simulate(relapse, 0.01, by=by, rows=2000).missed <= 2.25 * 0.01


def test_rows_that_hardly_relapse_are_told_apart_from_others_that_lead_far() -> None:
    """Both lead by three quarters of what is missing to 1. Half never relapse, of the others three in ten do."""
    sampler, generator = SolvedSampler(4000, tolerance=0.01), torch.Generator().manual_seed(0)
    safe = torch.arange(4000) % 2 == 0
    for _ in range(8):
        relapsed = ~safe & (torch.rand(4000, generator=generator) < 0.3)
        visit(sampler, torch.where(safe, 0.99, torch.where(relapsed, 0.0, 0.8)))
    plan = sampler.next_epoch()
    assert int(safe[plan].sum()) < 0.1 * 2000
    assert int((~safe)[plan].sum()) > 0.9 * 2000


@pytest.mark.parametrize("by", ["flags", "margins"])
def test_noisy_data_are_visited_and_clean_data_left_out(by: str) -> None:
    # Margins tell the few apart that hardly relapse.
    assert simulate(0.5, 0.01, by=by).visited > (0.85 if by == "flags" else 0.75)
    assert simulate(0.0, 0.01, by=by).visited < 0.07  # little more than what is always visited again
    assert simulate(0.0, 0.0, by=by).visited == 1
    shares = [simulate(relapse, 0.02, by=by).visited for relapse in (0.001, 0.01, 0.05, 0.2)]
    assert shares == sorted(shares)
    assert shares[-1] - shares[0] > 0.6


# -- state -------------------------------------------------------------------------------------------------------------


def tell(sampler: SolvedSampler, rows: Tensor, margins: Tensor, *, screens: bool) -> None:
    """Some rows of an epoch, screened where that is worth it or not, with a training pass that slips now and then."""
    for block in torch.split(rows, 10):
        if screens and (worth := sampler.worth_screening(block)).any():
            leave = torch.zeros(len(block), dtype=torch.bool)
            leave[worth] = sampler.screened(block[worth], margins[block][worth])
            block = block[~leave]
        sampler.update(block, torch.where(block % 7 == 0, 0.0, margins[block]))


def same(first: SolvedSampler, second: SolvedSampler) -> bool:
    """Whether they know the same, bit for bit."""
    states = first.state_dict(), second.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][name])) for name, value in states[0].items()
    )


@pytest.mark.parametrize("screens", [False, True])
def test_state_in_the_middle_of_an_epoch(screens: bool) -> None:
    first, second = SolvedSampler(200, tolerance=0.05), SolvedSampler(200, tolerance=0.05)
    margins = 2 * torch.rand(200, generator=torch.Generator().manual_seed(2)).sqrt() - 1
    for _ in range(3):
        tell(first, first.next_epoch(), margins, screens=screens)
    plan = first.next_epoch()
    tell(first, plan[:40], margins, screens=screens)
    if screens:
        first.screened(plan[40:50], margins[plan[40:50]])  # and not yet trained
    state = first.state_dict()
    assert 0 < state["position"] <= 40  # rows that are screened and not trained yet are not behind
    tell(first, plan[40:], -margins, screens=screens)  # the state is a copy

    second.load_state_dict(state)
    assert second.epoch == 3
    assert torch.equal(second.plan, plan)
    tell(second, plan[40:], -margins, screens=screens)
    assert same(first, second)
    second.load_state_dict(second.state_dict())
    for _ in range(3):
        assert torch.equal(first.next_epoch(), second.next_epoch())
        assert torch.equal(first.worth_screening(torch.arange(200)), second.worth_screening(torch.arange(200)))
        assert first.skip_margin == second.skip_margin
        for sampler in (first, second):
            tell(sampler, sampler.plan, margins, screens=screens)
        assert same(first, second)
    assert len(first.plan) < 190


def test_state_of_version_0_2() -> None:
    """Which knew how often rows were solved in a row, and what the epoch under way had shown: 1 solved, 2 not."""
    old: dict[str, Any] = {
        "epoch": 3,
        "started": True,
        "position": 2,
        "streak": torch.tensor([0, 1, 4, 2, 0, 3], dtype=torch.uint8),
        "seen": torch.tensor([0, 0, 1, 2, 1, 0], dtype=torch.uint8),
        "looks": torch.ones(2, 5, dtype=torch.float64),
        "plan": torch.tensor([2, 4, 3, 0]),
    }
    sampler = SolvedSampler(6, tolerance=1.0, delta=0.3)
    sampler.load_state_dict(old)
    assert sampler.epoch == 3
    assert sampler.solved.tolist() == [False, True, True, False, True, True]
    open_bands = {0, LOWEST}
    bands = sampler.bands(sampler.margins).tolist()
    assert {bands[0], bands[3]} <= open_bands
    assert [bands[row] for row in (1, 2, 4, 5)] == [LEADING, LEADING + 4, LEADING, LEADING + 2]  # as flags climb
    assert list(sampler) == [3, 0]  # the rest of the epoch
    sampler.update(torch.tensor([3, 0]), torch.tensor([0.9, 0.0]))
    assert 0 in sampler.next_epoch()
    again = SolvedSampler(6, tolerance=1.0, delta=0.3)
    again.load_state_dict(sampler.state_dict())
    assert same(again, sampler)
    for name, wrong, words in (
        ("streak", old["streak"][:5], "seen: expected"),
        ("streak", old["streak"] + 1, r"streak: expected numbers in \[0, 4\]"),
        ("seen", old["seen"] + 1, r"seen: expected numbers in \[0, 2\]"),
        ("plan", old["plan"] + 2, r"plan: expected numbers in \[0, 5\]"),
    ):
        with pytest.raises(ValueError, match=words):
            sampler.load_state_dict({**old, name: wrong})
    with pytest.raises(ValueError, match="state: expected 7 samples, found 6"):
        SolvedSampler(7).load_state_dict(old)
    assert same(again, sampler)  # nothing is half loaded


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("margins", torch.full((20,), -2.5), r"margins: expected numbers in \[-2, 1\]"),
        ("margins", torch.full((20,), float("nan")), "margins: expected numbers in"),
        ("margins", torch.zeros(20, dtype=torch.float64), "margins: expected torch.float32"),
        ("seen_in", torch.full((20,), -2, dtype=torch.int32), "seen_in: expected numbers in"),
        ("waiting", torch.zeros(19, dtype=torch.bool), "waiting: expected torch.bool of shape"),
        ("passes", torch.full((2, BANDS), -1.0, dtype=torch.float64), "passes: expected numbers in"),
        ("slips", torch.full((2, BANDS), float("inf"), dtype=torch.float64), "slips: expected numbers in"),
        ("plan", torch.tensor([20]), r"plan: expected numbers in \[0, 19\]"),
        ("epoch", -1, "epoch: expected an int in"),
        ("position", -1, "position: expected an int in"),
    ],
)
def test_bad_states(name: str, wrong: Any, words: str) -> None:
    sampler = SolvedSampler(20)
    state = sampler.state_dict()
    with pytest.raises(ValueError, match=words):
        sampler.load_state_dict({**state, name: wrong})
    if name != "position":  # which early versions did not write
        with pytest.raises(ValueError, match=f"state: expected '{name}' in it"):
            sampler.load_state_dict({key: value for key, value in state.items() if key != name})


@pytest.mark.parametrize("wrong", [torch.zeros(3), "yes", None])
@pytest.mark.parametrize("name", ["started", "screens"])
def test_flags_of_a_state_are_flags(name: str, wrong: object) -> None:
    sampler = SolvedSampler(20)
    with pytest.raises(TypeError, match=f"{name}: expected True or False, found {type(wrong).__name__}"):
        sampler.load_state_dict({**sampler.state_dict(), name: wrong})


def test_a_state_is_a_dict() -> None:
    for wrong in (5, None, "streak"):
        with pytest.raises(TypeError, match="state: expected a dict, found"):
            SolvedSampler(20).load_state_dict(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    def sampler() -> SolvedSampler:
        made = SolvedSampler(200, tolerance=0.05)
        for _ in range(4):
            visit(made, torch.arange(200) % 5 > 0)
        margins = torch.arange(200, dtype=torch.float32) / 200
        tell(made, made.next_epoch(), margins, screens=True)
        return made

    plain = sampler()
    with default_dtype(dtype):
        found = sampler()
        assert same(found, plain)
        found.load_state_dict(plain.state_dict())
        assert torch.equal(found.risk, plain.risk)
        assert found.skip_margin == plain.skip_margin
        assert torch.equal(found.next_epoch(), plain.next_epoch())


def loop(sampler: SolvedSampler, batches: int, *, drop_last: bool = False, workers: int = 0) -> list[int]:
    """Rows that a loop of one's own visits in so many batches, epoch after epoch; rows of even number are solved."""
    rows: Any = range(30)
    loader: DataLoader[Any] = DataLoader(rows, 4, sampler=sampler, drop_last=drop_last, num_workers=workers)
    visited: list[int] = []
    while True:
        for index in loader:
            visited += index.tolist()
            sampler.update(index, index % 2 == 0)
            batches -= 1
            if batches == 0:
                return visited


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batches", [1, 5, 7, 8, 9, 15, 17])  # 7 or 8 are an epoch
def test_iteration_resumes_where_the_state_was_taken(batches: int, drop_last: bool) -> None:
    whole, first, second = (SolvedSampler(30, tolerance=0.1) for _ in range(3))
    expected = loop(whole, 24, drop_last=drop_last)
    visited = loop(first, batches, drop_last=drop_last)
    second.load_state_dict(first.state_dict())
    assert visited + loop(second, 24 - batches, drop_last=drop_last) == expected
    assert second.epoch == whole.epoch


def test_rows_that_workers_have_fetched_are_not_lost() -> None:
    whole, first, second = (SolvedSampler(30, tolerance=0.1) for _ in range(3))
    expected, visited = loop(whole, 14), loop(first, 2, workers=1)
    second.load_state_dict(first.state_dict())
    assert visited + loop(second, 12) == expected


def test_an_epoch_of_which_nothing_was_seen_is_resumed_from_its_beginning() -> None:
    first, second = SolvedSampler(30), SolvedSampler(30)
    plan = first.next_epoch().tolist()
    second.load_state_dict(first.state_dict())
    assert list(second) == plan
    assert second.epoch == 0
    assert second.state_dict()["position"] == len(second) == 30
    assert list(second) != plan
    assert second.epoch == 1


@pytest.mark.parametrize("own", [True, False])
def test_ranks_resume_at_one_place(own: bool) -> None:
    """With a state for each rank, or that of the first for all."""
    ranks = [SolvedSampler(31, num_replicas=2, rank=rank) for rank in range(2)]
    shares = [list(sampler) for sampler in ranks]
    for sampler in ranks:
        sampler.load_state_dict({**sampler.state_dict(), "position": 0})
    for sampler, share in zip(ranks, shares, strict=True):
        sampler.update(torch.tensor(share[:6]), torch.ones(6, dtype=torch.bool))
    states = [sampler.state_dict() for sampler in ranks]
    for rank, sampler in enumerate(ranks):
        sampler.load_state_dict(states[rank if own else 0])
        assert list(sampler) == shares[rank][6:]


def test_a_new_epoch_can_be_begun_after_a_resume() -> None:
    first, second = SolvedSampler(30), SolvedSampler(30)
    loop(first, 2)
    for state in (first.state_dict(), {k: v for k, v in first.state_dict().items() if k != "position"}):
        second.load_state_dict(state)
        second.next_epoch()
        assert second.epoch == 1
        assert list(second) == second.plan.tolist()
        assert second.epoch == 2


def test_a_state_without_a_position_goes_on_with_the_next_epoch() -> None:
    first, second = SolvedSampler(30, tolerance=0.0), SolvedSampler(30, tolerance=0.0)
    loop(first, 2)
    state = first.state_dict()
    del state["position"]  # as earlier versions wrote it
    second.load_state_dict(state)
    assert sorted(second) == list(range(30))
    assert second.epoch == 1


def test_state_before_the_first_epoch() -> None:
    first, second = SolvedSampler(20), SolvedSampler(20)
    second.load_state_dict(first.state_dict())
    assert list(first) == list(second)
    assert list(first) == list(second)


def test_state_of_other_data() -> None:
    with pytest.raises(ValueError, match="state: expected 21 samples, found 20"):
        SolvedSampler(21).load_state_dict(SolvedSampler(20).state_dict())


# -- use ---------------------------------------------------------------------------------------------------------------


def test_three_lines_in_a_loop_of_your_own() -> None:
    rows, model = points(200), Net()
    dataset = TensorDataset(torch.arange(200), rows.inputs["features"], rows.target)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = SolvedSampler(len(dataset))
    loader, visited = DataLoader(dataset, batch_size=32, sampler=sampler), []
    for _ in range(8):
        visited.append(0)
        for index, features, target in loader:
            loss, stats = as_cross_entropy(model(features), target, return_stats=True)
            sampler.update(index, stats.margin)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            visited[-1] += len(index)
        assert visited[-1] == len(sampler)
    assert visited[0] == 200
    assert visited[-1] < 80
    with torch.no_grad():
        assert (model(rows.inputs["features"]).argmax(-1) == rows.target).double().mean() > 0.97


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_samples": 0}, ValueError, r"num_samples: expected an int in \[1, .*found 0"),
        ({"num_samples": 3.0}, TypeError, "num_samples: expected an int, found float"),
        ({"margin": 0}, ValueError, r"margin: expected a number in \(0, 1\], found 0"),
        ({"margin": 1.1}, ValueError, r"margin: expected a number in \[0, 1\], found 1.1"),
        ({"margin": float("nan")}, ValueError, "margin: .* found nan"),
        ({"margin": "a"}, TypeError, "margin: expected a number, found str"),
        ({"delta": -0.1}, ValueError, r"delta: expected a number in \[0, 1\], found -0.1"),
        ({"delta": None}, TypeError, "delta: expected a number, found NoneType"),
        ({"tolerance": 1.1}, ValueError, r"tolerance: expected a number in \[0, 1\], found 1.1"),
        ({"tolerance": float("nan")}, ValueError, "tolerance: .* found nan"),
        ({"recheck": 0}, ValueError, "recheck: expected a number in"),
        ({"recheck": "0.1"}, TypeError, "recheck: expected a number, found str"),
        ({"screen_above": -0.1}, ValueError, "screen_above: expected a number in"),
        ({"seed": -1}, ValueError, "seed: expected an int in"),
        ({"num_replicas": 0}, ValueError, "num_replicas: expected an int in"),
        ({"num_replicas": 2, "rank": 2}, ValueError, r"rank: expected an int in \[0, 1\], found 2"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        SolvedSampler(**{"num_samples": 10, **options})


def test_bad_updates() -> None:
    sampler = SolvedSampler(10)
    for tell in (sampler.update, sampler.screened):
        with pytest.raises(ValueError, match=r"margins: expected shape \(3,\), found \(2,\)"):
            tell(torch.arange(3), torch.tensor([0.5, 0.1]))
        for index in (10, -1):
            with pytest.raises(ValueError, match=r"indices: expected rows in \[0, 9\]"):
                tell(torch.tensor([index]), torch.tensor([0.5]))
        for wrong in (2.5, -1.1, float("inf"), float("-inf")):  # losses, or logits
            with pytest.raises(ValueError, match=r"margins: expected numbers in \[-1, 1\], found"):
                tell(torch.arange(3), torch.tensor([0.5, wrong, 0.1]))
        with pytest.raises(ValueError, match=r"margins: expected numbers in \[-1, 1\], found inf"):
            tell(torch.arange(1), torch.tensor([float("inf")]))
        with pytest.raises(ValueError, match=r"margins: expected flags of integers to be 0 or 1, found 3"):
            tell(torch.arange(3), torch.tensor([1, 3, 0]))  # how many classes are kept, say
        with pytest.raises(TypeError, match=r"margins: expected margins or flags, found torch.complex64"):
            tell(torch.arange(1), torch.tensor([0.5], dtype=torch.complex64))
        assert (sampler.margins == UNSEEN).all()  # nothing is half noted
        assert sampler.risk.tolist() == UNKNOWN
    assert sampler.skip_margin == pytest.approx(0.1)
    sampler.update(torch.empty(0, dtype=torch.long), torch.empty(0))
    assert sampler.risk.tolist() == UNKNOWN


def test_margins_that_are_not_numbers_are_open() -> None:
    sampler, rows = SolvedSampler(3, tolerance=1.0), torch.arange(3)
    nan = torch.tensor([float("nan"), 0.9, 1.0005])  # rounded
    sampler.update(sampler.next_epoch(), nan[sampler.plan])
    assert sampler.margins.tolist() == pytest.approx([-1, 0.9, 1])
    assert sampler.solved.tolist() == [False, True, True]
    assert 0 in sampler.next_epoch()
    assert not sampler.screened(rows, nan)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_margins_of_any_dtype(dtype: torch.dtype) -> None:
    sampler = SolvedSampler(3)
    sampler.update(torch.arange(3), torch.tensor([0.5, -0.25, 1.0], dtype=dtype, requires_grad=True))
    assert sampler.margins.tolist() == [0.5, -0.25, 1.0]
    assert sampler.margins.dtype == torch.float32


def test_updates_take_flags_of_any_shape_and_dtype() -> None:
    sampler = SolvedSampler(4)
    sampler.next_epoch()
    sampler.update(torch.arange(4, dtype=torch.int32).view(2, 2), torch.tensor([[1, 0], [0, 1]]))
    assert sampler.solved.tolist() == [True, False, False, True]
    assert sampler.bands(sampler.margins).tolist() == [LEADING, LOWEST, LOWEST, LEADING]
