"""Updates of some rows of a weight by their gradient: SGD and AdamW as torch.optim has them, and stochastic rounding.

An update is made in the accumulation dtype and rounded to the dtype of the weight once: to the nearest number or, for
bfloat16, up or down with probabilities that make it right on average. A change of less than half a step of bfloat16, a
256th of the weight, would be lost for ever otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from softsieve.kernels.cross_entropy import HAS_TRITON
from softsieve.kernels.cross_entropy_torch import accumulation_dtype

AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 22}  # numbers that are worked on at a time
_LOW = 0xFFFF  # bits of float32 that bfloat16 does not have


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
        _apply(exact, grad[some].to(exact.dtype), [state[some] for state in states], rule)
        if generator is not None:
            add_noise(exact, generator)
        if exact.dtype != part.dtype:
            part.copy_(exact)


def _apply(value: Tensor, grad: Tensor, states: Sequence[Tensor], rule: SGD | AdamW) -> None:
    """The update itself, in place."""
    if isinstance(rule, SGD):
        if rule.weight_decay:
            grad = grad.add(value, alpha=rule.weight_decay)
        if rule.momentum:
            grad = states[0].mul_(rule.momentum).add_(grad)
        value.add_(grad, alpha=-rule.lr)
        return
    mean, square = states
    value.mul_(1 - rule.lr * rule.weight_decay)
    mean.lerp_(grad, 1 - rule.beta1)
    square.mul_(rule.beta2).addcmul_(grad, grad, value=1 - rule.beta2)
    scale = square.sqrt().div_(rule.correction2**0.5).add_(rule.eps)
    value.addcdiv_(mean, scale, value=-rule.lr / rule.correction1)


def add_noise(value: Tensor, generator: torch.Generator) -> None:
    """Round float32 to numbers that bfloat16 has, up or down at random such that the mean is right. In place.

    16 random bits are added to those that bfloat16 lacks, which are then cut off. What it has stays what it is.

    Example:
        >>> values = torch.full((20000,), 1.001)
        >>> add_noise(values, torch.Generator().manual_seed(0))
        >>> sorted(set(values.tolist())), f"{values.mean():.3f}"
        ([1.0, 1.0078125], '1.001')
    """
    count = value.numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=value.device).random_(
        -(2**63), None, generator=generator
    )
    noise = words.view(torch.int16)[:count].view(value.shape).to(torch.int32).bitwise_and_(_LOW)
    value.view(torch.int32).add_(noise).bitwise_and_(~_LOW)
