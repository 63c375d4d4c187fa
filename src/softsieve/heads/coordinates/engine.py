"""The engine of the paper's algorithm."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softsieve import _checks
from softsieve._progress import ProgressCallback
from softsieve.heads.coordinates import algorithm, calibration
from softsieve.heads.coordinates.bounds import FIRST, Bounds, Calibrated, Computed, Declared, sizes
from softsieve.heads.coordinates.calibration import Calibration
from softsieve.heads.coordinates.hadamard import padded, random_signs, rotate
from softsieve.heads.engine import Answer, Engine, Layer, Promise, State, not_calibrated
from softsieve.heads.reader import Reader
from softsieve.heads.watching import Sample, WeightChanged, checksums, refuse_changes


class _Prepared(NamedTuple):
    """What was made of a weight."""

    reader: Reader  # of the weight, rotated or not, with its copy by columns
    sample: Sample  # rows that every call compares
    bounds: dict[tuple[int, float], Bounds]  # by k, 0 where one serves for all, and delta


class Coordinates(Engine):
    """Reads entries in a weighted random order. Its copy of the weight is made when it is first needed."""

    needed = staticmethod(calibration.needed)

    def __init__(self, layer: Layer) -> None:
        self.layer, self.calibrations = layer, {}
        self._prepared: _Prepared | None = None
        self._seen: tuple[int, ...] = ()  # what the watch said when that was made
        self._lock = threading.Lock()
        if layer.options.rotate:
            generator = torch.Generator().manual_seed(layer.options.seed)
            self._signs = random_signs(padded(layer.weight.shape[1]), generator=generator).to(layer.weight.device)

    def serves(self, k: int, batch: int | None, promise: Promise) -> bool:
        if self.layer.options.guarantee == "calibrated" and k not in self.calibrations:
            raise not_calibrated(k, self.calibrations)
        return True

    def topk(self, x: Tensor, k: int, promise: Promise, generator: torch.Generator | None) -> Answer:
        bounds = self._bounds(k, promise)
        problem = self._problem(self.layer.scaled(x, "x"), k, promise.eps, bounds.reader)
        return algorithm.solve(problem, bounds, generator).shaped(x.shape[:-1])

    def calibrate(
        self,
        queries: Tensor,
        ks: list[int],
        promise: Promise,
        *,
        generator: torch.Generator | None,
        progress: ProgressCallback,
    ) -> list[Any]:
        try:
            reader = self._prepare().reader
        except WeightChanged:  # what was fitted to another weight is of no use
            self.calibrations, self.fitted_to = {}, None
            reader = self._prepare().reader
        self._note_weight()
        scaled, fits = self.layer.scaled(queries, "queries"), []
        for k in ks:
            problem = self._problem(scaled, k, promise.eps, reader)
            fits.append(calibration.calibrate(problem, promise.delta, generator=generator))
            self.calibrations = {**self.calibrations, k: fits[-1]}
        return fits

    def _problem(self, queries: Tensor, k: int, eps: float, reader: Reader) -> algorithm.Problem:
        layer, options = self.layer, self.layer.options
        plain = layer.reader if options.rotate else reader
        bias = layer.scaled_bias()
        return algorithm.Problem(reader, plain, queries, self._rotate(queries), bias, k, eps, options.read_chosen)

    def _rotate(self, rows: Tensor) -> Tensor:
        return rotate(rows.to(self.layer.reader.dtype), self._signs) if self.layer.options.rotate else rows

    def _bounds(self, k: int, promise: Promise) -> Bounds:
        fit, noise = self.calibrations.get(k), self.layer.options.noise
        prepared, key = self._prepare(), (0 if fit is None else k, promise.delta)
        with self._lock:
            bounds = prepared.bounds.get(key)
            if fit is not None and getattr(bounds, "scale", None) is not fit.scale:
                bounds = Calibrated(prepared.reader, fit.scale)
            elif bounds is None and noise is not None:
                bounds = Declared(prepared.reader, noise, promise.delta)
            elif bounds is None:
                bounds = Computed(prepared.reader, promise.delta)
            prepared.bounds[key] = bounds
            return bounds

    def _prepare(self) -> _Prepared:
        """What is read, made anew when the weight may have changed.

        Raises:
            WeightChanged: when it has, and calibrations were fitted to what it was.
        """
        with self._lock:
            prepared, seen = self._prepared, self.layer.watch.now()
            if prepared is None or seen != self._seen or not prepared.sample.unchanged():
                self.check_weight()
                weight = self.layer.weight
                prepared = _Prepared(Reader(self._rotate(weight)), Sample(weight), {})
                self._prepared, self._seen = prepared, seen
            return prepared

    def check_weight(self) -> None:
        if self.fitted_to is not None:
            advice = "the calibration: call calibrate again"
            refuse_changes(self.layer.weight, self.layer.bias, self.fitted_to, advice)

    def _note_weight(self) -> None:
        """Keep what the weight is that calibrations are fitted to."""
        if self.fitted_to is None:
            self.fitted_to = checksums(self.layer.weight, self.layer.bias)

    def state(self) -> State:
        fits = self.calibrations
        tensors = {f"calibrations.{k}": fit.scale for k, fit in fits.items()}
        return State(tensors, {"calibrations": {str(k): fit.queries for k, fit in fits.items()}, "elsewhere": {}})

    @classmethod
    def from_state(cls, layer: Layer, promise: Promise, state: State) -> Coordinates:
        engine, size, options = cls(layer), layer.weight.shape[1], layer.options
        count = len(sizes(padded(size) if options.rotate else size, FIRST))
        fits = {}
        for name, queries in state.settings.pop("calibrations").items():
            k, scale = int(name), state.tensors.pop(f"calibrations.{name}")
            _checks.whole_number("k", k, 0, len(layer.weight))
            _checks.whole_number("queries", queries, 1, 2**63 - 1)
            if scale.shape != (count,) or not scale.is_floating_point() or bool((scale.isnan() | (scale < 0)).any()):
                raise ValueError(f"calibrations.{k}: expected {count} numbers, found shape {tuple(scale.shape)}")
            if options.guarantee != "calibrated":
                raise ValueError("calibrations: made for another guarantee")
            fits[k] = Calibration(scale, queries, promise.delta)
        engine.calibrations, engine.fitted_to = fits, state.fitted_to
        if fits:
            engine._note_weight()
        return engine
