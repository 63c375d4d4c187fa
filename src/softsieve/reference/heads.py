"""Linear heads and their estimates, short and obviously right, in float64."""

from __future__ import annotations

import math
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
