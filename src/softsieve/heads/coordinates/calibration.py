"""Split-conformal calibration: how wide intervals must be for answers to queries like the sample queries."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from softsieve.heads.coordinates.algorithm import Problem, solve
from softsieve.heads.coordinates.bounds import Calibrated
from softsieve.heads.engine import right

WIDTHS = tuple(4 * 0.8**number for number in range(30))  # that are tried, down to where estimates are taken as they are


class Calibration(NamedTuple):
    """What was fitted on sample queries."""

    scale: Tensor  # (rounds,): half widths in predicted deviations; infinite when there were too few queries
    queries: int  # how many there were
    delta: float  # the chance of a wrong answer that it was fitted for


def needed(delta: float) -> int:
    """The fewest sample queries for which `calibrate` gives finite intervals.

    Of N queries a third shapes; for the M others it takes ``ceil((1 - delta) (M + 1)) <= M``.

    Example:
        >>> needed(0.1), needed(0.01)
        (13, 148)
    """
    scoring = math.ceil(round(1 / delta - 1, 9))
    return next(count for count in range(scoring, 2 * scoring + 2) if count - count // 3 >= scoring)


def calibrate(problem: Problem, delta: float, *, generator: torch.Generator | None) -> Calibration:
    """Fit the widths of `Calibrated` intervals on the queries of a problem.

    A third of them, at random, shapes: how large errors are in each round. The others are answered with that shape
    times a width, from wide to narrow. The score of a query is the least width down to which all its answers are right:
    the top k, every probability within eps, and log Z within its interval. The width taken is the conformal quantile of
    the scores, the ``ceil((1 - delta) (M + 1))``-th smallest of M; one more exchangeable query has a
    greater score, and only then may its answer be wrong, with probability delta at most. A greater width serves as
    well, and is taken where less is read with it. Whether intervals hold does not matter.
    """
    count = len(problem.x)
    bounds = Calibrated(problem.reader)
    where = None if generator is None else generator.device
    mixed = torch.randperm(count, generator=generator, device=where).to(problem.x.device)
    shaping, scoring = (
        problem._replace(x=problem.x[part], turned=problem.turned[part])
        for part in (mixed[: count // 3], mixed[count // 3 :])
    )
    if bounds.count == 0:  # so few coordinates that all are read at once
        return Calibration(torch.zeros(0, dtype=torch.float64), count, delta)
    shape = (
        _errors(bounds, shaping, generator).quantile(0.9, 0).clamp_min(1e-30)
        if count >= 3
        else torch.ones(bounds.count, dtype=torch.float64)
    )
    shape = shape.double().cpu()
    return Calibration(shape * _width(scoring, shape, delta, generator), count, delta)


def _width(problem: Problem, shape: Tensor, delta: float, generator: torch.Generator | None) -> float:
    """The conformal quantile of the scores or, of the widths above it, the one with which least is read; else infinite.

    A score says that all wider answers are right, too, so the choice among them is free.
    """
    allowed = len(problem.x) - math.ceil(round((1 - delta) * (len(problem.x) + 1), 9))
    if allowed < 0:
        return math.inf
    best, least = math.inf, math.inf
    in_play = problem  # queries whose answers were right so far
    for width in WIDTHS:
        answer = solve(in_play, Calibrated(problem.reader, shape * width), generator)
        fine = right(answer, partial(_logits, problem), in_play.x, problem.eps, rows=problem.plain.rows)
        if len(problem.x) - int(fine.sum()) > allowed:
            break
        in_play = in_play._replace(x=in_play.x[fine], turned=in_play.turned[fine])
        read = float(answer.coordinates.double().mean())
        if read <= least:
            best, least = width, read
    return best


def _logits(problem: Problem, x: Tensor) -> Tensor:
    """Exact logits of queries."""
    logits = problem.plain.full(x)
    return logits if problem.bias is None else logits.add_(problem.bias)


def _errors(bounds: Calibrated, problem: Problem, generator: torch.Generator | None) -> Tensor:
    """Largest error over rows in predicted deviations, (batch, rounds)."""
    parts = []
    step = max(1, (1 << 24) // problem.plain.rows)
    for x, turned in zip(torch.split(problem.x, step), torch.split(problem.turned, step), strict=True):
        exact, rounds = problem.plain.full(x), []
        # What rounding alone does is no error, or a query read in full would count as infinitely wrong.
        rounding = 1e-5 * torch.linalg.vector_norm(x, dim=-1, keepdim=True) * bounds.norm
        for index, factor, deviation in bounds.prefixes(turned, generator):
            value = bounds.reader.columns(index, factor) + (turned @ bounds.reader.centre)[:, None]
            error = ((value - exact).abs() - rounding).clamp_min(0)
            predicted = deviation[:, None] * bounds.norm
            rounds.append((error / predicted).where(predicted > 0, 0.0).amax(-1).double())
        parts.append(torch.stack(rounds, -1))
    return torch.cat(parts)
