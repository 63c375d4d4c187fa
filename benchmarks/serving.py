"""Serving a multi-label layer of up to millions of classes on this CPU, one query at a time: top k, and all above 0."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.serving_layer import make_layer
from softsieve import AdaptiveSoftmax

PRODUCT = "product, bf16"
BLOCK = 1 << 14  # classes for which logits are computed in float64 at a time


class Result(NamedTuple):
    """One method at one shape. ``faster``: the time of the product in bf16, over that of this one."""

    n: int
    d: int
    method: str
    ms: float  # median
    ms_mean: float
    ms_p99: float
    faster: float  # by medians
    faster_mean: float
    success: float | None  # top k: share of queries whose k largest logits are right
    recall: float | None  # above: share of the classes above 0 that were found
    precision: float | None  # above: share of what was found that is above 0
    complete: float | None  # above: share of queries without a miss
    bytes_ratio: float  # bytes of the weight for each one read, in the mean
    exact: float  # share of queries that read everything


class Costs(NamedTuple):
    """What comes before the first query, and what the queries are like."""

    build_s: float
    calibrate_s: float
    above: float  # classes above 0, in the mean
    labels_found: float  # share of the labels that have logits above 0
    peak_gib: float  # of the process


class Truth(NamedTuple):
    """By float64, of every query."""

    best: Tensor  # (queries, k)
    above: list[set[int]]
    close: list[set[int]]  # classes whose logits are 0 up to rounding


def measure(
    n: int, d: int, *, rank: int, k: int, delta: float, calibration: int, test: int, fp32: bool,
    seed: int, say: Callable[[str], None] = lambda _: None,
) -> tuple[list[Result], Costs]:  # fmt: skip
    """All methods on the same layer and queries, which take turns.

    Example:
        >>> results, costs = measure(3000, 32, rank=24, k=5, delta=0.1, calibration=200, test=8, fp32=False, seed=0)
        >>> [result.method for result in results]
        ['product, bf16', 'product + topk, bf16', 'head.topk', 'head.above']
    """
    g = torch.Generator().manual_seed(seed)
    say("data")
    layer = make_layer(n, d, rank=rank, generator=g)
    shaping, sample, (queries, own) = layer.rows(4096, g)[0], layer.rows(calibration, g)[0], layer.rows(test, g)
    head = AdaptiveSoftmax(layer.weight, layer.bias, delta=delta, method="cascade")
    say("index")
    start = time.perf_counter()
    head.build(shaping)
    built = time.perf_counter()
    say("calibration")
    head.calibrate(sample, k, threshold=0.0, generator=g)
    calibrated = time.perf_counter()
    say("exact logits")
    truth = exact_answers(layer.weight, layer.bias, queries, k)
    say("queries")
    calls, count = _products(layer.weight, layer.bias, k, fp32), len(queries)
    calls |= {"head.topk": lambda x: head.topk(x, k), "head.above": lambda x: head.above(x, 0.0)}
    taken, answers = _asked(calls, queries)
    results = []
    base = taken[PRODUCT]
    for method, seconds in taken.items():
        given = answers[method]
        median, mean, last = (1e3 * value for value in _summary(seconds))
        faster = float(base.median() / seconds.median()), float(base.mean() / seconds.mean())
        result = Result(n, d, method, median, mean, last, *faster, None, None, None, None, 1.0, 1.0)
        if method.startswith("head."):
            read = sum(float(one.bytes_read) for one in given) / count / layer.weight.nbytes
            result = result._replace(bytes_ratio=1 / read, exact=sum(bool(one.exact) for one in given) / count)
            judge = _judge_topk if method == "head.topk" else _judge_above
            result = result._replace(**judge(given, truth))
        results.append(result)
    labels = [set((layer.families == family).nonzero().flatten().tolist()) for family in own]
    found = sum(len(some & above) for some, above in zip(labels, truth.above, strict=True)) / sum(map(len, labels))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    counts = sum(map(len, truth.above)) / len(queries)
    return results, Costs(built - start, calibrated - built, counts, found, peak)


def exact_answers(weight: Tensor, bias: Tensor, queries: Tensor, k: int) -> Truth:
    """What is right, some classes at a time."""
    best = torch.full((len(queries), k), -torch.inf, dtype=torch.float64)
    above: list[set[int]] = [set() for _ in queries]
    close: list[set[int]] = [set() for _ in queries]
    for start in range(0, len(weight), BLOCK):
        part = slice(start, start + BLOCK)
        logits = queries.double() @ weight[part].double().T + bias[part].double()
        best = torch.cat([best, logits.topk(min(k, logits.shape[1])).values], -1).topk(k).values
        for sets, chosen in ((above, logits > 0), (close, logits.abs() < 1e-4)):
            for query, row in chosen.nonzero().tolist():
                sets[query].add(start + row)
    return Truth(best, above, close)


def _products(weight: Tensor, bias: Tensor, k: int, fp32: bool) -> dict[str, Callable[[Tensor], Any]]:
    low = bias.bfloat16()

    def product(x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), weight, low)

    calls: dict[str, Callable[[Tensor], Any]] = {
        PRODUCT: product,
        "product + topk, bf16": lambda x: product(x).topk(k),
    }
    if fp32:
        wide = weight.float()
        calls["product, fp32"] = lambda x: F.linear(x, wide, bias)
    return calls


def _asked(
    calls: dict[str, Callable[[Tensor], Any]], queries: Tensor
) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """Seconds and answers of each method, which take turns; the first three queries are asked once before."""
    seconds: dict[str, list[float]] = {method: [] for method in calls}
    answers: dict[str, list[Any]] = {method: [] for method in calls}
    for number in (0, 1, 2, *range(len(queries))):
        x = queries[number : number + 1]
        for method, call in calls.items():
            start = time.perf_counter()
            answer = call(x)
            seconds[method].append(time.perf_counter() - start)
            answers[method].append(answer if method.startswith("head.") else None)
    return {method: torch.tensor(own[3:]) for method, own in seconds.items()}, {
        method: own[3:] for method, own in answers.items()
    }


def _summary(seconds: Tensor) -> tuple[float, float, float]:
    return float(seconds.median()), float(seconds.mean()), float(seconds.quantile(0.99))


def _judge_topk(answers: list[Any], truth: Truth) -> dict[str, Any]:
    logits = torch.cat([one.logits for one in answers]).double()
    rounding = 1e-4 * (1 + truth.best.abs().amax(-1, keepdim=True))
    return {"success": float(((logits - truth.best).abs() <= rounding).all(-1).double().mean())}


def _judge_above(answers: list[Any], truth: Truth) -> dict[str, Any]:
    """Classes whose logits are 0 up to rounding count neither way."""
    wanted = found = right = complete = 0
    for answer, above, close in zip(answers, truth.above, truth.close, strict=True):
        sure, given = above - close, set(answer.indices.tolist())
        wanted, found = wanted + len(sure), found + len(given - close)
        right, complete = right + len(given & sure), complete + (sure <= given)
    return {
        "recall": right / max(1, wanted),
        "precision": right / max(1, found),
        "complete": complete / len(answers),
    }
