"""What an adaptive head answers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TopK(NamedTuple):
    """The k largest softmax values of every query.

    Shape:
        ``(..., k)`` for ``indices``, ``probs`` and ``logits``, ``(..., 2)`` for ``log_z_interval``, ``(...)`` for the
        rest, where ``(..., d)`` is that of the queries.

    Example:
        >>> import torch
        >>> from softsieve import AdaptiveSoftmax
        >>> answer = AdaptiveSoftmax(torch.tensor([[0.0], [1.0], [3.0]])).topk(torch.tensor([1.0]), 2)
        >>> answer.indices.tolist(), round(answer.log_z.item(), 4), answer.exact.item()
        ([2, 1], 3.1698, True)
    """

    indices: Tensor  # int64, the largest first
    probs: Tensor  # softmax values of these rows, within eps with the stated probability
    logits: Tensor  # of these rows, times beta
    log_z: Tensor  # logarithm of the sum of exponentials of all logits
    log_z_interval: Tensor  # where it is with the stated probability
    coordinates: Tensor  # int64: different entries of the weight, or of its rotated copy, that were read
    bytes_read: Tensor  # int64: what was read of both in all, again and again included
    exact: Tensor  # bool: every row was read in full, so that nothing is left to chance


class LogPartition(NamedTuple):
    """The partition function of all logits, as a logarithm. Fields as in `TopK`.

    Other sums of exponentials are of this form, too. A Gaussian kernel density of bandwidth h has the logarithm
    ``logsumexp(-|x - y_i|^2 / (2 h^2))`` over its points up to a constant, and ``|x - y|^2 = |x|^2 - 2 x.y + |y|^2``:

    Example:
        >>> import torch
        >>> from softsieve import AdaptiveSoftmax
        >>> _ = torch.manual_seed(0)
        >>> points, x, h = torch.randn(1000, 300), torch.randn(300), 10.0
        >>> density = AdaptiveSoftmax(points, -points.square().sum(-1) / 2, beta=1 / h**2, eps=0.1,
        ...                           method="coordinates", guarantee="pac")
        >>> estimate = density.log_partition(x).log_z - x.square().sum() / (2 * h**2)
        >>> exact = (-(points - x).square().sum(-1) / (2 * h**2)).logsumexp(0)
        >>> abs(estimate.exp() / exact.exp() - 1).item() < 0.1
        True
    """

    log_z: Tensor  # the logarithm
    log_z_interval: Tensor  # where it is with the stated probability
    coordinates: Tensor  # int64: different entries that were read
    bytes_read: Tensor  # int64: what was read in all
    exact: Tensor  # bool: every row was read in full


class Above(NamedTuple):
    """Every class whose logit is above a threshold, of every query.

    Shape:
        ``(...)`` for ``counts``, ``bytes_read`` and ``exact``, where ``(..., d)`` is that of the queries; ``(m,)`` for
        ``indices`` and ``logits``, query after query, where m is the sum of the counts.

    Example:
        >>> import torch
        >>> from softsieve import AdaptiveSoftmax
        >>> found = AdaptiveSoftmax(torch.tensor([[-1.0], [1.0], [3.0]])).above(torch.tensor([[1.0], [-2.0]]))
        >>> found.counts.tolist(), found.indices.tolist(), found.logits.tolist()
        ([2, 1], [2, 1, 0], [3.0, 1.0, 2.0])
        >>> [classes.tolist() for classes, logits in found.per_query()]
        [[2, 1], [0]]
    """

    counts: Tensor  # int64: how many classes are above
    indices: Tensor  # int64: these classes, of each query the one with the largest logit first, equal ones by number
    logits: Tensor  # theirs, times beta: all of them were read in full
    bytes_read: Tensor  # int64: what was read in all
    exact: Tensor  # bool: every row was read in full, so that nothing is left to chance

    def per_query(self) -> list[tuple[Tensor, Tensor]]:
        """Classes and logits of each query, in the order of ``counts.flatten()``."""
        sizes = self.counts.flatten().tolist()
        return list(zip(self.indices.split(sizes), self.logits.split(sizes), strict=True))


class Coverage(NamedTuple):
    """How a head does on queries whose exact answers are known."""

    queries: int  # how many there were
    right: float  # share of right answers: the top k, probabilities within eps
    read: float  # bytes read, as a share of the weight's, in the mean
    exact: float  # share of queries for which everything was read
