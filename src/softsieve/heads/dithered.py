"""The cascade without sample queries: dithered codes, whose errors have the same distribution for every weight.

A row, less the mean row and randomly rotated, is coded with 4 bits a coordinate and *one dither for all rows*, a number
``v ~ U[-1/2, 1/2)`` for each coordinate::

    scale = max_j |a_j| / 7.5
    code = floor(a / scale + v)                      # -8 to 7
    estimate = scale * (code - v + 1/2)

Then ``(estimate - a) / scale`` is uniform on (-1/2, 1/2] and independent over coordinates, *whatever a is*: v alone is
random. The next 4 bits are the same code of what is left, ``a - estimate``, with a dither of their own: it is within
half a scale, so ``scale / 15`` takes the place of the scale.

So an estimated logit is wrong by ``scale * sum_j y_j U_j``, where y is the rotated query. A uniform U is the sum of
random signs times 1/4, 1/8, ..., so this is a weighted sum of random signs, of variance ``(scale |y|)^2 / 12``. Of such
a sum S of variance 1, ``P(S >= t) <= 3.18 P(Z >= t)`` with a normal Z (Bentkus and Dzindzalieta, A tight Gaussian bound
for weighted sums of Rademacher random variables, Bernoulli 21, 2015). With the union over both ends of both intervals
of n rows, all intervals hold at once with probability 1 - delta: over the dithers, for every weight, and for every
query that was chosen without looking at them. Everything after that is arithmetic, as in `coordinates`. The rotation is
not needed for any of this; it makes the largest coordinate of a row, hence its scale, small.

Needs numba, so import this module where it is used.
"""

from __future__ import annotations

import math
import threading
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softsieve.heads.above import RowsAbove
from softsieve.heads.cascade.cpu import one_at_a_time, raw_bits
from softsieve.heads.engine import Answer, Engine, Layer, Promise
from softsieve.heads.quantised import Weight
from softsieve.heads.reader import Reader
from softsieve.heads.watching import Sample
from softsieve.kernels import dithered_numba as kernels
from softsieve.kernels.cascade_numba import BLOCK, exact_rows

REACH = 7.5  # scales from 0 that 16 codes cover, whatever the dither
FINER = 15  # by so much the second code is finer than the first
SIGNS = 1 / (4 * NormalDist().cdf(-math.sqrt(2)))  # 3.18
REST = 1.5  # of eps: what rows not read further may leave open, relative to the partition function; less than 2

Array = Any  # np.ndarray, of any shape and dtype


class Index(NamedTuple):
    """What is kept for queries besides the weight (n, d). ``c = ceil(d / 2)``."""

    centre: Tensor  # (d,), the mean row
    signs: Tensor  # (2, p) int8: of the rotation, p the greatest power of two in d
    dither: Tensor  # (2, d) float64: of the first and of the second code
    scale: Tensor  # (n,)
    coarse: Tensor  # (blocks, c, BLOCK) uint8: the first codes, two a byte, a column of a block at a time
    fine: Tensor  # (n, c) uint8: the second codes, a row at a time


def empty(n: int, d: int, dtype: torch.dtype) -> Index:
    """An index of this shape, nothing of it filled in but zeros for the rows that the last block lacks."""
    size = (d + 1) // 2
    return Index(
        torch.empty(d, dtype=dtype),
        torch.empty(2, 1 << (d.bit_length() - 1), dtype=torch.int8),
        torch.empty(2, d, dtype=torch.float64),
        torch.empty(n, dtype=dtype),
        torch.zeros(-(-n // BLOCK), size, BLOCK, dtype=torch.uint8),
        torch.empty(n, size, dtype=torch.uint8),
    )


def build(weight: Weight, seed: int) -> Index:
    """Code the rows, a block at a time, in float64."""
    reader, generator = Reader(weight), torch.Generator().manual_seed(seed)
    index = empty(reader.rows, reader.size, reader.dtype)
    index.centre.copy_(reader.centre)
    index.signs.copy_(torch.randint(2, index.signs.shape, generator=generator) * 2 - 1)
    factors = _factors(index)
    index.dither.copy_(torch.rand(index.dither.shape, generator=generator, dtype=torch.float64) - 0.5)
    for number in range(-(-len(weight) // BLOCK)):
        rows = weight[number * BLOCK : (number + 1) * BLOCK]
        turned = (rows.double() - index.centre).contiguous()
        # Two overlapping Hadamard transforms, because `hadamard.rotate` fills rows up to a power of two, nearly twice
        # the bytes for 576 coordinates, and a dense orthogonal matrix would have to be read for every query.
        kernels.rotate_rows(turned.numpy(), factors)
        scale = _upwards(turned.abs().amax(-1) / REACH, index.scale.dtype)
        units = turned / torch.where(scale > 0, scale, 1.0)[:, None]
        first = (units + index.dither[0]).floor_().clamp_(-8, 7)
        left = (units - (first - index.dither[0] + 0.5)) * FINER
        second = (left + index.dither[1]).floor_().clamp_(-8, 7)
        at = slice(number * BLOCK, number * BLOCK + len(rows))
        index.scale[at], index.fine[at] = scale, _packed(second)
        index.coarse[number, :, : len(rows)] = _packed(first).T
    return index


def _factors(index: Index) -> Array:
    return (index.signs.double() / math.sqrt(index.signs.shape[1])).numpy()


def _upwards(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to a dtype, never down."""
    rounded = values.to(dtype)
    above = torch.nextafter(rounded, torch.tensor(torch.inf, dtype=dtype))
    return torch.where(rounded.double() < values, above, rounded)


def _packed(codes: Tensor) -> Tensor:
    """Codes from -8 to 7, two a byte."""
    size = (codes.shape[1] + 1) // 2
    digits = torch.zeros(len(codes), 2, size, dtype=torch.uint8)
    digits.view(len(codes), -1)[:, : codes.shape[1]] = (codes + 8).to(torch.uint8)
    return digits[:, 0] | digits[:, 1] << 4


def half_widths(n: int, d: int, delta: float) -> tuple[float, float]:
    """Half an interval after the first and after the second code, in scales, for a query of norm 1.

    ``t / sqrt(12)`` with ``3.18 P(Z >= t) = delta / (4 n)``, and a fifteenth of that: both ends of both intervals of n
    rows share delta. What is added is for rounding: ``2^-24`` times the roundings that a term goes through, times the
    sum of absolute terms. Sums in float32 add up groups first, so a term meets those of its group and one for each
    group, in any order. Digits up to 15 and the offset make terms of at most ``23 sum_j |y_j| <= 23 sqrt(d)``. What
    query and estimate meet besides is relative to the estimate, at most ``7.5 sqrt(d)``.
    """
    deviations = -NormalDist().inv_cdf(max(delta / (4 * n * SIGNS), 5e-324))
    uniform = deviations / math.sqrt(12)
    coarse, fine = (
        math.sqrt(d) * 2**-24 * (24 * (2 * group + d / (2 * group) + 4) + 8 * REACH)
        for group in (kernels.GROUP, kernels.STRETCH)
    )
    return uniform + coarse, uniform / FINER + coarse + fine / FINER


class Codes:
    """Dithered codes of a weight on the CPU (n, d), which take a byte for each entry; ``seed`` is that of all draws."""

    def __init__(self, weight: Weight, *, seed: int = 0) -> None:
        self.weight, self.index = weight.detach(), build(weight.detach(), seed)
        self._weight, self._factors = raw_bits(self.weight), _factors(self.index)
        self._centre, _, self._dither, self._scale, self._coarse, self._fine = (value.numpy() for value in self.index)

    def solve(self, queries: Tensor, bias: Tensor | None, k: int, promise: Promise) -> Answer:
        """Answer every query by itself, with the promised probability rightly. The chosen rows are read in full."""
        dtype = self.index.scale.dtype
        known_bias = (torch.zeros(0) if bias is None else bias).to(dtype).numpy()
        halves = half_widths(len(self.weight), self.weight.shape[1], promise.delta)
        with one_at_a_time(), np.errstate(all="ignore"):
            answers = [
                _answer(Known(self, x, known_bias, halves), k, promise.eps) for x in queries.contiguous().numpy()
            ]
        kinds = (torch.int64, dtype, dtype, dtype, dtype, torch.int64, torch.int64, torch.bool)
        fields = zip(zip(*answers, strict=True), kinds, strict=True)
        return Answer(*(torch.from_numpy(np.stack(values)).to(kind) for values, kind in fields))

    def above(self, queries: Tensor, bias: Tensor | None, threshold: float, promise: Promise) -> RowsAbove:
        """Rows above a threshold of every query, with the promised probability all of them."""
        dtype = self.index.scale.dtype
        known_bias = (torch.zeros(0) if bias is None else bias).to(dtype).numpy()
        halves = half_widths(len(self.weight), self.weight.shape[1], promise.delta)
        with one_at_a_time(), np.errstate(all="ignore"):
            found = [_above(Known(self, x, known_bias, halves), threshold) for x in queries.contiguous().numpy()]
        rows, logits, bytes_read, exact = zip(*found, strict=True)
        return RowsAbove(
            torch.repeat_interleave(torch.tensor([one.size for one in rows])),
            torch.from_numpy(np.concatenate(rows)),
            torch.from_numpy(np.concatenate(logits)),
            torch.tensor(bytes_read),
            torch.tensor(exact),
        )


class Dithered(Engine):
    """The cascade of dithered codes. They take a pass over the weight, are made when they are first needed, and anew
    when the weight may have changed: nothing was fitted that a change could break.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self._made: tuple[tuple[int, ...], Sample, Codes] | None = None  # and what the watch said then
        self._lock = threading.Lock()

    def topk(self, x: Tensor, k: int, promise: Promise, generator: torch.Generator | None = None) -> Answer:
        queries = self.layer.scaled(x, "x")
        return self._codes().solve(queries, self.layer.scaled_bias(), k, promise).shaped(x.shape[:-1])

    def above(self, queries: Tensor, threshold: float, promise: Promise) -> RowsAbove:
        return self._codes().above(queries, self.layer.scaled_bias(), threshold, promise)

    def _codes(self) -> Codes:
        with self._lock:
            seen = self.layer.watch.now()
            if self._made is None or self._made[0] != seen or not self._made[1].unchanged():
                weight, seed = self.layer.weight, self.layer.options.seed
                self._made = seen, Sample(weight), Codes(weight, seed=seed)
            return self._made[2]


# -- one query ---------------------------------------------------------------------------------------------------------

CODED, REFINED, EXACT = 0, 1, 2  # how well a row is known


class Known:
    """What is known of the logits of a query: an interval for each row, and what was read for it."""

    def __init__(self, codes: Codes, x: Array, bias: Array, halves: tuple[float, float]) -> None:
        self.codes, self.x, self.bias, self.halves = codes, x, bias, halves
        n, d = codes.weight.shape
        turned = x.astype(np.float64)[None]
        kernels.rotate_rows(turned, codes._factors)
        largest = np.abs(turned).max()
        unit = turned[0] / (largest or 1.0)
        norm = np.linalg.norm(unit)
        self.y = np.zeros((2, codes._fine.shape[1]), np.float32)  # of norm 1: no sum of its terms leaves float32
        self.y.reshape(-1)[:d] = unit / (norm or 1.0)
        # A digit stands for itself, less 8, less the dither, plus 1/2.
        self.offsets = (-7.5 - codes._dither) @ self.y.reshape(-1)[:d].astype(np.float64)
        self.spread = codes._scale * codes._scale.dtype.type(largest * norm)
        common = codes._scale.dtype.type(codes._centre.astype(np.float64) @ x.astype(np.float64))
        self.base = common + bias if bias.size else np.broadcast_to(common, n)
        self.low, self.high = np.empty((2, n), codes._scale.dtype)
        self.tier = np.zeros(n, np.uint8)
        estimates = np.empty(len(codes._coarse) * BLOCK, np.float32)
        kernels.preview(codes._coarse, self.y, np.float32(self.offsets[0]), estimates)
        self.estimates = estimates[:n]
        self._set(slice(None), self.estimates, halves[0])
        index = codes.index
        self.coordinates = n * d
        self.bytes_read = codes._fine.nbytes + sum(
            v.nbytes for v in (*index[:4], bias)
        )  # coarse codes, as many as fine

    def _set(self, rows: Any, estimates: Array, half: float) -> None:
        spread = self.spread[rows]
        middle = spread * estimates + self.base[rows]
        spread = spread * half
        self.low[rows], self.high[rows] = middle - spread, middle + spread

    def read_further(self, rows: Array) -> None:
        """The second codes of rows of which the first are known; the others in full."""
        tier = self.tier[rows]
        self._refine(rows[tier == CODED])
        self.read(rows[tier == REFINED])

    def _refine(self, rows: Array) -> None:
        more = np.empty(rows.size, np.float32)
        kernels.refine(self.codes._fine, self.y, np.float32(self.offsets[1]), rows, more)
        self._set(rows, self.estimates[rows] + more / np.float32(FINER), self.halves[1])
        self.tier[rows] = REFINED
        self.coordinates += rows.size * self.x.size
        self.bytes_read += rows.size * (self.y.shape[1] + self.spread.itemsize)

    def read(self, rows: Array) -> None:
        """Rows in full."""
        logits = np.empty(rows.size, self.low.dtype)
        exact_rows(self.codes._weight, self.x, rows, self.bias, logits)
        self.low[rows] = self.high[rows] = logits
        self.tier[rows] = EXACT
        self.coordinates += rows.size * self.x.size
        self.bytes_read += rows.size * (self.codes.weight.nbytes // len(self.codes.weight))


def _answer(known: Known, k: int, eps: float) -> tuple[Array, ...]:
    """Read until all is settled; fields of `Answer`.

    A row whose upper end is below the k-th largest lower end is not among the top k. When the chosen rows are known,
    their probabilities, and the partition function, are known to eps if and only if the greatest and the least sum of
    exponentials differ by no more than eps times both together. Until then, rows are read further where they leave
    most open: all but those which together leave no more open than a part of eps. As that part is of the geometric mean
    of both sums, which is at most the arithmetic one, there always are some.
    """
    low, high, tier = known.low, known.high, known.tier
    gaps = np.empty(low.size, np.float32)
    while True:
        shift = high.max()
        if not (np.isfinite(shift) and np.isfinite(low.min())):  # beyond what can be computed with
            unread = np.flatnonzero(tier < EXACT)
            if unread.size:
                known.read(unread)
                continue
            rows, least, most = np.arange(k), np.nan, np.nan
            break
        best = _kth(low, k) if k else np.inf
        wanted = high >= best
        wanted &= (low < high) & (np.count_nonzero(wanted) > k)
        least, most = kernels.sum_exponentials(low, high, shift, gaps)
        if most - least > eps * (most + least):
            still_open = gaps > kernels.gap_threshold(gaps, REST * eps * math.sqrt(least * most))
            wanted |= still_open if still_open.any() else low < high
        if wanted.any():
            known.read_further(np.flatnonzero(wanted))
            continue
        rows = np.flatnonzero(low >= best)
        rows = rows[np.argsort(-low[rows], kind="stable")][:k]  # of those tied, any
        unread = rows[tier[rows] < EXACT]
        if not unread.size:
            break
        known.read(unread)
    # The number within eps of all between: for probabilities, which it divides, and for the sum itself.
    middle = (least + most) / 2 if k else 2 * least * most / (least + most)
    log_z = float(shift) + math.log(middle)
    ends = float(shift) + np.log([least, most])
    probs = np.exp(low[rows].astype(np.float64) - log_z)
    return rows, probs, low[rows], log_z, ends, known.coordinates, known.bytes_read, (tier == EXACT).all()


def _above(known: Known, threshold: float) -> tuple[Array, Array, int, bool]:
    """Rows above a threshold, their logits, bytes read, and whether everything was read.

    A row whose upper end is not above it is not. The second codes are read of those that the first leave open, then
    rows in full: those that are above, too, whose logits are wanted.
    """
    low, high, tier = known.low, known.high, known.tier
    # An end that is no number says nothing. Rows that are sure to be above need no finer code, only their logit.
    known.read_further(np.flatnonzero(~(high <= threshold) & ~(low > threshold)))
    unread = np.flatnonzero(~(high <= threshold) & (tier < EXACT))
    known.read(unread)
    rows = np.flatnonzero(high > threshold)
    return rows, high[rows], known.bytes_read, bool((tier == EXACT).all())


def _kth(values: Array, k: int) -> Any:
    """The k-th largest."""
    # Of k blocks, each with a number that large, at least k numbers are.
    whole = values[: values.size // BLOCK * BLOCK].reshape(-1, BLOCK).max(-1)
    if whole.size >= k:
        values = values[values >= np.partition(whole, -k)[-k]]
    return np.partition(values, -k)[-k]
