"""Answers of a calibrated cascade: what its kernel answers, and exact ones for the rest."""

from __future__ import annotations

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
    unanswered = state != 0
    some = unanswered.any()
    if some:
        logits[unanswered] = 0.0  # the kernel may have written some before it gave up, without a log Z
    fields = [indices, np.exp(logits - log_z[:, None]), logits, log_z, interval, read[:, 0], read[:, 1], unanswered]
    if some:
        _look_at(state, numbers[:, 5], calibration, 7)
        rest = unanswered.nonzero()[0]
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
        _look_at(np.array([one.state for one in found]), np.array([one.scale for one in found]), calibration, 7)
    return Estimated(logits, rest, sum(one.bytes_read for one in found))


def _look_at(state: Any, scale: Any, calibration: CascadeCalibration, stacklevel: int) -> None:
    """Refuse a changed weight, warn of drift whoever called the head, so many levels above."""
    if (state == CHANGED).any():
        raise WeightChanged("weight: not the one that the index was built of: build it again")
    scales = scale[state == DRIFTED]
    if len(scales):
        warnings.warn(
            f"x: {len(scales)} of {len(state)} queries are unlike those of the calibration and were answered exactly: "
            f"errors of a preview are {float(scales[0]):.3g} of what was predicted, and were from "
            f"{calibration.low:.3g} to {calibration.high:.3g}",
            DriftWarning,
            stacklevel=stacklevel,
        )
