"""Updates of some rows of a weight by their gradient: SGD and AdamW as torch.optim has them, and stochastic rounding.

An update is made in the accumulation dtype and rounded to the dtype of the weight once: to the nearest number or, for
bfloat16, up or down with probabilities that make it right on average. A change of less than half a step of bfloat16, a
256th of the weight, would be lost for ever otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from softsieve.kernels.cross_entropy import HAS_TRITON
from softsieve.kernels.cross_entropy_torch import accumulation_dtype

AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 22}  # numbers that are worked on at a time
MULTIPLIED = 512  # rows, at most, of which a product is made where it is used
UPPER = int(sys.byteorder == "little")  # which half of the memory of a float32 bfloat16 has


class SGD(NamedTuple):
    """``w -= lr * buffer`` with ``buffer = momentum * buffer + grad + weight_decay * w``; none without momentum."""

    lr: float
    momentum: float
    weight_decay: float


class AdamW(NamedTuple):
    """Decoupled weight decay and a step of Adam; the corrections are ``1 - beta ** steps``."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    correction1: float
    correction2: float


def update(value: Tensor, grad: Tensor, states: Sequence[Tensor], rule: SGD | AdamW, seed: int | None = None) -> None:
    """Change ``value`` and ``states``, all (rows, ...), in place; a ``seed`` is for stochastic rounding to bfloat16.

    Example:
        >>> value = torch.ones(2)
        >>> update(value, torch.tensor([1.0, -1.0]), [], SGD(0.5, 0.0, 0.0))
        >>> value.tolist()
        [0.5, 1.5]
    """
    if value.is_cuda and HAS_TRITON and value.dtype != torch.float64:
        from softsieve.kernels import updates_triton

        updates_triton.update(value, grad, states, rule, seed)
        return
    generator = None if seed is None else torch.Generator(value.device).manual_seed(seed)
    size = max(1, value[:1].numel())
    rows = max(1, AT_ONCE.get(value.device.type, AT_ONCE["cuda"]) // size)
    for start in range(0, len(value), rows):
        some = slice(start, start + rows)
        part = value[some]
        exact = part.to(accumulation_dtype(part))
        _apply(exact, grad[some], [state[some] for state in states], rule)
        if generator is not None:
            round_randomly(exact, part, generator)
        elif exact.dtype != part.dtype:
            part.copy_(exact)


def multiplies(value: Tensor, rows: int) -> bool:
    """Whether `sgd_product` is for it: with more rows, the vendor's product and a pass over it take less time."""
    return value.is_cuda and HAS_TRITON and value.dtype == torch.bfloat16 and rows <= MULTIPLIED


def sgd_product(value: Tensor, gradient: Tensor, hidden: Tensor, lr: float, seed: int | None) -> None:
    """`update` by SGD without momentum and decay, with ``gradient.T @ hidden`` for the gradient, in Triton."""
    from softsieve.kernels import updates_triton

    updates_triton.sgd_product(value, gradient, hidden, lr, seed)


def _apply(value: Tensor, grad: Tensor, states: Sequence[Tensor], rule: SGD | AdamW) -> None:
    """The update itself, in place."""
    if isinstance(rule, SGD):
        if rule.weight_decay:
            grad = grad.add(value, alpha=rule.weight_decay)
        if rule.momentum:
            grad = states[0].mul_(rule.momentum).add_(grad)
        value.add_(grad, alpha=-rule.lr)
        return
    grad, (mean, square) = grad.to(value.dtype), states
    value.mul_(1 - rule.lr * rule.weight_decay)
    mean.lerp_(grad, 1 - rule.beta1)
    square.mul_(rule.beta2).addcmul_(grad, grad, value=1 - rule.beta2)
    scale = square.sqrt().div_(rule.correction2**0.5).add_(rule.eps)
    value.addcdiv_(mean, scale, value=-rule.lr / rule.correction1)


def round_randomly(exact: Tensor, out: Tensor, generator: torch.Generator) -> None:
    """Write float32 as bfloat16, rounded up or down at random such that the mean is right; spoils what was exact.

    16 random bits are added to those that bfloat16 lacks, which are then left out. What it has stays what it is.

    Example:
        >>> rounded = torch.empty(20000, dtype=torch.bfloat16)
        >>> round_randomly(torch.full((20000,), 1.001), rounded, torch.Generator().manual_seed(0))
        >>> sorted(set(rounded.tolist())), f"{rounded.float().mean():.3f}"
        ([1.0, 1.0078125], '1.001')
    """
    count = exact.numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=exact.device)
    noise = words.random_(-(2**63), None, generator=generator).view(torch.uint16)[:count].view(exact.shape)
    exact.view(torch.int32).add_(noise.to(torch.int32))
    out.view(torch.int16).copy_(exact.view(torch.int16).view(*exact.shape, 2)[..., UPPER])
