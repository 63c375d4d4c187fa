"""The top k of a linear head on a GPU: the cascade beside the exact product, all as CUDA graphs with cold caches."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import percentiles
from softsieve.heads import AdaptiveSoftmax
from softsieve.heads.cascade.index import lengths

PRODUCT, WHOLE, ONE_PASS, OURS = "F.linear", "linear + softmax + topk", "exact, one pass", "cascade"
METHODS = (PRODUCT, WHOLE, ONE_PASS, OURS)
_CACHE = 1 << 28  # bytes that are read before every run: several times the largest cache there is


class Result(NamedTuple):
    """One method for one batch size. Ratios say how many times faster it is, in the median and in the mean."""

    head: str
    n: int
    d: int
    batch: int
    method: str
    us: float
    us_p20: float
    us_p80: float
    us_mean: float
    us_p99: float
    over_product: float
    over_whole: float
    mean_over_product: float
    mean_over_whole: float
    p99_of_product: float  # 99th percentile, as a multiple of the product's mean
    success: (
        float  # share of the test queries with the right top k and probabilities within eps; of F.linear: not asked
    )
    exact: float  # share for which everything was read
    bytes_ratio: float  # bytes of the weight for each byte read
    groups: int  # batches of different queries that were timed
    preview: int  # columns
    tier: int  # columns, 0: none
    width: float
    floor: float
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
    """All methods on the same queries, taking turns, ``repeats`` batches at least."""
    head = AdaptiveSoftmax(weight, eps=eps, delta=delta, beta=beta, method="cascade", seed=seed)
    fit = head.calibrate(calibration.to(weight.dtype), k, generator=torch.Generator().manual_seed(seed))
    one_pass = AdaptiveSoftmax(weight, eps=eps, delta=delta, beta=beta, method="exact")
    queries = test.to(weight.dtype)
    found = head.coverage(queries, k)
    coordinates = float(head.topk(queries, k).coordinates.double().mean())
    (n, d), tiers = weight.shape, lengths(weight.shape[1])[1]
    success = [
        1.0,
        _success(lambda x: _top(F.linear(x, weight) * beta, k), one_pass, queries, k),
        _success(lambda x: one_pass.topk(x, k)[:3], one_pass, queries, k),
        found.right,
    ]
    results = []
    for batch in batches:
        static = queries[:batch].clone()
        calls: list[Callable[[], object]] = [
            lambda x=static: F.linear(x, weight),  # type: ignore[misc]
            lambda x=static: F.linear(x, weight).softmax(-1).topk(k),  # type: ignore[misc]
            lambda x=static: one_pass.topk(x, k),  # type: ignore[misc]
            lambda x=static: head.topk(x, k),  # type: ignore[misc]
        ]
        timed = _cold_times(calls, static, queries, max(repeats, len(queries) // batch))
        times = [percentiles(own) for own in timed]
        means = [statistics.fmean(own) for own in timed]
        highest = [statistics.quantiles(own, n=100, method="inclusive")[98] for own in timed]
        for number, (method, (low, median, high)) in enumerate(zip(METHODS, times, strict=True)):
            ours = method == OURS
            results.append(
                Result(
                    name, n, d, batch, method, median, low, high, means[number], highest[number],
                    times[0][1] / median, times[1][1] / median, means[0] / means[number], means[1] / means[number],
                    highest[number] / means[0], success[number],
                    found.exact if ours else 1.0, 1 / found.read if ours else 1.0, len(timed[number]),
                    tiers[fit.first] if ours else 0, tiers[fit.tier] if ours and fit.tier >= 0 else 0,
                    fit.width if ours else 0.0, fit.floor if ours else 0.0, coordinates if ours else float(n * d),
                    "cascade" if batch <= fit.batch else "exact",
                )
            )  # fmt: skip
    return results


def _top(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, probabilities and logits of the k largest, as torch makes them in the dtype of the logits."""
    probs, indices = logits.softmax(-1).topk(k)
    return indices, probs.float(), logits.gather(-1, indices).float()


def _success(
    ask: Callable[[Tensor], tuple[Tensor, ...]], head: AdaptiveSoftmax, queries: Tensor, k: int, batch: int = 64
) -> float:
    """The share of queries with the right top k and probabilities within eps, up to rounding."""
    fine = []
    for x in torch.split(queries, batch):
        indices, probs, _ = ask(x)
        exact = head.logits(x).double()
        best, log_z = exact.topk(k).values, exact.logsumexp(-1)
        rounding = 1e-5 * (1 + torch.maximum(best.abs().amax(-1), log_z.abs()))
        chosen = exact.gather(-1, indices)
        same = ((chosen.sort(-1, descending=True).values - best).abs() <= rounding[:, None]).all(-1)
        p = (chosen - log_z[:, None]).exp()
        fine.append(same & ((probs.double() - p).abs() <= (head.eps + rounding[:, None]) * p).all(-1))
    return float(torch.cat(fine).double().mean())


def _cold_times(calls: list[Callable[[], object]], static: Tensor, queries: Tensor, repeats: int) -> list[list[float]]:
    """The microseconds that the graph of each call takes, with other queries each time."""
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
    return [[1e3 * begin.elapsed_time(end) for begin, end in pairs] for pairs in events]
