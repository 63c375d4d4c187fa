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
CHUNK = 1 << 22  # entries of a weight that are worked on at a time

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


def checksums(weight: Tensor, bias: Tensor | None) -> Tensor:
    """A number for the bits of every row: their sum with random odd factors, modulo 2^64."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (weight.shape[1] + 1,), generator=generator) * 2 + 1
    factors = factors.to(weight.device)
    sums = torch.empty(len(weight), dtype=torch.int64, device=weight.device)
    step = max(1, CHUNK // weight.shape[1])
    compiled = weight.is_cpu and weight.numel() > CHUNK  # else torch is done before the kernel is there
    for start in range(0, len(weight), step):
        some = slice(start, start + step)
        if compiled:
            from softsieve.kernels.checksums_numba import sum_rows  # needs numba

            sum_rows(_bits(weight[some].contiguous()).numpy(), factors[:-1].numpy(), sums[some].numpy())
        else:
            sums[some] = (_bits(weight[some]).to(torch.int64) * factors[:-1]).sum(-1)
        if bias is not None:
            sums[some] += _bits(bias[some]).to(torch.int64) * factors[-1]
    return sums


def _bits(values: Tensor) -> Tensor:
    """The bits of floating-point numbers, as whole numbers of their size."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(kinds[values.element_size()])


class WeightChanged(RuntimeError):  # noqa: N818
    """Raised when the weight changed after something was fitted to it."""


def changed_rows(weight: Tensor, bias: Tensor | None, before: Tensor) -> Tensor:
    """Rows whose bits are not those of the checksums."""
    return (checksums(weight, bias) != before).nonzero()[:, 0]


def refuse_changes(weight: Tensor, bias: Tensor | None, before: Tensor, advice: str) -> None:
    """Compare the bits of all rows with their checksums.

    Raises:
        WeightChanged: when some differ, naming them.
    """
    rows = changed_rows(weight, bias, before)
    if len(rows):
        raise WeightChanged(f"weight: rows {list_rows(rows)} have changed since {advice}")


def list_rows(rows: Tensor) -> str:
    """Row numbers for a message."""
    first = ", ".join(map(str, rows[:5].tolist()))
    return first if len(rows) <= 5 else f"{first} and {len(rows) - 5} more"
