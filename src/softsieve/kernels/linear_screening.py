"""Rows of the linear loss that are solved by a wide margin, known from a product in 8 bits: screening.

The product of all rows is most of the time where few rows are dense. In 8 bits (e4m3: 1 sign, 4 of the exponent, 3 of
the mantissa) it takes half of it. A row whose label leads all others by more than the error of that product is solved:
its loss and gradients are 0. All other rows go through `kernels.linear` as they are, gathered.

**The error.** Hidden states and weights are rounded up or down at random, by chances that make the mean right. So for
any data the error of a logit, ``h . w - H . W`` with rounded ``H`` and ``W``, is a sum of independent terms of mean 0,
each in an interval as long as a step ``u`` of its number's grid, times a number. By Hoeffding's lemma it is
sub-Gaussian with the variance proxy

    V = sum (u_h / 2)^2 w^2 + sum H^2 (u_w / 2)^2
      <= |(u_h / 2)^2|_1/m |w^2|_m + |H^2|_1/m |(u_w / 2)^2|_m        where |x|_m^2 = sum m x^2

by Cauchy and Schwarz, for any positive ``m``; that of the columns is the mean square of the hidden states, so that a
few large columns cost nothing. These norms are of rows and of classes alone. With the largest ones of all classes

    P(any logit is off by more than t) <= 2 classes exp(-t^2 / 2V)
    P(the sum of the others' exponentials is above exp(t) times its estimate) <= exp(-t^2 / 2W)

the second because the mean of exponentials is at least the exponential of the mean error, weighted by softmax; for that
``W`` is ``V``, or less: roundings of different classes are independent, so the second term of ``V`` counts times the
largest softmax of another class. The label's own logit is exact. Half of `MISSED` for each gives the two ``t``. The
assumption is that the hash from which roundings come serves as random numbers.

**What is not random** has a `SLACK`: the product is rounded to 16 bits, by a part of its size ``|x|``, which is that
of the logit without its bias. For a single class the bound of its logit and the largest bias say what that is, or
``|h . w|^2 <= columns |h^2|_1/m |w^2|_m`` if it is less. For a sum of ``n`` exponentials, the largest of them of a
logit ``r``, it is ``max(r, log(n / sum))``: by Hoelder's inequality the sum of ``exp((1 - e) x)`` over negative ``x``
is at most ``n^e sum^(1 - e)``. A number that is not 0 has half a step in ``V`` even if it is on the grid, which leaves
room for what sums inside of a product lose.

What is known of rows that screening solves: their label leads, one class is kept, and log-sum-exp and margin are those
of the product in 8 bits with the label's exact logit, off by less than the first ``t``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softsieve.kernels import linear, linear_screening_torch, linear_torch
from softsieve.kernels.cross_entropy_torch import INF, accumulation_dtype
from softsieve.kernels.linear_types import (
    FEWEST,
    MEMORY,
    ON_CPU,
    SLACK,
    Chunk,
    Layer,
    Options,
    Saved,
    Scan,
    Settled,
    Targets,
    classes_at_a_time,
)

MISSED = 1e-6  # chance, at most, that a row is called solved that is not
ALIGNED = 16  # a multiple of which are the columns and classes of a product in 8 bits
LOST = 2**-24  # of a sum, by each of its roundings in float32
SEEDS = 0x5EED_0001, 0x5EED_0002  # of the roundings of hidden states and weights


class Quantised(NamedTuple):
    """Rows in 8 bits, and what is to be known of them for a bound on errors."""

    values: Tensor  # (rows, columns), e4m3; columns are a multiple of `ALIGNED`, the last ones 0
    scale: Tensor  # (rows,): of the values, a power of 2, so that scaling rounds nothing
    norm: Tensor  # (rows,): norm of the squares of the values, rounded up or as they were
    error: Tensor  # (rows,): norm of the squares of half a step of the grid, 0 for numbers that are 0

    def part(self, rows: int) -> Quantised:
        """The first rows."""
        return Quantised(self.values[:rows], self.scale[:rows], self.norm[:rows], self.error[:rows])


def make_quantised(rows: int, columns: int, like: Tensor) -> Quantised:
    """Memory for so many rows."""
    values = like.new_empty(rows, -(-columns // ALIGNED) * ALIGNED, dtype=torch.float8_e4m3fn)
    scale, norm, error = like.new_empty(3, rows, dtype=torch.float32).unbind()
    return Quantised(values, scale, norm, error)


@cache
def _kernels(name: str) -> Any:
    """The module that rounds, of that backend."""
    return (
        linear_screening_torch if name != linear.TRITON else import_module("softsieve.kernels.linear_screening_triton")
    )


def forward_counted(layer: Layer, targets: Targets, options: Options, shards: linear.Shards) -> tuple[Tensor, Saved]:
    """`kernels.linear` for rows none of which is ignored, of which those that screening solves are not looked at."""
    solved, saved = _screen(layer, targets, options)
    count = int((~solved).sum())
    if count == len(solved):
        return linear.forward_counted(layer, targets, options, shards)
    loss = saved.lse.new_zeros(())
    if count:
        rows = (~solved).nonzero_static(size=count).squeeze(1)
        summed = options if options.reduction == "none" else options._replace(reduction="sum")
        loss, some = linear.forward_counted(layer.select(rows), targets.select(rows), summed, shards)
        for value, part in zip(saved[:-1], some[:-1], strict=True):
            value[rows] = part
        saved = saved._replace(counts=some.counts)
        if options.reduction == "none":
            loss = torch.zeros_like(saved.lse).index_put_((rows,), loss)
    elif options.reduction == "none":
        loss = torch.zeros_like(saved.lse)
    if options.reduction == "mean":
        parts = saved.share.sum()
        parts = parts.masked_fill(parts == 0, 1)
        loss, saved = loss / parts, saved._replace(share=saved.share / parts)
    return loss, saved


def _screen(layer: Layer, targets: Targets, options: Options) -> tuple[Tensor, Saved]:
    """Which rows are solved for certain, and what is known of them; what others have is to be written over."""
    backend, kernels = linear.load_backend(options.backend), _kernels(options.backend)
    rows, label = len(layer.hidden), targets.label
    profile = torch.linalg.vector_norm(layer.hidden, dim=0, dtype=torch.float32).square_()
    profile = (profile / profile.mean()).clamp_(min=1e-6)
    top, own, rival = layer.hidden.new_full((3, rows), -INF, dtype=accumulation_dtype(layer.hidden)).unbind()
    state = Scan(top, torch.zeros_like(top), own, rival)
    marks = backend.make_marks(layer, state)
    budget = linear.BUFFER * (options.memory or MEMORY) // MEMORY
    hidden = make_quantised(rows, layer.hidden.shape[1], layer.hidden)
    classes = state.top.new_empty(2, len(layer.weight))
    kernels.quantise(layer.hidden, profile.reciprocal(), hidden, 0, SEEDS[0], grown=True)
    for chunk in _chunks(layer, hidden, classes, profile, kernels, budget):
        backend.scan(chunk, label, state, marks)
    exact = kernels.own_logits(layer, label)
    state, allowance, lse, margin = _allow(state, exact, hidden, classes.amax(1), layer)
    settled = backend.settle(layer, targets, state, marks, allowance)
    solved = settled.listed & (settled.rivals == 0)
    return solved, _make_saved(settled, targets, exact, lse, margin)


def _chunks(
    layer: Layer, hidden: Quantised, norms: Tensor, profile: Tensor, kernels: Any, budget: int
) -> Iterator[Chunk]:
    """The products of the rounded values, some classes at a time; norms and errors of the classes go to ``norms``."""
    rows, columns = hidden.values.shape
    budget = max(budget // 4, budget - hidden.values.nbytes)
    if layer.hidden.is_cpu:
        budget = min(budget, ON_CPU)
    step = min(len(layer.weight), classes_at_a_time(rows, budget // (2 * rows + columns), layer.hidden.device))
    lines = -(-step // ALIGNED) * ALIGNED
    weights = make_quantised(lines, columns, layer.hidden)
    weights.values.zero_()
    weights.scale.fill_(1)
    buffer = layer.hidden.new_empty(rows * lines, dtype=torch.bfloat16)
    width = 0
    for start in range(0, len(layer.weight), step):
        part = layer.weight[start : start + step]
        if len(part) != width:  # of the first chunk, and perhaps of the last
            width = len(part)
            lines = -(-width // ALIGNED) * ALIGNED
            made, factors = weights.part(width), weights.part(lines)
            products = buffer[: rows * lines].view(rows, lines)
        norm, error = norms[:, start : start + width]
        kernels.quantise(part, profile, made._replace(norm=norm, error=error), start, SEEDS[1], grown=False)
        kernels.multiply(hidden, factors, products)
        yield Chunk(products if lines == width else products[:, :width].contiguous(), layer.bias, layer.cap, start)


def _allow(
    state: Scan, exact: Tensor, hidden: Quantised, norms: Tensor, layer: Layer
) -> tuple[Scan, Tensor, Tensor, Tensor]:
    """What the rows are at worst, by how much others' logits may be larger, and the likely log-sum-exp and margin.

    At worst the label's logit is as low, and the sum of the others' exponentials as large, as errors may make them.
    """
    classes, size = layer.weight.shape
    of_state, of_class = (hidden.error * norms[0]).to(exact.dtype), (hidden.norm * norms[1]).to(exact.dtype)
    reach = ((of_state + of_class) * (2 * math.log(4 * classes / MISSED))).sqrt_()
    apart: Tensor | float = 0.0  # how far a logit may be from its product, which is what was rounded
    if layer.bias is not None:
        products = (size * hidden.norm * norms[0]).sqrt_().to(exact.dtype)
        apart = torch.minimum(products, layer.bias.abs().amax().to(exact.dtype))
    all_over_own = state.total * (state.top - state.own).exp()
    others = (all_over_own - 1).clamp_(min=0)
    odds = others * (state.own - exact).exp()
    lse = exact + odds.log1p()
    margin = (exact - lse).exp() - (state.rival - lse).exp()
    cancelled = LOST * (FEWEST + 2 * classes / FEWEST)
    least, most = (all_over_own * (1 + sign * cancelled) - 1 for sign in (-1, 1))
    typical = torch.maximum(state.rival, math.log(classes) - most.log() - state.own)
    slack = (2 + typical + apart) * (SLACK / 2)
    if layer.cap:
        spread = reach  # a capped error has not the mean 0
    else:
        largest = (state.rival - state.own + 2 * (reach + slack)).exp() / least
        largest = largest.masked_fill_(least <= 0, 1).clamp_(max=1)
        spread = ((of_state + of_class * largest) * (2 * math.log(2 / MISSED))).sqrt_()
    lowest = exact - (1 + exact.abs() + apart) * (SLACK / 2)
    most *= (state.own - lowest + spread + slack).exp()
    return Scan(lowest, 1 + most, lowest, state.rival), reach + SLACK * (1 + apart), lse, margin


def _make_saved(settled: Settled, targets: Targets, own: Tensor, lse: Tensor, margin: Tensor) -> Saved:
    """What is known of rows that are all solved."""
    share = linear_torch.make_shares(targets, 0, own)
    kept, right = torch.ones_like(targets.label), torch.ones_like(settled.listed)
    lists = right.clone(), settled.classes, settled.logits
    counts = torch.zeros(2, dtype=torch.long)
    return Saved(settled.threshold, kept, lse, torch.zeros_like(lse), share, own, margin, right, *lists, counts)
