"""Linear heads and their estimates, short and obviously right, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
    found = logits(weight, x, bias, beta=beta)
    values, indices = found.topk(k, -1)
    return ExactTopK(indices, found.softmax(-1).gather(-1, indices), values, found.logsumexp(-1))


def horvitz_thompson(row: Tensor, x: Tensor, index: list[int], pi: Tensor) -> tuple[float, float]:
    """The estimate of ``row . x`` from some coordinates, each there with probability pi, and that of its variance."""
    estimate = sum(float(row[j]) * float(x[j]) / float(pi[j]) for j in index)
    variance = sum((float(row[j]) * float(x[j])) ** 2 * (1 - float(pi[j])) / float(pi[j]) ** 2 for j in index)
    return estimate, variance


def dithered(row: Tensor, scale: float, dither: Tensor) -> Tensor:
    """What is known of a row from ``floor(row / scale + dither)``, up to half a scale; the dither is in [-1/2, 1/2)."""
    codes = [math.floor(float(a) / scale + float(v)) for a, v in zip(row, dither, strict=True)]
    return scale * (torch.tensor(codes, dtype=torch.float64) - dither.double() + 0.5)


class CascadeAnswer(NamedTuple):
    """What `cascade` finds. Rows that are no finalists have estimates."""

    state: str  # "answered", "drifted" or "expensive": only in the first case there is an answer
    indices: Tensor  # (k,)
    logits: Tensor  # (k,), exact
    log_z: float
    half: float  # of the interval of log_z
    entries: int  # of weight and codes that were read
    bytes_read: int
    scale: float  # of the errors of the preview, in predicted deviations
    signal: float  # size of the estimates of the probes, in sizes of their errors
    toward: float  # cosine of the angle to the mean query
    finalists: Tensor  # rows that were read in full
    dense: Tensor  # (n,): all logits; those of estimates have the estimated masses, or are upper ends
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


def expected_excess(deviation: Tensor, correction: float, width: float) -> Tensor:
    """``correction * deviation^2``, and from where its slope is the width on its tangent.

    With correction 1/2 that is log E exp(e) for a normal error e of this deviation, which ends at ``width * deviation``
    above 0 because a row with a larger one would not be left out.

    Example:
        >>> expected_excess(torch.tensor([1.0, 8.0]), 0.5, 4.0)
        tensor([ 0.5000, 24.0000])
    """
    bend = width / (2 * correction) if correction else math.inf
    return torch.where(
        deviation <= bend, correction * deviation.square(), width * deviation - correction * min(bend, 1e15) ** 2
    )


class _Estimates:
    """What preview and tiers say of all rows for one query."""

    def __init__(
        self,
        weight: Tensor,
        x: Tensor,
        bias: Tensor | None,
        beta: float,
        centre: Tensor,
        projection: Tensor,
        codes: Tensor,
        lengths: Sequence[int],
        deviations: Tensor,
        probes: Tensor,
        mean: Tensor | None,
    ) -> None:
        self.exact = logits(weight, x, bias, beta=beta)
        coded = len(centre) > len(x)
        extended = beta * (torch.cat([x.double(), torch.ones(1, dtype=torch.float64)]) if coded else x.double())
        self.base = centre.double() @ extended + (0.0 if bias is None or coded else beta * bias.double())
        self.base = self.base.expand(len(weight))
        self.terms = codes.double() * (projection.double() @ extended)
        self.lengths, self.deviations, self.probes = lengths, deviations, probes
        self.toward = 0.0
        if mean is not None:
            self.toward = float(mean.double() @ extended / extended.norm().clamp_min(1e-30))

    def look(self, level: int) -> tuple[Tensor, Tensor, float, float]:
        """Estimates of all rows, deviations of their errors, and on the probes scale of the errors and signal."""
        values = self.base + self.terms[:, : self.lengths[level]].sum(-1)
        predicted = self.deviations[level].double()
        some = self.probes
        scale = float(((self.exact - values)[some] / predicted[some]).square().mean().sqrt())
        signal = float(((values - self.base)[some] / predicted[some]).square().mean().sqrt()) / max(scale, 1e-30)
        return values, scale * predicted, scale, signal


def cascade(
    weight: Tensor,
    x: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 1.0,
    centre: Tensor,
    projection: Tensor,
    codes: Tensor,
    lengths: Sequence[int],
    deviations: Tensor,
    probes: Tensor,
    k: int,
    limit: float = math.inf,
    width: float,
    correction: float,
    floor: float,
    doubt: float,
    tolerance: float,
    mean: Tensor | None = None,
    usual: Usual = Usual(),  # noqa: B008
    upper: bool = False,
) -> CascadeAnswer:
    """One query through a preview, tiers of longer codes and exact rows, each row by itself.

    A row stays while its estimate with ``width`` deviations reaches what it takes to be among the top k, half way from
    the k-th best estimate to the k-th largest logit of the rows with the best ones, or the part of the normaliser that
    matters, whichever is less. Where fewer than k rows would stay, it is the k-th best estimate. When the preview
    leaves more rows than ``limit``, a longer one is made. A row that left counts with its last estimate and what errors
    add in the mean (`expected_excess`), and is below the k-th logit of the answer.

    A row is estimated by ``centre @ x + codes[:, :length] @ (projection @ x)[:length]`` and its bias, or with beta as
    one more coordinate of x if the bias is coded.

    Args:
        weight, bias: (n, d) and (n,).
        x: (d,).
        centre, projection, codes: (e,), (longest, e) and (n, longest); e is d, and one more with a coded bias.
        lengths: of the preview and of the longer one, then of the tiers.
        deviations: predicted ones of the errors of each. (2 + tiers, n)
        probes: rows whose errors say how large the errors of this query are.
        k, limit, width, correction, floor, doubt, tolerance, upper: as in `softsieve.kernels.cascade_numba.Plan`.
        mean: of queries like this one, of length 1.
        usual: what these stay within.
    """
    (n, d), e, item = weight.shape, len(centre), weight.element_size()
    known = _Estimates(weight, x, bias, beta, centre, projection, codes, lengths, deviations, probes, mean)
    exact, toward, based = known.exact, known.toward, bias is not None and e == d
    closest, highest = math.inf, -math.inf

    def no_answer(state: str) -> CascadeAnswer:
        none = torch.zeros(0, dtype=torch.int64)
        return CascadeAnswer(
            state, none, exact[:0], 0.0, 0.0, entries, read, scale, signal, toward, none, exact[:0], closest
        )

    def stay(left: Tensor, values: Tensor, deviation: Tensor, dense: Tensor, lowered: float) -> Tensor:
        """Which of the rows that are left may matter, as their estimates say."""
        nonlocal closest, highest
        bound = float(dense.logsumexp(0)) + floor
        if k:
            best = float(values[left].topk(k).values[-1])
            goal = (best + max(best, sure)) / 2
            reach = values + width * deviation - (min(bound, goal) - lowered - rounding)
            closest = min(closest, float(reach[left].abs().min()))
            bound = min(bound, best if int((left & (reach >= 0)).sum()) < k else goal)
        highest = max(highest, bound - lowered - rounding)
        reach = values + width * deviation - (bound - lowered - rounding)
        closest = min(closest, float(reach[left].abs().min()))
        return left & (reach >= 0)

    read, entries = e * 2 + len(probes) * d * item, len(probes) * d
    length, scale, signal = 0, math.nan, math.nan
    for level in range(2):
        estimates, deviation, measured, size = known.look(level)
        more, length = lengths[level] - length, lengths[level]
        read, entries = read + more * e * 2 + len(probes) * (more + 1), entries + len(probes) * more
        if level == 0:
            scale, signal = measured, size
            inside = usual.low <= scale <= usual.high and usual.toward_low <= toward <= usual.toward_high
            if not (inside and signal >= usual.signal):
                return no_answer("drifted")
        read, entries = read + n * (more + 1 + (4 if based and level == 0 else 0)), entries + n * more
        shift, rounding = float(estimates.max()), 1e-6 * abs(float(estimates.max()))
        sure = math.inf
        if k:
            ahead = estimates >= estimates.topk(min(k + 8, n)).values[-1]
            sure = float(exact[ahead].topk(k).values[-1])
            read, entries = read + int(ahead.sum()) * d * item, entries + int(ahead.sum()) * d
        everything = torch.ones(n, dtype=torch.bool)
        dense = estimates + expected_excess(deviation, correction, width)
        count = int(stay(everything, estimates, deviation, dense, 0.0).sum())
        if count <= limit or lengths[0] == lengths[1]:
            break
    if count > usual.survivors:
        return no_answer("drifted")
    preview = length
    for lowered in range(8):
        length, there, highest = preview, 0, -math.inf
        values, now = estimates, deviation
        added = expected_excess(deviation, correction, width)
        dense, ends = values + added, values + width * now  # with `added`, of the last estimate of each row
        left = torch.ones(n, dtype=torch.bool)
        for level in range(1, len(lengths)):
            if level > 1:
                longer, count = lengths[level], int(left.sum())
                cost = (longer - length) * e * 2 + count * (longer - there + 1)
                if longer < 2 * length or 2 * cost > count * d * item:
                    continue
                values, now, _, _ = known.look(level)
                added = torch.where(left, expected_excess(now, correction, width), added)
                dense = torch.where(left, values + added, dense)
                ends = torch.where(left, values + width * now, ends)
                read += cost + len(probes) * (longer - there + 1)
                entries += (count + len(probes)) * (longer - there)
                length = there = longer
            left = stay(left, values, now, dense, lowered)
        count = int(left.sum())
        if 2 * count > n:
            break
        read, entries = read + count * d * item, entries + count * d
        kth = float(exact[left].topk(k).values[-1]) if k else math.inf
        dense = torch.where(left, exact, _limited(dense, kth, highest))
        masses = (dense - shift).exp()
        half = float(doubt * (masses * added.clamp_max(1))[~left].sum() / masses.sum())
        closest = min(closest, abs(half - tolerance))
        if half <= tolerance:
            rows, log_z = left.nonzero()[:, 0], float(dense.logsumexp(0))
            if k and log_z - kth > usual.flat:
                return no_answer("drifted")
            top, order = exact[rows].topk(k)
            if upper:
                dense = torch.where(left, exact, ends)
            return CascadeAnswer(
                "answered", rows[order], top, log_z, half, entries, read, scale, signal, toward, rows, dense, closest
            )
    return no_answer("expensive")


def _limited(dense: Tensor, kth: float, level: float) -> Tensor:
    """Estimates of rows that did not reach a level, below the k-th logit even if the level is not."""
    below = kth - 1e-6 * abs(kth)
    return dense.clamp_max(below) if below < level else dense


def short_cascade(
    weight: Tensor,
    x: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 1.0,
    centre: Tensor,
    projection: Tensor,
    codes: Tensor,
    lengths: Sequence[int],
    deviations: Tensor,
    probes: Tensor,
    k: int,
    width: float,
    correction: float,
    floor: float,
    doubt: float,
    tolerance: float,
    mean: Tensor | None = None,
    usual: Usual = Usual(),  # noqa: B008
    upper: bool = False,
    capacity: float = math.inf,
    group: int = 64,
) -> CascadeAnswer:
    """One query through a preview, at most one tier, and exact rows: what a GPU does, in steps of a fixed number.

    A row stays while its estimate with ``width`` deviations reaches the k-th best estimate, or the part of the
    normaliser that matters. For the preview the k-th best of the best of each ``group`` rows stands for it, with k = 1
    that is the same. More survivors of the preview than ``capacity``, or more doubt about the normaliser than
    ``tolerance``, are no answer. Estimates of all logits are below the k-th logit of the answer, after log Z was summed
    up. Arguments as for `cascade`; ``lengths`` and ``deviations`` of the preview and, if there is one, of the tier.
    What is read is not counted.
    """
    n = len(weight)
    known = _Estimates(weight, x, bias, beta, centre, projection, codes, lengths, deviations, probes, mean)
    exact, toward = known.exact, known.toward
    none = torch.zeros(0, dtype=torch.int64)
    closest, scale, signal, highest = math.inf, math.nan, math.nan, -math.inf
    left = torch.ones(n, dtype=torch.bool)
    dense = added = ends = exact

    def no_answer(state: str) -> CascadeAnswer:
        return CascadeAnswer(state, none, exact[:0], 0.0, 0.0, 0, 0, scale, signal, toward, none, exact[:0], closest)

    for level in range(len(lengths)):
        estimates, deviation, unit, size = known.look(level)
        if level == 0:
            scale, signal, shift = unit, size, float(estimates.max())
            inside = usual.low <= scale <= usual.high and usual.toward_low <= toward <= usual.toward_high
            if not (inside and signal >= usual.signal):
                return no_answer("drifted")
        added = torch.where(left, expected_excess(deviation, correction, width), added)
        dense = torch.where(left, estimates + added, dense)
        ends = torch.where(left, estimates + width * deviation, ends)
        bound = float(dense.logsumexp(0)) + floor
        if k:
            some = estimates[left] if level else torch.stack([part.max() for part in torch.split(estimates, group)])
            bound = min(bound, float(some.topk(k).values[-1]) if len(some) >= k else -math.inf)
        bound -= 1e-6 * abs(shift)
        highest = max(highest, bound)
        reach = estimates + width * deviation - bound
        closest = min([closest, *reach[left].abs().tolist()])
        left = left & (reach >= 0)
        if level == 0 and int(left.sum()) > usual.survivors:
            return no_answer("drifted")
        if level == 0 and int(left.sum()) > capacity:
            return no_answer("expensive")
    dense = torch.where(left, exact, dense)
    masses = (dense - dense.max()).exp()
    half = float(doubt * (masses * added.clamp_max(1))[~left].sum() / masses.sum())
    closest = min(closest, abs(half - tolerance))
    rows, log_z = left.nonzero()[:, 0], float(dense.logsumexp(0))
    top, order = exact[rows].topk(min(k, len(rows)))
    kth = float(top[-1]) if k and len(top) else math.inf
    if k and log_z - kth > usual.flat:
        return no_answer("drifted")
    dense = torch.where(left, exact, ends if upper else _limited(dense, kth, highest))
    state = "answered" if half <= tolerance else "expensive"
    return CascadeAnswer(state, rows[order], top, log_z, half, 0, 0, scale, signal, toward, rows, dense, closest)
