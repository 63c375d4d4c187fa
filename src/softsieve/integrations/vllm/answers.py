"""Logits of all rows from an answer for the k largest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from softsieve.heads import TopK


def spread(answer: TopK, rows: int, dtype: torch.dtype) -> Tensor:
    """Logits (batch, rows) in float32: those of the answer in their places, one *floor* in all others.

    The floor is such that the exponentials of the others sum up to what the answer says of them, the partition
    function less the k largest. So ``log_softmax`` gives the k largest their log-probabilities with the promised error,
    nothing else can be chosen, or drawn with ``top_k`` up to k, and the rank of each of them is right.

    Args:
        answer: for the k largest of queries (batch, d).
        dtype: that of the exact head's logits, which those of the answer are rounded to: where two of them are equal
            to the exact head, they are equal here.

    Example:
        >>> from softsieve import AdaptiveSoftmax
        >>> weight, x = torch.arange(8.0)[:, None], torch.ones(1, 1)
        >>> logits = spread(AdaptiveSoftmax(weight).topk(x, 3), 8, torch.float32)
        >>> [round(value, 2) for value in logits[0].tolist()]
        [2.84, 2.84, 2.84, 2.84, 2.84, 5.0, 6.0, 7.0]
        >>> torch.allclose(logits.logsumexp(-1), (x @ weight.T).logsumexp(-1))
        True
    """
    values = answer.logits.to(dtype).float()
    batch, k = values.shape
    if k == rows:
        return values.new_empty(batch, rows).scatter_(1, answer.indices, values)
    exact, log_z = answer.logits.double(), answer.log_z.double()
    share = (exact - log_z[:, None]).exp().sum(-1)  # of the k largest; above 1 when the estimate of log Z is too low
    rest = (1 - share).clamp_min(torch.finfo(torch.float64).tiny).log()
    below = torch.nextafter(values[:, -1], values.new_tensor(-math.inf))
    floor = torch.minimum((log_z + rest - math.log(rows - k)).float(), below)
    return floor[:, None].repeat(1, rows).scatter_(1, answer.indices, values)
