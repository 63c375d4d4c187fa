"""The top k of a linear head, one query at a time: the time of the coordinates method beside the exact product."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.measure import times
from softsieve.heads import AdaptiveSoftmax

METHODS = ("F.linear", "linear + softmax + topk", "exact", "coordinates, pac", "coordinates, calibrated")
QUERIES = 20  # that are asked in turn, each by every method
SAMPLE = 400  # to calibrate with


class Result(NamedTuple):
    """One method at one shape. Ratios are to the bare product."""

    n: int
    d: int
    spread: float
    method: str
    ms: float
    ms_p20: float
    ms_p80: float
    time_ratio: float
    bytes_ratio: float
    exact: float


def measure(
    n: int, d: int, *, spread: float, eps: float, delta: float, k: int, repeats: int, seed: int = 0
) -> list[Result]:
    """All methods on the same normal weight and queries, taking turns.

    Example:
        >>> results = measure(50, 20, spread=1.0, eps=0.3, delta=0.1, k=1, repeats=1)
        >>> [r.method for r in results]
        ['F.linear', 'linear + softmax + topk', 'exact', 'coordinates, pac', 'coordinates, calibrated']
    """
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, d, generator=g)
    x = torch.randn(QUERIES + SAMPLE, d, generator=g) * (spread / d**0.5)
    queries = [query[None] for query in x[:QUERIES]]
    exact, pac, calibrated = (
        AdaptiveSoftmax(weight, eps=eps, delta=delta, method=method, guarantee=guarantee)
        for method, guarantee in (("exact", "pac"), ("coordinates", "pac"), ("coordinates", "calibrated"))
    )
    calibrated.calibrate(x[QUERIES:], generator=g)
    heads = (exact, pac, calibrated)

    def asked(function: Callable[[torch.Tensor], object]) -> Callable[[], object]:
        turn = cycle(queries)
        return lambda: function(next(turn))

    calls = [
        asked(lambda q: F.linear(q, weight)),
        asked(lambda q: F.linear(q, weight).softmax(-1).topk(k)),
        *(asked(lambda q, head=head: head.topk(q, k, generator=g)) for head in heads),  # type: ignore[misc]
    ]
    timed = times(calls, repeats=repeats)
    answers = [head.topk(x[:QUERIES], k, generator=g) for head in heads]
    read = [1.0, 1.0, *(float(a.bytes_read.double().mean()) / (n * d * weight.itemsize) for a in answers)]
    became = [1.0, 1.0, *(float(a.exact.double().mean()) for a in answers)]
    base = timed[0][1]
    return [
        Result(n, d, spread, method, median, low, high, median / base, size, share)
        for method, (low, median, high), size, share in zip(METHODS, timed, read, became, strict=True)
    ]
