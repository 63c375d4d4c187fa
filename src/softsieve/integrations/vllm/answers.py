"""Logits of all rows from an answer for the k largest."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from softsieve.heads import TopK


def spread(answer: TopK, rows: int, dtype: torch.dtype, *, beta: float = 1.0, scale: float = 1.0) -> Tensor:
    """Logits (batch, rows) in float32: those of the answer in their places, one *floor* in all others.

    The floor is such that the exponentials of the others sum up to what the answer says of them, the partition
    function less the k largest. So ``log_softmax`` gives the k largest their log-probabilities with the promised error,
    nothing else can be chosen, or drawn with ``top_k`` up to k, and the rank of each of them is right.

    Args:
        answer: for the k largest of queries (batch, d).
        dtype: that of the exact head's logits, which those of the answer are rounded to: where two of them are equal
            to the exact head, they are equal here.
        beta, scale: what the head, and the exact one, multiplies its logits with: the exact one does so after it has
            rounded them, and rounds once more.

    Example:
        >>> from softsieve import AdaptiveSoftmax
        >>> weight, x = torch.arange(8.0)[:, None], torch.ones(1, 1)
        >>> logits = spread(AdaptiveSoftmax(weight).topk(x, 3), 8, torch.float32)
        >>> [round(value, 2) for value in logits[0].tolist()]
        [2.84, 2.84, 2.84, 2.84, 2.84, 5.0, 6.0, 7.0]
        >>> torch.allclose(logits.logsumexp(-1), (x @ weight.T).logsumexp(-1))
        True
    """
    if not answer.logits.is_cpu:
        return spread_on_device(answer, rows, dtype, beta=beta, scale=scale)
    # In numpy: right after the rest of the model nothing is in a cache, and an operation of torch takes several times
    # as long.
    values, indices = _rounded(answer.logits, dtype, beta, scale).numpy(), answer.indices.numpy()
    batch, k = values.shape
    logits = np.empty((batch, rows), np.float32)
    if k < rows:
        log_z = answer.log_z.double().numpy()
        share = np.exp(answer.logits.double().numpy() - log_z[:, None]).sum(-1)  # above 1 where log Z is too low
        rest = np.log(np.maximum(1 - share, np.finfo(np.float64).tiny))
        below = np.nextafter(values[:, -1], np.float32(-np.inf))
        logits[:] = np.minimum((log_z + rest - math.log(rows - k)).astype(np.float32), below)[:, None]
    logits[np.arange(batch)[:, None], indices] = values
    return torch.from_numpy(logits)


def spread_on_device(answer: TopK, rows: int, dtype: torch.dtype, *, beta: float = 1.0, scale: float = 1.0) -> Tensor:
    """The same in operations of torch, none of which waits for the device."""
    values = _rounded(answer.logits, dtype, beta, scale)
    k, log_z = values.shape[-1], answer.log_z.double()
    if k == rows:
        return torch.empty_like(values).scatter_(-1, answer.indices, values)
    share = (answer.logits.double() - log_z[:, None]).exp().sum(-1)
    rest = (1 - share).clamp_min(torch.finfo(torch.float64).tiny).log()
    below = torch.nextafter(values[:, -1], torch.full_like(values[:, -1], -math.inf))  # made there, and not copied
    floor = torch.minimum((log_z + rest - math.log(rows - k)).float(), below)
    return floor[:, None].repeat(1, rows).scatter_(-1, answer.indices, values)


def _rounded(logits: Tensor, dtype: torch.dtype, beta: float, scale: float) -> Tensor:
    """Logits as the exact head rounds them, in float32."""
    return (logits.to(dtype) if scale == 1.0 else (logits / beta).to(dtype) * scale).float()
