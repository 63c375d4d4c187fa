"""Up to how many queries at a time the adaptive head is faster than the exact one, measured where it serves."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

BATCHES = (1, 2, 4, 8, 16, 32, 64)
GROUPS, TRIES = 5, 3  # queries that are measured with at each size, and how often each
# The share of the exact head's time that the adaptive one may take: between the layers of a model less of what it reads
# is in a cache than here, and in doubt the exact one answers.
LEAD = 0.5
STATES = BATCHES[-1] * 2  # that are measured with


def measure_crossover(
    adaptive: Callable[[Tensor], object],
    exact: Callable[[Tensor], object],
    states: Tensor,
    *,
    agree: Callable[[bool], bool] = bool,
) -> int:
    """The largest batch of those tried for which, as for all smaller ones, ``adaptive`` is faster by `LEAD`, else 0.

    Both take turns. Of each group of states the shortest time counts, which other programs disturb least, and of these
    the mean, for some states take longer than others.

    Args:
        states: queries (N, d), like those to come.
        agree: says on every rank what one of them has found, so that all decide alike.

    Example:
        >>> import torch
        >>> measure_crossover(lambda x: time.sleep(0.005 * len(x)), lambda x: time.sleep(0.03), torch.zeros(64, 2))
        2
    """
    best = 0
    for batch in BATCHES:
        if len(states) < batch:
            break
        times = [0.0, 0.0]
        for group in range(GROUPS):
            start = group * batch % (len(states) - batch + 1)
            queries = states[start : start + batch]
            tries = [[_seconds(call, queries) for call in (adaptive, exact)] for _ in range(TRIES)]
            times = [total + min(own) for total, own in zip(times, zip(*tries, strict=True), strict=True)]
        if not agree(times[0] < LEAD * times[1]):
            break
        best = batch
    return best


def _seconds(call: Callable[[Tensor], object], queries: Tensor) -> float:
    start = time.perf_counter()
    call(queries)
    return time.perf_counter() - start
