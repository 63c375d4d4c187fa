"""Which rows an epoch visits: those not yet solved, and enough of the solved ones to notice when they relapse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from softsieve import _checks

LONGEST = 4  # rows solved once, twice, ... and LONGEST or more times in a row have a relapse rate each


class SolvedSampler(Sampler[int]):
    """Visits every row that was not solved when last seen, and as many solved ones as their relapses call for.

    A solved row has zero gradient, so leaving it out costs nothing as long as it stays solved. Whether it does is known
    of every row that is seen again: of the rows solved ``s`` times in a row, some share ``risk[s]`` no longer is. An
    epoch leaves out solved rows, those of the smallest risk first, until the expected number of relapsed ones among
    them, going by the latest epochs, reaches ``tolerance * num_samples``, and always visits ``recheck`` of every kind.
    So clean data are mostly left out after the first epochs, and noisy data, whose rows relapse, are mostly visited.

    A loop may also screen rows: it asks `worth_screening` of which rows more than ``screen_above`` are expected to be
    solved, runs those forward without dropout, tells `update`, and trains on those that are not solved.

    Every rank of several processes takes the same decisions: what each rank saw is reduced once an epoch, when
    iteration starts. All ranks yield the same order, for loaders that shard it (Accelerate, Lightning); with
    ``num_replicas`` and ``rank`` each yields its own equal share.

    Args:
        num_samples: rows of the data set.
        tolerance: expected share of rows that have relapsed and are left out all the same, in [0, 1]; 0: none. A
            target, not a bound: the rates are an epoch old, and simulations went up to half above it.
        recheck: share of the solved rows that is always visited again, in (0, 1].
        screen_above: chance of being solved above which a row is worth a forward pass of its own, in [0, 1]; 0: any, 1:
            none. A forward pass is about a third of a training pass.
        seed: of the random order; the same on all ranks.
        num_replicas, rank: as in ``torch.utils.data.DistributedSampler``.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was found.

    Example:
        Batches must say which rows they hold; then training needs three lines more::

            sampler = SolvedSampler(len(dataset))
            for index, features, target in DataLoader(dataset, batch_size=32, sampler=sampler):
                loss, stats = as_cross_entropy(model(features), target, return_stats=True)
                sampler.update(index, stats.solved)

        A loop that keeps ``sampler.state_dict()`` in its checkpoints resumes in the middle of an epoch: after
        `load_state_dict` the first iteration yields the rows that `update` has not been told of, and no batch is to be
        skipped by hand.

        Of 1000 rows, 900 are solved whenever they are seen. Nothing is known of how they last, then it is:

        >>> sampler = SolvedSampler(1000, tolerance=0.01, recheck=0.1)
        >>> for epoch in range(4):
        ...     rows = torch.tensor(list(sampler))
        ...     sampler.update(rows, rows < 900)
        ...     print(len(rows), end=" ")
        1000 980 190 191
    """

    def __init__(
        self, num_samples: int, *, tolerance: float = 0.005, recheck: float = 0.1, screen_above: float = 1 / 3,
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
        self.tolerance, self.recheck, self.screen_above = tolerance, recheck, screen_above
        self.epoch = 0  # whose rows `plan` holds, in order
        self._started = False
        self._over = False  # whether iteration came to the end of the plan
        self._resume_at: int | None = None  # row of this rank's share at which iteration goes on with a loaded epoch
        self.streak = torch.zeros(num_samples, dtype=torch.uint8)  # times solved in a row, up to LONGEST
        self._seen = torch.zeros(num_samples, dtype=torch.uint8)  # in this epoch: 0 not, 1 solved, 2 not solved
        # By streak: screening and training passes over rows, and those that were not solved. Old ones fade.
        self._passes = torch.zeros(2, LONGEST + 1, dtype=torch.float64)
        self.plan = self._draw()

    @property
    def risk(self) -> Tensor:
        """By streak, the share of rows not solved when seen again. Before any were: as one time fewer; half; all."""
        risk = torch.empty(LONGEST + 1, dtype=torch.float64)
        for streak, (passes, failed) in enumerate(self._passes.T.tolist()):
            expected = float(risk[streak - 1]) if streak > 1 else (1.0, 0.5)[streak]  # what was never solved is not
            risk[streak] = (failed + 2 * expected) / (passes + 2)  # Laplace's rule: two passes' worth of expectation
        return risk

    @property
    def solved(self) -> Tensor:
        """Which rows were solved when last seen, as far as this rank knows: bool, (num_samples,)."""
        return torch.where(self._seen == 0, self.streak > 0, self._seen == 1)

    def worth_screening(self, indices: Tensor) -> Tensor:
        """Of which rows screening is expected to save the training pass; bool, shape of ``indices``."""
        index = _checks.row_numbers("indices", indices, self.num_samples)
        return (1 - self.risk >= self.screen_above)[self.streak[index].long()]

    def update(self, indices: Tensor, solved: Tensor) -> None:
        """Note which of the rows ``indices`` are ``solved``, on each rank for the rows it saw."""
        index = _checks.row_numbers("indices", indices, self.num_samples).flatten()
        flags = _checks.row_values("solved", solved, indices).flatten().bool()
        first = self._seen[index] == 0  # a second pass in one epoch says nothing about relapse
        streak, failed = self.streak[index[first]].long(), (~flags[first]).double()
        # Old passes fade, by half over a sixteenth of the data: the model moves on, and so do the rates.
        self._passes *= 0.5 ** (16 * len(streak) / self.num_samples)
        self._passes[0].index_add_(0, streak, torch.ones_like(failed))
        self._passes[1].index_add_(0, streak, failed)
        self._seen[index] = 2 - flags.to(torch.uint8)

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
        """Reduce what the ranks saw and bring the streaks up to date."""
        if dist.is_available() and dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            seen, passes = self._seen.to(device), self._passes.to(device)
            dist.all_reduce(seen, dist.ReduceOp.MAX)
            dist.all_reduce(passes)
            self._seen, self._passes = seen.cpu(), passes.cpu() / ranks
        grown = (self.streak + 1).clamp(max=LONGEST)
        self.streak = torch.where(self._seen == 0, self.streak, torch.where(self._seen == 1, grown, 0))
        self._seen = torch.zeros_like(self._seen)

    def _draw(self) -> Tensor:
        """The rows of this epoch in random order, a multiple of ``num_replicas`` of them."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        visit = self.streak == 0
        allowance = self.tolerance * self.num_samples  # relapsed rows that may go unnoticed
        for risk, streak in sorted((risk, streak) for streak, risk in enumerate(self.risk.tolist()) if streak > 0):
            rows = (self.streak == streak).nonzero().flatten()
            leave = min(int(len(rows) * (1 - self.recheck)), int(allowance / risk))
            allowance -= leave * risk
            visit[rows[torch.randperm(len(rows), generator=generator)[leave:]]] = True
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
        _checks.saved("streak", state["streak"], self.streak, high=LONGEST)
        _checks.saved("seen", state["seen"], self._seen, high=2)
        _checks.saved("looks", state["looks"], self._passes, high=1e300)
        _checks.saved("plan", state["plan"], self.plan, high=self.num_samples - 1, sized=False)
        self.epoch, self._started = state["epoch"], bool(state["started"])
        self.streak, self._seen = state["streak"].clone(), state["seen"].clone()
        self._passes, self.plan = state["looks"].clone(), state["plan"].clone()
        self._over = position >= len(self)
        self._resume_at = position if self._started and not self._over else None
