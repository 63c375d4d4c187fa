"""How far an estimate can be from the truth.

A round reads a prefix of a random order of the coordinates. Three kinds of rounds, one for each thing that may be
known:

- `Declared`: the caller declares the variance of the noise of a pull, as in the paper. Sub-Gaussian intervals.
- `Computed`: nothing is declared; Bernstein's inequality with bounds computed from the weight and the query.
- `Calibrated`: a predicted deviation times what it took to answer sample queries rightly (`calibration`).

The last two estimate ``(A - centre) x`` and add ``centre . x``, where the centre is the mean row: what all logits have
in common is known, not estimated. Below, ``A`` stands for that difference.

Only these make intervals. Those of the first two hold for all rows and rounds at once with probability 1 - delta, and
everything after them (`coordinates`) is arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from softsieve.heads.coordinates.estimators import arrivals, inclusion, prefix
from softsieve.heads.reader import Reader

FIRST = 16  # coordinates of the shortest prefix where noise is not declared: fewer decide nothing

# Half an interval for pairs of a query and a row (anything that broadcasts), given the sum of squares where asked for.
Half = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Round(NamedTuple):
    """Coordinates to read for every query, and what they tell."""

    coords: Tensor  # (batch, m)
    factor: Tensor  # (batch, m): the estimate is offset + sum factor_m (A - centre)[i, coords_m]; 0 beyond a prefix
    offset: Tensor  # (batch,)
    root: Tensor | None  # (batch, m), float64: the variance estimate is the sum of (root_m (A - centre)[i, coords_m])^2
    half: Half


class Bounds(Protocol):
    """Makes the rounds of a call."""

    reader: Reader  # of the weight that they bound, from which prefixes are read
    hold: bool  # whether the intervals themselves are promised to hold, or only the answers made from them

    def rounds(self, x: Tensor, generator: torch.Generator | None) -> Iterator[Round]:
        """Rounds for the queries (batch, d), each reading about twice as much as the one before."""


def sizes(d: int, first: int) -> list[int]:
    """Lengths of the prefixes: doubling, up to half of all coordinates. Beyond that, all are read."""
    lengths = []
    while first <= d // 2:
        lengths.append(first)
        first *= 2
    return lengths


def log_term(n: int, d: int, delta: float) -> float:
    """``ln(6 n ln(d) / delta)``: three events for each of n rows in up to 2 ln(d) rounds, delta in all."""
    return math.log(6 * n * math.log(max(d, 3)) / delta)


def most_rounds(d: int) -> int:
    """For which `log_term` pays."""
    return int(2 * math.log(max(d, 3)))


class Declared:
    """Uniform order without replacement, noise declared.

    A pull of row i is ``d A_ij x_j`` for a coordinate j drawn uniformly. If its distance from the mean is sub-Gaussian
    with the declared variance, so is the mean of m pulls with variance / m, with replacement and, by Hoeffding's
    comparison, without. Union over rows and rounds.
    """

    hold = True

    def __init__(self, reader: Reader, noise: float, delta: float) -> None:
        self.reader, self.noise = reader, noise
        self.log_term = log_term(reader.rows, reader.size, delta)

    def rounds(self, x: Tensor, generator: torch.Generator | None) -> Iterator[Round]:
        d = x.shape[-1]
        order = torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float64).argsort(-1)
        for size in sizes(d, 4)[: most_rounds(d)]:
            index = order[:, :size]
            factor = x.gather(-1, index) * (d / size)
            common = (factor * self.reader.centre[index]).sum(-1)  # the declaration is of pulls as they are
            yield Round(index, factor, common, None, self._half(size))

    def _half(self, size: int) -> Half:
        width = math.sqrt(2 * self.noise / size * self.log_term)
        return lambda query, row, _: torch.full((query + row).shape, width, dtype=self.reader.dtype, device=row.device)


class Computed:
    """Weighted order without replacement, nothing declared.

    By a time fixed before, each coordinate has arrived with probability ``pi_j``, independently. So the error
    ``sum_j A_ij x_j (I_j / pi_j - 1)`` of the Horvitz-Thompson estimate is a sum of independent centred terms: with
    variance ``V`` and terms of at most ``B``, Bernstein's inequality gives ``sqrt(2 V L) + B L / 3`` at probability
    ``2 exp(-L)``. V and B are bounded before anything is read, by row norms and by ``rho_i = max_j |A_ij| / s_j``
    (``s_j`` the column sums that make the weights ``w_j = |x_j| s_j``). Where single entries are read, V is also
    bounded by its own estimate ``V'``: a sum of independent non-negative terms of at most ``b``, so ``sqrt(V) <= sqrt(b
    L / 2) + sqrt(V' + b L / 2)`` but with probability ``exp(-L)`` (Maurer and Pontil's argument). Union over rows and
    rounds.
    """

    hold = True

    def __init__(self, reader: Reader, delta: float) -> None:
        self.reader = reader
        self.log_term = log_term(reader.rows, reader.size, delta)
        # A little upwards, so that rounding does not shrink an interval.
        up = 1 + 1e-5
        self.column_sums = column_sums(reader)
        self.norm = norms(reader) * up
        self.largest = torch.cat([part.abs().amax(-1) for part in centred(reader)]) * up
        inverse = torch.where(self.column_sums > 0, 1 / self.column_sums, 0.0)
        self.rho = torch.cat([(part.abs() * inverse).amax(-1).to(reader.dtype) for part in centred(reader)]) * up

    def rounds(self, x: Tensor, generator: torch.Generator | None) -> Iterator[Round]:
        weights = x.double().abs() * self.column_sums
        total, present = weights.sum(-1, keepdim=True), (weights > 0).sum(-1)
        arrived, order = arrivals(weights, generator=generator).sort(-1)
        for number in range(most_rounds(x.shape[-1])):
            # By this time 16, 32 ... have arrived at most on average, fewer the more the weights differ.
            time = torch.where(total > 0, FIRST * 2**number / total.clamp_min(1e-300), 0.0)
            pi = inclusion(weights, time).clamp_min(1e-200)
            if number and bool((pi.where(weights > 0, 0.0).sum(-1) > present / 2).all()):
                break
            yield self._round(x, weights, pi, order, (arrived <= time).sum(-1))
        if int(present.max()) <= x.shape[-1] // 2:  # queries with so many zeros that all the rest is little
            yield self._round(x, weights, torch.ones_like(weights), order, present)

    def _round(self, x: Tensor, weights: Tensor, pi: Tensor, order: Tensor, length: Tensor) -> Round:
        spread = (1 - pi) / pi  # variance of I / pi
        index = order[:, : max(1, int(length.max()))]
        arrived = torch.arange(index.shape[1], device=x.device) < length[:, None]
        chance, read = pi.gather(-1, index), x.double().gather(-1, index)
        factor = torch.where(arrived, read / chance, 0.0).to(x.dtype)
        root = torch.where(arrived, read.abs() * (1 - chance).sqrt() / chance, 0.0)
        # Roots of V, B and roots of b, as far as they do not depend on the row: times rho, and times norm or largest.
        value = x.double().abs()
        step = torch.where(pi < 1, spread.clamp_min(1.0), 0.0)
        parts = (
            (weights.square() * spread).sum(-1).sqrt(),
            (weights * step).amax(-1),
            (weights.square() * spread / pi).amax(-1).sqrt(),
            (value.square() * spread).amax(-1).sqrt(),
            (value * step).amax(-1),
            (value.square() * spread / pi).amax(-1).sqrt(),
        )
        return Round(index, factor, x @ self.reader.centre, root, partial(self._half, parts))

    def _half(self, parts: tuple[Tensor, ...], query: Tensor, row: Tensor, estimated: Tensor | None) -> Tensor:
        # float64 only where squares of small numbers are, which float32 may not hold.
        rho, norm, largest = self.rho[row], self.norm[row], self.largest[row]
        vw, bw, ew, vx, bx, ex = (part[query].to(rho.dtype if estimated is None else torch.float64) for part in parts)
        deviation = torch.minimum(rho * vw, norm * vx)
        bound = torch.minimum(rho * bw, largest * bx)
        if estimated is not None:
            most = torch.minimum(rho * ew, largest * ex).square() * (self.log_term / 2)
            deviation = torch.minimum(deviation, most.sqrt() + (estimated + most).sqrt())
        return (deviation * math.sqrt(2 * self.log_term) + bound * (self.log_term / 3)).to(rho.dtype)


class Calibrated:
    """Weighted order without replacement, widths from sample queries.

    Half an interval is ``scale[round] * s_i``, where ``s_i = |A_i| sqrt(sum_j a_j x_j^2 (1 - pi_j) / pi_j)`` predicts
    the deviation (``a_j`` the share of column j in the squares of the weight). `calibration` chooses ``scale`` so that
    the *answers* made from such intervals are right; the intervals themselves may well fail to hold for some row.
    """

    hold = False

    def __init__(self, reader: Reader, scale: Tensor | None = None) -> None:
        self.reader, self.scale = reader, scale
        self.column_sums = column_sums(reader)
        self.norm = norms(reader)

    @property
    def count(self) -> int:
        """Rounds that a call has at most."""
        return len(sizes(self.reader.size, FIRST))

    @cached_property
    def shares(self) -> Tensor:
        squares = torch.stack([part.square().sum(0, dtype=torch.float64) for part in centred(self.reader)]).sum(0)
        return squares / squares.sum().clamp_min(1e-300)

    def rounds(self, x: Tensor, generator: torch.Generator | None) -> Iterator[Round]:
        if self.scale is None:
            raise RuntimeError("not calibrated")
        if not bool(self.scale.isfinite().all()):  # too few sample queries: nothing can be said from a part
            return
        for number, (index, factor, deviation) in enumerate(self.prefixes(x, generator)):
            wide = deviation * self.scale[number].to(deviation)
            yield Round(index, factor, x @ self.reader.centre, None, self._half(wide))

    def _half(self, wide: Tensor) -> Half:
        return lambda query, row, _: wide[query] * self.norm[row]

    def prefixes(self, x: Tensor, generator: torch.Generator | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Coordinates, factors and the predicted deviation (batch,) of a row of norm 1, round by round."""
        weights = x.double().abs() * self.column_sums
        arrived = arrivals(weights, generator=generator)
        order = arrived.argsort(-1)
        squares = self.shares * x.double().square()
        for size in sizes(x.shape[-1], FIRST):
            index = order[:, :size]
            pi = prefix(weights, arrived, order, size)
            deviation = (squares * (1 - pi) / pi).sum(-1).sqrt()
            factor = x.double().gather(-1, index) / pi.gather(-1, index)
            yield index, factor.to(x.dtype), deviation.to(x.dtype)


def centred(reader: Reader) -> Iterator[Tensor]:
    """The rows without their mean, some at a time."""
    return (part - reader.centre for part in reader.parts())


def norms(reader: Reader) -> Tensor:
    """Euclidean norms of the centred rows."""
    return torch.cat([torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64) for part in centred(reader)]).to(
        reader.dtype
    )


def column_sums(reader: Reader) -> Tensor:
    """``sum_i |A_ij|`` of the centred rows, which sampling is weighted by; float64."""
    return torch.stack([part.abs().sum(0, dtype=torch.float64) for part in centred(reader)]).sum(0)
