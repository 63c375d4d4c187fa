"""Drawing classes from logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from softsieve.heads.engine import Ends, Layer, in_range


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


def draw_rows(
    layer: Layer,
    queries: Tensor,
    ends: Ends | None,
    temperature: float,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """A row for every scaled query (batch, d): below upper ends, as far as there are some, else by the exact product.

    Args:
        ends: upper ends of all logits; None when they are not known.
    """
    drawn = torch.full((len(queries),), -1, device=queries.device)
    if ends is not None:
        drawn = draw_below(*ends[:2], partial(layer.logits_of, queries), temperature, generator=generator)
    undrawn = (drawn < 0).nonzero()[:, 0]
    if len(undrawn):
        drawn[undrawn] = draw(in_range(layer.logits(queries[undrawn])), temperature, top_p, generator)
    return drawn


ROUNDS = (8, 64, 512)  # draws for each query, one after the other until one is accepted


def draw_below(
    ends: Tensor,
    asked: Tensor,
    logits: Callable[[Tensor, Tensor], Tensor],
    temperature: float,
    *,
    generator: torch.Generator | None,
) -> Tensor:
    """A class for every query from the softmax of its logits / temperature, of which only upper ends are known.

    Drawn from the softmax of the upper ends, a class is accepted with probability ``exp((logit - end) / temperature)``.
    The first that is accepted has the distribution of the logits, if all of these are below their ends.

    Args:
        ends: (batch, n).
        asked: queries for which to draw, (batch,) bool.
        logits: those of some queries and classes, by their numbers.

    Returns:
        Classes, (batch,) int64; -1 where none was asked for or accepted.
    """
    drawn = torch.full((len(ends),), -1, device=ends.device)
    left = asked.nonzero()[:, 0]
    tiny = torch.finfo(ends.dtype).tiny
    for count in ROUNDS:
        if not len(left):
            break
        own = ends[left]
        scaled = (own - own.amax(-1, keepdim=True)) / max(temperature, tiny)
        classes = torch.multinomial(scaled.softmax(-1), count, replacement=True, generator=generator)  # (left, count)
        exact = logits(left.repeat_interleave(count), classes.flatten()).view_as(classes)
        chance = ((exact - own.gather(-1, classes)) / max(temperature, tiny)).exp()
        uniform = torch.rand(chance.shape, dtype=chance.dtype, device=chance.device, generator=generator)
        accepted = uniform < chance
        first = accepted.to(torch.uint8).argmax(-1, keepdim=True)
        some = accepted.any(-1)
        drawn[left[some]] = classes.gather(-1, first)[some, 0]
        left = left[~some]
    return drawn
