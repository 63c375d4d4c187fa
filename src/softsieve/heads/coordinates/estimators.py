"""Estimates of the products of a query with all rows from some of the coordinates, and their variances.

The engine (`coordinates`) uses the last of these, the Horvitz-Thompson estimate over a weighted order without
replacement; the others are what the paper compares it with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Estimate(NamedTuple):
    """Of ``x @ weight.T``, with the estimated variance of each entry. Shape: ``(batch, n)`` each."""

    value: Tensor
    variance: Tensor


def importance(weight: Tensor, x: Tensor) -> Tensor:
    """How much each coordinate matters for each query: ``|x_j| * sum_i |A_ij|``, (batch, d)."""
    return x.abs() * weight.abs().sum(0)


def arrivals(weights: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """When each coordinate arrives: exponential times of rate ``weights``, those of weight 0 never.

    Sorted, they are a weighted order without replacement: ``-log`` of them are the Gumbel keys ``log w + G``. And the
    coordinates that have arrived by a time fixed before are independent of each other, each one there with probability
    `inclusion`: what the proofs of `bounds` need.
    """
    times = torch.empty_like(weights, dtype=torch.float64).exponential_(generator=generator)
    return torch.where(weights > 0, times / weights, torch.inf)


def inclusion(weights: Tensor, time: Tensor) -> Tensor:
    """Probability that a coordinate has arrived by a time; 1 for those that never do, whose terms are 0."""
    return torch.where(weights > 0, -torch.expm1(-weights * time), 1.0)


def prefix(weights: Tensor, arrived: Tensor, order: Tensor, size: int) -> Tensor:
    """Inclusion probabilities (batch, d) given the first ``size`` of the order: by the time of the next arrival."""
    if size >= arrived.shape[-1]:
        return torch.ones_like(weights)
    return inclusion(weights, arrived.gather(-1, order[:, size, None]))


def _terms(weight: Tensor, x: Tensor, index: Tensor) -> Tensor:
    """``A_ij x_j`` of the coordinates (batch, m), (batch, m, n)."""
    return weight.T[index] * x.gather(-1, index)[..., None]


def _mean(draws: Tensor, share_left: float = 1.0) -> Estimate:
    """Of independent draws (batch, m, n) of one mean, with their sample variance."""
    size = draws.shape[1]
    return Estimate(draws.mean(1), draws.var(1, correction=1 if size > 1 else 0) / size * share_left)


def uniform_with(weight: Tensor, x: Tensor, size: int, *, generator: torch.Generator | None = None) -> Estimate:
    """Coordinates drawn uniformly with replacement; the mean of ``d A_ij x_j``."""
    index = torch.randint(x.shape[-1], (len(x), size), generator=generator, device=x.device)
    return _mean(_terms(weight, x, index) * x.shape[-1])


def uniform_without(weight: Tensor, x: Tensor, size: int, *, generator: torch.Generator | None = None) -> Estimate:
    """The same without replacement; the variance has the finite-population correction ``1 - m / d``."""
    index = torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float64).argsort(-1)[:, :size]
    return _mean(_terms(weight, x, index) * x.shape[-1], 1 - size / x.shape[-1])


def importance_with(weight: Tensor, x: Tensor, size: int, *, generator: torch.Generator | None = None) -> Estimate:
    """Coordinates drawn with replacement and probabilities ``p`` by importance; the mean of ``A_ij x_j / p_j``."""
    weights = importance(weight, x)
    nothing = weights.sum(-1, keepdim=True) == 0
    chances = torch.where(nothing, 1.0, weights)
    chances = chances / chances.sum(-1, keepdim=True)
    index = torch.multinomial(chances, size, replacement=True, generator=generator)
    return _mean(_terms(weight, x, index) / chances.gather(-1, index)[..., None])


def importance_without(weight: Tensor, x: Tensor, size: int, *, generator: torch.Generator | None = None) -> Estimate:
    """The Horvitz-Thompson estimate over a prefix of the weighted order without replacement.

    ``sum A_ij x_j / pi_j`` with variance ``sum (A_ij x_j)^2 (1 - pi_j) / pi_j^2``; all coordinates give the exact
    product with variance 0. Both estimates are unbiased: given the time of the next arrival, each of the others was
    there with probability ``pi`` on its own.
    """
    weights = importance(weight, x).double()
    arrived = arrivals(weights, generator=generator)
    order = arrived.argsort(-1)
    index = order[:, :size]
    pi = prefix(weights, arrived, order, size).gather(-1, index)[..., None].to(x.dtype)
    terms = _terms(weight, x, index)
    return Estimate((terms / pi).sum(1), (terms.square() * (1 - pi) / pi.square()).sum(1))


ESTIMATORS: dict[str, Callable[..., Estimate]] = {
    "uniform-with": uniform_with,
    "uniform-without": uniform_without,
    "importance-with": importance_with,
    "importance-without": importance_without,
}
