"""Work that threads share in numba: one parallel loop for all of it, which calls by their addresses what does a part.

numba makes several functions out of each loop over `prange`, and compiles what the loop calls again in all of them, and
once more for a thread that does the work alone. Here there is one such loop, which knows nothing of its work, and what
does a part is compiled once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from softsieve.kernels.base_numba import jit_parallel_stage

_ADDRESS = ir.IntType(64)


@intrinsic
def _call_at(typingctx: Any, address: Any, given: Any, part: Any) -> Any:
    """Call the function at an address with the address of what it is given, and the number of a part."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_ADDRESS, _ADDRESS])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@jit_parallel_stage
def _run(address: int, given: int, parts: int, alone: bool) -> None:
    if alone:
        for part in range(parts):
            _call_at(address, given, part)
    else:
        for part in prange(parts):
            _call_at(address, given, np.int64(part))  # what `prange` counts with is unsigned


@intrinsic
def in_parts(typingctx: Any, work: Any, parts: Any, alone: Any, given: Any) -> Any:
    """Call ``work(part, *given)`` for each part from 0 on, one after the other or by as many threads as there are.

    Args:
        work: a compiled function that returns nothing; what it raises is lost.
        parts: how many there are.
        alone: whether one thread does them all.
        given: what each of them gets: a tuple of anything.
    """
    signature = _signature(work.dispatcher, (types.int64, *given.types))
    run = _signature(_run, (types.int64, types.int64, types.int64, types.boolean))

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, many, one_thread, values = args
        # A function that any work has the type of: it takes what is given from where that lies in memory.
        kind = ir.FunctionType(ir.VoidType(), [_ADDRESS, _ADDRESS])
        part = ir.Function(builder.module, kind, builder.module.get_unique_name("part"))
        part.linkage = "internal"
        inside = ir.IRBuilder(part.append_basic_block())
        taken = inside.load(inside.inttoptr(part.args[0], values.type.as_pointer()))
        _call(context, inside, work.dispatcher, signature, [part.args[1], *cgutils.unpack_tuple(inside, taken)])
        inside.ret_void()

        place = builder.ptrtoint(cgutils.alloca_once_value(builder, values), _ADDRESS)
        _call(context, builder, _run, run, [builder.ptrtoint(part, _ADDRESS), place, many, one_thread])
        return context.get_dummy_value()

    return types.void(work, types.int64, types.boolean, given), codegen


def _signature(function: Any, kinds: tuple[Any, ...]) -> Any:
    """Compile a function for some types, unless that was done before."""
    function.compile(kinds)
    return function.overloads[kinds].signature


def _call(context: Any, builder: Any, function: Any, signature: Any, args: list[Any]) -> None:
    compiled = function.overloads[signature.args]
    context.add_linking_libs([compiled.library])
    context.call_internal_no_propagate(builder, compiled.fndesc, signature, args)
