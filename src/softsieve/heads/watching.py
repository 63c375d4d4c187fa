"""Noticing that a weight may have changed: what torch counts, what optimizers step, and some rows bit by bit.

torch counts changes in place, but not those of fused optimizers, nor what is done to ``weight.data`` or through numpy.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

SAMPLED = 64  # rows that a `Sample` compares

_LOCK = threading.Lock()


class Watch:
    """Tells whether a weight or a bias may have changed between two looks at it.

    A change that torch counts is noticed, and a step of any optimizer that has a parameter in the same memory: torch
    does not count those of fused ones. Tensors of inference mode have no count.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3, 2))
        >>> watch = Watch(weight.detach(), None)
        >>> before = watch.now()
        >>> weight.grad = torch.ones(3, 2)
        >>> torch.optim.SGD([weight], lr=1.0, fused=True).step()
        >>> watch.now() == before
        False
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._tensors = [value for value in (weight, bias) if value is not None]
        self._counted = [value for value in self._tensors if not value.is_inference()]
        self._steps = 0
        with _LOCK:
            if not _HOOKS:
                _HOOKS.append(register_optimizer_step_post_hook(_after_step))
            _WATCHES.add(self)

    def now(self) -> tuple[int, ...]:
        """Numbers that are others after a change."""
        return (self._steps, *(value._version for value in self._counted))

    def _step(self, places: set[int]) -> None:
        """Note a step of the parameters at these places, 0 for any place."""
        if 0 in places or any(_place(value) in places for value in self._tensors):
            self._steps += 1


_WATCHES: WeakSet[Watch] = WeakSet()
_HOOKS: list[Any] = []  # the handle of ours, once there is something to watch


def _after_step(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    """Tell all watches which memory an optimizer may have changed."""
    with _LOCK:
        watches = list(_WATCHES)
    if watches:
        places = {_place(value) for group in optimizer.param_groups for value in group["params"]}
        for watch in watches:
            watch._step(places)


def _place(value: Tensor) -> int:
    """Where the memory of a tensor begins that it may share with others; 0 if it cannot be told."""
    try:
        return getattr(value, "_local_tensor", value).untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


class Sample:
    """Some rows of a weight as they were, to compare with what they are."""

    def __init__(self, weight: Tensor) -> None:
        mixed = torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))
        self._weight, self._rows = weight, mixed[:SAMPLED].to(weight.device)
        self._before = weight[self._rows]

    def unchanged(self) -> bool:
        return torch.equal(self._weight[self._rows], self._before)
