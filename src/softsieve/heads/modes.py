"""Heads compute in their own dtypes and keep ordinary tensors, whatever modes of torch their caller is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor


class _OnDevice(Protocol):
    _device_type: str  # such as "cpu", where it computes


Owner = TypeVar("Owner", bound=_OnDevice)
Given = ParamSpec("Given")
Result = TypeVar("Result")


@contextmanager
def own_modes(device_type: str) -> Iterator[None]:
    """Without autocast, and not in inference mode, whose tensors cannot be changed outside it."""
    before = torch.is_autocast_enabled(device_type)
    torch.set_autocast_enabled(device_type, False)  # a fraction of the time of a `torch.autocast` that is not enabled
    try:
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            yield
    finally:
        torch.set_autocast_enabled(device_type, before)


def in_own_modes(
    method: Callable[Concatenate[Owner, Given], Result],
) -> Callable[Concatenate[Owner, Given], Result]:
    """A method that always computes in `own_modes`. Entering these takes microseconds, so it is done only where needed.

    Example:
        >>> class Doubling:
        ...     _device_type = "cpu"
        ...
        ...     @in_own_modes
        ...     def answer(self, x):
        ...         return (x @ x).dtype
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     Doubling().answer(torch.ones(2, 2))
        torch.float32
    """

    @wraps(method)
    def called(self: Owner, /, *args: Given.args, **options: Given.kwargs) -> Result:
        if torch.is_autocast_enabled(self._device_type) or torch.is_inference_mode_enabled():
            with own_modes(self._device_type):
                return method(self, *args, **options)
        return method(self, *args, **options)

    return called


def ordinary(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, with copies of those that were made in inference mode. Called in `own_modes`."""
    return {name: value.clone() if value.is_inference() else value for name, value in values.items()}
