"""Heads that are fitted to sample queries: their index, their calibrations, and rows that have changed since."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from softsieve import _checks
from softsieve._progress import ProgressCallback, no_progress
from softsieve.heads.cascade.basis import Moments
from softsieve.heads.cascade.fit import MOST_K
from softsieve.heads.engine import Layer
from softsieve.heads.engines import check_cascade
from softsieve.heads.exact import Exact
from softsieve.heads.modes import in_own_modes, own_modes
from softsieve.heads.portable import Portable


class Fitted(Portable):
    """How `AdaptiveSoftmax` is fitted."""

    if TYPE_CHECKING:
        delta: float

    def build(self, queries: Tensor | Iterable[Tensor], *, progress: ProgressCallback = no_progress) -> None:
        """Make the index of the cascade for queries like these, of which only the second moment is kept.

        Calibrations that were made with another index are forgotten.

        Args:
            queries: (N, d), or several of these, one after the other.
            progress: called with what was just done, and the share of the whole that it was.

        Example:
            >>> _ = torch.manual_seed(0)
            >>> from softsieve import AdaptiveSoftmax
            >>> head = AdaptiveSoftmax(torch.randn(2000, 64))
            >>> head.build(torch.randn(1000, 64) for _ in range(10))
            >>> fitted = head.calibrate(torch.randn(2000, 64), k=[1, 8])
            >>> sorted(head.calibrations)
            [1, 8]
        """
        check_cascade("build", self._layer.options, self.weight)
        moments = _collect_moments(queries, self._layer)
        with own_modes(self._device_type):
            self._engine = self._kind.build(self._layer, moments, progress=progress)

    @in_own_modes
    def calibrate(
        self,
        queries: Tensor,
        k: int | Sequence[int] = 1,
        *,
        threshold: float | None = None,
        generator: torch.Generator | None = None,
        progress: ProgressCallback = no_progress,
    ) -> Any:
        """Fit ``guarantee="calibrated"`` on sample queries, for `topk` with this k; ``k=0``: for `log_partition`.

        With a ``threshold`` also for `above`.

        Warns when there are too few for ``delta``: then nothing can be promised from a part, and everything is read.

        Args:
            queries: (N, d), what later queries will be like. For a cascade other ones than those of `build`; if that
                was not called, a half of them, at random, is given to it. Of more than help, a cascade uses some, at
                random; ``queries`` of what is returned says how many.
            k: the one that will be asked for, or several. A cascade also answers smaller ones than a calibrated one.
                None of them, ``[]``, with a threshold.
            threshold: the least one that `above` will be asked with, for a cascade on a CPU. Higher ones are answered
                by it, too: what exceeds it is read, and then compared. On a GPU nothing is fitted for it.
            generator: of everything that is drawn; with ``"coordinates"`` of the device of the weight, else of the CPU.
            progress: called with what was just done, and the share of the whole that it was.

        Returns:
            The `Calibration` or, for a cascade, `CascadeCalibration`; a list of them for several k.
        """
        ks = list(k) if isinstance(k, Sequence) else [k]
        _check_calibration(self._layer, ks, generator)
        if threshold is not None:
            threshold = _checks.number("threshold", threshold, -1e30, 1e30)
            check_cascade("threshold", self._layer.options, self.weight)
        _checks.queries("queries", queries, self.weight)
        sample, engine = queries.detach().reshape(-1, queries.shape[-1]), self._engine
        fewest = self._kind.needed(self.delta) * (2 if engine is None else 1)
        _warn_of_few(len(sample), fewest, self.delta)
        steps = len(ks) + (engine is None) + (threshold is not None)
        part: ProgressCallback = partial(_part, progress, 1 / max(1, steps))
        if engine is None:
            mixed = torch.randperm(len(sample), generator=generator).to(sample.device)
            moments = _collect_moments(sample[mixed[: max(1, len(sample) // 2)]], self._layer)
            sample = sample[mixed[len(sample) // 2 :]]
            self._engine = engine = self._kind.build(self._layer, moments, progress=part)
        fits = engine.calibrate(sample, ks, self._promise, generator=generator, progress=part)
        if threshold is not None:
            engine.calibrate_above(sample, threshold, self._promise, generator=generator, progress=part)
        return fits if isinstance(k, Sequence) else fits[0]

    @in_own_modes
    def update_rows(self, rows: Tensor | Sequence[int]) -> None:
        """Make the index of a cascade right for rows of the weight that have been changed in place.

        The basis and the calibrations stay what they were: for a few rows, or small changes. Otherwise `build` again.

        Raises:
            WeightChanged: when other rows have changed, too; nothing is updated then.
        """
        self._engine = (self._engine or Exact(self._layer)).updated(rows)


def _check_calibration(layer: Layer, ks: list[int], generator: torch.Generator | None) -> None:
    options, weight = layer.options, layer.weight
    drawing = options.method == "coordinates"
    if options.guarantee != "calibrated" or options.method == "exact":
        found = f"found {options.guarantee!r} and {options.method!r}"
        raise ValueError(f"calibrate: expected guarantee='calibrated' and a method that can be calibrated, {found}")
    for k in ks:
        _checks.whole_number("k", k, 0, len(weight) if weight.is_cpu or drawing else min(len(weight), MOST_K))
    _checks.generator(generator, weight.device if drawing else torch.device("cpu"))
    if not drawing:
        check_cascade("calibrate", options, weight)


def _collect_moments(queries: Tensor | Iterable[Tensor], layer: Layer) -> Moments:
    """Moments of checked queries, several after each other; what makes them runs in the modes of the caller."""
    if not isinstance(queries, Iterable):
        raise TypeError(f"queries: expected a tensor (N, d) or several, found {type(queries).__name__}")
    weight = layer.weight
    with own_modes(weight.device.type):
        moments = Moments(weight.shape[1], weight.device)
    for part in [queries] if isinstance(queries, Tensor) else queries:
        with own_modes(weight.device.type):
            _checks.queries("queries", part, weight)
            moments.update(layer.scaled(part, "queries").float())
    if not moments.count:
        raise ValueError("queries: expected some, found none")
    if not bool(moments.mean.isfinite().all()):
        raise ValueError("queries: expected numbers whose squares float32 can hold, found some beyond")
    return moments


def _warn_of_few(count: int, fewest: int, delta: float) -> None:
    """Warn the caller of `AdaptiveSoftmax.calibrate`, which is in its own modes."""
    if count < fewest:
        few = f"{count} are too few for delta {delta:g}, which takes {fewest}"
        warnings.warn(f"queries: {few}: every answer will be exact", stacklevel=4)


def _part(progress: ProgressCallback, share: float, what: str, done: float) -> None:
    """ProgressCallback of a part of the work."""
    progress(what, done * share)
