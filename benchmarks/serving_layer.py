"""A multi-label layer of any size with the hidden states that it meets, made up as training leaves them.

Classes come in families, such as the variants of a product; a row of data is of a family and has its classes as labels.
Training pulls states and the weights of their labels together. So a state is the point of its family with some noise, a
weight that point with something of its own, all of them of one length, and a logit is ``SCALE * (cosine - BORDER)``, as
in classifiers on normalised states. Points have the falling spectrum that states of encoders have.

No gradient step is taken: over a million classes they take hours on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FAMILY = 5  # classes of a family, in the mean
OWN = 0.35  # what a class, and a state, has besides the point of its family, in such points
SCALE, BORDER = 30.0, 0.72  # of logits, and the cosine at which they are 0
CHUNK = 1 << 16  # classes that are made at a time


class Layer(NamedTuple):
    """A linear layer, and how the states are made that it meets."""

    weight: Tensor  # (n, d) bfloat16
    bias: Tensor  # (n,)
    families: Tensor  # (n,): of each class, rising
    axes: Tensor  # (d, d): times random numbers, something with the spectrum of states
    points: Tensor  # (families, d) bfloat16

    def rows(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Hidden states (count, d) of length 1, and the family of each, whose classes are its labels."""
        some = self.families[torch.randint(len(self.families), (count,), generator=generator)]
        return _near(self.points[some].float(), self.axes, generator), some


def make_layer(n: int, d: int, *, rank: int, generator: torch.Generator) -> Layer:
    """A layer of n classes whose states have this effective rank, the participation ratio of their spectrum."""
    turn = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q
    axes = spectrum(d, rank)[:, None] * turn.T
    families = torch.randint(-(-n // FAMILY), (n,), generator=generator).sort().values
    points = torch.empty(-(-n // FAMILY), d, dtype=torch.bfloat16)
    for part in torch.split(torch.arange(len(points)), CHUNK):
        points[part] = (torch.randn(len(part), d, generator=generator) @ axes).bfloat16()
    weight = torch.empty(n, d, dtype=torch.bfloat16)
    for part in torch.split(torch.arange(n), CHUNK):
        weight[part] = (SCALE * _near(points[families[part]].float(), axes, generator)).bfloat16()
    return Layer(weight, torch.full((n,), -SCALE * BORDER), families, axes, points)


def _near(points: Tensor, axes: Tensor, generator: torch.Generator) -> Tensor:
    """Points with some noise, of length 1."""
    return F.normalize(points + OWN * (torch.randn(points.shape, generator=generator) @ axes), dim=-1)


def spectrum(d: int, rank: int) -> Tensor:
    """Deviations along principal axes, falling like a power, of energy 1 a coordinate and this participation ratio.

    Example:
        >>> energy = spectrum(768, 64).square()
        >>> round((energy.sum() ** 2 / energy.square().sum()).item()), round(energy.mean().item(), 3)
        (64, 1.0)
    """
    low, high, places = 0.0, 8.0, torch.arange(1.0, d + 1)
    for _ in range(50):
        power = (low + high) / 2
        energy = places**-power
        low, high = (power, high) if energy.sum() ** 2 / energy.square().sum() > rank else (low, power)
    return (energy / energy.mean()).sqrt()
