"""Up to how many queries at a time the adaptive head is faster than the exact one, measured where it serves."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

BATCHES = (1, 2, 4, 8, 16, 32, 64)
GROUPS, TRIES = 5, 3  # queries that are measured with at each size, and how often each
LEAD = 0.9  # the share of the exact head's time that the adaptive one may take: in doubt the exact one answers
STATES = BATCHES[-1] * 2  # that are measured with
COLD = 64 << 20  # bytes that are read before every call: after the layers of a model nothing of a head is in a cache

Clock = Callable[[], float]


def measure_crossover(
    adaptive: Callable[[Tensor], object],
    exact: Callable[[Tensor], object],
    states: Tensor,
    *,
    agree: Callable[[bool], bool] = bool,
    now: Clock = time.perf_counter,
) -> int:
    """The largest batch of those tried for which, as for all smaller ones, ``adaptive`` is faster by `LEAD`, else 0.

    Both take turns, each with cold caches, as between the layers of a model. Of each group of states the shortest time
    counts, which other programs disturb least, and of these the mean, for some states take longer than others.

    Args:
        states: queries (N, d), like those to come.
        agree: says on every rank what one of them has found, so that all decide alike.
        now: the clock.

    Example:
        >>> clock = [0.0]
        >>> def takes(seconds): clock[0] += seconds
        >>> states, heads = torch.zeros(64, 2), (lambda x: takes(5.0 * len(x)), lambda x: takes(30.0))
        >>> measure_crossover(*heads, states, now=lambda: clock[0])
        4
    """
    best, other = 0, torch.ones(COLD // 4, device=states.device)
    for batch in BATCHES:
        if len(states) < batch:
            break
        times = [0.0, 0.0]
        for group in range(GROUPS):
            start = group * batch % (len(states) - batch + 1)
            queries = states[start : start + batch]
            tries = [[_seconds(call, queries, other, now) for call in (adaptive, exact)] for _ in range(TRIES)]
            times = [total + min(own) for total, own in zip(times, zip(*tries, strict=True), strict=True)]
        if not agree(times[0] < LEAD * times[1]):
            break
        best = batch
    return best


def _seconds(call: Callable[[Tensor], object], queries: Tensor, other: Tensor, now: Clock) -> float:
    float(other.sum())
    start = now()
    call(queries)
    return now() - start
