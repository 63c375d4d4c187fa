"""What calibration fits for a cascade, of a CPU and of a GPU, and how files have it."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

CAPACITY, MOST_K = 16384, 64  # on a GPU, as the kernels have them
TIERS = 4  # on a GPU, of those in the index, the shortest ones, that are tried


class Fallback(IntEnum):
    """Why a query is answered exactly, as the kernels say it."""

    NONE = 0
    CHANGED = 1  # the weight is not the one that the index was built of
    DRIFTED = 2  # the query is unlike those of the calibration
    EXPENSIVE = 3  # more rows would have to be read than the whole weight costs, or there is room for


class DriftWarning(UserWarning):
    """Queries are unlike those that the head was calibrated with, and were answered exactly."""


class CascadeCalibration(NamedTuple):
    """What was fitted on sample queries for one k, on a CPU."""

    k: int  # softmax values that it is for; 0: log Z
    eps: float  # relative error of a probability that it is for
    delta: float  # chance of a wrong answer that it is for
    queries: int  # how many were used
    right: float  # the share of answers that were right with this width, over the queries that decided on it
    read: float  # the share of the weight's bytes that these read
    first: int  # the number of the preview
    second: int  # that of the preview for queries of which the first leaves more survivors than the limit
    limit: float  # survivors that the first preview may leave before the second follows
    width: float  # of a row's margin, in standard deviations of its error; infinite: everything is read
    correction: float  # of exponentials of estimates: exp(correction * deviation^2)
    doubt: float  # standard deviation of log Z that goes with a corrected sum
    interval: float  # half-width of log Z's interval, in these
    low: float  # limits beyond which a query falls back: errors of a preview, as a share of what was predicted
    high: float  # the same, above
    batch: int  # up to so many queries at a time the cascade was measured to be faster than the exact product
    signal: float = 0.0  # size of estimates, in sizes of their errors: below this
    toward_low: float = -2.0  # cosine of the angle to the mean query: below this
    toward_high: float = 2.0  # the same, above
    most: float = math.inf  # survivors of the preview: above this
    flat: float = math.inf  # log Z less the k-th logit: above this
    envelope: float = math.inf  # deviations that no logit is above its estimate by, for `sample`; infinite: not known
    level: float = -math.inf  # the least threshold that it serves for in `above`; -infinity: it is for k


class GpuCascadeCalibration(NamedTuple):
    """What was fitted on sample queries for one k, on a GPU. Fields as in `CascadeCalibration`, besides:"""

    k: int
    eps: float
    delta: float
    queries: int
    right: float
    read: float
    first: int  # the number of the tier that is the preview
    tier: int  # that of the survivors, -1 for none
    capacity: int  # survivors that there is room for
    width: float
    correction: float
    doubt: float
    interval: float
    low: float
    high: float
    batch: int
    signal: float = 0.0
    toward_low: float = -2.0
    toward_high: float = 2.0
    most: float = math.inf
    flat: float = math.inf
    envelope: float = math.inf
    level: float = -math.inf
    bits: int = 8  # of the codes of the preview: 8, or 4 for all but the leading ones
    floor: float = 1.0  # share of the partition function from which on rows are read in full, of eps / 2


Fit = CascadeCalibration | GpuCascadeCalibration
AnyFit = TypeVar("AnyFit", CascadeCalibration, GpuCascadeCalibration)

_NEWER = (
    "signal",
    "toward_low",
    "toward_high",
    "most",
    "flat",
    "envelope",
    "level",
    "floor",
    "bits",
)  # not in files of version 0.1
_ONLY = {"floor": 1.0, "bits": 8}  # what earlier versions knew, of a GPU; files have others
_LEAST = {"tier": -1, "toward_low": -math.inf, "toward_high": -math.inf, "level": -math.inf}  # others are 0 at least
_WHOLE = ("k", "queries", "first", "second", "batch", "tier", "capacity", "bits")
# Files have the fields of both kinds.
_OF_CPU: dict[str, Any] = {"tier": -1, "capacity": 0}
_OF_GPU: dict[str, Any] = {"second": 0, "limit": 0.0}


def to_file(fit: Fit) -> dict[str, Any]:
    """The fields that a file has for a calibration."""
    fields = fit._asdict()
    if math.isinf(fit.level):
        del fields["level"]
    for name, value in _ONLY.items():
        if fields.get(name) == value:
            del fields[name]
    return fields | (_OF_CPU if "limit" in fields else _OF_GPU | {"second": fields["first"]})


def from_file(fields: dict[str, Any], *, k: int, rows: int, previews: int, tiers: int) -> Fit:
    """The calibration of what a file has.

    Raises:
        TypeError, ValueError: when it does not belong to a head with so many rows, previews and tiers.
    """
    names = {*CascadeCalibration._fields, *_OF_CPU} | (set(_ONLY) if fields.get("capacity") else set())
    if not names - set(_NEWER) <= set(fields) <= names:
        raise ValueError(f"calibrations.{k}: expected {sorted(names)}, found {sorted(fields)}")
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int if name in _WHOLE else (int, float)):
            raise TypeError(f"calibrations.{k}: {name}: expected a number, found {value!r}")
        if math.isnan(value) or value < _LEAST.get(name, 0):
            raise ValueError(f"calibrations.{k}: {name}: expected a number of at least 0, found {value!r}")
    capacity = fields["capacity"]
    count = tiers if capacity else previews
    fits = fields["first"] <= fields["second"] < count and fields["tier"] < tiers and capacity & (capacity - 1) == 0
    fits = fits and fields.get("floor", 1.0) > 0
    fits = fits and fields.get("bits", 8) in ((4, 8) if 0 < fields["first"] < TIERS else (8,))
    if fields["k"] != k or k > rows or not fits or capacity > CAPACITY or (capacity and k > MOST_K):
        raise ValueError(f"calibrations.{k}: made for another head")
    kind, others = (GpuCascadeCalibration, _OF_GPU) if capacity else (CascadeCalibration, _OF_CPU)
    return kind(**{name: value for name, value in fields.items() if name not in others})


def half_width(doubt: Any, fit: Fit) -> Any:
    """The promised half-width of log Z's interval, from the half-width that was to be reached.

    What follows from eps at most and a quarter of it at least: an estimate of a small error is itself uncertain.
    """
    promised = -math.log1p(-fit.eps)
    least = promised if math.isinf(fit.interval) else promised / 4
    return (doubt * min(fit.interval, 1e30)).clip(least, promised)


def widened(fit: AnyFit) -> AnyFit:
    """The same with margins that no row that is left out is beyond."""
    return fit._replace(width=fit.envelope, most=math.inf)
