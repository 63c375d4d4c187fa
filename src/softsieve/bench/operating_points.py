"""Operating points of a head: bytes read and time of an answer against how often it is right, all methods in one run.

To add a method: a line in `RIVALS`, for what is built from the weight alone, or in `FITTED`, for what sees queries.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from softsieve._progress import Report, in_silence
from softsieve.bench.synthetic_heads import make_head
from softsieve.errors import InputError, listed
from softsieve.experiments.language_heads import exact_logits, spread
from softsieve.experiments.output import new_figure
from softsieve.heads import AdaptiveSoftmax
from softsieve.heads.calibration import needed
from softsieve.integrations.hidden_states import Corpus, Head

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DELTAS = (0.01, 0.1, 0.03)  # a smaller one takes more sample queries than most files have
EF_SEARCH = (32, 128, 512, 2048)
NPROBE = (1, 8, 32, 128, 512)
PREVIEW_SHARES = (16, 8, 4)  # ranks d/16, d/8, d/4
PREVIEW_ROWS = (64, 256, 1024)
FAISS_SUM = 1024  # results that a softmax is taken over where there is no other estimate of probabilities
NOTE = f"faiss has no probabilities: its success is with a softmax over its best {FAISS_SUM}, found at no cost"
_AT_A_TIME = 50  # queries whose logits are in float64 at a time


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
    time_ratio: float  # ms of the faster exact product / ms
    exact_share: float  # of the queries for which everything was read
    build_s: float
    index_mb: float  # that are kept beside the weight


class Answer(NamedTuple):
    """What a method says to one query."""

    indices: Tensor  # (k,), -1 for none
    probs: Tensor | None  # (k,)
    bytes_read: float
    exact: bool = False


class Point(NamedTuple):
    """A method at one setting, ready to be asked a query (d,) for its top k."""

    method: str
    setting: str
    ask: Callable[[Tensor, int], Answer]
    build_s: float = 0.0
    index_mb: float = 0.0
    delta: float | None = None
    estimate: Callable[[Tensor, int], Tensor] | None = None  # probabilities of one that has none, at no cost


class Layer(NamedTuple):
    """A head whose inverse temperature is 1."""

    weight: Tensor  # as it is stored, (n, d)
    full: Tensor  # in float32
    bias: Tensor | None  # in float32, (n,)

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        """Of some rows."""
        return F.linear(x, self.full[rows], None if self.bias is None else self.bias[rows])


class Plan(NamedTuple):
    """What is asked for."""

    ks: Sequence[int]
    eps: float
    deltas: Sequence[float]
    seed: int


# -- methods -----------------------------------------------------------------------------------------------------------


def _exact_fp32(layer: Layer) -> Iterator[Point]:
    def ask(x: Tensor, k: int) -> Answer:
        probs, indices = F.linear(x, layer.full, layer.bias).softmax(-1).topk(k)
        return Answer(indices, probs, layer.full.nbytes, True)

    yield Point("exact fp32", "", ask)


def _exact_bf16(layer: Layer) -> Iterator[Point]:
    weight = layer.weight.bfloat16()

    def ask(x: Tensor, k: int) -> Answer:
        logits = F.linear(x.bfloat16(), weight).float()
        probs, indices = (logits if layer.bias is None else logits + layer.bias).softmax(-1).topk(k)
        return Answer(indices, probs, weight.nbytes, True)

    yield Point("exact bf16", "", ask)


def _preview(layer: Layer, method: str = "SVD preview", moment: Tensor | None = None) -> Iterator[Point]:
    """SVD-softmax (NeurIPS 2017): all logits from a projection, the largest again from the full rows.

    The projection loses least for queries of this second moment, the identity unless given.
    """
    start = time.perf_counter()
    root, inverse = (torch.eye(layer.full.shape[1]),) * 2 if moment is None else _roots(moment)
    basis = torch.linalg.eigh(root @ (layer.full.T @ layer.full) @ root).eigenvectors.flip(-1)
    shared = time.perf_counter() - start
    for share in PREVIEW_SHARES:
        start = time.perf_counter()
        kept = basis[:, : max(1, len(basis) // share)]
        turn, rows = kept.T @ inverse, layer.full @ (root @ kept)
        taken = shared + time.perf_counter() - start
        size = (turn.nbytes + rows.nbytes) / 1e6
        for most in PREVIEW_ROWS:
            ask = partial(_ask_preview, layer, turn, rows, most)
            yield Point(method, f"rank d/{share}, {most} rows", ask, taken, size)


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Of a symmetric matrix, the root and its inverse."""
    values, vectors = torch.linalg.eigh(moment.double())
    roots = values.clamp_min(1e-9 * float(values[-1])).sqrt()
    return ((vectors * roots) @ vectors.T).float(), ((vectors / roots) @ vectors.T).float()


def _ask_preview(layer: Layer, turn: Tensor, rows: Tensor, most: int, x: Tensor, k: int) -> Answer:
    logits = F.linear(F.linear(x, turn), rows, layer.bias)
    best = logits.topk(min(max(most, k), len(logits))).indices
    logits[best] = layer.logits(x, best)
    probs, indices = logits.softmax(-1).topk(k)
    return Answer(indices, probs, turn.nbytes + rows.nbytes + 4 * len(best) * len(x))


class _Index(NamedTuple):
    """An index of faiss that holds all rows."""

    index: Any
    settings: dict[str, Any]  # the parameters of a search by the name of the setting
    always: int  # rows or centroids that every search reads
    counter: Any = None  # of faiss, of the others


def _flat(faiss: Any, rows: Any) -> _Index:
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    return _Index(index, {"": None}, len(rows))


def _hnsw(faiss: Any, rows: Any, metric: str = "METRIC_INNER_PRODUCT") -> _Index:
    index = faiss.IndexHNSWFlat(rows.shape[1], 32, getattr(faiss, metric))
    index.hnsw.efConstruction = 128
    index.add(rows)
    settings = {f"efSearch {size}": faiss.SearchParametersHNSW(efSearch=size) for size in EF_SEARCH}
    return _Index(index, settings, 0, faiss.cvar.hnsw_stats)


def _hnsw_l2(faiss: Any, rows: Any) -> _Index:
    """With all rows brought to one length by one more coordinate, the nearest has the largest product."""
    squares = np.square(rows).sum(1, keepdims=True)
    return _hnsw(faiss, np.hstack([rows, np.sqrt(squares.max() - squares)]), "METRIC_L2")


def _ivf(faiss: Any, rows: Any) -> _Index:
    (n, d), lists = rows.shape, int(4 * len(rows) ** 0.5)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(d), d, min(lists, n), faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1  # no warning
    index.train(rows)
    index.add(rows)
    settings = {f"nprobe {size}": faiss.SearchParametersIVF(nprobe=size) for size in NPROBE if size <= index.nlist}
    return _Index(index, settings, index.nlist, faiss.cvar.indexIVF_stats)


def _faiss(method: str, build: Callable[[Any, Any], _Index], layer: Layer) -> Iterator[Point]:
    """The bias is one more coordinate. What is read are the rows that faiss counts."""
    try:
        faiss = import_module("faiss")
    except ModuleNotFoundError:
        raise InputError(f"{method} needs the package faiss: pip install 'softsieve[rivals]'") from None
    faiss.omp_set_num_threads(torch.get_num_threads())
    rows = layer.full if layer.bias is None else torch.cat([layer.full, layer.bias[:, None]], 1)
    start = time.perf_counter()
    index, settings, always, counter = build(faiss, rows.numpy())
    taken = time.perf_counter() - start
    size = faiss.serialize_index(index).nbytes / 1e6
    more = torch.zeros(index.d - layer.full.shape[1])  # coordinates of a query
    if layer.bias is not None:
        more[0] = 1

    def search(parameters: Any, x: Tensor, k: int) -> Tensor:
        query = torch.cat([x, more]) if len(more) else x
        return torch.from_numpy(index.search(query[None].numpy(), k, params=parameters)[1][0])

    def ask(parameters: Any, x: Tensor, k: int) -> Answer:
        if counter is not None:
            counter.reset()
        indices = search(parameters, x, k)
        read = always + (0 if counter is None else counter.ndis)
        return Answer(indices, None, 4 * index.d * read, counter is None)

    def estimate(parameters: Any, x: Tensor, k: int) -> Tensor:
        found = search(parameters, x, min(max(FAISS_SUM, k), len(rows)))
        probs = layer.logits(x, found[found >= 0]).softmax(-1)
        return F.pad(probs, (0, k)).topk(k).values

    for setting, parameters in settings.items():
        ready = partial(ask, parameters)
        yield Point(method, setting, ready, taken, size, estimate=partial(estimate, parameters))


def _fitted_preview(layer: Layer, sample: Tensor, plan: Plan) -> Iterator[Point]:
    return _preview(layer, "SVD preview, fitted", sample.T @ sample / len(sample))


def _sieve(name: str, options: dict[str, Any], layer: Layer, sample: Tensor, plan: Plan) -> Iterator[Point]:
    """`AdaptiveSoftmax`: the cascade at every delta, others at the first. As many threads as the rivals have."""
    numba = import_module("numba")
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    for delta in plan.deltas if name == "cascade" else plan.deltas[:1]:
        generator = torch.Generator().manual_seed(plan.seed)
        start = time.perf_counter()
        head = AdaptiveSoftmax(layer.weight, layer.bias, eps=plan.eps, delta=delta, **options)
        if head.guarantee == "calibrated":
            few = spread(sample, 2 * needed(delta)) if head.method == "coordinates" else sample  # it takes minutes
            head.calibrate(few, list(plan.ks), generator=generator)
        taken = time.perf_counter() - start
        for k in plan.ks:  # what is made when it is first needed is there after that
            head.topk(sample[0], k, generator=generator)
        size = (_held(head) - layer.weight.nbytes) / 1e6
        yield Point(name, f"delta {delta:g}", partial(_ask_sieve, head, generator), taken, size, delta)


def _ask_sieve(head: AdaptiveSoftmax, generator: torch.Generator, x: Tensor, k: int) -> Answer:
    found = head.topk(x, k, generator=generator)
    return Answer(found.indices, found.probs, float(found.bytes_read), bool(found.exact))


def _held(thing: object) -> int:
    """Bytes of all arrays that an object of ours holds, each memory once."""
    sizes: dict[int, int] = {}
    seen: set[int] = set()

    def visit(part: object) -> None:
        if id(part) in seen:
            return
        seen.add(id(part))
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(part, np.ndarray):
            sizes.setdefault(part.ctypes.data, part.nbytes)
        elif isinstance(part, dict | list | tuple):
            for value in part.values() if isinstance(part, dict) else part:
                visit(value)
        elif type(part).__module__.startswith("softsieve"):
            visit(vars(part))

    visit(thing)
    return sum(sizes.values())


EXACT = ("exact fp32", "exact bf16")  # always measured, as ratios are to them
RIVALS: dict[str, Callable[[Layer], Iterator[Point]]] = {
    "exact fp32": _exact_fp32,
    "exact bf16": _exact_bf16,
    "SVD preview": _preview,
    "faiss flat": partial(_faiss, "faiss flat", _flat),
    "faiss HNSW": partial(_faiss, "faiss HNSW", _hnsw),
    "faiss HNSW, L2": partial(_faiss, "faiss HNSW, L2", _hnsw_l2),
    "faiss IVF": partial(_faiss, "faiss IVF", _ivf),
}
FITTED: dict[str, Callable[[Layer, Tensor, Plan], Iterator[Point]]] = {
    "SVD preview, fitted": _fitted_preview,
    "cascade": partial(_sieve, "cascade", {"method": "cascade"}),
    "cascade, pac": partial(_sieve, "cascade, pac", {"method": "cascade", "guarantee": "pac"}),
    "coordinates": partial(_sieve, "coordinates", {"method": "coordinates"}),
}
METHODS = (*RIVALS, *FITTED)


def available() -> list[str]:
    """The methods whose packages are installed."""
    return [name for name in METHODS if not name.startswith("faiss") or find_spec("faiss") is not None]


# -- measuring ---------------------------------------------------------------------------------------------------------


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
            rounding.append(1e-9 * logits.abs().amax(-1))  # of two sums of the same numbers in another order
        self.best, self.log_z, self.rounding = torch.cat(best), torch.cat(log_z), torch.cat(rounding)

    def judge(self, number: int, indices: Tensor, probs: Tensor) -> tuple[bool, bool]:
        """Whether the top k of a query are right in value, and whether the probabilities are within eps as well."""
        rows = indices.tolist()
        if min(rows) < 0 or len(set(rows)) < len(rows):
            return False, False
        bias = None if self.layer.bias is None else self.layer.bias[indices]
        logits = exact_logits(self.layer.weight[indices], bias, self.queries[number, None])[0]
        off = (logits.sort(descending=True).values - self.best[number, : len(indices)]).abs()
        topk_right = bool((off <= self.rounding[number]).all())
        p = (logits - self.log_z[number]).exp()
        return topk_right, topk_right and bool(((probs.double() - p).abs() <= self.eps * p).all())


class _Tally(NamedTuple):
    """A row a query."""

    ms: list[float]
    bytes_read: list[float]
    exact: list[bool]
    topk_right: list[bool]
    right: list[bool]


def _take_turns(
    points: Sequence[Point], truth: Truth, k: int, report: Callable[[], object], seed: int, stretch: int
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
            report()
    return tallies


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
    seed: int = 0,
    exact: Sequence[str] = EXACT,
    report: Report = in_silence,
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
            report(f"building {method}", 0)
            fixed += RIVALS[method](layer)
    plan = Plan(ks, eps, deltas, seed)
    samples, tests = (
        [spread(head.corpora[corpus][part].float() * head.beta, count) for corpus in names]
        for part, count in enumerate((calibration, test_queries))
    )

    def fitted(to: str, sample: Tensor) -> Iterator[Point]:
        for method in methods:
            if method in FITTED:
                report(f"{to}: building {method}", 0)
                yield from FITTED[method](layer, sample, plan)

    shared = list(fitted("all texts", torch.cat(samples))) if pooled else []
    results = []
    for corpus, sample, queries in zip(names, samples, tests, strict=True):
        points = [*fixed, *(shared if pooled else fitted(corpus, sample))]
        truth = Truth(layer, queries, k=max(ks), eps=eps)
        for k in ks:
            step = partial(report, f"{corpus}, top {k}", 1 / (len(queries) * len(ks) * len(names)))
            tallies = _take_turns(points, truth, k, step, seed, stretch)
            results += _results(points, tallies, (name, corpus), k, eps, layer.weight.numel())
    return results


def _check(
    head: Head,
    corpora: Sequence[str],
    methods: Sequence[str],
    ks: Sequence[int],
    deltas: Sequence[float],
    exact: Sequence[str],
) -> None:
    for what, found, known in (
        ("corpus", corpora, head.corpora),
        ("method", methods, METHODS),
        ("exact", exact or [""], EXACT),
    ):
        for name in found:
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
    points: Sequence[Point], tallies: Sequence[_Tally], names: tuple[str, str], k: int, eps: float, size: int
) -> list[Result]:
    shares = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    times = [torch.tensor(tally.ms, dtype=torch.float64).quantile(shares).tolist() for tally in tallies]
    base = min(ms for point, (_, ms, _) in zip(points, times, strict=True) if point.method in EXACT)
    results = []
    for point, tally, (low, ms, high) in zip(points, tallies, times, strict=True):
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
                time_ratio=base / ms,
                exact_share=sum(tally.exact) / count,
                build_s=point.build_s,
                index_mb=point.index_mb,
            )
        )
    return results


def scaling(
    ns: Sequence[int],
    ds: Sequence[int],
    *,
    rank: int,
    calibration: int,
    test_queries: int,
    seed: int = 0,
    report: Report = in_silence,
    **options: Any,
) -> list[dict[str, Any]]:
    """The results of `measure` on made-up heads of every shape, with n, d and rank."""
    rows: list[dict[str, Any]] = []
    shapes = [(n, d) for n in ns for d in ds]
    for n, d in shapes:
        report(f"making {n} x {d}", 0)
        weight, *corpus = make_head(n, d, rank=rank, calibration=calibration, test=test_queries, seed=seed)
        head = Head(weight, None, 1.0, None, {"made up": Corpus(*corpus)})

        def part(what: str, share: float, shape: str = f"{n} x {d}") -> None:
            report(f"{shape}: {what}", share / len(shapes))

        results = measure(
            head,
            name=f"{n} x {d}",
            calibration=calibration,
            test_queries=test_queries,
            seed=seed,
            report=part,
            **options,
        )
        rows += [{"n": n, "d": d, "rank": rank, **result._asdict()} for result in results]
    return rows


# -- pictures ----------------------------------------------------------------------------------------------------------

_TICKS = (0.9, 0.5, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
_MARKS = "osD^vP*X<>ph"


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
                found = [r for r in results if (r.corpus, r.k, r.method) == (corpus, k, method)]
                found.sort(key=attrgetter(f"{ratio}_ratio"))
                x = [getattr(r, f"{ratio}_ratio") for r in found]
                style = {"marker": _MARKS[number % len(_MARKS)], "color": f"C{number}", "lw": 0.5}
                panel.plot(x, [max(1 - r.success, floor) for r in found], label=method, **style)
                if method.startswith("faiss"):
                    panel.plot(x, [max(1 - r.topk_right, floor) for r in found], mfc="none", **style)
            panel.axvline(1, color="grey", lw=0.5)
            panel.set(xscale="log", xlabel=f"{ratio} of the exact product / {ratio}", title=f"{corpus}, top {k}")
            _stretch(panel, floor)
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    words = "bytes against bfloat16, time against the faster exact product; hollow: right top k of faiss"
    figure.suptitle(f"{results[0].head}: {words}", fontsize="small")
    return figure


def draw_scaling(rows: Sequence[dict[str, Any]]) -> Figure:
    """Time and success against d: a column an n and k, a line a method and setting."""
    places = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    kinds = list(dict.fromkeys((row["method"], row["setting"]) for row in rows))
    sizes = sorted({row["d"] for row in rows})
    figure = new_figure(4.5 * len(places) + 2, 7)
    axes = figure.subplots(2, len(places), squeeze=False)
    floor = 0.5 / max(row["queries"] for row in rows)
    for (above, below), place in zip(axes.T, places, strict=True):
        for number, kind in enumerate(kinds):
            found = [row for row in rows if (row["n"], row["k"]) == place and (row["method"], row["setting"]) == kind]
            d = [row["d"] for row in found]
            style = {"marker": _MARKS[number % len(_MARKS)], "color": f"C{number}", "label": " ".join(kind)}
            spans = [[row["ms"] - row["ms_p20"] for row in found], [row["ms_p80"] - row["ms"] for row in found]]
            above.errorbar(d, [row["ms"] for row in found], spans, lw=1, capsize=2, **style)
            below.plot(d, [max(1 - row["success"], floor) for row in found], lw=0.5, **style)
        above.set(
            xscale="log", yscale="log", xlabel="d", ylabel="ms, with p20 to p80", title=f"n {place[0]}, top {place[1]}"
        )
        below.set(xscale="log", xlabel="d")
        for panel in (above, below):
            panel.set_xticks(sizes, map(str, sizes))
            panel.minorticks_off()
        _stretch(below, floor)
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    return figure


def _stretch(panel: Any, floor: float) -> None:
    """An axis of success, stretched near 1; what is plotted are failures."""
    from matplotlib.ticker import NullLocator

    ticks = [tick for tick in _TICKS if tick > floor]
    panel.set_yscale("log")
    panel.set_ylim(1.1, floor / 1.3)
    panel.set_yticks([*ticks, floor], [*(f"{100 * (1 - tick):g} %" for tick in ticks), "all"])
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_ylabel("success")
