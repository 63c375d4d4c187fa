"""Split-conformal quantiles: how wide intervals must be for queries like the sample queries."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from softsieve.heads.bounds import Calibrated, offset
from softsieve.heads.reader import Reader


class Calibration(NamedTuple):
    """What was fitted on sample queries."""

    scale: Tensor  # (rounds,): half widths in predicted deviations; infinite when there were too few queries
    queries: int  # how many there were
    delta: float


def needed(delta: float) -> int:
    """The fewest sample queries for which `calibrate` gives finite intervals.

    Of N queries a third shapes; for the M others it takes ``ceil((1 - delta) (M + 1)) <= M``.

    Example:
        >>> needed(0.1), needed(0.01)
        (13, 148)
    """
    scoring = math.ceil(round(1 / delta - 1, 9))
    return next(count for count in range(scoring, 2 * scoring + 2) if count - count // 3 >= scoring)


def conformal_quantile(scores: Tensor, delta: float) -> float:
    """What the score of one more exchangeable query exceeds with probability at most delta.

    The ``ceil((1 - delta) (N + 1))``-th smallest of N scores; infinite when there is none.

    Example:
        >>> conformal_quantile(torch.arange(1.0, 20.0), 0.1)
        18.0
    """
    rank = math.ceil(round((1 - delta) * (len(scores) + 1), 9))
    return float(scores.double().sort().values[rank - 1]) if rank <= len(scores) else math.inf


def calibrate(
    reader: Reader, plain: Reader, queries: Tensor, turned: Tensor, delta: float, *, generator: torch.Generator | None
) -> Calibration:
    """Fit the widths of `Calibrated` intervals.

    A third of the queries, at random, say how the rounds compare with each other; the others' largest error over all
    rows and rounds, in these units, is the score whose conformal quantile is taken. So all intervals of a query hold at
    once with probability 1 - delta.

    Args:
        reader, turned: what prefixes are read from, rotated or not, and the sample queries that belong to it, (N, d).
        plain, queries: the same as they are, for the exact products.
    """
    bounds = Calibrated(reader)
    count, step = len(turned), max(1, (1 << 24) // reader.rows)
    errors = torch.cat(
        [
            _errors(bounds, x, plain.full(exact), generator)
            for x, exact in zip(torch.split(turned, step), torch.split(queries, step), strict=True)
        ]
    )  # (N, rounds)
    mixed = torch.randperm(count, generator=generator)
    shaping, scoring = errors[mixed[: count // 3]], errors[mixed[count // 3 :]]
    if errors.shape[1] == 0:  # so few coordinates that all are read at once
        return Calibration(errors.new_zeros(0), count, delta)
    shape = shaping.quantile(0.9, 0).clamp_min(1e-30) if len(shaping) else errors.new_ones(errors.shape[1])
    score = (scoring / shape).amax(-1)
    return Calibration(shape * conformal_quantile(score, delta), count, delta)


def _errors(bounds: Calibrated, x: Tensor, exact: Tensor, generator: torch.Generator | None) -> Tensor:
    """Largest error over rows in predicted deviations, (batch, rounds)."""
    found = []
    for index, factor, deviation in bounds.prefixes(x, generator):
        # What rounding alone does is no error, or a query read in full would count as infinitely wrong.
        rounding = 1e-5 * torch.linalg.vector_norm(x, dim=-1, keepdim=True) * bounds.norm
        value = bounds.reader.columns(index, factor) + offset(bounds.reader, x, index, factor)[:, None]
        error = ((value - exact).abs() - rounding).clamp_min(0)
        predicted = deviation[:, None] * bounds.norm
        error = torch.where(predicted > 0, error / predicted, torch.where(error > 0, torch.inf, 0.0))
        found.append(error.amax(-1).double())
    return torch.stack(found, -1) if found else exact.new_zeros(len(x), 0, dtype=torch.float64)
