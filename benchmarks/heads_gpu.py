"""The top k of a linear head on a GPU: the cascade beside the exact product, all as CUDA graphs with cold caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import percentiles
from softsieve.heads import AdaptiveSoftmax
from softsieve.heads.cascade.index import lengths

PRODUCT, WHOLE, OURS = "F.linear", "linear + softmax + topk", "cascade"
METHODS = (PRODUCT, WHOLE, OURS)
_CACHE = 1 << 28  # bytes that are read before every run: several times the largest cache there is


class Result(NamedTuple):
    """One method for one batch size. Ratios say how many times faster it is."""

    head: str
    n: int
    d: int
    batch: int
    method: str
    us: float
    us_p20: float
    us_p80: float
    over_product: float
    over_whole: float
    success: float  # share of the test queries with the right top k and probabilities within eps
    exact: float  # share for which everything was read
    bytes_ratio: float  # bytes of the weight for each byte read
    preview: int  # columns
    tier: int  # columns, 0: none
    width: float
    coordinates: float  # entries of codes and weight that were read, in the mean
    auto: str  # what method="auto" takes for this batch size, called one by one


def measure(
    name: str,
    weight: Tensor,
    calibration: Tensor,
    test: Tensor,
    *,
    beta: float = 1.0,
    batches: list[int],
    k: int,
    eps: float,
    delta: float,
    repeats: int,
    seed: int = 0,
) -> list[Result]:
    """All methods on the same queries, taking turns; queries are in the weight's dtype."""
    head = AdaptiveSoftmax(weight, eps=eps, delta=delta, beta=beta, method="cascade", seed=seed)
    fit = head.calibrate(calibration.to(weight.dtype), k, generator=torch.Generator().manual_seed(seed))
    queries = test.to(weight.dtype)
    found = head.coverage(queries, k)
    coordinates = float(head.topk(queries, k).coordinates.double().mean())
    (n, d), tiers = weight.shape, lengths(weight.shape[1])[1]
    results = []
    for batch in batches:
        static = queries[:batch].clone()
        calls: list[Callable[[], object]] = [
            lambda x=static: F.linear(x, weight),  # type: ignore[misc]
            lambda x=static: F.linear(x, weight).softmax(-1).topk(k),  # type: ignore[misc]
            lambda x=static: head.topk(x, k),  # type: ignore[misc]
        ]
        timed = _cold_times(calls, static, queries, repeats)
        product, whole = timed[0][1], timed[1][1]
        for method, (low, median, high) in zip(METHODS, timed, strict=True):
            ours = method == OURS
            results.append(
                Result(
                    name, n, d, batch, method, median, low, high, product / median, whole / median,
                    found.right if ours else 1.0, found.exact if ours else 1.0, 1 / found.read if ours else 1.0,
                    tiers[fit.first] if ours else 0, tiers[fit.tier] if ours and fit.tier >= 0 else 0,
                    fit.width if ours else 0.0, coordinates if ours else float(n * d),
                    "cascade" if batch <= fit.batch else "exact",
                )
            )  # fmt: skip
    return results


def _cold_times(
    calls: list[Callable[[], object]], static: Tensor, queries: Tensor, repeats: int
) -> list[tuple[float, float, float]]:
    """20th, 50th and 80th percentile of the microseconds that the graph of each call takes, of other queries each."""
    graphs = []
    for call in calls:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    cache = torch.zeros(_CACHE // 4, device=queries.device)
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    batch = len(static)
    for number in range(repeats):
        first = number * batch % (len(queries) - batch + 1)
        for graph, pairs in zip(graphs, events, strict=True):
            static.copy_(queries[first : first + batch])
            cache.sum()  # read: lines that a cache has yet to write back would take time from whoever comes next
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            pairs.append((begin, end))
    torch.cuda.synchronize()
    return [percentiles([1e3 * begin.elapsed_time(end) for begin, end in pairs]) for pairs in events]
