"""Linear heads and their estimates, short and obviously right, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def dequantise(codes: Tensor, scales: Tensor, minimums: Tensor | None = None, levels: Tensor | None = None) -> Tensor:
    """The rows of a quantised weight: whole numbers (n, d), and a scale and a minimum for each group of a row.

    ``levels``: what the numbers stand for before that; themselves unless given.
    """
    group = codes.shape[1] // scales.shape[1]
    values = codes.double() if levels is None else levels.double()[codes.long()]
    rows = values * scales.double().repeat_interleave(group, 1)
    return rows if minimums is None else rows + minimums.double().repeat_interleave(group, 1)


class ExactTopK(NamedTuple):
    """What `softsieve.AdaptiveSoftmax.topk` approximates. Shape: ``(..., k)`` and ``(...)``."""

    indices: Tensor
    probs: Tensor
    logits: Tensor
    log_z: Tensor


def logits(weight: Tensor, x: Tensor, bias: Tensor | None = None, *, beta: float = 1.0) -> Tensor:
    """``beta * (weight @ x + bias)`` for queries (..., d), (..., n)."""
    product = x.double() @ weight.double().T
    return beta * (product if bias is None else product + bias.double())


def topk_softmax(weight: Tensor, x: Tensor, k: int = 1, bias: Tensor | None = None, *, beta: float = 1.0) -> ExactTopK:
    """The k largest softmax values of a linear head.

    Example:
        >>> import torch
        >>> topk_softmax(torch.eye(2), torch.tensor([0.0, 1.0])).indices
        tensor([1])
    """
    exact = logits(weight, x, bias, beta=beta)
    values, indices = exact.topk(k, -1)
    return ExactTopK(indices, exact.softmax(-1).gather(-1, indices), values, exact.logsumexp(-1))


def above(
    weight: Tensor, x: Tensor, threshold: float = 0.0, bias: Tensor | None = None, *, beta: float = 1.0
) -> list[tuple[list[int], list[float]]]:
    """Classes whose logits are above a threshold and their logits, the largest first, for each query of (..., d).

    Example:
        >>> above(torch.tensor([[1.0], [2.0], [-1.0]]), torch.tensor([1.0]))
        [([1, 0], [2.0, 1.0])]
    """
    found = []
    for row in logits(weight, x, bias, beta=beta).reshape(-1, len(weight)).tolist():
        classes = sorted((i for i in range(len(row)) if row[i] > threshold), key=lambda i: (-row[i], i))
        found.append((classes, [row[i] for i in classes]))
    return found


def horvitz_thompson(row: Tensor, x: Tensor, index: list[int], pi: Tensor) -> tuple[float, float]:
    """The estimate of ``row . x`` from coordinates drawn with probabilities pi, and that of its variance."""
    estimate = sum(float(row[j]) * float(x[j]) / float(pi[j]) for j in index)
    variance = sum((float(row[j]) * float(x[j])) ** 2 * (1 - float(pi[j])) / float(pi[j]) ** 2 for j in index)
    return estimate, variance


def dithered(row: Tensor, scale: float, dither: Tensor) -> Tensor:
    """What is known of a row from ``floor(row / scale + dither)``, up to half a scale; the dither is in [-1/2, 1/2)."""
    codes = [math.floor(float(a) / scale + float(v)) for a, v in zip(row, dither, strict=True)]
    return scale * (torch.tensor(codes, dtype=torch.float64) - dither.double() + 0.5)


class CascadeAnswer(NamedTuple):
    """The answer of `cascade`. Only "answered" has a top k and log Z."""

    state: str  # "answered", or why everything has to be read: "drifted" or "expensive"
    indices: Tensor  # (k,)
    logits: Tensor  # (k,), exact
    log_z: float
    half: float  # half-width of the interval of log_z
    entries: int  # of weight and codes that were read
    bytes_read: int
    scale: float  # of the errors of the preview, in predicted deviations
    signal: float  # size of the estimates of the probes, in sizes of their errors
    toward: float  # cosine of the angle to the mean query
    finalists: Tensor  # rows that were read in full
    dense: Tensor  # (n,): all logits; those of dropped rows are corrected estimates, or upper ends
    closest: float  # by so much a decision would have to be missed to be another one


class Usual(NamedTuple):
    """What queries like those of the calibration stay within; others are not answered."""

    low: float = 0.0
    high: float = math.inf
    signal: float = 0.0
    toward_low: float = -2.0
    toward_high: float = 2.0
    survivors: float = math.inf
    flat: float = math.inf


class CascadeIndex(NamedTuple):
    """Codes of rows, and what a query meets them with.

    A row is estimated by ``centre @ x + codes[:, :length] @ (projection @ x)[:length]`` and its bias, or with beta as
    one more coordinate of x if the bias is coded: then e is d + 1, else d.
    """

    centre: Tensor  # (e,)
    projection: Tensor  # (longest, e)
    codes: Tensor  # (n, longest)
    lengths: Sequence[int]  # of the preview and of the longer one, then of the tiers
    deviations: Tensor  # predicted ones of the errors of each length. (2 + tiers, n)
    probes: Tensor  # rows whose errors say how large the errors of a query are
    mean: Tensor | None = None  # of queries like those to come, of length 1
    coarse: Tensor | None = None  # codes that the first preview has instead. (n, length)


class CascadePlan(NamedTuple):
    """How to answer, as in `softsieve.kernels.cascade_numba.Plan`; capacity and group are for `short_cascade`."""

    k: int
    width: float
    correction: float
    floor: float
    doubt: float
    tolerance: float
    limit: float = math.inf
    usual: Usual = Usual()
    upper: bool = False
    level: float = -math.inf  # with k = 0: rows that may be above it are the answer
    capacity: float = math.inf  # the most survivors of the preview
    group: int = 64  # rows of which the best estimate stands for all


def expected_excess(deviation: Tensor, correction: float, width: float) -> Tensor:
    """``correction * deviation^2``, and from where its slope is the width on its tangent.

    With correction 1/2 that is log E exp(e) for a normal error e of this deviation, which ends at ``width * deviation``
    above 0 because a row with a larger one would not be dropped.

    Example:
        >>> expected_excess(torch.tensor([1.0, 8.0]), 0.5, 4.0)
        tensor([ 0.5000, 24.0000])
    """
    bend = width / (2 * correction) if correction else math.inf
    return torch.where(
        deviation <= bend, correction * deviation.square(), width * deviation - correction * min(bend, 1e15) ** 2
    )


class _Query:
    """One query: its exact logits, estimates of any length, the last ones of each row, and what was read."""

    def __init__(
        self, weight: Tensor, x: Tensor, bias: Tensor | None, beta: float, index: CascadeIndex, plan: CascadePlan
    ) -> None:
        self.index, self.plan = index, plan
        self.exact = logits(weight, x, bias, beta=beta)
        coded = len(index.centre) > len(x)
        extended = beta * (torch.cat([x.double(), torch.ones(1, dtype=torch.float64)]) if coded else x.double())
        base = index.centre.double() @ extended + (0.0 if bias is None or coded else beta * bias.double())
        self.base = base.expand(len(weight))
        turned = index.projection.double() @ extended
        self.terms = index.codes.double() * turned
        self.coarse = None if index.coarse is None else index.coarse.double() @ turned[: index.coarse.shape[1]]
        self.toward = 0.0
        if index.mean is not None:
            self.toward = float(index.mean.double() @ extended / extended.norm().clamp_min(1e-30))
        self.scale = self.signal = math.nan
        self.entries = self.bytes_read = 0
        self.closest, self.highest = math.inf, -math.inf  # decision; threshold of those that dropped a row
        self.dense = self.excess = self.upper = self.base

    def estimate(self, which: int) -> tuple[Tensor, Tensor]:
        """Estimates of all rows from codes of one of the lengths, and deviations of their errors."""
        own = self.terms[:, : self.index.lengths[which]].sum(-1)
        values = self.base + (own if which or self.coarse is None else self.coarse)
        predicted, probes = self.index.deviations[which].double(), self.index.probes
        scale = float(((self.exact - values)[probes] / predicted[probes]).square().mean().sqrt())
        if which == 0:
            size = float(((values - self.base)[probes] / predicted[probes]).square().mean().sqrt())
            self.scale, self.signal = scale, size / max(scale, 1e-30)
        return values, scale * predicted

    def is_usual(self) -> bool:
        """Whether the errors of the first preview and the direction are those of the calibration."""
        usual = self.plan.usual
        inside = usual.low <= self.scale <= usual.high and usual.toward_low <= self.toward <= usual.toward_high
        return inside and self.signal >= usual.signal

    def update(self, rows: Tensor, values: Tensor, deviation: Tensor) -> None:
        """Take these estimates for some rows."""
        excess = expected_excess(deviation, self.plan.correction, self.plan.width)
        self.excess = torch.where(rows, excess, self.excess)
        self.dense = torch.where(rows, values + excess, self.dense)
        self.upper = torch.where(rows, values + self.plan.width * deviation, self.upper)

    def reaching(self, rows: Tensor, threshold: float) -> Tensor:
        """Those of the rows whose upper ends reach a threshold."""
        distance = self.upper - threshold
        if bool(rows.any()):
            self.closest = min(self.closest, float(distance[rows].abs().min()))
        return rows & (distance >= 0)

    def survivors(self, rows: Tensor, values: Tensor, attained: float, slack: float) -> Tensor:
        """Those of the rows that may be among the top k or matter for the partition function."""
        k, threshold = self.plan.k, float(self.dense.logsumexp(0)) + self.plan.floor
        if self.plan.level > -math.inf:
            threshold = self.plan.level
        if k:
            best = float(values[rows].topk(k).values[-1])
            aim = (best + max(best, attained)) / 2
            enough = int(self.reaching(rows, min(threshold, aim) - slack).sum()) >= k
            threshold = min(threshold, aim if enough else best)
        self.highest = max(self.highest, threshold - slack)
        return self.reaching(rows, threshold - slack)

    def tally(self, rows: int, entries: int, bytes_: int) -> None:
        """Count what is read of some rows."""
        self.entries, self.bytes_read = self.entries + rows * entries, self.bytes_read + rows * bytes_

    def limited(self, kth: float) -> Tensor:
        """Estimates of dropped rows, below the k-th logit even if what they did not reach is above it."""
        below = kth - 1e-6 * abs(kth)
        return self.dense.clamp_max(below) if below < self.highest else self.dense

    def half_width(self, finalists: Tensor, dense: Tensor) -> float:
        """Half of the interval of log Z, when logits are taken for these."""
        shares = (dense - dense.logsumexp(0)).exp()
        half = float(self.plan.doubt * (shares * self.excess.clamp_max(1))[~finalists].sum())
        self.closest = min(self.closest, abs(half - self.plan.tolerance))
        return half

    def answer(
        self, state: str, finalists: Tensor, dense: Tensor, log_z: float = 0.0, half: float = 0.0
    ) -> CascadeAnswer:
        rows = finalists.nonzero()[:, 0]
        top, order = self.exact[rows].topk(self.plan.k if len(rows) else 0)
        dense = torch.where(finalists, self.exact, self.upper if self.plan.upper else dense)
        return CascadeAnswer(
            state, rows[order], top, log_z, half, self.entries, self.bytes_read,
            self.scale, self.signal, self.toward, rows, dense, self.closest,
        )  # fmt: skip

    def no_answer(self, state: str) -> CascadeAnswer:
        return self.answer(state, torch.zeros_like(self.exact, dtype=torch.bool), self.exact)


def cascade(
    weight: Tensor, x: Tensor, bias: Tensor | None = None, *, beta: float = 1.0, index: CascadeIndex, plan: CascadePlan
) -> CascadeAnswer:
    """One query (d,) through a preview, tiers of longer codes and exact rows, each row by itself.

    A row stays while its estimate with ``width`` deviations reaches what it takes to be among the top k, half way from
    the k-th best estimate to the k-th largest logit of the rows with the best ones, or the share of the partition
    function that matters, whichever is less. Where fewer than k rows would stay, it is the k-th best estimate. With a
    ``level``, it is that. When the preview leaves more rows than ``limit``, a longer one is made. A dropped row counts
    with its last estimate and what errors add in the mean (`expected_excess`), and is below the k-th logit of the
    answer.
    """
    query = _Query(weight, x, bias, beta, index, plan)
    (n, d), e, probes, lengths, k = weight.shape, len(index.centre), len(index.probes), index.lengths, plan.k
    row_bytes, everything = d * weight.element_size(), torch.ones(len(weight), dtype=torch.bool)
    query.tally(1, 0, e * 2)
    query.tally(probes, d, row_bytes)
    length, attained = 0, math.inf
    for which in range(2):
        estimates, deviation = query.estimate(which)
        more, length = lengths[which] - length, lengths[which]
        query.tally(1, 0, more * e * 2)
        query.tally(probes, more, more + 1)
        if not query.is_usual():
            return query.no_answer("drifted")
        query.tally(n, more, more + 1 + (4 if which == 0 and bias is not None and e == d else 0))
        slack = 1e-6 * abs(float(estimates.max()))
        if k:
            ahead = estimates >= estimates.topk(min(k + 8, n)).values[-1]
            attained = float(query.exact[ahead].topk(k).values[-1])
            query.tally(int(ahead.sum()), d, row_bytes)
        query.update(everything, estimates, deviation)
        count = int(query.survivors(everything, estimates, attained, slack).sum())
        if count <= plan.limit or lengths[0] == lengths[1]:
            break
    if count > plan.usual.survivors:
        return query.no_answer("drifted")
    for lowered in range(8):
        query.highest, known, probed = -math.inf, length, 0
        read = length if length in lengths[2:] else 0  # a preview that is as long as a tier: rows go on from there
        query.update(everything, estimates, deviation)
        rows = query.survivors(everything, estimates, attained, lowered + slack)
        for tier in range(2, len(lengths)):
            longer, count = lengths[tier], int(rows.sum())
            cost = (longer - known) * e * 2 + count * (longer - read + 1)
            if longer < 2 * known or 2 * cost > count * row_bytes:
                continue
            values, now = query.estimate(tier)
            query.update(rows, values, now)
            query.tally(1, count * (longer - read), cost)
            query.tally(probes, longer - probed, longer - probed + 1)
            known = read = probed = longer
            rows = query.survivors(rows, values, attained, lowered + slack)
        count = int(rows.sum())
        if 2 * count > n:
            break
        query.tally(count, d, row_bytes)
        kth = float(query.exact[rows].topk(k).values[-1]) if k else math.inf
        dense = torch.where(rows, query.exact, query.limited(kth))
        if plan.level > -math.inf:
            return query.answer("answered", rows, dense)
        half, log_z = query.half_width(rows, dense), float(dense.logsumexp(0))
        if half <= plan.tolerance:
            if log_z - kth > plan.usual.flat:
                return query.no_answer("drifted")
            return query.answer("answered", rows, dense, log_z, half)
    return query.no_answer("expensive")


def short_cascade(
    weight: Tensor, x: Tensor, bias: Tensor | None = None, *, beta: float = 1.0, index: CascadeIndex, plan: CascadePlan
) -> CascadeAnswer:
    """One query through a preview, at most one tier, and exact rows: what a GPU does, in steps of a fixed number.

    A row stays while its estimate with ``width`` deviations reaches the k-th best estimate, or the share of the
    partition function that matters. For the preview the k-th best of the best of each ``group`` rows stands for it,
    with k = 1 that is the same. More survivors of the preview than ``capacity``, or a half-width of log Z above
    ``tolerance``, are no answer. Estimates of all logits are below the k-th logit of the answer, after log Z was summed
    up. ``lengths`` and ``deviations`` are those of the preview and, if there is one, of the tier. What is read is not
    counted.
    """
    query, k = _Query(weight, x, bias, beta, index, plan), plan.k
    rows, slack = torch.ones(len(weight), dtype=torch.bool), 0.0
    for which in range(len(index.lengths)):
        estimates, deviation = query.estimate(which)
        if not query.is_usual():
            return query.no_answer("drifted")
        query.update(rows, estimates, deviation)
        threshold = float(query.dense.logsumexp(0)) + plan.floor
        if which == 0:
            slack = 1e-6 * abs(float(estimates.max()))
        if k:
            best = (
                estimates[rows] if which else torch.stack([part.max() for part in torch.split(estimates, plan.group)])
            )
            threshold = min(threshold, float(best.topk(k).values[-1]) if len(best) >= k else -math.inf)
        query.highest = max(query.highest, threshold - slack)
        rows = query.reaching(rows, threshold - slack)
        if which == 0 and int(rows.sum()) > min(plan.usual.survivors, plan.capacity):
            return query.no_answer("drifted" if int(rows.sum()) > plan.usual.survivors else "expensive")
    dense = torch.where(rows, query.exact, query.dense)
    half, log_z = query.half_width(rows, dense), float(dense.logsumexp(0))
    best = query.exact[rows].topk(min(k, int(rows.sum()))).values
    kth = float(best[-1]) if len(best) else math.inf
    if log_z - kth > plan.usual.flat:
        return query.no_answer("drifted")
    if half > plan.tolerance or len(best) < k:
        return query.no_answer("expensive")
    return query.answer("answered", rows, query.limited(kth), log_z, half)
