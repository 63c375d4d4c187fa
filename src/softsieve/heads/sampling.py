"""Drawing classes from logits."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(logits: Tensor, temperature: float, top_p: float | None, generator: torch.Generator | None) -> Tensor:
    """A class for every row of logits (..., n), from the softmax of logits / temperature, (...) int64.

    With ``top_p`` from the largest that have this much probability together, at least one.

    Example:
        >>> draw(torch.tensor([[0.0, 9.0], [9.0, 0.0]]), 1.0, 0.5, None).tolist()
        [1, 0]
    """
    flat = logits.reshape(-1, logits.shape[-1])
    tiny = torch.finfo(flat.dtype).tiny  # what is less would be 0 in this dtype
    flat = (flat - flat.amax(-1, keepdim=True)) / max(temperature, tiny)  # the largest is 0, whatever the temperature
    if top_p is not None and top_p < 1:
        ordered, order = flat.softmax(-1).sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.where(before < max(top_p, tiny), 0.0)
        drawn = order.gather(-1, torch.multinomial(ordered, 1, generator=generator))
    else:
        drawn = torch.multinomial(flat.softmax(-1), 1, generator=generator)
    return drawn.reshape(logits.shape[:-1])
