"""Heads of any shape, made up: what the output layer of a language model is like, without the model."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

_SPAN = 8  # directions that carry the decaying part, in effective ranks
_ROW_TAIL, _QUERY_TAIL = 0.2, 0.01  # share of the energy that lies in all directions alike
_TYPICAL = 0.4  # median of the largest probability
_LIFT = (4.0, 7.0)  # of the row a query is about, in deviations of the logits: from lost in the crowd to certain


class SyntheticHead(NamedTuple):
    """A weight and what it is asked."""

    weight: Tensor  # bfloat16, as heads are stored, (n, d)
    calibration: Tensor  # (rows, d)
    test: Tensor


def make_head(
    n: int, d: int, *, rank: int, calibration: int = 1000, test: int = 500, seed: int = 0, device: str = "cpu"
) -> SyntheticHead:
    """Rows with a decaying spectrum, and queries of effective rank ``rank`` that are each about a row, more or less.

    The effective rank is the participation ratio ``(sum lambda)^2 / sum lambda^2`` of the queries' second moment, whose
    eigenvalues fall like ``(1 + c j)^-2``. Frequent rows are asked for more often, as words are. Queries are
    scaled so that the median of the largest probability is 0.4; it ranges from a few hundredths to 1.

    Args:
        n, d: shape of the weight.
        rank: at most d.
        calibration, test: how many queries.
        seed: of everything that is drawn; the same numbers on every device of a kind.
        device: where all of it is.

    Example:
        >>> head = make_head(1000, 64, rank=16, calibration=300, test=100)
        >>> largest = (head.test @ head.weight.float().T).softmax(-1).amax(-1)
        >>> 0.2 < largest.median() < 0.6, largest.min() < 0.2, largest.max() > 0.9
        (tensor(True), tensor(True), tensor(True))

    Raises:
        ValueError: for a rank that is not in 1..d.
    """
    if not 1 <= rank <= d:
        raise ValueError(f"rank: expected 1 to d = {d}, found {rank}")
    g = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=g, device=device)
    span = min(d, _SPAN * rank)
    decay = _decay(span, rank).to(device)
    directions = torch.linalg.qr(normal(d, span)).Q.T  # (span, d)
    signal = normal(n, span)
    row_scale, query_scale = decay**-0.5, 1 / decay
    tail = (_ROW_TAIL * row_scale.square().sum() / d).sqrt()
    weight = (signal * row_scale) @ directions
    weight += normal(n, d) * tail
    weight = weight.bfloat16()

    count = calibration + test
    logit_scale = row_scale * query_scale
    lift = torch.empty(count, 1, device=device).uniform_(*_LIFT, generator=g) * logit_scale.norm() / logit_scale.sum()
    alike = lift.clamp_max(0.95)  # correlation of a query with the row it is about
    about = torch.multinomial(1 / torch.arange(10.0, n + 10, device=device), count, replacement=True, generator=g)
    mixed = alike * signal[about] + (1 - alike.square()).sqrt() * normal(count, span)
    tail = (_QUERY_TAIL * query_scale.square().sum() / d).sqrt()
    queries = (mixed * query_scale) @ directions + normal(count, d) * tail
    queries *= _temperature(weight.float(), queries[:256])
    return SyntheticHead(weight, queries[:calibration], queries[calibration:])


def _decay(span: int, rank: int) -> Tensor:
    """``1 + c j`` for j below ``span``, such that the squares of its inverse have the participation ratio ``rank``."""
    low, high = 0.0, 100.0
    for _ in range(50):
        middle = (low + high) / 2
        energy = (1 + middle * torch.arange(span, dtype=torch.float64)) ** -2
        many = energy.sum().square() / energy.square().sum() > rank
        low, high = (middle, high) if many else (low, middle)
    return 1 + low * torch.arange(span)


def _temperature(weight: Tensor, queries: Tensor) -> float:
    """The factor that makes the median of the largest probability typical."""
    logits = queries @ weight.T
    logits -= logits.amax(-1, keepdim=True)
    low, high = 1e-6, 1e6
    for _ in range(40):
        middle = (low * high) ** 0.5
        certain = (-(middle * logits).logsumexp(-1)).exp().median() > _TYPICAL
        low, high = (low, middle) if certain else (middle, high)
    return low
