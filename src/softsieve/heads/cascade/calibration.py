"""Calibration of the cascade: which preview and which width of margins make answers to sample queries right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from softsieve._progress import ProgressCallback, no_progress
from softsieve.heads.cascade.fit import AnyFit, Fallback, Fit, half_width
from softsieve.heads.reader import Reader

if TYPE_CHECKING:
    from softsieve.heads.cascade.engine import Cascade

CONFIDENCE = 0.99  # with which the promise holds, over samples of queries
_STEP = 0.93**0.5
WIDTHS = tuple(12 * _STEP**number for number in range(80))  # that are tried, from wide to narrow
# For a level that stands fixed. A class that a state belongs to is above its estimate by many deviations, because what
# the estimate leaves out of both is alike; the k-th best shows by how much, a level does not.
LEVEL_WIDTHS = tuple(12 * _STEP**number for number in range(-32, 80))
SHAPING = 256  # queries, at most, that only choose; the others decide
DECIDING = (25.0, 50.0)  # over delta: queries that decide, at most, where there are many rows and where there are few
ANYWAY = 2000  # queries that decide, if there are so many, however large delta is
ROWS = 1 << 28  # rows of all deciding queries together, from which on there are many
TOGETHER = 16  # widths that are tried on one preview
PART = 256  # queries after which widths with too many errors are given up
TRUTH = 0.2  # of the time of a calibration, that exact answers take
CORRECTIONS = tuple(number / 20 for number in range(4, 21))
SLACK = 0.5  # so much further out than any query of the sample, a query falls back
ENVELOPES = (4.0, 5.0, 6.0, 8.0, 12.0)  # deviations that are tried, as far as they are wider than the margins
ROUNDING = 1e-5  # of `sizes`, that upper ends may be exceeded by
ENVELOPE_QUERIES = 700  # that are tried with, at most: one of them may be wrong for 1 %
_AT_ONCE = 1 << 24  # logits that are there at a time
_CACHED = 1 << 22  # the same on a CPU, where they are gone over several times and stay in a cache
_PREVIEWED = 1 << 23  # rows of all queries together, at most, that previews are chosen with
_FEW = 64  # queries that previews are chosen with, however many rows there are
_CLOSE = 8  # rows besides the top k that may be among them but for rounding


class Trial(NamedTuple):
    """Answers to a batch of sample queries, with all that calibration needs to know of them."""

    fallback: Tensor  # int64, see `Fallback`
    indices: Tensor  # (batch, k)
    logits: Tensor  # (batch, k)
    log_z: Tensor  # (batch,) float64, as the rest
    half: Tensor  # half-width of log Z that was reached
    coordinates: Tensor  # int64
    bytes_read: Tensor  # int64, without those of an exact answer
    scale: Tensor  # of the errors of the preview
    survivors: Tensor  # int64: of the preview
    signal: Tensor  # size of the estimates of the probes, in sizes of their errors
    toward: Tensor  # cosine of the angle to the mean query
    flat: Tensor  # log Z less the k-th logit
    above: Any = None  # (batch,) int64: rows above the level, if there is one


class Truth(NamedTuple):
    """Exact answers."""

    best: Tensor  # (N, k), falling
    log_z: Tensor  # (N,)

    @property
    def rounding(self) -> Tensor:
        """What logits and log Z may be off by all the same. (N,)"""
        largest = torch.cat([self.best, self.log_z[:, None]], -1).abs().amax(-1)
        return 16 * torch.finfo(self.best.dtype).eps * (1 + largest.double())

    def top(self, k: int) -> Truth:
        """The same for a smaller k."""
        return Truth(self.best[:, :k], self.log_z)

    def some(self, rows: slice) -> Truth:
        return Truth(self.best[rows], self.log_z[rows])


class Above(NamedTuple):
    """How many rows are above a level, by more than rounding."""

    counts: Tensor  # (N,) int64

    def some(self, rows: slice) -> Above:
        return Above(self.counts[rows])


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


def useful(delta: float, rows: int) -> int:
    """The most sample queries that are used, for a weight of so many rows: more would hardly make margins narrower.

    Of M that decide, `allowed` may be wrong: 0.56 of delta M with 25 / delta of them, 0.68 with twice as many, and
    never more than delta M.

    Example:
        >>> useful(0.1, 50_000), useful(0.01, 50_000), useful(0.01, 262_144)
        (2256, 5256, 2756)
    """
    least, most = (math.ceil(number / delta) for number in DECIDING)
    return SHAPING + max(ANYWAY, least, min(most, ROWS // rows))


def draw(
    queries: Tensor, delta: float, rows: int, generator: torch.Generator | None, progress: ProgressCallback
) -> Tensor:
    """As many of the queries as are `useful`, at random and in random order."""
    mixed = torch.randperm(len(queries), generator=generator)[: useful(delta, rows)].to(queries.device)
    if len(mixed) < len(queries):
        progress(f"using {len(mixed)} of {len(queries)} queries", 0.0)
    return queries[mixed]


def truth(
    reader: Reader, queries: Tensor, bias: Tensor | None, k: int, progress: ProgressCallback = no_progress
) -> Truth:
    """Exact answers to scaled queries; ``bias`` times beta."""
    if queries.is_cpu:
        return _truth_in_blocks(reader, queries, bias, k, progress)
    parts = []
    for some in torch.split(queries, max(1, _AT_ONCE // reader.rows)):
        logits = reader.full(some)
        if bias is not None:
            logits += bias
        best, rows = logits.topk(min(k + _CLOSE, reader.rows) if k else 0, -1)
        if k:  # matrix units round more than single rows are
            query = torch.arange(len(some), device=queries.device)[:, None].expand_as(rows)
            best = reader.pairs(query.reshape(-1), rows.reshape(-1), some).view_as(rows)
            best = (best if bias is None else best + bias[rows]).topk(k, -1).values
        parts.append(Truth(best, logits.logsumexp(-1)))
        progress("exact answers", len(some) / len(queries))
    return Truth(*map(torch.cat, zip(*parts, strict=True)))


def _truth_in_blocks(reader: Reader, queries: Tensor, bias: Tensor | None, k: int, progress: ProgressCallback) -> Truth:
    """The same, some rows for all queries at a time: the weight is converted and read once."""
    best = torch.full((len(queries), k), -math.inf, dtype=queries.dtype)
    highest = torch.full((len(queries), 1), -math.inf, dtype=queries.dtype)
    total = torch.zeros_like(highest, dtype=torch.float64)  # of exponentials, over e^highest
    for start, logits in reader.blocks(queries, _CACHED):
        if bias is not None:
            logits += bias[start : start + logits.shape[-1]]
        largest = logits.amax(-1, keepdim=True)
        if k:  # few queries have one of their largest logits among these
            some = (largest > best[:, -1:])[:, 0].nonzero()[:, 0]
            own = logits[some].topk(min(k, logits.shape[-1]), -1).values
            best[some] = torch.cat([best[some], own], -1).topk(k, -1).values
        before, highest = highest, torch.maximum(highest, largest)
        # Not `logsumexp`, which takes five times as long.
        sums = logits.sub_(highest).exp_().sum(-1, keepdim=True, dtype=torch.float64)
        total = total * (before - highest).exp() + sums
        progress("exact answers", logits.shape[-1] / reader.rows)
    return Truth(best, (highest + total.log()).to(queries.dtype)[:, 0])


def sizes(logits: Tensor) -> Tensor:
    """What logits (..., n) are rounded in proportion to: their own size or the largest logit's.

    Not the largest size: a class that is masked by a bias of -1e9 would make all others uncertain.
    """
    return 1 + torch.maximum(logits.abs(), logits.amax(-1, keepdim=True).abs())


def above_level(blocks: Iterable[tuple[int, Tensor]], level: float) -> Above:
    """Rows above a level, from blocks of exact logits (N, some). Rows within rounding of it do not count."""
    counts: Any = 0
    for _, logits in blocks:
        counts = counts + (logits - 16 * torch.finfo(logits.dtype).eps * sizes(logits) > level).sum(-1)
    return Above(counts)


def right(trial: Trial, exact: Truth | Above, fit: Fit) -> Tensor:
    """Whether answers are right, up to rounding: values of the top k, probabilities within eps, log Z in its interval;
    with a level, that no row above it is missing, for those that are there were read in full.

    Fallbacks, which are answered exactly, are. (batch,)
    """
    if isinstance(exact, Above):
        complete: Tensor = (exact.counts <= trial.above) | (trial.fallback != 0)
        return complete
    rounding = exact.rounding
    top = ((trial.logits - exact.best).abs() <= rounding[:, None]).all(-1)
    error = exact.log_z.double() - trial.log_z
    ratio = error.expm1() if fit.k else (-error).expm1()  # probabilities have the partition function below the line
    inside: Tensor = error.abs() <= half_width(trial.half, fit) + rounding
    return (top & (ratio.abs() <= fit.eps + rounding) & inside) | (trial.fallback != 0)


class _Sample(NamedTuple):
    """Scaled queries with their exact answers."""

    engine: Cascade
    queries: Tensor
    exact: Truth | Above

    def some(self, rows: slice) -> _Sample:
        return _Sample(self.engine, self.queries[rows], self.exact.some(rows))

    def ask(self, fits: Sequence[Any]) -> list[tuple[Trial, Tensor, float]]:
        """For each fit a trial, which answers are right, and what they cost, as a share of the whole weight."""
        asked = []
        for fit, trial in zip(fits, self.engine.trials(self.queries, fits), strict=True):
            asked.append((trial, right(trial, self.exact, fit), self.engine.cost(fit, trial)))
        return asked

    def read(self, trial: Trial) -> float:
        """The mean share of the weight's bytes that were read."""
        whole = self.engine.layer.bytes
        return float((trial.bytes_read.double() + (trial.fallback != 0) * whole).mean()) / whole


def calibrate(
    engine: Cascade, queries: Tensor, exact: Truth | Above, start: AnyFit, *, progress: ProgressCallback = no_progress
) -> AnyFit:
    """Fit preview, correction and width on scaled queries, which are in random order.

    The first of the queries shape: they choose the preview that takes least, the correction of exponentials, the
    standard deviation of log Z that goes with corrected sums, and which widths are tried. The others decide on the
    width. They are answered with these widths from wide to narrow, and the score of a query is the least width down to
    which its answers are right. A width is wide enough if no more scores are above it than `allowed`; of those the one
    is taken with which least is read. Scores are numbers of single queries, and the widths do not depend on those that
    decide: so that is one quantile of exchangeable numbers, however many widths are tried (Vovk 2012).
    """
    count = _shaping(len(queries))
    sample = _Sample(engine, queries, exact)
    shaping, deciding = sample.some(slice(count)), sample.some(slice(count, None))
    errors = allowed(len(deciding.queries), start.delta)
    if errors < 0:
        progress("calibrating", 1.0 - TRUTH)
        return start
    engine.announce(progress)
    shape = _shape(shaping, start, progress)
    fit, trial = _decide(deciding, shape, errors, progress)
    if trial is not None:
        (other,) = engine.trials(shaping.queries, [fit])
        fit = _limit(torch.cat([_features(other), _features(trial)]), fit)
    progress("telling queries apart", 0.1)
    return fit


def _widths(fit: AnyFit) -> tuple[float, ...]:
    """Those that are tried, from wide to narrow."""
    return WIDTHS if math.isinf(fit.level) else LEVEL_WIDTHS


def _shape(sample: _Sample, start: AnyFit, progress: ProgressCallback) -> AnyFit:
    """Choose everything but the width, which is a first guess."""
    # Where every query takes long, some of those that only choose will do.
    few = sample.some(slice(max(_FEW, _PREVIEWED // len(sample.engine.layer.weight))))
    previews: list[AnyFit] = sample.engine.choose(start, _narrowest(few, start, progress))
    if isinstance(sample.exact, Above):  # no exponentials are asked for
        progress("choosing a preview", 0.1)
        return previews[0]
    variants: list[AnyFit] = []
    for preview in previews:
        variants += sample.engine.variants(_correct(few, few.exact, preview))
    shapes = [_doubt(sample, sample.exact, variant) for variant in variants]
    progress("correcting exponentials", 0.1)
    return min(shapes, key=lambda shape: shape[1])[0]


def _narrowest(sample: _Sample, start: AnyFit, progress: ProgressCallback) -> list[tuple[AnyFit, Trial]]:
    """Each of the settings with the narrowest width that has few errors, by bisection, and a trial of it."""
    errors, widths = int(start.delta * len(sample.queries) / 2), _widths(start)[::2]
    fits: list[AnyFit] = [start._replace(**setting) for setting in sample.engine.settings()]
    low, high = [0] * len(fits), [len(widths) - 1] * len(fits)
    known: dict[tuple[int, int], Trial] = {}
    rounds = (len(widths) - 1).bit_length() + 1
    for last in [False] * (rounds - 1) + [True]:
        tried = [number if last else (number + other + 1) // 2 for number, other in zip(low, high, strict=True)]
        new = [number for number, width in enumerate(tried) if (number, width) not in known]
        asked = sample.ask([fits[number]._replace(width=widths[tried[number]]) for number in new])
        for number, (trial, fine, _) in zip(new, asked, strict=True):
            known[number, tried[number]] = trial
            if len(fine) - int(fine.sum()) <= errors:
                low[number] = max(low[number], tried[number])
            else:
                high[number] = max(tried[number] - 1, low[number])
        progress("choosing a preview", 0.2 / rounds)
    return [(fit._replace(width=widths[low[number]]), known[number, low[number]]) for number, fit in enumerate(fits)]


def _correct(few: _Sample, exact: Any, start: AnyFit) -> AnyFit:
    """Choose the correction of exponentials by a few queries."""
    fits = [start._replace(correction=correction, doubt=1.0) for correction in CORRECTIONS]
    squares = []
    for trial in few.engine.trials(few.queries, fits, half_width=1e30):
        error = (exact.log_z.double() - trial.log_z)[trial.fallback == 0]
        # Errors of rows that are lost are no matter of the correction.
        squares.append(float(error.clamp(-1, 1).square().mean()) if len(error) else math.inf)
    return fits[squares.index(min(squares))]


def _doubt(sample: _Sample, exact: Truth, fit: AnyFit) -> tuple[AnyFit, float]:
    """Say by all how far corrected sums are off, and what answers cost that fall back where that is too far."""
    (trial,) = sample.engine.trials(sample.queries, [fit._replace(doubt=1.0)], half_width=1e30)
    answered = trial.fallback == 0
    error = (exact.log_z.double() - trial.log_z)[answered]
    # Errors that are nothing but rounding do not count.
    ratio = (error.abs() - exact.rounding[answered]).clamp_min(0) / trial.half[answered].clamp_min(1e-12)
    usual = max(float(ratio.quantile(0.9)), 1e-3) if len(ratio) else 1.0
    wide = answered & (usual * trial.half > math.log1p(fit.eps))
    trial = trial._replace(fallback=torch.where(wide, int(Fallback.EXPENSIVE), trial.fallback))
    fit = fit._replace(doubt=usual, interval=2 * float(ratio.max()) / usual if len(ratio) else math.inf)
    return sample.engine.roomy(fit, trial), sample.engine.cost(fit, trial)


def _decide(sample: _Sample, shape: AnyFit, errors: int, progress: ProgressCallback) -> tuple[AnyFit, Trial | None]:
    """The width, with the trial of it; infinite, without one, if none will do.

    The widest that takes hardly more than the one that takes least, as the engine has it.
    """
    fine: list[tuple[float, AnyFit, Trial]] = []
    widths, count = _tried_widths(shape), len(sample.queries)
    wrong = torch.zeros(count, dtype=torch.bool, device=sample.queries.device)  # with this width or a wider one
    for start in range(0, len(widths), TOGETHER):
        fits = [shape._replace(width=width) for width in widths[start : start + TOGETHER]]
        trials, wrong = _while_right(sample, fits, wrong, errors)
        for fit, (trial, many) in zip(fits, trials, strict=False):
            cost, read = sample.engine.cost(fit, trial), sample.read(trial)
            if read <= 1:
                fine.append((cost, fit._replace(read=read, right=1 - many / count), trial))
        if len(trials) < len(fits):
            progress("deciding on the width", 0.4 * (len(widths) - start) / len(widths))
            break
        progress("deciding on the width", 0.4 * len(fits) / len(widths))
    if not fine:
        return shape._replace(width=math.inf, read=1.0, right=1.0), None
    most = min(cost for cost, *_ in fine) * (1 + sample.engine.slack)
    return next((fit, trial) for cost, fit, trial in fine if cost <= most)


def _while_right(
    sample: _Sample, fits: Sequence[AnyFit], wrong: Tensor, errors: int
) -> tuple[list[tuple[Trial, int]], Tensor]:
    """Trials of ever narrower widths, and how many queries were wrong by then, up to the first with too many of them.

    Also the queries that were wrong with one of these widths or before. Some queries at a time are asked: what is too
    much for these is too much for all.
    """
    parts: list[list[Trial]] = [[] for _ in fits]
    many, after = [0] * len(fits), []
    step = len(wrong) if sample.engine.on_gpu else PART  # there few queries take as long as many
    for rows in torch.split(torch.arange(len(wrong)), step):
        some = slice(int(rows[0]), int(rows[-1]) + 1)
        own = wrong[some]
        for number, (trial, fine, _) in enumerate(sample.some(some).ask(fits[: len(parts)])):
            own = own | ~fine
            parts[number].append(trial)
            many[number] += int(own.sum())
        after.append(own)
        parts = parts[: next((number for number in range(len(parts)) if many[number] > errors), len(parts))]
        if not parts:
            break
    return [(_joined(some), count) for some, count in zip(parts, many, strict=False)], torch.cat(after)


def _joined(parts: Sequence[Trial]) -> Trial:
    """Trials of one calibration with some queries each as one."""
    fields: list[Any] = [None if values[0] is None else torch.cat(values) for values in zip(*parts, strict=True)]
    return Trial(*fields)


def _tried_widths(shape: AnyFit) -> list[float]:
    """From wide to narrow, the first wider than what shaping queries took, and close to each other where that was."""
    widths = [width for width in _widths(shape) if width <= max(1.75 * shape.width, 6.0)]  # few may have shaped
    near = sum(width > 1.25 * shape.width for width in widths)
    return widths[:near:4] + widths[near:]


# -- queries unlike the sample -----------------------------------------------------------------------------------------

# Of each feature (`_features`): the least difference that counts as one.
_DIFFERENCES = (0.1, 0.1, 0.1, 0.05, 0.05, 0.2, 0.2)


def _features(trial: Trial) -> Tensor:
    """What tells queries unlike the sample, each the larger the stranger a query is. (batch, features)"""
    scale, signal = trial.scale.clamp_min(1e-30).log(), trial.signal.clamp_min(1e-30).log()
    flat = torch.where(trial.fallback == 0, trial.flat, -math.inf)
    survivors = trial.survivors.double().log1p()
    return torch.stack([scale, -scale, -signal, trial.toward, -trial.toward, survivors, flat], -1).double()


def _limit(features: Tensor, fit: AnyFit) -> AnyFit:
    """How far features of a query may be from the median before it falls back: half as far again as any of the sample.

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


def envelope(engine: Cascade, queries: Tensor, logits: Callable[[Tensor], Tensor], fit: AnyFit) -> AnyFit:
    """So many deviations that, for a query like these, no row that is left out has a logit further above its estimate.

    That holds for ``1 - delta`` of the queries, with the same confidence as the rest: of those tried, the least with
    which no more of the sample queries than `allowed` have a logit beyond. Infinite if none will do.
    """
    queries = queries[:ENVELOPE_QUERIES]
    errors, step = allowed(len(queries), fit.delta), max(1, _AT_ONCE // len(engine.layer.weight))
    beyond = {width: 0 for width in ENVELOPES if width >= fit.width}  # queries, of the widths that may still do
    for part in torch.split(queries, step):
        if not beyond:
            break
        exact = logits(part)
        slack = ROUNDING * sizes(exact)
        for width in list(beyond):
            ends = engine.ends(part, fit._replace(envelope=width))
            beyond[width] += int(((exact > ends.logits.add_(slack)).any(-1) & ends.answered).sum())
            if beyond[width] > errors:
                del beyond[width]
    return fit._replace(envelope=min(beyond)) if beyond else fit
