"""Answers of a calibrated cascade: what its kernel answers, and exact ones for the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from softsieve.heads.cascade import Asked, Cascade
from softsieve.heads.cascade_calibration import CascadeCalibration, half_width, plan
from softsieve.heads.coordinates import Answer

CHANGED, DRIFTED = 1, 2  # states of a query, as the kernels have them


class DriftWarning(UserWarning):
    """Queries are unlike those that the head was calibrated with, and were answered exactly."""


class WeightChanged(RuntimeError):  # noqa: N818
    """The weight is not the one that the index was built of."""


def solve(
    cascade: Cascade, x: Tensor, calibration: CascadeCalibration, exactly: Callable[[Tensor, int], Answer]
) -> Answer:
    """Answer queries times beta, each by itself; ``exactly`` those that the kernel does not, for the calibration's k.

    Raises:
        WeightChanged: when the kernel finds other rows than the index was built of.
    """
    asked = ask(cascade, x, calibration)
    # Through numpy, whose small operations take a fraction of torch's time.
    logits, log_z = asked.logits.numpy(), asked.log_z.numpy().astype(asked.logits.numpy().dtype)
    half = half_width(asked.half, calibration).numpy().astype(log_z.dtype)
    answer = Answer(
        asked.indices,
        torch.from_numpy(np.exp(logits - log_z[:, None])),
        asked.logits,
        torch.from_numpy(log_z),
        torch.from_numpy(np.stack([log_z - half, log_z + half], -1)),
        asked.coordinates,
        asked.bytes_read,
        torch.from_numpy(asked.state.numpy() != 0),
    )
    if not asked.state.numpy().any():
        return answer
    rest = answer.exact.nonzero()[:, 0]
    exact = exactly(x[rest], calibration.k)
    for value, right in zip(answer[:5], exact[:5], strict=True):
        value[rest] = right
    answer.coordinates[rest] = exact.coordinates
    answer.bytes_read[rest] += exact.bytes_read
    return answer


def ask(cascade: Cascade, x: Tensor, calibration: CascadeCalibration, *, dense: bool = False) -> Asked:
    """What the kernel answers; warns of queries unlike the calibration's."""
    asked = cascade.ask(x, plan(calibration), dense=dense)
    state = asked.state.numpy()
    if not state.any():
        return asked
    if (state == CHANGED).any():
        raise WeightChanged("weight: not the one that the index was built of: build it again")
    scales = asked.scale[asked.state == DRIFTED]
    if len(scales):
        warnings.warn(
            f"x: {len(scales)} of {len(x)} queries are unlike those of the calibration and were answered exactly: "
            f"errors of a preview are {float(scales[0]):.3g} of what was predicted, and were from "
            f"{calibration.low:.3g} to {calibration.high:.3g}",
            DriftWarning,
            stacklevel=5,  # who called `topk`
        )
    return asked
