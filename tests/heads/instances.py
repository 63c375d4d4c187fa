"""Heads and queries of many kinds, and who judges answers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from scipy.stats import binom
from torch import Tensor

from softsieve.data.synthetic_heads import make_head
from softsieve.heads import TopK
from softsieve.reference.answers import is_right
from softsieve.reference.heads import logits

Made = tuple[Tensor, Tensor]  # weight (n, d), queries (count, d)
Maker = Callable[[int, int, int, torch.Generator], Made]


def gaussian(n: int, d: int, count: int, g: torch.Generator) -> Made:
    return torch.randn(n, d, generator=g), torch.randn(count, d, generator=g) * (3 / d**0.5)


def peaked(n: int, d: int, count: int, g: torch.Generator) -> Made:
    """Queries near a row each: what a classifier sees."""
    weight = torch.randn(n, d, generator=g)
    row = torch.randint(n, (count,), generator=g)
    return weight, weight[row] * (20 / d) + torch.randn(count, d, generator=g) * (1 / d**0.5)


def common(n: int, d: int, count: int, g: torch.Generator) -> Made:
    """Most of every row is what all rows have in common, as in language models."""
    weight, x = peaked(n, d, count, g)
    return weight + 5 * torch.randn(1, d, generator=g), x


def heavy_tailed(n: int, d: int, count: int, g: torch.Generator) -> Made:
    """Cauchy in weight and query, cut far out."""
    weight, x = (torch.empty(rows, d).cauchy_(generator=g).clamp(-100, 100) for rows in (n, count))
    return weight, x * (0.3 / d**0.5)


def duplicates(n: int, d: int, count: int, g: torch.Generator) -> Made:
    weight, x = peaked(-(-n // 3), d, count, g)
    return weight.repeat(3, 1)[:n].clone(), x


def dominant(n: int, d: int, count: int, g: torch.Generator) -> Made:
    weight, x = gaussian(n, d, count, g)
    weight[n // 2] = 4 * x.sign().mean(0)
    return weight, x


def all_equal(n: int, d: int, count: int, g: torch.Generator) -> Made:
    weight, x = gaussian(1, d, count, g)
    return weight.expand(n, d).clone(), x


def zero_query(n: int, d: int, count: int, g: torch.Generator) -> Made:
    weight, x = gaussian(n, d, count, g)
    return weight, torch.zeros_like(x)


def sparse_query(n: int, d: int, count: int, g: torch.Generator) -> Made:
    weight, x = gaussian(n, d, count, g)
    return weight, x * (torch.rand(x.shape, generator=g) < 0.03) * 4


def negative_and_huge(n: int, d: int, count: int, g: torch.Generator) -> Made:
    weight, x = peaked(n, d, count, g)
    return weight - 2, x * 1000


def language(n: int, d: int, count: int, g: torch.Generator) -> Made:
    """As of a language model."""
    seed = int(torch.randint(2**31, (1,), generator=g))
    weight, x, _ = make_head(n, d, rank=d // 4, calibration=count, test=1, seed=seed)
    return weight.float(), x


def spectral(n: int, d: int, count: int, g: torch.Generator) -> Made:
    """Coordinates that fall off, and queries of very different lengths: some errors are far larger than others."""
    scale = torch.arange(1, d + 1) ** -0.5
    weight, x = torch.randn(n, d, generator=g) * scale, torch.randn(count, d, generator=g) * scale * 8
    return weight, x * torch.exp(0.5 * torch.randn(count, 1, generator=g))


KINDS: dict[str, Maker] = {
    made.__name__: made
    for made in (
        gaussian,
        peaked,
        common,
        heavy_tailed,
        duplicates,
        dominant,
        all_equal,
        zero_query,
        sparse_query,
        negative_and_huge,
    )
}


def right(answer: TopK, weight: Tensor, x: Tensor, eps: float, bias: Tensor | None = None, beta: float = 1.0) -> Tensor:
    """Whether each answer holds: the k largest values, by value, and all probabilities within eps; up to rounding."""
    truth = logits(weight, x, bias, beta=beta)
    rounding = 1e-5 * (1 + truth.abs().amax(-1, keepdim=True))
    return is_right(answer.indices, answer.probs, truth, eps=eps, rounding=rounding)


def plausible(failures: int, trials: int, delta: float) -> bool:
    """Whether so many failures are no surprise at probability delta: an exact binomial test at one in ten thousand."""
    return bool(binom.sf(failures - 1, trials, delta) > 1e-4)
