"""The ways to ask a head for its top k: the exact product, `AdaptiveSoftmax` and its rivals.

To add a method: a line in `RIVALS`, for what is built from the weight alone, or in `FITTED`, for what sees queries.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from softsieve._threads import follow_torch
from softsieve.extras import package
from softsieve.heads import AdaptiveSoftmax
from softsieve.heads.coordinates.calibration import needed
from softsieve.heads.quantised import QuantisedWeight, describe

EF_SEARCH = (32, 128, 512, 2048)
NPROBE = (1, 8, 32, 128, 512)
PREVIEW_SHARES = (16, 8, 4)  # ranks d/16, d/8, d/4
PREVIEW_ROWS = (64, 256, 1024)
FAISS_SUM = 1024  # results that a softmax is taken over where there is no other estimate of probabilities
NOTE = f"faiss has no probabilities: its success is with a softmax over its best {FAISS_SUM}, found at no cost"


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

    weight: Any  # as it is stored, (n, d): a tensor or a `QuantisedWeight`
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


def _exact_fp32(layer: Layer) -> Iterator[Point]:
    def ask(x: Tensor, k: int) -> Answer:
        probs, indices = F.linear(x, layer.full, layer.bias).softmax(-1).topk(k)
        return Answer(indices, probs, layer.full.nbytes, True)

    yield Point("exact fp32", "", ask)


def _exact_bf16(layer: Layer) -> Iterator[Point]:
    weight = layer.full.bfloat16()

    def ask(x: Tensor, k: int) -> Answer:
        logits = F.linear(x.bfloat16(), weight).float()
        probs, indices = (logits if layer.bias is None else logits + layer.bias).softmax(-1).topk(k)
        return Answer(indices, probs, weight.nbytes, True)

    yield Point("exact bf16", "", ask)


def _exact_rows(layer: Layer) -> Iterator[Point]:
    """The product with the rows of a quantised weight, as they are; nothing for one that is not."""
    if not isinstance(layer.weight, QuantisedWeight):
        return
    head = AdaptiveSoftmax(layer.weight, layer.bias, method="exact")

    def ask(x: Tensor, k: int) -> Answer:
        answer = head.topk(x, k)
        return Answer(answer.indices, answer.probs, head.weight.nbytes, True)

    yield Point("exact, own rows", describe(layer.weight), ask)


def _dynamic(layer: Layer) -> Iterator[Point]:
    """torch's dynamic quantisation: weights in 8 bits with a scale a row, and each query in 8 bits, too."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # in favour of torchao, which has another product
        quantisation = import_module("torch.ao.quantization")
        plan = {torch.nn.Linear: quantisation.per_channel_dynamic_qconfig}
        module = quantisation.quantize_dynamic(torch.nn.Sequential(_linear(layer)), plan, inplace=True)
    yield _by_module("int8, torch", "dynamic", module, layer, 1.0, time.perf_counter() - start)


def _torchao(method: str, bits: int, layer: Layer) -> Iterator[Point]:
    """torchao's quantisation of weights alone: 8 bits with a scale a row, or 4 with one for 32 entries."""
    torchao = package("torchao.quantization", method)
    start = time.perf_counter()
    kind = (
        {
            "weight_dtype": torch.int4,  # type: ignore[attr-defined]
            "granularity": torchao.PerGroup(32),
        }
        if bits == 4
        else {}
    )
    if bits == 4 and layer.full.shape[1] % 32:
        return
    module = _linear(layer).bfloat16()
    torchao.quantize_(module, torchao.IntxWeightOnlyConfig(**kind) if kind else torchao.Int8WeightOnlyConfig())
    setting = "a scale a row" if bits == 8 else "groups of 32"
    yield _by_module(method, setting, module, layer, bits / 8, time.perf_counter() - start)


def _linear(layer: Layer) -> torch.nn.Linear:
    module = torch.nn.Linear(layer.full.shape[1], len(layer.full), bias=False, device="meta")
    module.weight = torch.nn.Parameter(layer.full, requires_grad=False)
    return module


def _by_module(method: str, setting: str, module: Any, layer: Layer, size: float, taken: float) -> Point:
    """A point that asks a module for all logits but their bias; ``size``: bytes of an entry, besides scales."""
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    read = size * layer.full.numel()

    @torch.no_grad()
    def ask(x: Tensor, k: int) -> Answer:
        logits = module(x[None].to(dtype))[0].float()
        probs, indices = (logits if layer.bias is None else logits + layer.bias).softmax(-1).topk(k)
        return Answer(indices, probs, read)

    return Point(method, setting, ask, taken, read / 1e6)


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
    faiss = package("faiss", method)
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
        rows_searched = search(parameters, x, min(max(FAISS_SUM, k), len(rows)))
        probs = layer.logits(x, rows_searched[rows_searched >= 0]).softmax(-1)
        return F.pad(probs, (0, k)).topk(k).values

    for setting, parameters in settings.items():
        ready = partial(ask, parameters)
        yield Point(method, setting, ready, taken, size, estimate=partial(estimate, parameters))


def _fitted_preview(layer: Layer, sample: Tensor, plan: Plan) -> Iterator[Point]:
    return _preview(layer, "SVD preview, fitted", sample.T @ sample / len(sample))


def _sieve(name: str, options: dict[str, Any], layer: Layer, sample: Tensor, plan: Plan) -> Iterator[Point]:
    """`AdaptiveSoftmax`: the cascade at every delta, others at the first. As many threads as the rivals have."""
    follow_torch()
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
        size = (_bytes_in_memory(head) - layer.weight.nbytes) / 1e6
        yield Point(name, f"delta {delta:g}", partial(_ask_sieve, head, generator), taken, size, delta)


def _ask_sieve(head: AdaptiveSoftmax, generator: torch.Generator, x: Tensor, k: int) -> Answer:
    answer = head.topk(x, k, generator=generator)
    return Answer(answer.indices, answer.probs, float(answer.bytes_read), bool(answer.exact))


def _bytes_in_memory(thing: object) -> int:
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
    "exact, own rows": _exact_rows,
    "int8, torch": _dynamic,
    "int8, torchao": partial(_torchao, "int8, torchao", 8),
    "int4, torchao": partial(_torchao, "int4, torchao", 4),
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
    needed_by = {name: module for name in METHODS for module in ("faiss", "torchao") if module in name}
    return [name for name in METHODS if name not in needed_by or find_spec(needed_by[name]) is not None]


def spread(rows: Tensor, count: int) -> Tensor:
    """At most ``count`` rows, evenly spread: neighbours in a text are alike."""
    return rows if len(rows) <= count else rows[torch.linspace(0, len(rows) - 1, count).long()]
