"""Several queries at a time on a CPU: the cascade beside the exact product, on the states of a real head."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve.heads import DriftWarning
from softsieve.integrations.hidden_states import Head

PRODUCT, WHOLE, OURS = "F.linear, bf16", "linear + softmax + topk, bf16", "cascade"


class Result(NamedTuple):
    """One method for one text and size of a batch."""

    corpus: str
    n: int
    d: int
    batch: int
    method: str
    ms: float  # median
    ms_mean: float
    ms_p99: float
    mean_over_product: float  # how many times less time it takes in the mean than the product alone
    mean_over_whole: float
    right: float  # share of the test queries with the right top k and probabilities within eps; of others: not asked
    groups: int  # batches of different queries


def measure(
    layer: Head, *, batches: Sequence[int], k: int, eps: float, delta: float, calibration: int, test_queries: int,
    seed: int, say: Callable[[str], Any] = lambda _: None,
) -> list[Result]:  # fmt: skip
    """All methods in turns, batch by batch, for every text of the head."""
    results = []
    weight = layer.weight.bfloat16()
    for name, corpus in layer.corpora.items():
        say(f"{name}: calibrating")
        head = AdaptiveSoftmax(weight, layer.bias, eps=eps, delta=delta, beta=layer.beta, method="cascade", seed=seed)
        queries = corpus.calibration[:calibration].float()
        head.calibrate(queries, k, generator=torch.Generator().manual_seed(seed))
        test = corpus.test[:test_queries].float()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DriftWarning)
            right = head.coverage(test, k).right
            for batch in batches:
                say(f"{name}: {batch} at a time")
                results += _timed(name, weight, head, test, batch, k, right)
    return results


def _timed(
    name: str, weight: Tensor, head: AdaptiveSoftmax, test: Tensor, batch: int, k: int, right: float
) -> list[Result]:
    calls: dict[str, Callable[[Tensor], object]] = {
        PRODUCT: lambda x: F.linear(x.bfloat16(), weight),
        WHOLE: lambda x: F.linear(x.bfloat16(), weight).float().softmax(-1).topk(k),
        OURS: lambda x: head.topk(x, k),
    }
    groups = [test[start : start + batch] for start in range(0, len(test) - batch + 1, batch)]
    times: dict[str, list[float]] = {method: [] for method in calls}
    for x in [groups[0], *groups]:  # the first time of all is not counted
        for method, call in calls.items():
            start = time.perf_counter()
            call(x)
            times[method].append(1e3 * (time.perf_counter() - start))
    counted = {method: own[1:] for method, own in times.items()}
    means = {method: statistics.fmean(own) for method, own in counted.items()}
    n, d = weight.shape
    return [
        Result(
            name, n, d, batch, method, statistics.median(own), means[method],
            statistics.quantiles([*own, *own], n=100, method="inclusive")[98], means[PRODUCT] / means[method],
            means[WHOLE] / means[method], right if method == OURS else 1.0, len(own),
        )
        for method, own in counted.items()
    ]  # fmt: skip
