"""SeTa (arXiv 2503.13385), a rival of skipping: a random share of the rows, and of these a window from easy to hard."""

from __future__ import annotations

import torch
from torch import Tensor

from softsieve import _checks
from softsieve.training.infobatch import InfoBatchSampler

ITERATIONS = 100  # of k-means at most; in one dimension it ends long before


class SeTaSampler(InfoBatchSampler):
    """Leaves out a random share ``prune`` of the rows, and of the others those too easy or too hard for their time.

    The rows of an epoch are grouped by their loss when last seen (k-means). A window over ``window * groups`` of the
    groups moves by one an epoch from the easiest to the hardest, and starts again. The first epoch, for which nothing
    is known, and the last ``1 - anneal`` of them visit all groups. Rows count alike.

    Args:
        num_samples: rows of the data set.
        epochs: length of training.
        prune: share of the rows that every epoch leaves out at random (r in the paper), in [0, 1).
        groups: how many there are (k in the paper), at least 1.
        window: share of the groups that an epoch visits (alpha in the paper), in (0, 1].
        anneal: share of the epochs that have a window, in [0, 1].
        seed: of what is left out, and of the random order.

    ``prune``, ``groups`` and ``window`` are those of the authors for training without loss of accuracy on CIFAR.

    Example:
        >>> sampler = SeTaSampler(4, epochs=8, prune=0, groups=2, window=0.5)
        >>> len(sampler.next_epoch())
        4
        >>> sampler.update(torch.arange(4), torch.tensor([0.0, 1.0, 0.1, 0.9]))
        >>> [sorted(sampler.next_epoch().tolist()) for _ in range(3)]
        [[0, 2], [1, 3], [0, 2]]
    """

    def __init__(
        self, num_samples: int, *, epochs: int, prune: float = 0.1, groups: int = 5, window: float = 0.9,
        anneal: float = 0.875, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(num_samples, epochs=epochs, prune=prune, anneal=anneal, seed=seed)
        _checks.whole_number("groups", groups, 1, 2**16)
        _checks.number("window", window, 1e-6, 1)
        self.groups, self.window = groups, window

    def _visits(self, generator: torch.Generator) -> Tensor:
        visit = torch.zeros(self.num_samples, dtype=torch.bool)
        size = max(1, self.num_samples - int(self.prune * self.num_samples))
        visit[torch.randperm(self.num_samples, generator=generator)[:size]] = True
        seen = visit & self.loss.isfinite()
        if self.epoch > 0 and not self.anneals and seen.any():
            group = group_values(self.loss[seen], self.groups)
            size = max(1, round(self.window * self.groups))
            first = (self.epoch - 1) % (self.groups - size + 1)
            inside = (group >= first) & (group < first + size)
            if inside.any():  # rows of equal losses are all in one group
                visit[seen] = inside  # rows never seen are visited
        return visit


def group_values(values: Tensor, groups: int) -> Tensor:
    """The group of every value by k-means, the smallest in group 0; it begins at quantiles, so nothing is drawn.

    Example:
        >>> group_values(torch.tensor([5.0, 0.0, 0.1, 9.0, 5.2]), 3)
        tensor([1, 0, 0, 2, 1])
    """
    values = values.double()
    places = (torch.arange(groups, dtype=torch.float64) + 0.5) / groups
    centres = values.sort().values[(places * len(values)).long()]
    group = torch.full(values.shape, -1)
    for _ in range(ITERATIONS):
        nearest = torch.bucketize(values, (centres[1:] + centres[:-1]) / 2)
        if torch.equal(nearest, group):
            break
        group = nearest
        size = torch.bincount(group, minlength=groups)
        total = torch.zeros(groups, dtype=torch.float64).index_add_(0, group, values)
        centres = torch.where(size > 0, total / size.clamp_min(1), centres).sort().values
    return group
