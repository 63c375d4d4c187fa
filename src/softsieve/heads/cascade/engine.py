"""The engine of a cascade: what is the same on a CPU and on a GPU."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from softsieve import _checks
from softsieve._progress import ProgressCallback
from softsieve.heads.above import AT_ONCE, SHARE, RowsAbove
from softsieve.heads.cascade import calibration, crossover
from softsieve.heads.cascade import fit as fits
from softsieve.heads.cascade import index as indexes
from softsieve.heads.cascade.basis import Moments
from softsieve.heads.cascade.calibration import Trial
from softsieve.heads.cascade.fit import CascadeCalibration, Fit
from softsieve.heads.engine import Answer, Ends, Engine, Layer, Promise, State, not_calibrated
from softsieve.heads.exact import Exact
from softsieve.heads.quantised import Weight
from softsieve.heads.watching import WeightChanged, changed_rows, list_rows, refuse_changes


class Cascade(Engine):
    """An index with its weight and what was calibrated. `CpuCascade` and `GpuCascade` answer by it."""

    has_estimates = True
    needed = staticmethod(calibration.needed)
    on_gpu: bool
    slack = 0.0  # by which answers may take longer than the fastest that are right often enough, to be right more often

    def __init__(self, layer: Layer, index: indexes.Index) -> None:
        self.layer, self.index, self.fitted_to = layer, index, index.checksums
        self.calibrations: dict[int, Any] = {}
        self.elsewhere: dict[int, Fit] = {}  # made on the other kind of device, kept for files
        self.levels: dict[float, CascadeCalibration] = {}  # for `above`, by the least threshold; of a CPU alone
        self._exact = Exact(layer)
        self._seen = layer.watch.now()  # what the watch said when the weight was the one that the index was built of

    @classmethod
    def build(cls, layer: Layer, moments: Moments, *, progress: ProgressCallback) -> Cascade:
        seed = layer.options.seed
        return cls(layer, indexes.build(layer.weight, layer.bias, moments, seed=seed, progress=progress))

    # -- what a CPU and a GPU do in their own ways ---------------------------------------------------------------------

    @abstractmethod
    def solve(self, x: Tensor, fit: Any, k: int) -> Answer:
        """Answer queries (..., d) by a calibration for this k or more."""

    def announce(self, progress: ProgressCallback) -> None:
        """Say that the first trial will take long, where it will."""

    @abstractmethod
    def trials(self, queries: Tensor, fits: Sequence[Any], *, half_width: float | None = None) -> list[Trial]:
        """Answer scaled queries (batch, d) by each of several calibrations, with all that choosing needs to know.

        The half-width of log Z to reach is what eps says unless it is an argument.
        """

    @abstractmethod
    def settings(self) -> list[dict[str, int]]:
        """The settings that calibration chooses from."""

    @abstractmethod
    def start(self, k: int, promise: Promise, queries: int) -> Any:
        """A calibration by which everything is read."""

    @abstractmethod
    def choose(self, start: Any, trials: list[tuple[Any, Trial]]) -> list[Any]:
        """The calibrations that may take least time, the best first, from a trial of each of the settings."""

    def variants(self, fit: Any) -> list[Any]:
        """What else is tried of a chosen calibration when it is known how far corrected sums are off."""
        return [fit]

    def roomy(self, fit: Any, trial: Trial) -> Any:
        """The same with room for as many survivors as queries like these have."""
        return fit

    def cost(self, fit: Any, trial: Trial) -> float:
        """What answers take in the mean, as a share of what the whole weight takes: here the bytes that they read."""
        read = trial.bytes_read.double() + (trial.fallback != 0) * self.layer.bytes
        return float(read.mean()) / self.layer.bytes

    @abstractmethod
    def ends(self, queries: Tensor, fit: Any) -> Ends:
        """Upper ends of all logits of scaled queries.

        Exact for the finalists, elsewhere the last estimate and as many deviations as the envelope has.
        """

    def solve_above(self, queries: Tensor, fit: CascadeCalibration, threshold: float) -> RowsAbove:
        """Rows above a threshold of scaled queries (batch, d), by a calibration for this one or a lower one."""
        raise NotImplementedError  # nothing is fitted for a threshold where there is no such rule

    # -- answers -------------------------------------------------------------------------------------------------------

    def serves(self, k: int, batch: int | None, promise: Promise) -> bool:
        if batch is not None and self._calibrated(k) is None:
            return False
        fit = self.fit(k, promise)
        return (batch is None or batch <= fit.batch) and math.isfinite(fit.width)

    def topk(self, x: Tensor, k: int, promise: Promise, generator: torch.Generator | None) -> Answer:
        fit = self.fit(k, promise)
        self.notice_changes()
        return self.solve(x, fit, k)

    def upper_ends(self, queries: Tensor, promise: Promise) -> Ends | None:
        fit = self.fit(self.largest_k(), promise)
        self.notice_changes()
        return self.ends(queries, fit) if math.isfinite(fit.envelope) else None

    def serves_above(self, threshold: float, batch: int | None, promise: Promise) -> bool:
        fit = self._level(threshold, promise)
        if fit is None:  # upper ends serve, where a k gives them; nobody measured whether they are faster
            return batch is None and self._calibrated(self.largest_k()) is not None
        return (batch is None or batch <= fit.batch) and math.isfinite(fit.width)

    def above(self, queries: Tensor, threshold: float, promise: Promise) -> RowsAbove:
        self.notice_changes()
        if (fit := self._level(threshold, promise)) is not None:
            return self.solve_above(queries, fit, threshold)
        parts = torch.split(queries, max(1, AT_ONCE // len(self.layer.weight)))
        return RowsAbove.join([self._above_by_ends(some, threshold, promise) for some in parts])

    def _above_by_ends(self, queries: Tensor, threshold: float, promise: Promise) -> RowsAbove:
        """The same where nothing was fitted for a threshold: rows whose upper ends are above it are read in full."""
        ends, layer = self.upper_ends(queries, promise), self.layer
        if ends is None:
            return layer.above(queries, threshold)
        slack = calibration.ROUNDING * calibration.sizes(ends.logits)  # what the ends were calibrated up to
        candidates = ends.logits + slack > threshold
        few = ends.answered & (SHARE * candidates.sum(-1) <= len(layer.weight))
        query, row = (candidates & few[:, None]).nonzero(as_tuple=True)
        logit = layer.logits_of(queries, query, row)
        many = torch.bincount(query, minlength=len(queries))
        bytes_read, above = ends.bytes_read + many * (layer.bytes // len(layer.weight)), logit > threshold
        found = RowsAbove(query[above], row[above], logit[above], bytes_read, ~few)
        return complete(found, (~few).nonzero()[:, 0], layer, queries, threshold)

    def _level(self, threshold: float, promise: Promise) -> CascadeCalibration | None:
        """The calibration that serves for a threshold, if there is one: that of the highest level up to it.

        Raises:
            RuntimeError: when it was made for another promise.
        """
        level = max((one for one in self.levels if one <= threshold), default=None)
        if level is None or self.on_gpu:
            return None
        fit = self.levels[level]
        if fit.delta != promise.delta:
            raise RuntimeError(
                f"calibrated for delta {fit.delta:g}, which is now {promise.delta:g}: call calibrate again"
            )
        return fit

    def largest_k(self) -> int:
        """The k that logits of all rows are answered by."""
        return max(self.calibrations, default=0) or 1

    def fit(self, k: int, promise: Promise) -> Any:
        """The calibration that serves for k.

        Raises:
            RuntimeError: when there is none, or it was made for another promise.
        """
        calibrated = self._calibrated(k)
        if calibrated is None:
            remark = f" on {self.layer.weight.device.type}, only those of another kind of device"
            raise not_calibrated(k, self.calibrations, remark if self.elsewhere else "")
        fit = self.calibrations[calibrated]
        if (fit.eps, fit.delta) != promise:
            raise RuntimeError(
                f"calibrated for eps {fit.eps:g} and delta {fit.delta:g}, which are now {promise.eps:g} and "
                f"{promise.delta:g}: call calibrate again"
            )
        return fit

    def _calibrated(self, k: int) -> int | None:
        """The calibrated k that serves for this one: the same or, if not 0, the least that is larger."""
        if k in self.calibrations:
            return k
        return min((other for other in self.calibrations if other >= k > 0), default=None)

    # -- fitting -------------------------------------------------------------------------------------------------------

    def calibrate(
        self,
        queries: Tensor,
        ks: list[int],
        promise: Promise,
        *,
        generator: torch.Generator | None,
        progress: ProgressCallback,
    ) -> list[Any]:
        self.notice_changes()
        layer, enough = self.layer, len(queries) >= calibration.needed(promise.delta)
        queries = calibration.draw(queries, promise.delta, len(self.layer.weight), generator, progress)
        scaled, made = layer.scaled(queries, "queries"), list[Any]()
        if not ks:
            return made
        seconds: dict[int, float] = {}  # of exact answers, by the size of a batch
        share = partial(_share, progress, calibration.TRUTH * len(ks))
        exact = calibration.truth(layer.reader, scaled, layer.scaled_bias(), max(ks), share)
        for k in ks:
            start = self.start(k, promise, len(queries))
            fit = calibration.calibrate(self, scaled, exact.top(k), start, progress=progress)
            exactly = partial(self._exact.topk, k=k, promise=promise)
            solve = partial(self.solve, fit=fit, k=k)
            fit = fit._replace(batch=crossover.measured_batch(solve, exactly, queries, seconds))
            if not math.isfinite(fit.width) and enough:
                warnings.warn(
                    f"queries: no width of margins gives right answers from a part of the weight for k = {k}: "
                    "every answer will be exact",
                    stacklevel=4,  # the caller of `AdaptiveSoftmax.calibrate`, which is in its own modes
                )
            elif k == max(ks):  # the one that `sample` asks with
                fit = calibration.envelope(self, scaled, layer.logits, fit)
            made.append(fit)
            self.calibrations = {**self.calibrations, k: fit}
        return made

    def calibrate_above(
        self,
        queries: Tensor,
        level: float,
        promise: Promise,
        *,
        generator: torch.Generator | None,
        progress: ProgressCallback,
    ) -> CascadeCalibration | None:
        """Fit what `above` takes for thresholds from a level on; None where upper ends serve for all thresholds."""
        if self.on_gpu:
            progress("nothing to calibrate", 1.0)
            return None
        self.notice_changes()
        enough = len(queries) >= calibration.needed(promise.delta)
        queries = calibration.draw(queries, promise.delta, len(self.layer.weight), generator, progress)
        scaled = self.layer.scaled(queries, "queries")
        exact = calibration.above_level(self.layer.blocks(scaled), level)
        progress("exact answers", calibration.TRUTH)
        start = self.start(0, promise, len(queries))._replace(level=level)
        fit: CascadeCalibration = calibration.calibrate(self, scaled, exact, start, progress=progress)
        if math.isfinite(fit.width):
            ask, exactly = (
                partial(self.solve_above, fit=fit, threshold=level),
                partial(self.layer.above, threshold=level),
            )
            fit = fit._replace(batch=crossover.measured_batch(ask, exactly, scaled, {}))
        elif enough:
            warnings.warn(
                f"queries: no width of margins finds all rows above {level:g} from a part of the weight: "
                "every answer will be exact",
                stacklevel=4,
            )
        self.levels = {**self.levels, level: fit}
        return fit

    def updated(self, rows: Tensor | Sequence[int]) -> Cascade:
        weight, bias = self.layer.weight, self.layer.bias
        numbers = _check_rows(rows, weight, bias)
        others = changed_rows(weight, bias, self.index.checksums)
        others = others[~torch.isin(others, numbers)]
        if len(others):
            raise WeightChanged(f"weight: other rows have changed, too: {list_rows(others)}; build the index again")
        index = indexes.Index(*(value.clone() for value in self.index))  # other heads may have parts of this one
        indexes.update(index, weight, bias, torch.unique(numbers))
        engine = type(self)(self.layer, index)
        engine.calibrations, engine.elsewhere, engine.levels = self.calibrations, self.elsewhere, self.levels
        return engine

    def notice_changes(self) -> None:
        """Compare the weight with the index, if it may have changed.

        Raises:
            WeightChanged: when it has.
        """
        seen = self.layer.watch.now()
        if seen != self._seen:
            self.check_weight()
            self._seen = seen

    def check_weight(self) -> None:
        advice = "the index was built: call update_rows for a few rows, build and calibrate for many"
        refuse_changes(self.layer.weight, self.layer.bias, self.index.checksums, advice)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        tensors = {f"index.{name}": value for name, value in self.index._asdict().items()}
        both = {"calibrations": self.calibrations, "elsewhere": self.elsewhere}
        settings = {name: {str(k): fits.to_file(fit) for k, fit in one.items()} for name, one in both.items()}
        if self.levels:
            settings["levels"] = {str(level): fits.to_file(fit) for level, fit in self.levels.items()}
        return State(tensors, settings)

    @classmethod
    def from_state(cls, layer: Layer, promise: Promise, state: State) -> Cascade:
        tensors, settings, fitted_to = state
        tensors.setdefault("index.mean", torch.zeros_like(tensors["index.centre"]))  # version 0.1 had none
        parts = (tensors.pop(f"index.{name}") for name in indexes.Index._fields)
        index = indexes.Index(*(part.to(layer.weight.device) for part in parts))
        indexes.check(index, layer.weight, layer.bias)
        engine = cls(layer, index)
        previews = len(index.steps) + len(indexes.long_previews(len(index.centre)))
        tiers = len(index.tier_steps)
        for fields in (settings.pop("calibrations"), settings.pop("elsewhere", {})):
            for name, values in fields.items():
                k = int(name)
                fit = fits.from_file(values, k=k, rows=len(layer.weight), previews=previews, tiers=tiers)
                if not math.isinf(fit.level):
                    raise ValueError(f"calibrations.{name}: level: expected none, found {fit.level!r}")
                (engine.calibrations if bool(values["capacity"]) == cls.on_gpu else engine.elsewhere)[k] = fit
        for name, values in settings.pop("levels", {}).items():
            fit = fits.from_file(values, k=0, rows=len(layer.weight), previews=previews, tiers=tiers)
            if not isinstance(fit, CascadeCalibration) or fit.level != float(name) or math.isinf(fit.level):
                raise ValueError(f"levels.{name}: made for another level")
            engine.levels[fit.level] = fit
        if fitted_to is not None:
            engine._seen = ()
        return engine


def gap_for(dtype: torch.dtype | None, own: torch.dtype, beta: float) -> tuple[float, float] | None:
    """How far below the k-th largest logit estimates have to be for a dtype that both are rounded to, divided by beta.

    Relatively and absolutely: the numbers that are rounded to the same one are so close together. None: with the dtype
    that they have of their own, nothing is rounded.
    """
    if dtype is None or dtype.itemsize >= own.itemsize:
        return None
    finite = torch.finfo(dtype)
    relative = 1.01 * finite.eps  # a little more: of the k-th logit before it is rounded, and for what float32 rounds
    return relative, relative * finite.tiny * abs(beta)


def _share(progress: ProgressCallback, share: float, what: str, done: float) -> None:
    """Progress of a part of the work."""
    progress(what, done * share)


def complete(found: RowsAbove, queries: Tensor, layer: Layer, scaled: Tensor, threshold: float) -> RowsAbove:
    """The same with what the exact product finds for some of the queries, by their numbers, which had nothing."""
    if not len(queries):
        return found
    exact = layer.above(scaled[queries], threshold)
    pairs = queries[exact.query], exact.row, exact.logit
    bytes_read = found.bytes_read.clone()
    bytes_read[queries] += exact.bytes_read
    query, row, logit = (torch.cat([one, other]) for one, other in zip(found[:3], pairs, strict=True))
    return RowsAbove(query, row, logit, bytes_read, found.exact)


def _check_rows(rows: Tensor | Sequence[int], weight: Weight, bias: Tensor | None) -> Tensor:
    """Numbers of rows whose entries are finite, on the device of the weight."""
    try:
        numbers = torch.as_tensor(rows)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"rows: expected some whole numbers, found {rows!r}") from error
    if numbers.ndim != 1 or numbers.is_floating_point() or numbers.dtype == torch.bool or not len(numbers):
        raise ValueError(f"rows: expected some whole numbers, found {numbers.dtype} of shape {tuple(numbers.shape)}")
    if int(numbers.min()) < 0 or int(numbers.max()) >= len(weight):
        raise ValueError(f"rows: expected numbers in [0, {len(weight) - 1}], found {rows}")
    numbers = numbers.to(weight.device)
    _checks.finite("weight", weight[numbers].float())
    if bias is not None:
        _checks.finite("bias", bias[numbers])
    return numbers
