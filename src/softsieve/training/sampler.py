"""Which rows an epoch visits: those that do not lead safely, and enough of the others to notice when they relapse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from softsieve import _checks

# Rows are told apart by their margin when last seen, in bands: not seen yet, below the margin asked for by so much, and
# above it by such shares of what is missing to 1.
BELOW = (-0.3, -0.1)
ABOVE = (0, 1 / 64, 1 / 32, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 7 / 8, 15 / 16, 31 / 32)
SAFEST = ABOVE.index(3 / 4)  # the highest from which on rows are left out; those above it only tell relapses apart
LOWEST, LEADING = 1, 2 + len(BELOW)  # the first band of rows that were seen, and of those that led
BANDS = LEADING + len(ABOVE)
UNSEEN = -2.0  # the margin of a row that was never seen
LAST = 2**30  # the epoch beyond which nobody trains
FADE = 256  # rows over which what is known fades by half at least: rates of fewer say little
SLIPS = 0.08  # share of rows with a gradient in training that is few enough to leave out all rows of their band


class SolvedSampler(Sampler[int]):
    """Visits every row that does not lead safely, and as many others as their relapses call for.

    A row whose target leads by more than the delta of the loss has zero gradient, so leaving it out costs nothing as
    long as it stays so. Two rates are measured, by the margin that rows had when last seen:

    - Relapses: which share is below the margin when seen again. An epoch leaves out rows above it, those of the
      smallest risk first, until the expected number of relapsed ones among them reaches ``tolerance * num_samples``. It
      always visits ``recheck`` of each kind, those not seen for longest first.
    - Slips, where a loop screens: dropout lowers margins, so that of the rows which a screening pass shows above delta
      some have a gradient in training. Rows are left out from the smallest margin on at which 8 % or less have one.

    A loop may screen rows before it trains: it asks `worth_screening` which rows are likely to be left out, runs those
    forward without dropout, and tells `screened` their margins, which says which of them to leave out.

    Every rank of several processes takes the same decisions: what each rank saw is reduced once an epoch, when
    iteration starts. All ranks yield the same order, for loaders that shard it (Accelerate, Lightning); with
    ``num_replicas`` and ``rank`` each yields its own equal share.

    Args:
        num_samples: rows of the data set.
        margin: from which rows are left out, in (0, 1], whatever the delta of the loss. None: from where training has
            no gradient, ``delta``, or as much above it as slips call for.
        delta: that of the loss, in [0, 1].
        tolerance: expected share of rows that have relapsed and are left out all the same, in [0, 1]; 0: none. A
            target, not a bound: the rates are an epoch old, and of few rows rough. Simulations went up to two thirds
            above it with 20,000 rows, and to 2.2 times as high with 2,000.
        recheck: share of the rows left out that is always visited again, in (0, 1].
        screen_above: chance of being left out above which a row is worth a forward pass of its own, in [0, 1]; 0: any.
            A forward pass is about a third of a training pass, and an open row is trained on all the same.
        seed: of the random order; the same on all ranks.
        num_replicas, rank: as in ``torch.utils.data.DistributedSampler``.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was found.

    Example:
        Batches must say which rows they hold; then training needs three lines more::

            sampler = SolvedSampler(len(dataset))
            for index, features, target in DataLoader(dataset, batch_size=32, sampler=sampler):
                loss, stats = as_cross_entropy(model(features), target, return_stats=True)
                sampler.update(index, stats.margin)

        A loop that keeps ``sampler.state_dict()`` in its checkpoints resumes in the middle of an epoch: after
        `load_state_dict` the first iteration yields the rows that `update` has not been told of, and no batch is to be
        skipped by hand.

        Of 1000 rows, 900 lead by 0.9 whenever they are seen. Nothing is known of how that lasts, then it is:

        >>> sampler = SolvedSampler(1000, tolerance=0.01, recheck=0.1)
        >>> for epoch in range(4):
        ...     rows = torch.tensor(list(sampler))
        ...     sampler.update(rows, torch.where(rows < 900, 0.9, 0.0))
        ...     print(len(rows), end=" ")
        1000 980 190 190
    """

    def __init__(
        self, num_samples: int, *, margin: float | None = None, delta: float = 0.1, tolerance: float = 0.02,
        recheck: float = 0.05, screen_above: float = 1 / 2, seed: int = 0, num_replicas: int = 1, rank: int = 0,
    ) -> None:  # fmt: skip
        _checks.whole_number("num_samples", num_samples, 1, 2**40)
        if margin is not None and _checks.number("margin", margin, 0, 1) == 0:
            raise ValueError("margin: expected a number in (0, 1], found 0")
        self.margin, self.delta = margin, _checks.number("delta", delta, 0, 1)
        self.tolerance = _checks.number("tolerance", tolerance, 0, 1)
        self.recheck = _checks.number("recheck", recheck, 1e-6, 1)
        self.screen_above = _checks.number("screen_above", screen_above, 0, 1)
        _checks.whole_number("seed", seed, 0, 2**40)
        _checks.whole_number("num_replicas", num_replicas, 1, 2**31)
        _checks.whole_number("rank", rank, 0, num_replicas - 1)
        self.num_samples, self.seed, self.num_replicas, self.rank = num_samples, seed, num_replicas, rank
        least = self.delta if margin is None else float(margin)
        edges = [*(least + step for step in BELOW), *(least + share * (1 - least) for share in ABOVE)]
        self._edges = torch.tensor(edges, dtype=torch.float32)  # of the bands
        self.epoch = 0  # whose rows `plan` holds, in order
        self._started = False
        self._over = False  # whether iteration came to the end of the plan
        self._resume_at: int | None = None  # row of this rank's share at which iteration goes on with a loaded epoch
        self.margins = torch.full((num_samples,), UNSEEN, dtype=torch.float32)  # when last seen
        self._seen_in = torch.full((num_samples,), -1, dtype=torch.int32)  # epoch
        self._screens = False  # whether the loop does
        self._waiting = torch.zeros(num_samples, dtype=torch.bool)  # rows screened in this epoch and not trained since
        # By band, passes over rows and those in which a row was open, or had a gradient. Old ones fade.
        self._passes = torch.zeros(2, BANDS, dtype=torch.float64)  # screening, or training where nobody screens
        self._slips = torch.zeros(2, BANDS, dtype=torch.float64)  # training, by the margin in the screening before it
        self.plan = self._draw()

    @property
    def skip_margin(self) -> float:
        """From which margin rows are left out now."""
        first = len(BELOW)
        if self.margin is None and self._screens:
            rates = _falling(_rates(self._slips)[LEADING:], self._slips[0, LEADING:])
            first += min(int((rates > SLIPS).sum()), SAFEST)
        return float(self._edges[first])

    @property
    def risk(self) -> Tensor:
        """By band, the share of rows that were open when seen again; of bands not seen again, as of the band below."""
        return _rates(self._passes)

    @property
    def solved(self) -> Tensor:
        """Which rows led when last seen, as far as this rank knows: bool, (num_samples,)."""
        return self.margins >= self._edges[len(BELOW)]

    def bands(self, margins: Tensor) -> Tensor:
        """The band of each margin, from 0 (not seen) to ``BANDS - 1``."""
        return torch.where(margins == UNSEEN, 0, LOWEST + torch.bucketize(margins, self._edges, right=True))

    def worth_screening(self, indices: Tensor) -> Tensor:
        """Of which rows screening is expected to save the training pass; bool, shape of ``indices``.

        A share ``recheck`` of all rows is screened anyway, or nothing would be known of them.
        """
        index = _checks.row_numbers("indices", indices, self.num_samples)
        return (1 - self.risk >= self.screen_above)[self.bands(self.margins[index])] | self._picked[index]

    def screened(self, indices: Tensor, margins: Tensor, *, delta: float | None = None) -> Tensor:
        """Note the ``margins`` of a screening pass, and say which of the rows ``indices`` to leave out; bool.

        Args:
            indices, margins: row numbers, and the margin of each or whether it is solved.
            delta: of the loss by now, where a schedule moves it.
        """
        index, values = self._check(indices, margins, delta)
        self._screens = True
        leads = values >= self.skip_margin
        self._passes = self._counted(self._passes, self.bands(self.margins[index]), ~leads)
        self.margins[index], self._seen_in[index], self._waiting[index] = values, self.epoch, True
        return (leads & ~self._picked[index]).view(indices.shape)  # those picked show whether they slip

    def update(self, indices: Tensor, margins: Tensor, *, delta: float | None = None) -> None:
        """Note the ``margins`` of the rows ``indices`` in training, on each rank of the rows it saw.

        Args:
            indices, margins: row numbers, and the margin of each or whether it is solved. A row that is only known as
                solved is taken to lead by more each time.
            delta: of the loss by now, where a schedule moves it.
        """
        index, values = self._check(indices, margins, delta)
        before, least = self.margins[index], self._edges[len(BELOW)]
        bands, waited = self.bands(before), self._waiting[index]
        self._slips = self._counted(self._slips, bands[waited], values[waited] < least)
        if self._screens:  # dropout lowers what training shows
            values = torch.where(waited, before, torch.maximum(values, before))
        else:
            first = self._seen_in[index] < self.epoch  # a second pass in one epoch says nothing about relapse
            self._passes = self._counted(self._passes, bands[first], values[first] < least)
        self.margins[index], self._seen_in[index], self._waiting[index] = values, self.epoch, False

    def _check(self, indices: Tensor, margins: Tensor, delta: float | None) -> tuple[Tensor, Tensor]:
        """Row numbers and margins, flat and on the CPU; flags as the margins they stand for.

        Of a loss with another ``delta``, margins as they would be with the sampler's: above it when solved.
        """
        index = _checks.row_numbers("indices", indices, self.num_samples).flatten()
        values = _checks.row_values("margins", margins, indices).flatten()
        if values.is_floating_point():
            above = 0.0 if delta is None else _checks.number("delta", delta, 0, 1) - self.delta
            above = above if self.margin is None else 0.0  # a margin of one's own stays where it is
            return index, (_checks.row_margins(values.float()) - above).clamp(-1, 1)
        up = (self.bands(self.margins[index]) + 1).clamp(LEADING, LEADING + SAFEST)
        return index, torch.where(_checks.row_flags("margins", values), self._edges[up - LOWEST - 1], -1.0)

    def _counted(self, passes: Tensor, bands: Tensor, failed: Tensor) -> Tensor:
        """With so many more; old ones fade by half over a sixteenth of the data, or `FADE` rows: the model moves on."""
        passes = passes * 0.5 ** (len(bands) / max(self.num_samples / 16, FADE))
        return passes.index_add(1, bands, torch.stack([torch.ones(len(bands)), failed]).double())

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

    def next_epoch(self, *, whole: bool = False) -> Tensor:
        """Begin an epoch: take in what all ranks saw in the last one and return the rows to visit now, in order.

        A ``whole`` one visits all, for a loop that has reason not to leave anything out yet.
        """
        if self._started:
            self._take_in()
            self.epoch += 1
            self.plan = self._draw(whole=whole)
        self._started, self._over, self._resume_at = True, False, None
        return self.plan

    def _take_in(self) -> None:
        """Reduce what the ranks saw in this epoch."""
        self._waiting = torch.zeros_like(self._waiting)
        if not dist.is_available() or not dist.is_initialized() or (ranks := dist.get_world_size()) == 1:
            return
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        latest = torch.where(self._seen_in == self.epoch, self.margins, UNSEEN).to(device)
        passes = torch.stack([self._passes, self._slips]).to(device)
        screens = torch.tensor(self._screens, dtype=torch.uint8, device=device)
        dist.all_reduce(latest, dist.ReduceOp.MAX)
        dist.all_reduce(passes)
        dist.all_reduce(screens, dist.ReduceOp.MAX)
        latest, self._screens = latest.cpu(), bool(screens)
        self._passes, self._slips = (passes.cpu() / ranks).unbind()
        self.margins = torch.where(latest == UNSEEN, self.margins, latest)
        self._seen_in = torch.where(latest == UNSEEN, self._seen_in, self.epoch)

    def _generator(self) -> torch.Generator:
        """Of this epoch's decisions. The first thing that is drawn from it are the rows picked to be seen anyway."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        self._picked = torch.rand(self.num_samples, generator=generator, dtype=torch.float32) < self.recheck
        return generator

    def _draw(self, *, whole: bool = False) -> Tensor:
        """The rows of this epoch in random order, a multiple of ``num_replicas`` of them."""
        generator = self._generator()
        bands, visit = self.bands(self.margins), (self.margins < self.skip_margin) | whole
        allowance = self.tolerance * self.num_samples  # relapsed rows that may go unnoticed
        # The same orders whatever is known: skipping nothing is the plain run.
        turn, order = (torch.randperm(self.num_samples, generator=generator) for _ in range(2))
        for risk, band in sorted((risk, band) for band, risk in enumerate(self.risk.tolist()) if band >= LEADING):
            rows = turn[((bands == band) & ~visit)[turn]]
            leave = min(int(len(rows) * (1 - self.recheck)), int(allowance / risk))
            allowance -= leave * risk
            visit[rows[self._seen_in[rows].argsort(stable=True)][: len(rows) - leave]] = True
        order = order[visit[order]]
        short = -len(order) % self.num_replicas
        return torch.cat([order, order[torch.arange(short) % max(1, len(order))]])

    def state_dict(self) -> dict[str, Any]:
        """All that changes, so that a run resumed in the middle of an epoch decides as it would have.

        What other ranks saw since the epoch began is not in it: save one for each rank, or between epochs. ``position``
        is how many rows of this rank's share are behind: up to the last that `update` was told of, whatever a loader
        has fetched since, and all of them when iteration came to the end.
        """
        told = ((self._seen_in == self.epoch) & ~self._waiting)[self._share()].nonzero()
        position = len(self) if self._over else int(told.max()) + 1 if len(told) else 0
        numbers = {"epoch": self.epoch, "started": self._started, "position": position, "screens": self._screens}
        return {**numbers, **{name: value.clone() for name, value in self._tensors().items()}}

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "margins": self.margins, "seen_in": self._seen_in, "waiting": self._waiting, "passes": self._passes,
            "slips": self._slips, "plan": self.plan,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the `state_dict` was taken.

        Iteration goes on with the epoch that was under way, from ``position`` on, so a loop must not skip batches
        itself. With that epoch at its end, or without a position, it begins the next one; so does `next_epoch` at once.
        States of version 0.2, which knew whether rows are solved and not by how much, are taken, too.
        """
        _checks.state(state, ("epoch", "started", "plan"))
        _checks.whole_number("epoch", state["epoch"], 0, LAST)
        position = state.get("position", 2**62)  # earlier versions wrote none
        _checks.whole_number("position", position, 0, 2**62)
        if "streak" in state:
            state = self._from_streaks(state)
        _checks.state(state, ("screens", *self._tensors()))
        if (rows := _checks.tensor("margins", state["margins"]).numel()) != self.num_samples:
            raise ValueError(f"state: expected {self.num_samples} samples, found {rows}")
        low = {"margins": UNSEEN, "seen_in": -1}
        high = {"seen_in": LAST, "passes": 1e15, "slips": 1e15, "plan": self.num_samples - 1}
        for name, tensor in self._tensors().items():
            _checks.saved(name, state[name], tensor, low=low.get(name, 0), high=high.get(name, 1), sized=name != "plan")
        flags = [_checks.flag(name, state[name]) for name in ("started", "screens")]
        self.epoch, self._started, self._screens = state["epoch"], *flags
        self.margins, self._seen_in, self._waiting = (state[n].clone() for n in ("margins", "seen_in", "waiting"))
        self._passes, self._slips, self.plan = (state[n].clone() for n in ("passes", "slips", "plan"))
        self._generator()
        self._over = position >= len(self)
        self._resume_at = position if self._started and not self._over else None

    def _from_streaks(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state of version 0.2: how often in a row each was solved, and what this epoch showed: 1 solved, 2 not."""
        _checks.state(state, ("seen",))
        rows = _checks.tensor("streak", state["streak"]).numel()
        _checks.saved("streak", state["streak"], torch.empty(rows, dtype=torch.uint8), high=4)
        _checks.saved("seen", state["seen"], state["streak"], high=2)
        streak, seen = state["streak"].long() + (state["seen"] == 1), state["seen"] > 0
        solved = (streak > 0) & (state["seen"] != 2)
        earlier = min(state["epoch"], 1) - 1  # no row is known before the first epoch
        return {
            "epoch": state["epoch"], "started": state["started"], "plan": state["plan"], "screens": False,
            "margins": torch.where(solved, self._edges[len(BELOW) - 1 + streak], torch.where(seen, -1.0, UNSEEN)),
            "seen_in": torch.where(seen, state["epoch"], earlier).int(), "waiting": torch.zeros_like(seen),
            "passes": torch.zeros_like(self._passes), "slips": torch.zeros_like(self._slips),
        }  # fmt: skip


def _rates(passes: Tensor) -> Tensor:
    """By band, the share of passes that failed. Before any: as in the band below; of the first that lead, half."""
    rates = torch.empty(BANDS, dtype=torch.float64)
    for band, (count, failed) in enumerate(passes.T.tolist()):
        expected = 1.0 if band <= LOWEST else float(rates[band - 1])  # what was never seen, or far off, is open
        expected = min(expected, 0.5) if band == LEADING else expected
        rates[band] = (failed + 2 * expected) / (count + 2)  # Laplace's rule: two passes' worth of expectation
    return rates


def _falling(rates: Tensor, passes: Tensor) -> Tensor:
    """The nearest rates that fall from band to band: neighbours that rise are pooled, by how many passes they had."""
    pools: list[tuple[float, float, int]] = []  # rate times weight, weight, and bands that share the rate
    for rate, count in zip(rates.tolist(), passes.tolist(), strict=True):
        pool = (rate * (count + 2), count + 2, 1)
        while pools and pools[-1][0] * pool[1] < pool[0] * pools[-1][1]:
            last = pools.pop()
            pool = (last[0] + pool[0], last[1] + pool[1], last[2] + pool[2])
        pools.append(pool)
    return torch.tensor([total / weight for total, weight, bands in pools for _ in range(bands)], dtype=torch.float64)
