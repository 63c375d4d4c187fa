"""Launches of Triton kernels that take less of the host's time than a small kernel does.

Triton asks of every argument, at every launch, whether the code compiled for another launch is good for it. Who knows
what that depends on gives it as a key, and all later launches with the same key go straight to the code.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

MOST = 1024  # keys of a kernel that are kept
ALIGNED = 15  # bits of an address that are 0 where 16 bytes can be read at once


class Launches:
    """Those of one kernel.

    The key must tell apart all that the compiled code may depend on: the device, dtypes, whole numbers, constants, and
    the number of warps, by whatever these follow from. Addresses are looked at here.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[Hashable, Any] = {}

    def by_types(
        self, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...], **options: Any
    ) -> None:
        """Launch with a key of what Triton would ask: ``args`` are tensors and numbers, which constants come after."""
        tensors = tuple(arg for arg in args if isinstance(arg, Tensor))
        key = (tensors[0].device, *map(_kind, args), constants, *options.values())
        self(key, tensors, grid, *args, *constants, **options)

    def __call__(
        self, key: Hashable, tensors: tuple[Tensor, ...], grid: tuple[int, int, int], *args: Any, **options: Any
    ) -> None:
        """Launch with all ``args`` in order, constants among them; ``tensors`` are those that may not be aligned."""
        address = 0
        for tensor in tensors:
            address |= tensor.data_ptr()
        if address & ALIGNED:
            self.kernel[grid](*args, **options)
            return
        compiled = self.compiled.get(key)
        if compiled is not None:
            compiled[grid](*args)
            return
        compiled = self.kernel[grid](*args, **options)
        if hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
            if len(self.compiled) >= MOST:
                self.compiled.clear()
            self.compiled[key] = compiled


def _kind(arg: Any) -> Hashable:
    """What compiled code depends on of an argument: 1 is a constant to Triton, and so is what 16 divides."""
    if isinstance(arg, Tensor):
        return arg.dtype
    if type(arg) is int:
        return arg == 1, arg % 16 == 0, arg.bit_length() // 32
    return float if type(arg) is float else arg
