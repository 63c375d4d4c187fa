"""Operating points of a head: bytes and time of an answer against how often it is right, all methods in one run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from softsieve._progress import ProgressCallback, no_progress
from softsieve.comparisons.head_methods import EXACT, FITTED, METHODS, RIVALS, Layer, Plan, Point, spread
from softsieve.comparisons.output import new_figure
from softsieve.errors import InputError, listed
from softsieve.heads.quantised import Weight
from softsieve.reference.answers import float64_rounding, right_parts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from softsieve.integrations.hidden_states import Head

DELTAS = (0.01, 0.1, 0.03)  # a smaller one takes more sample queries than most files have
_AT_A_TIME = 50  # queries whose logits are in float64 at a time
_ROWS = 1 << 14  # of the weight that are in float64 at a time
_CACHES = 1 << 27  # bytes, more than any cache of the machine has


class Result(NamedTuple):
    """One operating point on one corpus. Ratios are of the exact product to it: above 1 is less."""

    head: str
    corpus: str
    method: str
    setting: str
    k: int
    eps: float
    delta: float | None
    queries: int
    success: float  # share of the queries with the right top k and all probabilities within eps
    topk_right: float  # with the right top k
    bytes_mean: float
    bytes_ratio: float  # n * d * 2, the weight in bfloat16, / bytes_mean
    ms: float
    ms_p20: float
    ms_p80: float
    ms_mean: float
    ms_p99: float
    time_ratio: float  # ms of the faster exact product / ms
    mean_ratio: float  # the same of means
    exact_share: float  # of the queries for which everything was read
    build_s: float
    index_mb: float  # that are kept beside the weight
    ms_cold: float | None  # the median after what is in caches has been replaced, None if that was not asked for
    cold_ratio: float | None  # that of the faster exact product / ms_cold


def exact_logits(weight: Weight, bias: Tensor | None, queries: Tensor, *, beta: float = 1.0) -> Tensor:
    """``beta * (queries @ weight.T + bias)`` in float64, some rows of the weight at a time to save memory."""
    parts = (weight[start : start + _ROWS].double() for start in range(0, len(weight), _ROWS))
    logits = torch.cat([queries.double() @ part.T for part in parts], 1)
    return beta * (logits if bias is None else logits + bias.double())


class Truth:
    """The exact answers to some queries, in float64, and whether others are as good.

    Example:
        >>> layer = Layer(torch.eye(3), torch.eye(3), None)
        >>> truth = Truth(layer, torch.tensor([[0.0, 1.0, 1.0]]), k=1, eps=0.3)
        >>> p = torch.tensor([0.0, 1.0, 1.0]).softmax(-1)
        >>> truth.judge(0, torch.tensor([2]), 1.2 * p[2:])  # rows 1 and 2 are tied
        (True, True)
        >>> truth.judge(0, torch.tensor([2]), 1.4 * p[2:]), truth.judge(0, torch.tensor([0]), p[:1])
        ((True, False), (False, False))
    """

    def __init__(self, layer: Layer, queries: Tensor, *, k: int, eps: float) -> None:
        self.layer, self.queries, self.eps = layer, queries, eps
        best, log_z, rounding = [], [], []
        for part in torch.split(queries, _AT_A_TIME):
            logits = exact_logits(layer.weight, layer.bias, part)
            best.append(logits.topk(k).values)
            log_z.append(logits.logsumexp(-1))
            rounding.append(float64_rounding(logits))
        self.best, self.log_z, self.rounding = torch.cat(best), torch.cat(log_z), torch.cat(rounding)

    def judge(self, number: int, indices: Tensor, probs: Tensor) -> tuple[bool, bool]:
        """Whether the top k of a query are right in value, and whether the probabilities are within eps as well."""
        rows = indices.tolist()
        if min(rows) < 0:
            return False, False
        bias = None if self.layer.bias is None else self.layer.bias[indices]
        logits = exact_logits(self.layer.weight[indices], bias, self.queries[number, None])[0]
        best, log_z, rounding = self.best[number, : len(rows)], self.log_z[number], self.rounding[number]
        topk_right, right = right_parts(indices, probs, logits, best, log_z, eps=self.eps, rounding=rounding)
        return bool(topk_right), bool(right)


class _Tally(NamedTuple):
    """A row a query."""

    ms: list[float]
    bytes_read: list[float]
    exact: list[bool]
    topk_right: list[bool]
    right: list[bool]


def _take_turns(
    points: Sequence[Point], truth: Truth, k: int, progress: Callable[[], object], seed: int, stretch: int
) -> list[_Tally]:
    """Some queries after the other go to all points, in random order: slow spells are shared.

    With a stretch of one query no cache is warm when a point is asked; with more, its caches are warm as those of a
    server that does nothing else.
    """
    tallies = [_Tally([], [], [], [], []) for _ in points]
    turns = list(zip(points, tallies, strict=True))
    order = random.Random(seed)
    for point in points:
        point.ask(truth.queries[0], k)  # warm-up
    for some in torch.split(torch.arange(len(truth.queries)), stretch):
        order.shuffle(turns)
        for point, tally in turns:
            answers = []
            for x in truth.queries[some]:
                start = time.perf_counter()
                answers.append(point.ask(x, k))
                tally.ms.append((time.perf_counter() - start) * 1e3)
            for number, answer in zip(some.tolist(), answers, strict=True):
                tally.bytes_read.append(answer.bytes_read)
                tally.exact.append(answer.exact)
                probs = point.estimate(truth.queries[number], k) if point.estimate else answer.probs
                topk_right, right = truth.judge(number, answer.indices, torch.zeros(k) if probs is None else probs)
                tally.topk_right.append(topk_right)
                tally.right.append(right)
        for _ in some:
            progress()
    return tallies


def _time_cold(
    points: Sequence[Point], queries: Tensor, k: int, seed: int, progress: Callable[[], object]
) -> list[list[float]]:
    """Milliseconds of each point for each query, with nothing of it in a cache, in random order."""
    other = torch.zeros(_CACHES, dtype=torch.uint8)
    times: list[list[float]] = [[] for _ in points]
    turns = list(zip(points, times, strict=True))
    order = random.Random(seed)
    for x in queries:
        order.shuffle(turns)
        for point, taken in turns:
            other.add_(1)
            start = time.perf_counter()
            point.ask(x, k)
            taken.append((time.perf_counter() - start) * 1e3)
        progress()
    return times


def measure(
    head: Head,
    *,
    name: str,
    corpora: Sequence[str] = (),
    methods: Sequence[str] = METHODS,
    ks: Sequence[int] = (1, 8),
    eps: float = 0.3,
    deltas: Sequence[float] = DELTAS,
    calibration: int = 2000,
    test_queries: int = 500,
    pooled: bool = False,
    stretch: int = 25,
    cold: int = 0,
    seed: int = 0,
    exact: Sequence[str] = EXACT,
    progress: ProgressCallback = no_progress,
) -> list[Result]:
    """All operating points of the methods, and of the exact product, for every corpus and k.

    Args:
        head: a layer with its hidden states; the soft cap of its logits is left out, as it is in all methods.
        name: of the head, in the results.
        corpora: which of its texts; all of them if empty.
        methods: of `METHODS`.
        ks: how many of the largest.
        eps: relative error that a probability may have.
        deltas: of "cascade", an operating point each; the first is that of other methods with a guarantee.
        calibration, test_queries: hidden states of each text, at most, spread evenly over its two parts.
        pooled: fit methods to the states of all texts together instead of to those of each.
        stretch: queries that a method answers before it is the next one's turn; with 1 no cache is warm.
        cold: queries that are asked once more, each after all that is in caches was replaced.
        seed: of everything that is drawn.
        exact: the exact products to compare with, of `EXACT`; that in bf16 is a crash on a few machines.

    Raises:
        InputError: for a corpus, a method or a k that there is not, or a package that is not installed.
    """
    _check(head, corpora, methods, ks, deltas, exact)
    names = list(corpora or head.corpora)
    bias = None if head.bias is None else head.bias.float() * head.beta
    layer = Layer(head.weight, head.weight.float().contiguous(), bias)
    methods = [method for method in METHODS if method in (*exact, *methods)]
    fixed: list[Point] = []
    for method in methods:
        if method in RIVALS:
            progress(f"building {method}", 0)
            fixed += RIVALS[method](layer)
    plan = Plan(ks, eps, deltas, seed)
    samples, tests = (
        [spread(head.corpora[corpus][part].float() * head.beta, count) for corpus in names]
        for part, count in enumerate((calibration, test_queries))
    )

    def fitted(to: str, sample: Tensor) -> Iterator[Point]:
        for method in methods:
            if method in FITTED:
                progress(f"{to}: building {method}", 0)
                yield from FITTED[method](layer, sample, plan)

    shared = list(fitted("all texts", torch.cat(samples))) if pooled else []
    results = []
    for corpus, sample, queries in zip(names, samples, tests, strict=True):
        points = [*fixed, *(shared if pooled else fitted(corpus, sample))]
        truth = Truth(layer, queries, k=max(ks), eps=eps)
        for k in ks:
            step = partial(progress, f"{corpus}, top {k}", 1 / (len(queries) * len(ks) * len(names)))
            tallies = _take_turns(points, truth, k, step, seed, stretch)
            times = _time_cold(points, queries[:cold], k, seed, partial(progress, f"{corpus}, top {k}, cold", 0))
            results += _results(points, tallies, times, (name, corpus), k, eps, layer.weight.numel())
    return results


def _check(
    head: Head,
    corpora: Sequence[str],
    methods: Sequence[str],
    ks: Sequence[int],
    deltas: Sequence[float],
    exact: Sequence[str],
) -> None:
    for what, names_asked, known in (
        ("corpus", corpora, head.corpora),
        ("method", methods, METHODS),
        ("exact", exact or [""], EXACT),
    ):
        for name in names_asked:
            if name not in known:
                raise InputError(f"{what}: expected one of {listed(known)}, found {name!r}")
    if not head.corpora:
        raise InputError("queries: expected tensors NAME.calibration and NAME.test, found none")
    for k in ks:
        if not 1 <= k <= len(head.weight):
            raise InputError(f"k: expected 1 to {len(head.weight)}, found {k}")
    if not ks or not deltas:
        raise InputError(f"{'deltas' if ks else 'ks'}: expected at least one, found none")


def _results(
    points: Sequence[Point],
    tallies: Sequence[_Tally],
    cold: Sequence[Sequence[float]],
    names: tuple[str, str],
    k: int,
    eps: float,
    size: int,
) -> list[Result]:
    shares = torch.tensor([0.2, 0.5, 0.8, 0.99], dtype=torch.float64)
    times = [torch.tensor(tally.ms, dtype=torch.float64).quantile(shares).tolist() for tally in tallies]
    means = [sum(tally.ms) / len(tally.ms) for tally in tallies]
    medians = [median(one) if one else None for one in cold]
    exact = [number for number, point in enumerate(points) if point.method in EXACT]
    base, base_mean = min(times[number][1] for number in exact), min(means[number] for number in exact)
    base_cold = min((value for number in exact if (value := medians[number]) is not None), default=0.0)
    results = []
    rows = zip(points, tallies, times, means, medians, strict=True)
    for point, tally, (low, ms, high, slowest), mean, ms_cold in rows:
        count, read = len(tally.ms), sum(tally.bytes_read) / len(tally.ms)
        results.append(
            Result(
                *names,
                point.method,
                point.setting,
                k,
                eps,
                point.delta,
                count,
                success=sum(tally.right) / count,
                topk_right=sum(tally.topk_right) / count,
                bytes_mean=read,
                bytes_ratio=2 * size / read,
                ms=ms,
                ms_p20=low,
                ms_p80=high,
                ms_mean=mean,
                ms_p99=slowest,
                time_ratio=base / ms,
                mean_ratio=base_mean / mean,
                exact_share=sum(tally.exact) / count,
                build_s=point.build_s,
                index_mb=point.index_mb,
                ms_cold=ms_cold,
                cold_ratio=None if ms_cold is None else base_cold / ms_cold,
            )
        )
    return results


# -- pictures ----------------------------------------------------------------------------------------------------------

_TICKS = (0.9, 0.5, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
MARKS = "osD^vP*X<>ph"


def draw(results: Sequence[Result]) -> Figure:
    """Success against the ratios of bytes and of time: a column a corpus, two rows a k, a line a method.

    Hollow marks are faiss' share of right top k, whose probabilities are not judged.
    """
    corpora, ks, methods = (
        list(dict.fromkeys(getattr(r, field) for r in results)) for field in ("corpus", "k", "method")
    )
    figure = new_figure(4.5 * len(corpora) + 2, 3.5 * 2 * len(ks))
    axes = figure.subplots(2 * len(ks), len(corpora), squeeze=False)
    floor = 0.5 / max(r.queries for r in results)
    for row, (k, ratio) in enumerate((k, ratio) for k in ks for ratio in ("bytes", "time")):
        for panel, corpus in zip(axes[row], corpora, strict=True):
            for number, method in enumerate(methods):
                points = [r for r in results if (r.corpus, r.k, r.method) == (corpus, k, method)]
                points.sort(key=attrgetter(f"{ratio}_ratio"))
                x = [getattr(r, f"{ratio}_ratio") for r in points]
                style = {"marker": MARKS[number % len(MARKS)], "color": f"C{number}", "lw": 0.5}
                panel.plot(x, [max(1 - r.success, floor) for r in points], label=method, **style)
                if method.startswith("faiss"):
                    panel.plot(x, [max(1 - r.topk_right, floor) for r in points], mfc="none", **style)
            panel.axvline(1, color="grey", lw=0.5)
            panel.set(xscale="log", xlabel=f"{ratio} of the exact product / {ratio}", title=f"{corpus}, top {k}")
            stretch_success(panel, floor)
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    words = "bytes against bfloat16, time against the faster exact product; hollow: right top k of faiss"
    figure.suptitle(f"{results[0].head}: {words}", fontsize="small")
    return figure


def stretch_success(panel: Any, floor: float) -> None:
    """An axis of success, stretched near 1; what is plotted are failures."""
    from matplotlib.ticker import NullLocator

    ticks = [tick for tick in _TICKS if tick > floor]
    panel.set_yscale("log")
    panel.set_ylim(1.1, floor / 1.3)
    panel.set_yticks([*ticks, floor], [*(f"{100 * (1 - tick):g} %" for tick in ticks), "all"])
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_ylabel("success")
