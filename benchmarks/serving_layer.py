"""A multi-label layer of any size with the hidden states that it meets, made up as training would have it.

Classes are the leaves of a tree, and their centres those of their branches with something of their own. A row of data
has some labels, most of them of one branch; its hidden state is the sum of their centres and noise. All of that has the
falling spectrum that hidden states of encoders have.

Gradient steps over a million classes take too long on a CPU, so the layer is made in closed form. Gradient descent on
squared errors from zero, stopped early, is a ridge regression: a class has ``(second moment + ridge)^-1 centre``, up to
a factor and its bias. Those are trained, with a logistic loss, as functions of few numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LABELS = 5  # of a row
TOGETHER = 0.6  # chance that a further label is of the branch of the first one
OWN = 0.6  # share of a centre's energy that is not its branch's
NOISE = 1.0  # energy of the noise, in centres
CHUNK = 1 << 16  # classes that are worked on at a time
SCALING, NEGATIVES = 512, 4096  # rows, and classes besides their labels, that the layer is scaled with


class Data(NamedTuple):
    """Classes and how rows are made of them."""

    centres: Tensor  # (n, d) bfloat16
    scales: Tensor  # (d,): of the noise
    branch: int  # leaves of a branch
    popularity: Tensor  # (branches,): how often the first label is of each

    def rows(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Hidden states (count, d) and labels (count, LABELS), of which some are the same class twice."""
        n = len(self.centres)
        first = torch.multinomial(self.popularity, count, replacement=True, generator=generator)[:, None]
        near = first * self.branch + torch.randint(self.branch, (count, LABELS), generator=generator)
        anywhere = torch.randint(n, (count, LABELS), generator=generator)
        together = torch.rand(count, LABELS, generator=generator) < TOGETHER
        together[:, 0] = True
        labels = torch.where(together, near, anywhere) % n
        hidden = self.centres[labels.flatten()].float().view(count, LABELS, -1).sum(1)
        return hidden + math.sqrt(NOISE) * self.scales * torch.randn(hidden.shape, generator=generator), labels


def make_data(n: int, d: int, *, rank: int, generator: torch.Generator) -> Data:
    """Classes whose hidden states have this effective rank, the participation ratio of their spectrum."""
    branch = max(1, round(math.sqrt(n)))
    branches = math.ceil(n / branch)
    scales = spectrum(d, rank)
    turn = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q
    parents = torch.randn(branches, d, generator=generator)
    centres = torch.empty(n, d, dtype=torch.bfloat16)
    for start in range(0, n, CHUNK):
        part = torch.arange(start, min(start + CHUNK, n))
        own = torch.randn(len(part), d, generator=generator)
        mixed = math.sqrt(OWN) * own + math.sqrt(1 - OWN) * parents[part // branch]
        centres[part] = (mixed * scales @ turn.T).bfloat16()
    noise = (scales.square() @ turn.square().T).sqrt()
    return Data(centres, noise, branch, 1 / torch.arange(10.0, branches + 10))


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


class Layer(NamedTuple):
    """A linear layer whose logits are above 0 for labels."""

    weight: Tensor  # (n, d) bfloat16
    bias: Tensor  # (n,)


def make_layer(data: Data, *, ridge: float, rows: int, generator: torch.Generator) -> Layer:
    """The layer of some data in closed form, from so many rows of them.

    Args:
        ridge: in largest eigenvalues of the second moment of hidden states.
    """
    hidden, labels = data.rows(rows, generator)
    moment = hidden.T @ hidden / rows
    largest = float(torch.linalg.eigvalsh(moment)[-1])
    solve = torch.linalg.inv(moment + ridge * largest * torch.eye(len(moment)))
    weight, energy = data.centres.clone(), torch.empty(len(data.centres))
    for part in torch.split(torch.arange(len(weight)), CHUNK):
        centre = data.centres[part].float()
        own = centre @ solve
        weight[part], energy[part] = own.bfloat16(), (own * centre).sum(-1)
    some = torch.randint(len(weight), (NEGATIVES,), generator=generator)
    hidden, labels = hidden[:SCALING], labels[:SCALING]
    positive = (hidden[:, None] * weight[labels.flatten()].float().view(*labels.shape, -1)).sum(-1)
    negative = hidden @ weight[some].float().T
    factor, slope, offset = _trained_scales(
        torch.stack([positive, energy[labels]]), torch.stack([negative, energy[some].expand_as(negative)]), len(weight)
    )
    return Layer(weight.mul_(factor), slope * energy + offset)


def _trained_scales(positive: Tensor, negative: Tensor, n: int) -> list[float]:
    """Factors of products and of energies, and an offset, of the least logistic loss.

    Products and energies of labels, (2, rows, LABELS), and of some other classes, which stand for all, (2, rows, some).
    """
    scales = torch.tensor([20.0, -5.0, -10.0], requires_grad=True)
    units = positive.abs().mean((1, 2))
    optimizer = torch.optim.LBFGS([scales], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        weights = torch.cat([scales[:2] / units, scales[2:]])
        own, others = (weights[0] * of[0] + weights[1] * of[1] + weights[2] for of in (positive, negative))
        loss = F.softplus(-own).sum(-1).mean() + F.softplus(others).mean() * n
        loss.backward()
        return loss

    optimizer.step(closure)
    return torch.cat([scales[:2] / units, scales[2:]]).tolist()
