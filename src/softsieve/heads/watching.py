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

from softsieve.heads.quantised import Weight

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

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        self._tensors = [*_row_parts(weight), *([] if bias is None else [bias])]
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

    def __init__(self, weight: Weight) -> None:
        mixed = torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))
        self._weight, self._rows = weight, mixed[:SAMPLED].to(weight.device)
        self._before = _row_parts(weight[self._rows])

    def unchanged(self) -> bool:
        return all(map(torch.equal, _row_parts(self._weight[self._rows]), self._before))


def _row_parts(weight: Weight) -> list[Tensor]:
    """The tensors that have a row for each row of a weight."""
    return [weight] if isinstance(weight, Tensor) else weight.row_parts


def checksums(weight: Weight, bias: Tensor | None) -> Tensor:
    """A number for the bits of every row: their sum with random odd factors, modulo 2^64.

    Of a quantised weight they are the bits of codes, scales and minimums, and of what codes stand for.
    """
    parts, shared = _row_parts(weight), None if isinstance(weight, Tensor) else weight.levels
    width = sum(part.shape[1] for part in parts)
    generator = torch.Generator().manual_seed(0)
    count = width + 1 + (0 if shared is None else len(shared))
    factors = torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1
    factors = factors.to(weight.device)
    sums = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)
    step = max(1, CHUNK // weight.shape[1])
    compiled = weight.is_cpu and len(weight) * width > CHUNK  # else torch is done before the kernel is there
    for start in range(0, len(weight), step):
        some, first = slice(start, start + step), 0
        for part in parts:
            sums[some] += _sums(part[some], factors[first : first + part.shape[1]], compiled)
            first += part.shape[1]
        if bias is not None:
            sums[some] += _bits(bias[some]).to(torch.int64) * factors[width]
    return sums if shared is None else sums + (_bits(shared).to(torch.int64) * factors[width + 1 :]).sum()


def _sums(values: Tensor, factors: Tensor, compiled: bool) -> Tensor:
    """The bits of every row of numbers, times the factors, added up."""
    bits = _bits(values)
    if not compiled:
        return (bits.to(torch.int64) * factors).sum(-1)
    from softsieve.kernels.checksums_numba import sum_rows  # needs numba

    sums = torch.empty(len(values), dtype=torch.int64)
    sum_rows(bits.contiguous().numpy(), factors.numpy(), sums.numpy())
    return sums


def _bits(values: Tensor) -> Tensor:
    """The bits of numbers, as whole numbers of their size."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(kinds[values.element_size()])


class WeightChanged(RuntimeError):  # noqa: N818
    """Raised when the weight changed after something was fitted to it."""


def changed_rows(weight: Weight, bias: Tensor | None, before: Tensor) -> Tensor:
    """Rows whose bits are not those of the checksums."""
    return (checksums(weight, bias) != before).nonzero()[:, 0]


def refuse_changes(weight: Weight, bias: Tensor | None, before: Tensor, advice: str) -> None:
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
