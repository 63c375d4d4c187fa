"""Whether an answer of a head is right, by the exact logits: the one judge of tests, benchmarks and experiments."""

from __future__ import annotations

import torch
from torch import Tensor

_UNDERFLOW = 1e-30  # a probability below this may come out as 0 in float32
_SAME_SUM = 1e-9  # of the largest logit: how far two float64 sums of the same numbers in another order differ


def is_right(
    indices: Tensor, probs: Tensor, exact: Tensor, *, eps: float, rounding: Tensor | float | None = None
) -> Tensor:
    """Whether answers are as promised: the values of the top k, and every probability within ``eps`` of its own.

    Values are compared, not indices, as any of equal logits will do.

    Args:
        indices, probs: the answers, (..., k).
        exact: all logits in float64, (..., n).
        eps: relative error that a probability may have.
        rounding: how far the logits behind an answer may be off, (..., 1); as far as float64 sums are if not given.

    Returns:
        One flag an answer, (...).

    Example:
        >>> exact = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
        >>> p = exact.softmax(-1)
        >>> is_right(torch.tensor([2]), 1.2 * p[2:], exact, eps=0.3)
        tensor(True)
        >>> is_right(torch.tensor([2]), 1.4 * p[2:], exact, eps=0.3), is_right(torch.tensor([0]), p[:1], exact, eps=0.3)
        (tensor(False), tensor(False))
    """
    if rounding is None:
        rounding = float64_rounding(exact)
    best, log_z = exact.topk(indices.shape[-1]).values, exact.logsumexp(-1, keepdim=True)
    return right_parts(indices, probs, exact.gather(-1, indices), best, log_z, eps=eps, rounding=rounding)[1]


def float64_rounding(exact: Tensor) -> Tensor:
    """How far float64 logits (..., n) may differ from the same sums in another order, (..., 1)."""
    return _SAME_SUM * exact.abs().amax(-1, keepdim=True)


def right_parts(
    indices: Tensor,
    probs: Tensor,
    chosen: Tensor,
    best: Tensor,
    log_z: Tensor,
    *,
    eps: float,
    rounding: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Whether the top k are right in value, and whether the probabilities are right as well, (...) each.

    Args:
        indices, probs: the answers, (..., k).
        chosen: the exact logits of these indices, (..., k).
        best: the k largest exact logits, falling, (..., k).
        log_z: the exact log of the partition function, (..., 1).
        eps, rounding: as in `is_right`.
    """
    different = indices.sort(-1).values.diff().ne(0).all(-1)
    same = ((chosen.sort(-1, descending=True).values - best).abs() <= rounding).all(-1)
    p = (chosen - log_z).exp()
    # A logit known up to a rounding gives a probability known up to that, relatively.
    allowed = eps + torch.as_tensor(rounding).expm1().clamp_max(1e3)
    close = ((probs.double() - p).abs() <= allowed * p + _UNDERFLOW).all(-1)
    return different & same, different & same & close
