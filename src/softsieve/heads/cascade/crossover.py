"""Up to how many queries at a time a cascade is faster than the exact product, by measuring both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BATCHES = (1, 2, 4, 8, 16, 32, 64)
_GROUPS = 5  # of queries that a batch of each size is measured with
_ROUNDS = 6  # times that each of them is asked, at most
_PATIENCE = 0.5  # seconds after which there is no other round
_LEAST_GROUPS, _MOST_GROUPS = 48, 480  # batches of each size that a device is measured with
_CACHE = 1 << 27  # bytes that are read before each of them, to empty caches
_CYCLES = 2_000_000  # of a device, by which the host is ahead of it


def measured_batch(
    ask: Callable[[Tensor], object], exact: Callable[[Tensor], object], x: Tensor, seconds: dict[int, float]
) -> int:
    """Up to how many queries at a time ``ask`` is faster than ``exact``; 0 if never.

    A batch takes ``exact`` no less time than a smaller one did, so it is measured where that does not tell, and then
    both take turns. What was measured goes to ``seconds``, by the size of a batch: for another k it is the same but for
    a moment.
    """
    if x.is_cuda:
        return _measured_on_device(ask, exact, x)
    best, known = 0, 0.0
    for batch in BATCHES:
        places = torch.arange(_GROUPS * batch, device=x.device) % len(x)
        queries = [x[some] for some in torch.split(places, batch)]  # other ones each time: some take longer
        known = max(known, seconds.get(batch, 0.0))
        rounds = _ROUNDS if batch in seconds else 1  # if one does not tell, both are measured
        taken = _seconds([ask], queries, enough=known, rounds=rounds)[0] if known else math.inf
        if taken > known and batch not in seconds:
            taken, known = _seconds([ask, exact], queries)
            seconds[batch] = known
        if taken > known:
            break
        best = batch
    return best


def _measured_on_device(ask: Callable[[Tensor], object], exact: Callable[[Tensor], object], x: Tensor) -> int:
    """The same by the means over many different queries, some of which fall back, of what the device takes."""
    best = 0
    for batch in BATCHES:
        groups = max(_LEAST_GROUPS, min(_MOST_GROUPS, len(x) // batch))
        places = torch.arange(groups * batch, device=x.device) % len(x)
        queries = [x[some] for some in torch.split(places, batch)]
        # The exact answer takes the same for all queries.
        if _mean_on_device(ask, queries) > _mean_on_device(exact, queries[:_LEAST_GROUPS]):
            break
        best = batch
    return best


def _mean_on_device(call: Callable[[Tensor], object], queries: Sequence[Tensor]) -> float:
    """Seconds that a device takes for one of these as a CUDA graph, in the mean, with other things in its caches."""
    static, device = queries[0].clone(), queries[0].device
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        call(static)
    torch.cuda.current_stream(device).wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call(static)
    cache = torch.zeros(_CACHE // 4, device=device)
    pairs = []
    torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
    for x in queries:
        static.copy_(x)
        cache.sum()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize(device)
    return float(sum(begin.elapsed_time(end) for begin, end in pairs)) / 1e3 / len(queries)


def _seconds(
    calls: Sequence[Callable[[Tensor], object]],
    queries: Sequence[Tensor],
    *,
    enough: float = -math.inf,
    rounds: int = _ROUNDS,
) -> list[float]:
    """What each of the calls takes on a CPU: the median over queries of the shortest of several times.

    Other work on a machine makes a call take longer, never shorter, and a short one of several threads many times as
    long. So every query is asked again and again, with all calls in turns, until time is up or the first of them takes
    no more than ``enough``.
    """
    shortest, end = [[math.inf] * len(queries) for _ in calls], time.perf_counter() + _PATIENCE
    for _ in range(rounds):
        for number, x in enumerate(queries):
            for own, call in zip(shortest, calls, strict=True):
                own[number] = min(own[number], _timed(call, x))
        medians = [sorted(own)[len(own) // 2] for own in shortest]
        if medians[0] <= enough or time.perf_counter() >= end:
            break
    return medians


def _timed(call: Callable[[Tensor], object], x: Tensor) -> float:
    start = time.perf_counter()
    call(x)
    return time.perf_counter() - start
