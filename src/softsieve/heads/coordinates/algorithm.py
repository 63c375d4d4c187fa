"""The algorithm of the paper for any k: read prefixes of a random order until intervals decide, the rest in full.

While the intervals of `bounds` hold, a row whose upper end is below the k-th largest lower end is not among the top k,
and every probability lies between its least and its greatest value over the intervals. So one probability delta serves
best arms and partition function alike, and no constant stands between an interval and an answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from softsieve.heads.coordinates.bounds import Bounds, Round
from softsieve.heads.engine import Answer
from softsieve.heads.reader import Reader

MANY_ROWS = 1024  # from so many on, reading more than is wanted may be the faster way:
FEW = 1 / 16  # whole columns, when more than this share of the rows is wanted
HALF = 1 / 3  # the whole weight, when more than this share is to be read in full
AT_ONCE = 1 << 24  # queries times rows that are worked on together


class Problem(NamedTuple):
    """Queries and what they are asked of."""

    reader: Reader  # of the weight that prefixes are read from, rotated or not
    plain: Reader  # of the weight as it is, for rows read in full
    x: Tensor  # (batch, d)
    turned: Tensor  # the queries as they belong to `reader`
    bias: Tensor | None  # (n,)
    k: int  # 0: the partition function alone
    eps: float
    read_chosen: bool  # read the chosen rows in full, so that their logits are exact


def solve(problem: Problem, bounds: Bounds, generator: torch.Generator | None) -> Answer:
    """Answer all queries, so many at a time that memory stays small."""
    step = max(1, AT_ONCE // problem.plain.rows)
    parts = [
        _solve(problem._replace(x=x, turned=turned), bounds, generator)
        for x, turned in zip(torch.split(problem.x, step), torch.split(problem.turned, step), strict=True)
    ]
    return parts[0] if len(parts) == 1 else Answer(*map(torch.cat, zip(*parts, strict=True)))


def _solve(problem: Problem, bounds: Bounds, generator: torch.Generator | None) -> Answer:
    state = _State(problem)
    rounds = bounds.rounds(problem.turned, generator)
    for round, wanted in _all(state, rounds) if problem.plain.rows < MANY_ROWS else _worthwhile(state, list(rounds)):
        state.estimate(round, wanted)
        _settle(state)
        if not bool(state.wanted.any()):
            break
    while bool(state.wanted.any()):
        state.read(state.wanted)
        _settle(state)
    return _answer(state, bounds.hold)


def _all(state: _State, rounds: Iterator[Round]) -> Iterator[tuple[Round, Tensor]]:
    """Every round, for every row that is wanted."""
    for round in rounds:
        yield round, state.wanted


def _worthwhile(state: _State, rounds: list[Round]) -> Iterator[tuple[Round, Tensor]]:
    """The first round, and later ones for queries to which they promise much; none when the last does not.

    Saves the time of rounds that settle nothing. Decided for each query by itself: what it is answered must not depend
    on the others of its batch.
    """
    hope = torch.ones_like(state.full[:, :1])
    for number, round in enumerate(rounds):
        if number == 1:
            hope = _promising(state, rounds[-1])
        promising = hope if number == 0 else hope & _promising(state, round)
        wanted = state.wanted & promising
        if bool(wanted.any()):
            yield round, wanted
        elif not bool(hope.any()):
            return


def _promising(state: _State, round: Round) -> Tensor:
    """Whether a round would settle three quarters of a query's rows with the estimates that we have, (batch, 1)."""
    query = torch.arange(len(state.low), device=state.low.device)
    half = round.half(query[:, None], torch.arange(state.low.shape[1], device=query.device), None)
    half = half.where(~state.full, 0.0)
    middle = (state.low + state.high) / 2
    problem = state.problem._replace(read_chosen=False)
    unsettled, _ = _unsettled(problem, middle - half, middle + half, state.full)
    return 4 * unsettled.sum(-1, keepdim=True) < state.wanted.sum(-1, keepdim=True)


def _some(here: Tensor, of: Tensor) -> Tensor | slice:
    """The queries ``here``, as a slice when they are all: that copies nothing."""
    return slice(None) if len(here) == len(of) else here


class _State:
    """What is known of the logits of a batch: an interval for each, and what was read for it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        shape = (len(problem.x), problem.plain.rows)
        self.low = problem.x.new_full(shape, -torch.inf)
        self.high = problem.x.new_full(shape, torch.inf)
        self.depth = torch.zeros(shape, dtype=torch.int32, device=problem.x.device)  # of the longest prefix
        self.full = torch.zeros_like(self.depth, dtype=torch.bool)  # rows read in full: both ends are the logit
        self.wanted = torch.ones_like(self.full)  # rows that must be read further
        self.bytes = torch.zeros(shape[:1], dtype=torch.int64, device=problem.x.device)
        self.bias = problem.x.new_zeros(shape[1]) if problem.bias is None else problem.bias

    def estimate(self, round: Round, wanted: Tensor) -> None:
        """Read a prefix for the wanted rows, or for all rows of a query."""
        reader, size = self.problem.reader, round.coords.shape[1]
        many = wanted.sum(-1) > (FEW * reader.rows if reader.rows >= MANY_ROWS else reader.rows)
        here = many.nonzero()[:, 0]
        if len(here):
            some = _some(here, wanted)
            value = reader.columns(round.coords[some], round.factor[some]) + round.offset[some, None] + self.bias
            half = round.half(here[:, None], torch.arange(reader.rows, device=here.device), None)
            full = self.full[some]
            self._set((some,), value.where(~full, self.low[some]), half.where(~full, 0.0), size)
            self.bytes[some] += size * reader.rows * reader.column_bytes
        wanted = wanted & ~many[:, None]
        query, row = wanted.nonzero(as_tuple=True)
        if len(query):
            value, squares = reader.entries(query, row, round.coords, round.factor, round.root)
            value = value + round.offset[query] + self.bias[row]
            self._set((query, row), value, round.half(query, row, squares), size)
            self.bytes += wanted.sum(-1) * (size * reader.row_bytes)

    def _set(self, at: tuple[Tensor | slice, ...], value: Tensor, half: Tensor, size: int) -> None:
        self.low[at], self.high[at] = value - half, value + half
        self.depth[at] = size

    def read(self, wanted: Tensor) -> None:
        """Read rows in full, or all rows of a query."""
        plain, x = self.problem.plain, self.problem.x
        many = wanted.sum(-1) > (HALF * plain.rows if plain.rows >= MANY_ROWS else plain.rows)
        here = many.nonzero()[:, 0]
        if len(here):
            some = _some(here, wanted)
            self.low[some] = self.high[some] = plain.full(x[some]) + self.bias
            self.full[some] = True
            self.bytes[some] += plain.rows * plain.size * plain.row_bytes
        query, row = (wanted & ~many[:, None]).nonzero(as_tuple=True)
        if len(query):
            self.low[query, row] = self.high[query, row] = plain.pairs(query, row, x) + self.bias[row]
            self.full[query, row] = True
            self.bytes += torch.bincount(query, minlength=len(x)) * (plain.size * plain.row_bytes)


def _settle(state: _State) -> None:
    """Say which rows must be read further, and read chosen ones in full where that is asked for."""
    while True:
        state.wanted, chosen = _unsettled(state.problem, state.low, state.high, state.full)
        if not bool(chosen.any()):
            return
        state.read(chosen)


def _unsettled(problem: Problem, low: Tensor, high: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that must be read further, and chosen rows that are to be read in full first; (batch, n) each."""
    k, eps = problem.k, problem.eps
    wanted = torch.zeros_like(full)
    chosen = torch.zeros_like(full)
    if k:
        best, index = low.topk(k, dim=-1)
        candidates = ~(high < best[:, -1:])  # also where arithmetic failed
        wanted = candidates & ~full & (candidates.sum(-1, keepdim=True) > k)
        decided = ~wanted.any(-1, keepdim=True)  # also when too many are left that are tied: any of them will do
        chosen = torch.zeros_like(full).scatter_(1, index, True) & decided & ~full
        if problem.read_chosen and bool(chosen.any()):
            return wanted, chosen
    exponentials = _exponentials(low, high)
    sums = _sums(exponentials)
    ends = _probabilities(low, high, exponentials, sums, index) if k else sums
    settled = _close(*ends, eps).all(-1, keepdim=True)
    # Rows that leave more doubt about the sum than their part of what eps allows, and chosen ones, which the rest of
    # the sum does not help.
    doubtful = ~(exponentials.high - exponentials.low <= sums[0] * (eps / (2 * full.shape[1]))) | chosen
    return wanted | (doubtful & ~settled & ~full), torch.zeros_like(chosen)


def _close(least: Tensor, greatest: Tensor, eps: float) -> Tensor:
    """Whether some number is within eps of all between them."""
    return greatest - least <= eps * (greatest + least)


class _Exponentials(NamedTuple):
    """Exponentials of both ends, over that of the greatest upper end (batch, 1)."""

    low: Tensor
    high: Tensor
    shift: Tensor


def _exponentials(low: Tensor, high: Tensor) -> _Exponentials:
    shift = high.amax(-1, keepdim=True)
    # In sums, what is below e^-80 of the greatest counts as that: less slows processors down, and it is far from
    # deciding anything.
    return _Exponentials((low - shift).clamp_min_(-80).exp_(), (high - shift).clamp_min_(-80).exp_(), shift)


def _sums(exponentials: _Exponentials) -> tuple[Tensor, Tensor]:
    """Least and greatest sum of exponentials, (batch, 1) each, over that of `shift`."""
    return exponentials.low.sum(-1, True, dtype=torch.float64), exponentials.high.sum(-1, True, dtype=torch.float64)


def _probabilities(
    low: Tensor, high: Tensor, exponentials: _Exponentials, sums: tuple[Tensor, Tensor], chosen: Tensor
) -> tuple[Tensor, Tensor]:
    """Least and greatest probability of the chosen rows (batch, k) over all logits in their intervals."""
    chosen_low, chosen_high = exponentials.low.gather(-1, chosen), exponentials.high.gather(-1, chosen)
    others_low, others_high = sums[0] - chosen_low, sums[1] - chosen_high
    own_low, own_high = ((end.gather(-1, chosen).double() - exponentials.shift).exp() for end in (low, high))
    return own_low / (own_low + others_high), own_high / (own_high + others_low)


def _answer(state: _State, hold: bool) -> Answer:
    problem, dtype = state.problem, state.low.dtype
    exponentials = _exponentials(state.low, state.high)
    both = _sums(exponentials)
    sums = torch.cat(both, -1)
    # The number that is within eps of all between; for k > 0 the one that goes with the probabilities.
    middle = sums.mean(-1) if problem.k else 2 * sums.prod(-1) / sums.sum(-1)
    log_z, ends = middle.log(), sums.log()
    if not hold:  # the interval is what eps promises of the partition function, or more
        least, greatest = log_z - math.log1p(problem.eps), log_z - math.log1p(-problem.eps)
        ends = torch.stack([torch.minimum(ends[:, 0], least), torch.maximum(ends[:, 1], greatest)], -1)
        ends = torch.where(state.full.all(-1, keepdim=True), log_z[:, None], ends)
    index = state.low.topk(problem.k, dim=-1).indices
    logits = (state.low.gather(-1, index) + state.high.gather(-1, index)) / 2
    logits, order = logits.sort(-1, descending=True)
    index = index.gather(-1, order)
    least, greatest = _probabilities(state.low, state.high, exponentials, both, index)
    plain, reader = problem.plain, problem.reader
    kept = state.depth if reader is not plain else torch.where(state.full, 0, state.depth)  # rotated entries are others
    return Answer(
        index,
        (2 * least * (greatest / (least + greatest).clamp_min(1e-300))).to(dtype),
        logits,
        (log_z + exponentials.shift[:, 0]).to(dtype),
        (ends + exponentials.shift).to(dtype),
        (kept + state.full * plain.size).sum(-1, dtype=torch.int64),
        state.bytes,
        state.full.all(-1),
    )
