"""Up to how many queries at a time the adaptive head is faster than the exact one, measured where it serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

BATCHES = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 7
LEAD = 0.9  # the share of the exact head's time that the adaptive one may take: in doubt, the exact one answers
STATES = BATCHES[-1] * 2  # that are measured with


def measure_crossover(
    adaptive: Callable[[Tensor], object],
    exact: Callable[[Tensor], object],
    states: Tensor,
    *,
    agree: Callable[[bool], bool] = bool,
) -> int:
    """The largest batch of those tried for which, as for all smaller ones, ``adaptive`` is faster by `LEAD`, else 0.

    Both take turns, each time with other states, for some take longer than others.

    Args:
        states: queries (N, d), like those to come.
        agree: says on every rank what one of them has found, so that all decide alike.

    Example:
        >>> import torch
        >>> measure_crossover(lambda x: time.sleep(0.01 * len(x)), lambda x: time.sleep(0.03), torch.zeros(64, 2))
        2
    """
    best = 0
    for batch in BATCHES:
        times: tuple[list[float], list[float]] = [], []
        for turn in range(-1, REPEATS):  # what the first one takes is not counted
            start = (turn + 1) * batch % max(1, len(states) - batch + 1)
            queries = states[start : start + batch]
            for call, taken in zip((adaptive, exact), times, strict=True):
                begin = time.perf_counter()
                call(queries)
                taken += [time.perf_counter() - begin] if turn >= 0 else []
        if len(states) < batch or not agree(_middle(times[0]) < LEAD * _middle(times[1])):
            break
        best = batch
    return best


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
