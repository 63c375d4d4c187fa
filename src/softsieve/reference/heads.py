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
    finalists: Tensor  # rows that were read in full
    dense: Tensor  # (n,): all logits; those of estimates have the estimated masses
    closest: float  # by so much a decision would have to be missed to be another one


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
    low: float = 0.0,
    high: float = math.inf,
) -> CascadeAnswer:
    """One query through a preview, tiers of longer codes and exact rows, each row by itself.

    A row stays while its estimate with ``width`` deviations reaches what it takes to be among the top k, half way from
    the k-th best estimate to the k-th largest logit of the rows with the best ones, or the part of the normaliser that
    matters, whichever is less. Where fewer than k rows would stay, it is the k-th best estimate. When the preview
    leaves more rows than ``limit``, a longer one is made.

    A row is estimated by ``centre @ x + codes[:, :length] @ (projection @ x)[:length]``, with beta as one more
    coordinate of x if there is a bias.

    Args:
        weight, bias: (n, d) and (n,).
        x: (d,).
        centre, projection, codes: (e,), (longest, e) and (n, longest); e is d, and one more with a bias.
        lengths: of the preview and of the longer one, then of the tiers.
        deviations: predicted ones of the errors of each. (2 + tiers, n)
        probes: rows whose errors say how large the errors of this query are.
        k, limit, width, correction, floor, doubt, tolerance, low, high: as in `softsieve.kernels.cascade_numba.Plan`.
    """
    (n, d), e, item = weight.shape, len(centre), weight.element_size()
    exact = logits(weight, x, bias, beta=beta)
    extended = beta * (x.double() if bias is None else torch.cat([x.double(), torch.ones(1, dtype=torch.float64)]))
    terms = codes.double() * (projection.double() @ extended)
    closest = math.inf

    def look(level: int) -> tuple[Tensor, Tensor, float]:
        """Estimates of all rows, the deviations of their errors, and the scale of these on the probes."""
        estimates = centre.double() @ extended + terms[:, : lengths[level]].sum(-1)
        errors = (exact - estimates)[probes] / deviations[level, probes].double()
        scale = float(errors.square().mean().sqrt())
        return estimates, scale * deviations[level].double(), scale

    def no_answer(state: str) -> CascadeAnswer:
        none = torch.zeros(0, dtype=torch.int64)
        return CascadeAnswer(state, none, exact[:0], 0.0, 0.0, entries, read, scale, none, exact[:0], closest)

    def stay(left: Tensor, values: Tensor, deviation: Tensor, dense: Tensor, lowered: float) -> Tensor:
        """Which of the rows that are left may matter, as their estimates say."""
        nonlocal closest
        bound = float(dense.logsumexp(0)) + floor
        if k:
            best = float(values[left].topk(k).values[-1])
            goal = (best + max(best, sure)) / 2
            reach = values + width * deviation - (min(bound, goal) - lowered - rounding)
            closest = min(closest, float(reach[left].abs().min()))
            bound = min(bound, best if int((left & (reach >= 0)).sum()) < k else goal)
        reach = values + width * deviation - (bound - lowered - rounding)
        closest = min(closest, float(reach[left].abs().min()))
        return left & (reach >= 0)

    read, entries = e * 2 + len(probes) * d * item, len(probes) * d
    known, scale = 0, math.nan
    for level in range(2):
        estimates, deviation, measured = look(level)
        more, known = lengths[level] - known, lengths[level]
        read, entries = read + more * e * 2 + len(probes) * (more + 1), entries + len(probes) * more
        if level == 0:
            scale = measured
            if not low <= scale <= high:
                return no_answer("drifted")
        read, entries = read + n * (more + 1), entries + n * more
        shift, rounding = float(estimates.max()), 1e-6 * abs(float(estimates.max()))
        sure = math.inf
        if k:
            ahead = estimates >= estimates.topk(min(k + 8, n)).values[-1]
            sure = float(exact[ahead].topk(k).values[-1])
            read, entries = read + int(ahead.sum()) * d * item, entries + int(ahead.sum()) * d
        everything = torch.ones(n, dtype=torch.bool)
        count = int(stay(everything, estimates, deviation, estimates + correction * deviation.square(), 0.0).sum())
        if count <= limit or lengths[0] == lengths[1]:
            break
    preview = known
    for lowered in range(8):
        known, there = preview, 0
        values, now = estimates, deviation
        added = correction * deviation.square()
        dense = values + added  # with `added`, of the last estimate of each row
        left = torch.ones(n, dtype=torch.bool)
        for level in range(1, len(lengths)):
            if level > 1:
                longer, count = lengths[level], int(left.sum())
                cost = (longer - known) * e * 2 + count * (longer - there + 1)
                if longer < 2 * known or 2 * cost > count * d * item:
                    continue
                values, now, _ = look(level)
                added = torch.where(left, correction * now.square(), added)
                dense = torch.where(left, values + added, dense)
                read += cost + len(probes) * (longer - there + 1)
                entries += (count + len(probes)) * (longer - there)
                known = there = longer
            left = stay(left, values, now, dense, lowered)
        count = int(left.sum())
        if 2 * count > n:
            break
        read, entries = read + count * d * item, entries + count * d
        dense = torch.where(left, exact, dense)
        masses = (dense - shift).exp()
        half = float(doubt * (masses * added.clamp_max(1))[~left].sum() / masses.sum())
        closest = min(closest, abs(half - tolerance))
        if half <= tolerance:
            rows, log_z = left.nonzero()[:, 0], float(dense.logsumexp(0))
            top, order = exact[rows].topk(k)
            return CascadeAnswer("answered", rows[order], top, log_z, half, entries, read, scale, rows, dense, closest)
    return no_answer("expensive")


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
    low: float = 0.0,
    high: float = math.inf,
    capacity: float = math.inf,
    group: int = 64,
) -> CascadeAnswer:
    """One query through a preview, at most one tier, and exact rows: what a GPU does, in steps of a fixed number.

    A row stays while its estimate with ``width`` deviations reaches the k-th best estimate, or the part of the
    normaliser that matters. For the preview the k-th best of the best of each ``group`` rows stands for it, with k = 1
    that is the same. More survivors of the preview than ``capacity``, or more doubt about the normaliser than
    ``tolerance``, are no answer. Arguments as for `cascade`; ``lengths`` and ``deviations`` of the preview and, if
    there is one, of the tier. What is read is not counted.
    """
    n = len(weight)
    exact = logits(weight, x, bias, beta=beta)
    extended = beta * (x.double() if bias is None else torch.cat([x.double(), torch.ones(1, dtype=torch.float64)]))
    terms = codes.double() * (projection.double() @ extended)
    none = torch.zeros(0, dtype=torch.int64)
    closest, scale = math.inf, math.nan
    left = torch.ones(n, dtype=torch.bool)
    dense = added = exact
    for level, length in enumerate(lengths):
        estimates = centre.double() @ extended + terms[:, :length].sum(-1)
        errors = (exact - estimates)[probes] / deviations[level, probes].double()
        unit = float(errors.square().mean().sqrt())
        deviation = unit * deviations[level].double()
        if level == 0:
            scale, shift = unit, float(estimates.max())
            if not low <= scale <= high:
                return CascadeAnswer("drifted", none, exact[:0], 0.0, 0.0, 0, 0, scale, none, exact[:0], closest)
        added = torch.where(left, correction * deviation.square(), added)
        dense = torch.where(left, estimates + added, dense)
        bound = float(dense.logsumexp(0)) + floor
        if k:
            some = estimates[left] if level else torch.stack([part.max() for part in torch.split(estimates, group)])
            bound = min(bound, float(some.topk(k).values[-1]) if len(some) >= k else -math.inf)
        reach = estimates + width * deviation - (bound - 1e-6 * abs(shift))
        closest = min([closest, *reach[left].abs().tolist()])
        left = left & (reach >= 0)
        if level == 0 and int(left.sum()) > capacity:
            return CascadeAnswer("expensive", none, exact[:0], 0.0, 0.0, 0, 0, scale, none, exact[:0], closest)
    dense = torch.where(left, exact, dense)
    masses = (dense - dense.max()).exp()
    half = float(doubt * (masses * added.clamp_max(1))[~left].sum() / masses.sum())
    closest = min(closest, abs(half - tolerance))
    rows, log_z = left.nonzero()[:, 0], float(dense.logsumexp(0))
    top, order = exact[rows].topk(min(k, len(rows)))
    state = "answered" if half <= tolerance else "expensive"
    return CascadeAnswer(state, rows[order], top, log_z, half, 0, 0, scale, rows, dense, closest)
