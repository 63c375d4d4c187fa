"""Rounding to 8 bits at random, and products of what is rounded, in plain torch: e4m3 emulated, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softsieve.kernels.cross_entropy_torch import accumulation_dtype
from softsieve.kernels.linear_types import Layer

LARGEST = 448.0  # of e4m3
SMALLEST = 2.0**-6  # normal number; below, and up to it, the grid is that of multiples of an eighth of it
GATHERED = 1 << 22  # numbers of weights that are gathered at a time


def quantise(values: Tensor, profile: Tensor, rounded: Any, first: int, seed: int, *, grown: bool) -> None:
    """Round rows, which begin at the row ``first`` of all, to a `linear_screening.Quantised`.

    Norms weigh columns by the ``profile``; those of values that have ``grown`` are of the larger neighbour on the grid.
    """
    x = values.float()
    peak = x.abs().amax(1)
    exponent = torch.frexp(peak * (1 / LARGEST)).exponent.clamp_(min=-126)
    scale = torch.where(peak > 0, ((exponent + 127) << 23).view(torch.float32), 1)
    scale.masked_fill_(~x.isfinite().all(1), float("nan"))
    size = (x.abs() / scale[:, None]).clamp_(max=LARGEST)
    step = torch.exp2(size.clamp(min=SMALLEST).log2().floor_()) / 8
    step = torch.where(size < 8 * step, step / 2, step).clamp_(min=SMALLEST / 8)  # where log2 was rounded up
    steps = size / step
    below = steps.floor()
    generator = torch.Generator(x.device).manual_seed(seed + first)
    drawn = torch.rand(x.shape, generator=generator, device=x.device)
    up = steps - below > drawn
    rounded.values.zero_()
    rounded.values[:, : x.shape[1]] = ((below + up) * step).copysign_(x).to(rounded.values.dtype)
    half = torch.where(x == 0, 0, step / 2)
    norm = (steps.ceil() * step if grown else size).pow(4) @ profile
    rounded.scale.copy_(scale)
    rounded.norm.copy_(norm.sqrt() * scale.square())
    rounded.error.copy_((half.pow(4) @ profile).sqrt() * scale.square())


def multiply(hidden: Any, weight: Any, products: Tensor) -> None:
    """Write the products of the values, rounded to 16 bits; in float32 until then."""
    wide = (hidden.values.float() * hidden.scale[:, None]) @ (weight.values.float() * weight.scale[:, None]).t()
    products.copy_(wide)


def own_logits(layer: Layer, label: Tensor) -> Tensor:
    """The logits of the labels from the values as they are, NaN where a label is out of range."""
    hidden, weight, bias, cap = layer
    dtype = accumulation_dtype(hidden)
    outside = (label < 0) | (label >= len(weight))
    label = label.masked_fill(outside, 0)
    step = max(1, GATHERED // hidden.shape[1])
    x = hidden.new_empty(len(label), dtype=dtype)
    for start in range(0, len(label), step):
        some = slice(start, start + step)
        x[some] = (hidden[some].to(dtype) * weight[label[some]].to(dtype)).sum(1)
    x = x.to(hidden.dtype).to(dtype)  # as the product of matrices rounds
    if bias is not None:
        x = x + bias[label].to(dtype)
    return (cap * torch.tanh(x / cap) if cap else x).masked_fill(outside, float("nan"))
