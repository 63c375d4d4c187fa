"""What the adaptive and the exact head take for how many queries at a time, measured where they serve."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

BATCHES = (1, 2, 4, 8, 16, 32, 64)
GROUPS, TRIES = 5, 3  # queries that are measured with at each size, and how often each
LEAD = 0.9  # the share of the exact head's time that the adaptive one may take: in doubt the exact one answers
HOPELESS = 2.0  # times the exact head's time: larger batches are not tried
STATES = BATCHES[-1] * 2  # that are measured with
COLD = 64 << 20  # bytes that are read before every call: after the layers of a model nothing of a head is in a cache

Clock = Callable[[], float]


Times = dict[int, tuple[float, float]]  # seconds of the adaptive and of the exact head, by batch size


def measure_times(
    adaptive: Callable[[Tensor], object],
    exact: Callable[[Tensor], object],
    states: Tensor,
    *,
    agree: Callable[[bool], bool] = bool,
    now: Clock = time.perf_counter,
) -> Times:
    """What both heads take for batches of the sizes that are tried, up to the first that has no chance.

    Both take turns, each with cold caches, as between the layers of a model. Of each group of states the shortest time
    counts, which other programs disturb least, and of these the mean, for some states take longer than others.

    Args:
        states: queries (N, d), like those to come.
        agree: says on every rank what one of them has found, so that all go on alike.
        now: the clock.

    Example:
        >>> clock = [0.0]
        >>> def takes(seconds): clock[0] += seconds
        >>> states, heads = torch.zeros(64, 2), (lambda x: takes(5.0 * len(x)), lambda x: takes(30.0))
        >>> times = measure_times(*heads, states, now=lambda: clock[0])
        >>> times, crossover(times)
        ({1: (5.0, 30.0), 2: (10.0, 30.0), 4: (20.0, 30.0), 8: (40.0, 30.0), 16: (80.0, 30.0)}, 4)
    """
    times: Times = {}
    other = torch.ones(COLD // 4, device=states.device)
    for batch in BATCHES:
        if len(states) < batch:
            break
        sums = [0.0, 0.0]
        for group in range(GROUPS):
            start = group * batch % (len(states) - batch + 1)
            queries = states[start : start + batch]
            tries = [[_seconds(call, queries, other, now) for call in (adaptive, exact)] for _ in range(TRIES)]
            sums = [total + min(own) for total, own in zip(sums, zip(*tries, strict=True), strict=True)]
        times[batch] = sums[0] / GROUPS, sums[1] / GROUPS
        if not agree(sums[0] < HOPELESS * sums[1]):
            break
    return times


def crossover(times: Times) -> int:
    """The largest batch for which, as for all smaller ones, the adaptive head is faster by `LEAD`, else 0."""
    best = 0
    for batch, (own, exact) in sorted(times.items()):
        if own >= LEAD * exact:
            break
        best = batch
    return best


def _seconds(call: Callable[[Tensor], object], queries: Tensor, other: Tensor, now: Clock) -> float:
    float(other.sum())
    start = now()
    call(queries)
    return now() - start
