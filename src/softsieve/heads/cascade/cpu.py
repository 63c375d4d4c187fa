"""The cascade on a CPU: numba kernels that answer one query at a time, from any thread."""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from softsieve._files import LINE
from softsieve._progress import ProgressCallback
from softsieve.heads.above import RowsAbove
from softsieve.heads.cascade import index as indexes
from softsieve.heads.cascade.calibration import Trial
from softsieve.heads.cascade.cpu_trials import Asked, answer_all, trial_of
from softsieve.heads.cascade.engine import Cascade, complete, gap_for
from softsieve.heads.cascade.fit import CascadeCalibration, DriftWarning, Fallback, half_width, widened
from softsieve.heads.cascade.index import BLOCK, SPREADS
from softsieve.heads.engine import Answer, Ends, Estimated, Layer, Promise
from softsieve.heads.quantised import QuantisedWeight, Weight
from softsieve.heads.watching import WeightChanged

if TYPE_CHECKING:
    from softsieve.kernels import cascade_numba as kernels

SAMPLES = 4  # rows whose bits are kept, to notice that the weight has changed
_PAGE = 1 << 21  # bytes of a large page of memory
# Bytes of a preview that could be read in the time of other things: one more row; a byte of a row or record; sums and
# margins of a preview, a row. With cold caches and two threads (a fit to 1,200 answers); a row takes one thread less.
_ROW, _BYTE, _PREVIEW = 256, 2, 16
_GROUP = 8  # queries, at least, that share a pass over the preview where there are so many; their estimates stay cached
_WORK = 1 << 20  # codes of the preview for all queries, from which on they share one
_FIELDS = 11  # of `Found`
_LOCK = threading.Lock()

Finalists = tuple[Any, Any]  # arrays of rows, rising, and of their logits


class CpuCascade(Cascade):
    """An index with its weight on a CPU."""

    on_gpu = False

    def __init__(self, layer: Layer, index: indexes.Index) -> None:
        from softsieve.kernels import cascade_numba as kernels

        super().__init__(layer, index._replace(records=_in_whole_lines(index.records)))
        index, weight = self.index, layer.weight
        self._dtype = layer.reader.dtype
        self._kind = np.float64 if self._dtype == torch.float64 else np.float32
        previews, tiers = indexes.lengths(len(index.centre))
        longer = indexes.long_previews(len(index.centre))
        some = slice(tiers.index(longer[0]), tiers.index(longer[-1]) + 1) if longer else slice(0)
        self.lengths = [*previews, *longer]
        self.previews = len(self.lengths)
        self._bias_is_coded = indexes.is_coded(index, weight)
        bias = (torch.zeros(0) if layer.bias is None else layer.bias).to(self._dtype) * layer.beta
        self._arrays = kernels.Index(
            raw_bits(weight),
            bias.numpy(),
            bias.numpy()[: 0 if self._bias_is_coded else None],
            raw_bits(index.project),
            index.centre.numpy(),
            index.mean.numpy(),
            np.array(self.lengths),
            index.columns.numpy(),
            torch.cat([index.spreads, index.records[:, some].T.view(torch.uint8)]).numpy(),
            torch.cat([index.steps, index.tier_steps[some]]).numpy(),
            np.array(tiers),
            index.records.numpy(),
            index.tier_steps.numpy(),
            index.probes.int().numpy(),
            raw_bits(weight[index.probes[:SAMPLES]]),
            weight.nbytes // len(weight),
        )
        self._ask = kernels.ask
        self._address: int | None = None  # of its compiled code, once several queries share a pass
        self._local = threading.local()

    def _arrays_for(self, plans: Sequence[kernels.Plan]) -> kernels.Index:
        """What the kernel reads, with columns as long as the longest preview of these plans has."""
        longest = self.lengths[max((plan.second for plan in plans), default=0)]
        if longest > self._arrays.columns.shape[1]:
            columns = _in_large_pages(indexes.by_columns(self.index, self.lengths[-1])).numpy()
            self._arrays = self._arrays._replace(columns=columns)
        return self._arrays

    # -- answers -------------------------------------------------------------------------------------------------------

    def solve(self, x: Tensor, fit: CascadeCalibration, k: int) -> Answer:
        # Arrays up to the end: an operation of torch takes as long as many of numpy's, and that is a good part of the
        # time of one query.
        queries = self.layer.scaled(x, "x")
        indices, logits, numbers = self._run(queries, plan_of(fit))
        log_z, half = numbers[:, 1].astype(self._kind), half_width(numbers[:, 2], fit).astype(self._kind)
        interval = np.empty((len(log_z), 2), self._kind)
        interval[:, 0], interval[:, 1] = log_z - half, log_z + half
        read = numbers[:, 3:5].astype(np.int64)
        exact = numbers[:, 0] != 0
        fields = [indices, np.exp(logits - log_z[:, None]), logits, log_z, interval, read[:, 0], read[:, 1], exact]
        if exact.any():
            _explain(numbers, fit, stacklevel=7)
            rows = exact.nonzero()[0]
            answer = self._exact.answer(queries[torch.from_numpy(rows)], fit.k)
            for value, right in zip(fields[:6], answer[:6], strict=True):
                value[rows] = right.numpy()
            fields[6][rows] += answer.bytes_read.numpy()
        if k != fit.k:
            fields[:3] = [value[:, :k] for value in fields[:3]]
        shape = x.shape[:-1]
        return Answer(*(torch.from_numpy(value.reshape(shape + value.shape[1:])) for value in fields))

    def logits(self, queries: Tensor, promise: Promise, dtype: torch.dtype | None = None) -> Estimated:
        fit = self.fit(self.largest_k(), promise)
        self.notice_changes()
        logits = torch.empty(len(queries), len(self.layer.weight), dtype=self._dtype)
        gap = gap_for(dtype, self._dtype, self.layer.beta)
        _, _, numbers = self._run(queries, plan_of(fit, gap=gap), logits.numpy())
        fallbacks: list[int] = numbers[:, 0].nonzero()[0].tolist()
        if fallbacks:
            _explain(numbers, fit, stacklevel=5)
        return Estimated(logits, fallbacks, int(numbers[:, 4].sum()))

    def solve_above(self, queries: Tensor, fit: CascadeCalibration, threshold: float) -> RowsAbove:
        finalists: list[Finalists] = []
        _, _, numbers = self._run(queries, plan_of(fit), finalists=finalists)
        fallbacks = numbers[:, 0] != 0
        if fallbacks.any():
            _explain(numbers, fit, stacklevel=6)
        kept = [logits > threshold for _, logits in finalists]
        rows, logits = (
            np.concatenate([one[part][keep] for one, keep in zip(finalists, kept, strict=True)]) for part in (0, 1)
        )
        counts = np.array([np.count_nonzero(keep) for keep in kept])
        found = RowsAbove(
            torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
            torch.from_numpy(rows.astype(np.int64)),
            torch.from_numpy(logits),
            torch.from_numpy(numbers[:, 4].astype(np.int64)),
            torch.from_numpy(fallbacks),
        )
        return complete(found, torch.from_numpy(fallbacks.nonzero()[0]), self.layer, queries, threshold)

    def ends(self, queries: Tensor, fit: CascadeCalibration) -> Ends:
        logits = torch.empty(len(queries), len(self.layer.weight), dtype=self._dtype)
        plan, out = plan_of(widened(fit), math.inf, upper=True), logits.numpy()
        numbers = torch.from_numpy(self._run(queries, plan, out)[2])
        return Ends(logits, numbers[:, 0] == 0, numbers[:, 4].long())

    def _run(
        self, queries: Tensor, plan: kernels.Plan, everywhere: Any = None, finalists: list[Finalists] | None = None
    ) -> tuple[Any, Any, Any]:
        """Rows and logits of the top k of scaled queries, and what the kernel says of each: fields of `Found`.

        All logits are written to ``everywhere``, if that is an array (batch, n); those of each query's finalists are
        appended to ``finalists``, if that is a list.
        """
        batch, x = len(queries), np.ascontiguousarray(queries.numpy())
        coded = indexes.extend(queries, self.layer.beta).numpy() if self._bias_is_coded else x
        rows, logits = np.zeros((batch, plan.k), np.int64), np.zeros((batch, plan.k), self._kind)
        if everywhere is None:
            everywhere = np.empty((batch, 0), self._kind)
        arrays, answers = self._arrays_for([plan]), np.zeros((batch, _FIELDS))
        together = 1 if finalists is not None else self._together(batch, plan)
        with one_at_a_time():
            if together > 1:
                for start in range(0, batch, together):
                    some = slice(start, start + together)
                    self._answer_together(
                        arrays, plan, x[some], coded[some], rows[some], logits[some], everywhere[some], answers[some]
                    )
                return rows, logits, answers
            ask, scratch = self._ask, self._scratch()
            for i in range(batch):
                found = ask(arrays, plan, x[i], coded[i], scratch, rows[i], logits[i], everywhere[i], 0)
                answers[i] = found
                if finalists is not None:
                    many = found.finalists
                    finalists.append((scratch.rows[:many].copy(), scratch.exact[:many].copy()))
            return rows, logits, answers

    def _together(self, batch: int, plan: kernels.Plan) -> int:
        """How many of the queries share a pass over the preview, and the threads."""
        from numba import get_num_threads

        work = batch * len(self.layer.weight) * self.lengths[plan.first]
        return min(batch, max(_GROUP, 2 * get_num_threads())) if work > _WORK else 1

    def _answer_together(
        self, arrays: kernels.Index, plan: kernels.Plan, x: Any, coded: Any,
        rows: Any, logits: Any, everywhere: Any, answers: Any,
    ) -> None:  # fmt: skip
        from softsieve.kernels.batch_numba import address_of, ask_all

        batch, length = len(x), self.lengths[plan.first]
        given = arrays, plan, x, coded, self._shared_memory(batch), rows, logits, everywhere
        if self._address is None:
            self._address = address_of(*given)
        y, offsets = np.empty((batch, length), np.float32), np.empty(batch, np.float32)
        ask_all(self._address, *given, answers, np.zeros(1, np.int64), y, offsets)

    def _shared_memory(self, batch: int) -> kernels.Scratch:
        """Memory for queries that share a pass: estimates of each, and what each thread of the kernel needs."""
        from numba import get_num_threads

        kept: kernels.Scratch | None = getattr(self._local, "shared", None)
        if kept is None or len(kept.estimates) < batch or len(kept.tally) != get_num_threads():
            kept = self._make_scratch(get_num_threads())
            estimates = np.zeros((batch, kept.estimates.shape[1]), np.float32)
            # A thread has a query for itself, and sums are made for one plan.
            kept = kept._replace(estimates=estimates, summed=kept.summed[:, :0], alone=1 << 62)
            self._local.shared = kept
        return kept._replace(estimates=kept.estimates[:batch])

    def _scratch(self) -> Any:
        """Memory of this thread."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = self._make_scratch()
        return self._local.scratch

    def _make_scratch(self, *threads: int) -> Any:
        from softsieve.kernels import cascade_numba as kernels

        blocks, probes = len(self.index.columns), len(self.index.probes)
        rows = blocks * BLOCK

        def zeros(size: int, kind: Any = np.float32) -> Any:
            return np.zeros((*threads, size), kind)

        return kernels.Scratch(
            estimates=zeros(rows),
            largest=zeros(blocks),
            upper_ends=zeros(blocks),
            sums=zeros(blocks),
            corrected=zeros(blocks),
            ends=zeros(blocks, np.int64),
            marks=zeros(rows, np.uint8),
            rows=zeros(rows, np.int32),
            values=zeros(rows),
            spreads=zeros(rows, np.uint8),
            exact=zeros(rows, self._kind),
            dropped=zeros(rows + 1),
            excesses=zeros(rows + 1),
            y=zeros(SPREADS + len(self.index.unit)),
            probe_logits=zeros(probes, self._kind),
            probe_starts=zeros(probes),
            probe_estimates=zeros(probes),
            probe_spreads=zeros(probes, np.uint8),
            tally=zeros(2, np.int64),
            summed=zeros(4),
        )

    # -- calibration ---------------------------------------------------------------------------------------------------

    def announce(self, progress: ProgressCallback) -> None:
        from softsieve.kernels.base_numba import is_compiled

        if not is_compiled(self._ask):
            progress("compiling kernels, once per machine", 0.0)

    def trials(
        self, queries: Tensor, fits: Sequence[CascadeCalibration], *, half_width: float | None = None
    ) -> list[Trial]:
        from softsieve.kernels import cascade_numba as kernels

        plans = [plan_of(fit, half_width) for fit in fits]
        shape = len(fits), len(queries)
        rows = [np.zeros((len(queries), fit.k), np.int64) for fit in fits]
        logits = [np.zeros((len(queries), fit.k), self._kind) for fit in fits]
        answers, above = np.zeros((*shape, len(kernels.Found._fields))), np.zeros(shape, np.int64)

        def keep(found: kernels.Found, number: int, i: int, scratch: kernels.Scratch) -> None:
            answers[number, i] = found
            if not math.isinf(fits[number].level):
                above[number, i] = np.count_nonzero(scratch.exact[: found.finalists] > fits[number].level)

        nowhere = np.empty((len(queries), 0), self._kind)
        x = queries.numpy()
        coded = indexes.extend(queries, self.layer.beta).numpy() if self._bias_is_coded else x
        asked = Asked(self._ask, self._arrays_for(plans), self.lengths, x, coded, self._make_scratch)
        answer_all(asked, plans, lambda number, i: (rows[number][i], logits[number][i], nowhere[i]), keep)
        numbers = torch.from_numpy(answers)
        return [
            trial_of(numbers[number], rows[number], logits[number], None if math.isinf(fit.level) else above[number])
            for number, fit in enumerate(fits)
        ]

    def settings(self) -> list[dict[str, int]]:
        return [{"first": number, "second": number} for number in range(self.previews)]

    def start(self, k: int, promise: Promise, queries: int) -> CascadeCalibration:
        return CascadeCalibration(
            k, *promise, queries, 1.0, 1.0, 0, 0, 0.0, math.inf, 0.5, 0.0, math.inf, 0.0, math.inf, 0
        )

    def choose(
        self, start: CascadeCalibration, trials: list[tuple[CascadeCalibration, Trial]]
    ) -> list[CascadeCalibration]:
        """The cost of a trial is bytes of a preview that could be read in the time that each answer takes."""
        previews, rows = [], len(self.layer.weight)
        for fit, trial in trials:
            fallbacks = (trial.fallback != 0) * self.layer.bytes
            others = _BYTE * (trial.bytes_read.double() - rows * self.lengths[fit.first])
            cost = rows * self.lengths[fit.first] + others + _ROW * trial.survivors.double() + fallbacks
            previews.append((fit.width, trial.survivors, cost))
        return [cheapest(start, previews, again=float(_PREVIEW * rows))]


def cheapest(
    start: CascadeCalibration, previews: list[tuple[float, Tensor, Tensor]], *, again: float
) -> CascadeCalibration:
    """The two previews, and the limit between them, that cost least in the mean.

    Args:
        previews: width, survivors and cost of each, for some queries.
        again: what a second preview costs besides its columns.
    """
    best, least = start, math.inf
    for first, (width, survivors, cost) in enumerate(previews):
        for second, (other, _, longer) in enumerate(previews[first:], first):
            limits = [math.inf] if second == first else sorted(set(survivors.tolist()))
            for limit in limits:
                mean = float(torch.where(survivors > limit, longer + again, cost).mean())
                if mean < least:
                    least = mean
                    best = start._replace(first=first, second=second, limit=float(limit), width=max(width, other))
    return best


@functools.lru_cache
def plan_of(
    fit: CascadeCalibration,
    half_width: float | None = None,
    *,
    upper: bool = False,
    gap: tuple[float, float] | None = None,
) -> kernels.Plan:
    """What the kernel is told; the half-width of log Z to reach is what eps says unless it is an argument."""
    from softsieve.kernels.cascade_numba import GAP, Plan, Usual

    return Plan(
        fit.k,
        fit.first,
        fit.second,
        fit.limit,
        fit.width,
        fit.correction,
        math.log(fit.eps / 2),
        fit.doubt,
        math.log1p(fit.eps) if half_width is None else half_width,
        Usual(fit.low, fit.high, fit.signal, fit.toward_low, fit.toward_high, fit.most, fit.flat),
        upper,
        fit.level,
        gap or GAP,
    )


def _explain(numbers: Any, fit: CascadeCalibration, *, stacklevel: int) -> None:
    """Refuse a changed weight, and warn whoever called the head of drifted queries; ``numbers``: a row a query.

    Raises:
        WeightChanged: when the kernel met other rows than the index was built of.
    """
    fallback = numbers[:, 0]
    if (fallback == Fallback.CHANGED).any():
        raise WeightChanged("weight: not the one that the index was built of: build it again")
    drifted = numbers[fallback == Fallback.DRIFTED]
    if not len(drifted):
        return
    query, reason = drifted[0], "estimates beyond float32"
    ranges = {
        "errors of a preview, of what was predicted": (query[5], fit.low, fit.high),
        "estimates, of their errors": (query[8], fit.signal, math.inf),
        "cosine of the angle to the mean query": (query[9], fit.toward_low, fit.toward_high),
        "rows that survive the preview": (query[6], 0, fit.most),
        "log Z less the k-th logit": (query[10], -math.inf, fit.flat),
    }
    for what, (value, low, high) in ranges.items():
        if not low <= value <= high:
            reason = f"{what}: {value:.3g}, expected from {low:.3g} to {high:.3g}"
            break
    warnings.warn(
        f"x: {len(drifted)} of {len(fallback)} queries are unlike those of the calibration and were answered exactly: "
        f"{reason}",
        DriftWarning,
        stacklevel=stacklevel,
    )


def _in_whole_lines(values: Tensor) -> Tensor:
    """The same where they are a mapped file's and begin with a cache line, so that all processes share one memory.

    The system keeps large files in large pages by itself. Otherwise a copy: a row that begins within a line takes one
    line more, and small pages take longer to find.
    """
    mapped = not values.untyped_storage().resizable()  # torch has not allocated it
    return values if mapped and values.data_ptr() % LINE == 0 else _in_large_pages(values)


def _in_large_pages(values: Tensor) -> Tensor:
    """A copy that begins with a large page of memory: rows lie in whole cache lines, and are found faster."""
    size = values.numel() * values.element_size()
    room = np.empty(size + _PAGE, np.uint8)  # if this is large, numpy asks for large pages
    start = -room.ctypes.data % _PAGE
    return torch.from_numpy(room[start : start + size]).view(values.dtype).view(values.shape).copy_(values)


def raw_bits(values: Weight) -> Any:
    """As the kernels know it, without a copy: an array, bfloat16 as uint16 and float16 as int16; or `Quantised`."""
    if isinstance(values, QuantisedWeight):
        from softsieve.kernels.quantised_numba import Quantised

        none = values.scales[:0, :0]
        return Quantised(
            values.codes.view(torch.int8).numpy(),
            raw_bits(values.scales),
            raw_bits(none if values.minimums is None else values.minimums),
            (torch.zeros(0) if values.levels is None else values.levels).numpy(),
        )
    same = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
    return values.view(same[values.dtype]).numpy() if values.dtype in same else values.numpy()


@functools.cache
def one_at_a_time() -> AbstractContextManager[object]:
    """A lock, the same for all, unless numba's threads, which the kernels have started, can serve several callers."""
    from numba.np.ufunc.parallel import threading_layer

    return nullcontext() if threading_layer() in ("omp", "tbb") else _LOCK  # type: ignore[no-untyped-call]
