"""Calibration of the cascade: which preview and which width of margins make answers to sample queries right."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softsieve._progress import Report, in_silence
from softsieve.heads.cascade import Asked, Cascade
from softsieve.heads.cascade_gpu import GpuCascade
from softsieve.heads.reader import Reader

Engine = Cascade | GpuCascade

CAPACITY, MOST_K = 8192, 64  # on a GPU, as the kernels have them
CONFIDENCE = 0.99  # with which the promise holds, over samples of queries
WIDTHS = tuple(12 * 0.93**number for number in range(40))  # that are tried, from wide to narrow
SHAPING = 256  # queries, at most, that only choose; the others decide
CORRECTIONS = tuple(number / 20 for number in range(4, 21))
SLACK = 0.5  # so much further out than any query of the sample, a query counts as from elsewhere
ENVELOPES = (4.0, 5.0, 6.0, 8.0, 12.0)  # deviations that are tried, as far as they are wider than the margins
ENVELOPE_QUERIES = 1024  # that are tried with, at most
BATCHES = (1, 2, 4, 8, 16, 32, 64)
_REPEATS = 5
_AT_ONCE = 1 << 24  # logits that are there at a time
_CLOSE = 8  # rows besides the top k that may be among them but for rounding


class CascadeCalibration(NamedTuple):
    """What was fitted on sample queries, for one k."""

    k: int  # softmax values that it is for; 0: log Z
    eps: float  # relative error of a probability that it is for
    delta: float  # chance of a wrong answer that it is for
    queries: int  # how many there were
    right: float  # the share of answers that were right with this width, over those that decided on it
    read: float  # the share of the weight's bytes that these read
    first: int  # the level of the preview
    second: int  # the level for queries of which the first leaves more rows than the limit
    limit: float  # rows that the first preview may leave before the second follows
    width: float  # of margins; infinite: everything is read
    correction: float  # of masses that are only estimated: exp(correction * deviation^2)
    doubt: float  # about log Z, for mass that was corrected
    interval: float  # half width of log Z's, in doubts
    low: float  # scale of a preview's errors below which a query is unlike those of the calibration
    high: float  # the same, above
    batch: int  # up to so many queries at a time the cascade was measured to be faster than the exact product
    tier: int = -1  # on a GPU, where `first` is a tier, too: that of the rows that are left, -1 for none
    capacity: int = 0  # on a GPU: survivors of the preview that there is room for; 0: this is for a CPU
    signal: float = 0.0  # size of estimates, in sizes of their errors, below which a query is unlike those
    toward_low: float = -2.0  # cosine of the angle to the mean query: below this likewise
    toward_high: float = 2.0  # the same, above
    most: float = math.inf  # survivors of the preview: above this likewise
    flat: float = math.inf  # log Z less the k-th logit: above this likewise
    envelope: float = math.inf  # deviations that no logit is above its estimate by, for `sample`; infinite: not known


_NEWER = ("signal", "toward_low", "toward_high", "most", "flat", "envelope")  # not in files of version 0.1
_LEAST = {"tier": -1, "toward_low": -math.inf, "toward_high": -math.inf}  # others are 0 at least


def restored(found: dict[str, Any], *, k: int, rows: int, previews: int, tiers: int) -> CascadeCalibration:
    """A calibration from what a file says.

    Raises:
        TypeError, ValueError: when it cannot be one.
    """
    fields = set(CascadeCalibration._fields)
    if not fields - set(_NEWER) <= set(found) <= fields:
        raise ValueError(f"calibrations.{k}: expected {sorted(fields)}, found {sorted(found)}")
    for name, value in found.items():
        whole = name in ("k", "queries", "first", "second", "batch", "tier", "capacity")
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise TypeError(f"calibrations.{k}: {name}: expected a number, found {value!r}")
        if math.isnan(value) or value < _LEAST.get(name, 0):
            raise ValueError(f"calibrations.{k}: {name}: expected a number of at least 0, found {value!r}")
    room = found["capacity"]
    levels = tiers if room else previews
    fits = found["first"] <= found["second"] < levels and found["tier"] < tiers and room & (room - 1) == 0
    if found["k"] != k or k > rows or not fits or room > CAPACITY or (room and k > MOST_K):
        raise ValueError(f"calibrations.{k}: made for another head")
    return CascadeCalibration(**found)


class Truth(NamedTuple):
    """Exact answers."""

    best: Tensor  # (N, k), falling
    log_z: Tensor  # (N,)

    @property
    def rounding(self) -> Tensor:
        """What logits and log Z may be off by all the same. (N,)"""
        largest = torch.cat([self.best, self.log_z[:, None]], -1).abs().amax(-1)
        return 16 * torch.finfo(self.best.dtype).eps * (1 + largest.double())

    def some(self, rows: Tensor) -> Truth:
        return Truth(self.best[rows], self.log_z[rows])


def needed(delta: float) -> int:
    """The fewest sample queries for which a promise can be made.

    M queries decide, and with none of their answers wrong ``(1 - delta)^M <= 1 - CONFIDENCE`` must hold.

    Example:
        >>> needed(0.1), needed(0.01)
        (65, 688)
    """
    deciding = math.ceil(round(math.log(1 - CONFIDENCE) / math.log1p(-delta), 9))
    return next(count for count in range(deciding, 2 * deciding + SHAPING) if count - _shaping(count) >= deciding)


def allowed(count: int, delta: float) -> int:
    """So many of the answers to ``count`` queries may be wrong; -1 when there are too few queries.

    The largest e with ``P(Binomial(count, delta) <= e) <= 1 - CONFIDENCE``. For exchangeable queries the score of one
    more is then above that of the ``count - e``-th smallest with probability delta at most, not only in the mean over
    samples, but with that confidence for the one sample there is (Vovk 2012).
    """
    tail, log_term, odds = 0.0, count * math.log1p(-delta), math.log(delta) - math.log1p(-delta)
    for errors in range(count + 1):
        tail += math.exp(log_term)
        if tail > 1 - CONFIDENCE:
            return errors - 1
        log_term += math.log((count - errors) / (errors + 1)) + odds if errors < count else 0.0
    return count


def _shaping(count: int) -> int:
    return min(count // 3, SHAPING)


def truth(reader: Reader, x: Tensor, bias: Tensor | None, k: int) -> Truth:
    """Exact answers to queries times beta; ``bias`` times beta."""
    found = []
    for part in torch.split(x, max(1, _AT_ONCE // reader.rows)):
        logits = reader.full(part)
        if bias is not None:
            logits += bias
        rounded = not x.is_cpu and k > 0
        best, rows = logits.topk(min(k + _CLOSE, reader.rows) if rounded else k, -1)
        if rounded:  # matrix units round more than single rows are
            query = torch.arange(len(part), device=x.device)[:, None].expand_as(rows)
            best = reader.pairs(query.reshape(-1), rows.reshape(-1), part).view_as(rows)
            best = (best if bias is None else best + bias[rows]).topk(k, -1).values
        found.append(Truth(best, logits.logsumexp(-1)))
    return Truth(torch.cat([f.best for f in found]), torch.cat([f.log_z for f in found]))


def right(asked: Asked, exact: Truth, calibration: CascadeCalibration) -> Tensor:
    """Whether answers are: the top k by value, probabilities within eps, the normaliser within its interval; (batch,).

    Up to rounding. What the kernel did not answer is answered exactly.
    """
    rounding = exact.rounding
    top = ((asked.logits - exact.best).abs() <= rounding[:, None]).all(-1)
    error = exact.log_z.double() - asked.log_z
    ratio = error.expm1() if calibration.k else (-error).expm1()  # probabilities have the normaliser below the line
    inside: Tensor = error.abs() <= half_width(asked.half, calibration) + rounding
    return (top & (ratio.abs() <= calibration.eps + rounding) & inside) | (asked.state != 0)


def half_width(doubt: Any, calibration: CascadeCalibration) -> Any:
    """Half the interval of log Z that is promised, from the half width that was to be reached.

    What follows from eps at most and a quarter of it at least: small doubts are themselves in doubt.
    """
    promised = -math.log1p(-calibration.eps)
    least = promised if math.isinf(calibration.interval) else promised / 4
    return (doubt * min(calibration.interval, 1e30)).clip(least, promised)


class _Sample(NamedTuple):
    """Queries with their exact answers."""

    engine: Engine
    x: Tensor
    exact: Truth

    def some(self, rows: Tensor) -> _Sample:
        return _Sample(self.engine, self.x[rows], self.exact.some(rows))

    def ask(self, calibration: CascadeCalibration) -> tuple[Asked, Tensor, float]:
        """Answers, whether they are right, and the share of the weight's bytes that they read, in the mean."""
        asked = self.engine.answer(self.x, calibration)
        return asked, right(asked, self.exact, calibration), float(self.read(asked).mean()) / self.whole

    def read(self, asked: Asked) -> Tensor:
        """Bytes that each answer read, with those of an exact one where there was no other."""
        return asked.bytes_read.double() + (asked.state != 0) * self.whole

    @property
    def whole(self) -> int:
        """Bytes of the weight."""
        return self.engine.weight.numel() * self.engine.weight.element_size()


def calibrate(
    engine: Engine,
    x: Tensor,
    exact: Truth,
    *,
    k: int,
    eps: float,
    delta: float,
    generator: torch.Generator | None,
    progress: Report = in_silence,
) -> CascadeCalibration:
    """Fit preview, correction and width on queries times beta.

    Some of the queries, at random, shape: they choose the preview that takes least, the correction of masses, and how
    much doubt about log Z goes with corrected mass. The others decide on the width. They are answered with widths from
    wide to narrow, and the score of a query is the least width down to which its answers are right. A width is wide
    enough if no more scores are above it than `allowed`; of those the one is taken with which least is read.
    """
    shaping_count = _shaping(len(x))
    mixed = torch.randperm(len(x), generator=generator).to(x.device)
    shaping, deciding = (
        _Sample(engine, x, exact).some(part) for part in (mixed[:shaping_count], mixed[shaping_count:])
    )
    found = CascadeCalibration(
        k, eps, delta, len(x), 1.0, 1.0, 0, 0, 0.0, math.inf, 0.5, 0.0, math.inf, 0.0, math.inf, 0
    )
    errors = allowed(len(deciding.x), delta)
    if errors < 0:
        progress("calibrating", 1.0)
        return found
    found = _decide(deciding, _shape(shaping, found, progress), errors, progress)
    if math.isfinite(found.width):
        found = _usual(torch.cat([_features(part.ask(found)[0]) for part in (shaping, deciding)]), found)
    progress("telling queries apart", 0.1)
    return found


def _shape(sample: _Sample, start: CascadeCalibration, progress: Report) -> CascadeCalibration:
    """Choose everything but the width, which is a first guess."""
    engine = sample.engine
    shapes = engine.shapes
    errors = int(start.delta * len(sample.x) / 2)
    found = []
    for shape in shapes:
        low, high = 0, len(WIDTHS) - 1  # the narrowest width with few errors, by bisection
        while low < high:
            middle = (low + high + 1) // 2
            _, fine, _ = sample.ask(start._replace(**shape, width=WIDTHS[middle]))
            if len(fine) - int(fine.sum()) <= errors:
                low = middle
            else:
                high = middle - 1
        trial = start._replace(**shape, width=WIDTHS[low])
        asked, _, _ = sample.ask(trial)
        cost = engine.cost(asked, trial) + (asked.state != 0) * sample.whole
        found.append((trial, asked.survivors, cost))
        progress("choosing a preview", 0.4 / len(shapes))
    if isinstance(engine, GpuCascade):
        best, survivors, _ = min(found, key=lambda one: float(one[2].mean()))
        best = best._replace(capacity=engine.room(survivors))
    else:
        best = _cheapest(start, [(one.width, survivors, cost) for one, survivors, cost in found], engine.again)
    trials = []
    for correction in CORRECTIONS:
        trial = best._replace(correction=correction)
        asked = engine.answer(sample.x, trial._replace(doubt=1.0), tolerance=1e30)
        error = (sample.exact.log_z.double() - asked.log_z)[asked.state == 0]
        # Errors of rows that are lost are no matter of the correction.
        trials.append((float(error.clamp(-1, 1).square().mean()), trial, error, asked))
        progress("correcting masses", 0.1 / len(CORRECTIONS))
    _, best, error, asked = min(trials, key=lambda trial: trial[0])
    doubt = asked.half[asked.state == 0]
    # Errors that are nothing but rounding call for no doubt.
    ratio = (error.abs() - sample.exact.rounding[asked.state == 0]).clamp_min(0) / doubt.clamp_min(1e-12)
    usual = float(ratio.quantile(0.9)) if len(ratio) else 1.0
    return best._replace(
        doubt=max(usual, 1e-3), interval=2 * float(ratio.max()) / max(usual, 1e-3) if len(ratio) else math.inf
    )


def _cheapest(
    start: CascadeCalibration, levels: list[tuple[float, Tensor, Tensor]], again: float
) -> CascadeCalibration:
    """The previews, and the limit between them, that cost least; ``levels``: width, survivors and cost of each."""
    best, least = start, math.inf
    for first, (width, survivors, cost) in enumerate(levels):
        for second, (other, _, longer) in enumerate(levels[first:], first):
            limits = [math.inf] if second == first else sorted(set(survivors.tolist()))
            for limit in limits:
                mean = float(torch.where(survivors > limit, longer + again, cost).mean())
                if mean < least:
                    least = mean
                    best = start._replace(first=first, second=second, limit=float(limit), width=max(width, other))
    return best


def _decide(sample: _Sample, shape: CascadeCalibration, errors: int, progress: Report) -> CascadeCalibration:
    """The width: the first one is wider than what shaping queries took, and does not depend on those that decide."""
    best = shape._replace(width=math.inf, read=1.0, right=1.0)
    widths = [width for width in WIDTHS if width <= max(1.75 * shape.width, 6.0)]  # few queries may have shaped
    count, wrong = len(sample.x), 0
    for number, width in enumerate(widths):
        _, fine, read = sample.ask(shape._replace(width=width))
        wrong += len(fine) - int(fine.sum())
        if wrong > errors:
            progress("deciding on the width", 0.4 * (len(widths) - number) / len(widths))
            break
        if read <= best.read:
            best = shape._replace(width=width, read=read, right=float(fine.sum()) / count)
        sample = sample.some(fine)
        progress("deciding on the width", 0.4 / len(widths))
    return best


# -- queries from elsewhere --------------------------------------------------------------------------------------------

# Of each feature (`_features`): the least difference that counts as one.
_DIFFERENCES = (0.1, 0.1, 0.1, 0.05, 0.05, 0.2, 0.2)


def _features(asked: Asked) -> Tensor:
    """What tells queries from elsewhere, each the larger the stranger a query is. (batch, features)"""
    scale, signal = asked.scale.clamp_min(1e-30).log(), asked.signal.clamp_min(1e-30).log()
    flat = torch.where(asked.state == 0, asked.flat, -math.inf)
    survivors = asked.survivors.double().log1p()
    return torch.stack([scale, -scale, -signal, asked.toward, -asked.toward, survivors, flat], -1).double()


def _usual(features: Tensor, fit: CascadeCalibration) -> CascadeCalibration:
    """How far features of a query may be from the median before it counts as from elsewhere: half as far again as any.

    A single feature of one more query is further out than all of N with probability ``1 / (N + 1)``. Where its tail is
    exponential, that falls to ``N^-1.5`` half as far again, so over all features it stays below half of delta, for
    which N is ``4.6 / delta`` at least.
    """
    finite = features.nan_to_num(neginf=0.0, posinf=0.0)
    middle = finite.median(0).values
    furthest = (finite.amax(0) - middle).clamp_min(torch.tensor(_DIFFERENCES, device=finite.device))
    limit = (middle + (1 + SLACK) * furthest).tolist()
    return fit._replace(
        high=math.exp(limit[0]),
        low=math.exp(-limit[1]),
        signal=math.exp(-limit[2]),
        toward_high=limit[3],
        toward_low=-limit[4],
        most=math.exp(limit[5]) - 1,
        flat=limit[6] if fit.k else math.inf,
    )


# -- sampling ----------------------------------------------------------------------------------------------------------


def envelope(
    engine: Engine, x: Tensor, logits: Callable[[Tensor], Tensor], fit: CascadeCalibration
) -> CascadeCalibration:
    """So many deviations that, for a query like these, no row that is left out has a logit further above its estimate.

    That holds for ``1 - delta`` of the queries, with the same confidence as the rest: of those tried, the least with
    which no more of the sample queries than `allowed` have a logit beyond. Infinite if none will do.
    """
    x = x[:ENVELOPE_QUERIES]
    errors = allowed(len(x), fit.delta)
    trials = [fit._replace(envelope=width) for width in ENVELOPES if width >= fit.width]
    beyond = [0] * len(trials)
    for part in torch.split(x, max(1, _AT_ONCE // len(engine.weight))):
        exact = logits(part)
        rounding = 1e-5 * (1 + exact.abs().amax(-1, keepdim=True))
        for number, trial in enumerate(trials):
            if beyond[number] <= errors:
                ends, answered = engine.upper_ends(part, trial)
                beyond[number] += int(((exact > ends + rounding).any(-1) & answered).sum())
    return next((trial for trial, count in zip(trials, beyond, strict=True) if count <= errors), fit)


def measured_batch(ask: Callable[[Tensor], object], exact: Callable[[Tensor], object], x: Tensor) -> int:
    """Up to how many queries at a time ``ask`` is faster than ``exact``; 0 if never."""
    best = 0
    for batch in BATCHES:
        places = torch.arange(_REPEATS * batch, device=x.device) % len(x)
        queries = [x[some] for some in torch.split(places, batch)]  # other ones each time: some take longer
        if _seconds(ask, queries) > _seconds(exact, queries):
            break
        best = batch
    return best


def _seconds(call: Callable[[Tensor], object], queries: Sequence[Tensor]) -> float:
    """The median of the calls; what a device does first is not counted."""
    taken = []
    first = queries[0]
    for x in [first, first, *queries] if first.is_cuda else queries:
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        start = time.perf_counter()
        call(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        taken.append(time.perf_counter() - start)
    taken = taken[-len(queries) :]
    return sorted(taken)[len(taken) // 2]
