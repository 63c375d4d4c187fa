"""Answers of a calibrated cascade: what its kernel answers, and exact ones for the rest."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softsieve.heads.cascade import Cascade, plan_of
from softsieve.heads.cascade_calibration import CascadeCalibration, half_width
from softsieve.heads.coordinates import Answer

CHANGED, DRIFTED = 1, 2  # states of a query, as the kernels have them


class DriftWarning(UserWarning):
    """Queries are unlike those that the head was calibrated with, and were answered exactly."""


class WeightChanged(RuntimeError):  # noqa: N818
    """The weight is not the one that the index was built of."""


def solve(
    cascade: Cascade,
    x: Tensor,
    calibration: CascadeCalibration,
    exactly: Callable[[Tensor, int], Answer],
    shape: tuple[int, ...],
) -> Answer:
    """Answer queries times beta, each by itself; ``exactly`` those that the kernel does not, for the calibration's k.

    Fields are of this shape for each query. Up to there they are arrays: an operation of torch takes as long as many of
    numpy's, and for one query that is a good part of the time.

    Raises:
        WeightChanged: when the kernel finds other rows than the index was built of.
    """
    indices, logits, numbers = cascade.raw(x, plan_of(calibration))
    state, log_z = numbers[:, 0], numbers[:, 1].astype(logits.dtype)
    half = half_width(numbers[:, 2], calibration).astype(logits.dtype)
    interval = np.empty((len(log_z), 2), logits.dtype)
    interval[:, 0], interval[:, 1] = log_z - half, log_z + half
    read = numbers[:, 3:5].astype(np.int64)
    fields = [indices, np.exp(logits - log_z[:, None]), logits, log_z, interval, read[:, 0], read[:, 1], state != 0]
    if fields[-1].any():
        _look_at(numbers, calibration, 7)
        rest = fields[-1].nonzero()[0]
        exact = exactly(x[torch.from_numpy(rest)], calibration.k)
        for value, right in zip(fields[:6], exact[:6], strict=True):
            value[rest] = right.numpy()
        fields[6][rest] += exact.bytes_read.numpy()
    return Answer(*(torch.from_numpy(value.reshape(shape + value.shape[1:])) for value in fields))


class Estimated(NamedTuple):
    """Logits of all rows, times beta."""

    logits: Tensor  # (batch, n): exact for rows that were read in full, elsewhere estimates
    rest: list[int]  # queries that the kernel does not answer, whose logits are anything
    bytes_read: int | Tensor  # in all
    exactly: int | Tensor = 0  # queries whose logits are all exact because they could not be answered otherwise


def estimate(cascade: Cascade, x: Tensor, calibration: CascadeCalibration) -> Estimated:
    """All logits of queries times beta.

    Raises:
        WeightChanged: when the kernel finds other rows than the index was built of.
    """
    logits = torch.empty(len(x), len(cascade.weight), dtype=cascade.dtype)
    found = cascade.fill(x, plan_of(calibration), logits.numpy())
    rest = [i for i, one in enumerate(found) if one.state]
    if rest:
        _look_at(np.array(found), calibration, 7)
    return Estimated(logits, rest, sum(one.bytes_read for one in found))


def _look_at(found: Any, calibration: CascadeCalibration, stacklevel: int) -> None:
    """Refuse a changed weight, warn of drift whoever called the head, so many levels above; `Found` of each query."""
    state = found[:, 0]
    if (state == CHANGED).any():
        raise WeightChanged("weight: not the one that the index was built of: build it again")
    drifted = found[state == DRIFTED]
    if len(drifted):
        warnings.warn(
            f"x: {len(drifted)} of {len(state)} queries are unlike those of the calibration and were answered exactly: "
            f"{_difference(drifted[0], calibration)}",
            DriftWarning,
            stacklevel=stacklevel,
        )


def _difference(found: Any, fit: CascadeCalibration) -> str:
    """What makes a query unlike those of the calibration."""
    ranges = {
        "errors of a preview, of what was predicted": (found[5], fit.low, fit.high),
        "estimates, of their errors": (found[8], fit.signal, math.inf),
        "cosine of the angle to the mean query": (found[9], fit.toward_low, fit.toward_high),
        "rows that survive the preview": (found[6], 0, fit.most),
        "log Z less the k-th logit": (found[10], -math.inf, fit.flat),
    }
    for what, (value, low, high) in ranges.items():
        if not low <= value <= high:
            return f"{what}: {value:.3g}, expected from {low:.3g} to {high:.3g}"
    return "estimates beyond float32"
