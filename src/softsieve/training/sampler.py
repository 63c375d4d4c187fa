"""Which rows an epoch visits: those not yet solved, and enough of the solved ones to notice when they relapse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from softsieve import _checks

# Levels of rows by how far they led when last seen: below what is asked for, by steps, and above it, by shares of what is
# missing to a lead of 1.
BELOW = (-0.3, -0.1)
ABOVE = (0, 1 / 64, 1 / 32, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
UNSEEN, LOWEST, FIRST = 0, 1, 2 + len(BELOW)  # the level of rows never seen, the lowest of others, the first that leads
LEVELS = FIRST + len(ABOVE)
NEVER = -2.0  # the lead of a row that was never seen


class SolvedSampler(Sampler[int]):
    """TODO"""

    def __init__(
        self, num_samples: int, *, margin: float | None = None, delta: float = 0.1, tolerance: float = 0.05,
        recheck: float = 0.05, screen_above: float = 1 / 2, slips: float = 0.06,
        seed: int = 0, num_replicas: int = 1, rank: int = 0,
    ) -> None:  # fmt: skip
        _checks.whole_number("num_samples", num_samples, 1, 2**40)
        _checks.number("tolerance", tolerance, 0, 1)
        _checks.number("recheck", recheck, 1e-6, 1)
        _checks.number("screen_above", screen_above, 0, 1)
        _checks.whole_number("seed", seed, 0, 2**40)
        _checks.whole_number("num_replicas", num_replicas, 1, 2**31)
        _checks.whole_number("rank", rank, 0, num_replicas - 1)
        self.num_samples, self.seed, self.num_replicas, self.rank = num_samples, seed, num_replicas, rank
        self.margin, self.delta, self.tolerance, self.recheck = margin, delta, tolerance, recheck
        self.screen_above, self.slips = screen_above, slips
        self._base = base = delta if margin is None else margin
        edges = [base + step for step in BELOW] + [base + share * (1 - base) for share in ABOVE]
        self._edges = torch.tensor(edges, dtype=torch.float32)
        self.epoch = 0  # whose rows `plan` holds, in order
        self._started = False
        self._over = False  # whether iteration came to the end of the plan
        self._resume_at: int | None = None  # row of this rank's share at which iteration goes on with a loaded epoch
        self.leads = torch.full((num_samples,), NEVER, dtype=torch.float32)  # when last seen
        self.seen_at = torch.full((num_samples,), -1, dtype=torch.int32)  # in which epoch
        self._looked = torch.zeros(num_samples, dtype=torch.bool)  # screened in this epoch and not trained since
        # By level: passes over rows when last seen there, and those in which they were open. Old ones fade.
        self._passes = torch.zeros(2, LEVELS, dtype=torch.float64)
        # By level when just screened: training passes, and those in which the row had a gradient all the same.
        self._slips = torch.zeros(2, LEVELS, dtype=torch.float64)
        self._screens = False
        self.plan = self._draw()

    def _levels(self, leads: Tensor) -> Tensor:
        level = LOWEST + torch.bucketize(leads, self._edges, right=True)
        return torch.where(leads == NEVER, UNSEEN, level)

    def _count(self, table: Tensor, level: Tensor, failed: Tensor) -> None:
        table *= 0.5 ** (16 * len(level) / self.num_samples)
        table[0].index_add_(0, level, torch.ones(len(level), dtype=torch.float64))
        table[1].index_add_(0, level, failed.double())

    @staticmethod
    def _rates(table: Tensor) -> Tensor:
        rates = torch.empty(LEVELS, dtype=torch.float64)
        for level, (passes, failed) in enumerate(table.T.tolist()):
            expected = 1.0 if level <= LOWEST else float(rates[level - 1])
            if level == FIRST:
                expected = min(expected, 0.5)
            rates[level] = (failed + 2 * expected) / (passes + 2)
        return rates

    @property
    def risk(self) -> Tensor:
        return self._rates(self._passes)

    @property
    def bar(self) -> float:
        """The lead at which rows are left out"""
        if self.margin is not None or not self._screens:
            return self._base
        few = (self._rates(self._slips) <= self.slips)[FIRST:].nonzero().flatten()
        return float(self._edges[len(BELOW) + (int(few[0]) if len(few) else len(ABOVE) - 1)])

    @property
    def solved(self) -> Tensor:
        return self.leads >= self._base

    def worth_screening(self, indices: Tensor) -> Tensor:
        """Of which rows screening is expected to save the training pass; bool, shape of ``indices``."""
        index = _checks.row_numbers("indices", indices, self.num_samples)
        return (1 - self.risk >= self.screen_above)[self._levels(self.leads[index])] | self._drawn[index]

    def screened(self, indices: Tensor, margins: Tensor) -> Tensor:
        """Note margins of a screening pass; says which rows may be left out now."""
        index, values = indices.flatten(), margins.flatten().float()
        self._screens = True
        leads = values >= self.bar
        self._count(self._passes, self._levels(self.leads[index]), ~leads)
        self.leads[index] = values
        self.seen_at[index] = self.epoch
        self._looked[index] = True
        return leads & ~self._drawn[index]

    def update(self, indices: Tensor, margins: Tensor) -> None:
        index = _checks.row_numbers("indices", indices, self.num_samples).flatten()
        values = _checks.row_values("margins", margins, indices).flatten()
        values = values.float() * 2 - 1 if values.dtype == torch.bool else values.float()
        before = self.leads[index]
        level, looked = self._levels(before), self._looked[index]
        self._count(self._slips, level[looked], values[looked] <= self._base)
        if not self._screens:
            first = self.seen_at[index] < self.epoch  # a second pass in one epoch says nothing about relapse
            self._count(self._passes, level[first], values[first] < self._base)
        self.leads[index] = torch.where(looked, before, torch.maximum(values, before) if self._screens else values)
        self.seen_at[index] = self.epoch
        self._looked[index] = False

    def __iter__(self) -> Iterator[int]:
        start = self._resume_at
        if start is None:
            self.next_epoch()
        self._resume_at = None
        yield from self._share()[start:].tolist()
        self._over = True

    def __len__(self) -> int:
        """Rows that this rank visits in the epoch under way (in the first, before it starts), those behind included."""
        return len(self.plan) // self.num_replicas

    def _share(self) -> Tensor:
        """The rows of the plan that are this rank's."""
        return self.plan[self.rank * len(self) : (self.rank + 1) * len(self)]

    def next_epoch(self) -> Tensor:
        """Begin an epoch: take in what all ranks saw in the last one and return the rows to visit now, in order."""
        if self._started:
            self._take_in()
            self.epoch += 1
            self.plan = self._draw()
        self._started, self._over, self._resume_at = True, False, None
        return self.plan

    def _take_in(self) -> None:
        self._looked.zero_()

    def _draw(self) -> Tensor:
        """The rows of this epoch in random order, a multiple of ``num_replicas`` of them."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        self._drawn = torch.rand(self.num_samples, generator=generator) < self.recheck
        level, risks = self._levels(self.leads), self.risk
        counts = torch.bincount(level, minlength=LEVELS)
        visit = self.leads < self.bar
        allowance = self.tolerance * float((counts * risks).sum())  # open rows that may go unnoticed
        for risk, number in sorted((risk, level) for level, risk in enumerate(risks.tolist()) if level >= FIRST):
            rows = ((level == number) & ~visit).nonzero().flatten()
            leave = min(int(len(rows) * (1 - self.recheck)), int(allowance / risk))
            allowance -= leave * risk
            rows = rows[torch.randperm(len(rows), generator=generator)]
            rows = rows[self.seen_at[rows].argsort(stable=True)]
            visit[rows[: len(rows) - leave]] = True
        order = visit.nonzero().flatten()
        order = order[torch.randperm(len(order), generator=generator)]
        short = -len(order) % self.num_replicas
        return torch.cat([order, order[torch.arange(short) % max(1, len(order))]])

    def state_dict(self) -> dict[str, Any]:
        """All that changes, so that a run resumed in the middle of an epoch decides as it would have.

        What other ranks saw since the epoch began is not in it: save one for each rank, or between epochs. ``position``
        is how many rows of this rank's share are behind: up to the last that `update` was told of, whatever a loader
        has fetched since, and all of them when iteration came to the end.
        """
        told = self._seen[self._share()].nonzero()
        position = len(self) if self._over else int(told.max()) + 1 if len(told) else 0
        tensors = {"streak": self.streak, "seen": self._seen, "looks": self._passes, "plan": self.plan}
        numbers = {"epoch": self.epoch, "started": self._started, "position": position}
        return {**numbers, **{name: value.clone() for name, value in tensors.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the `state_dict` was taken.

        Iteration goes on with the epoch that was under way, from ``position`` on, so a loop must not skip batches
        itself. With that epoch at its end, or without a position, it begins the next one; so does `next_epoch` at once.
        """
        _checks.state(state, ("epoch", "started", "streak", "seen", "looks", "plan"))
        if len(state["streak"]) != self.num_samples:
            raise ValueError(f"state: expected {self.num_samples} samples, found {len(state['streak'])}")
        _checks.whole_number("epoch", state["epoch"], 0, 2**31)
        position = state.get("position", 2**62)  # earlier versions wrote none
        _checks.whole_number("position", position, 0, 2**62)
        pass
        _checks.saved("seen", state["seen"], self._seen, high=2)
        _checks.saved("looks", state["looks"], self._passes, high=1e300)
        _checks.saved("plan", state["plan"], self.plan, high=self.num_samples - 1, sized=False)
        self.epoch, self._started = state["epoch"], bool(state["started"])
        self.streak, self._seen = state["streak"].clone(), state["seen"].clone()
        self._passes, self.plan = state["looks"].clone(), state["plan"].clone()
        self._over = position >= len(self)
        self._resume_at = position if self._started and not self._over else None
