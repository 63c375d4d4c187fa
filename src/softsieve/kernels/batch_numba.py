"""Several queries through the cascade on the CPU: one pass over the preview's codes, then a thread for each query.

One query is shared among all threads at every step, and each step ends with waiting for the slowest of them. Of
several, each thread answers some from beginning to end, and takes the next one when it is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import typeof, types
from numba.core import cgutils
from numba.extending import intrinsic

from softsieve.kernels.base_numba import BLOCK, jit_fast_stage, jit_holding, jit_stage, prefetch_row
from softsieve.kernels.cascade_numba import Found, Index, Plan, Scratch, ask
from softsieve.kernels.estimates_numba import start_block
from softsieve.kernels.parts_numba import in_parts
from softsieve.kernels.quantised_numba import exact_row
from softsieve.kernels.rows_numba import add_columns, project


@intrinsic
def take(typingctx: Any, counter: Any) -> Any:
    """Return the first number of an array of int64, and add 1 to it; no two threads get the same one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), codegen


@intrinsic
def _ask_at(
    typingctx: Any, address: Any, index: Any, plan: Any, x: Any, extended: Any, scratch: Any, top: Any, logits: Any,
    dense: Any, ready: Any,
) -> Any:  # fmt: skip
    """Call `ask` by its address, which `address_of` gives.

    Called by its name, all of it would be compiled again in every function around the call.
    """
    kinds = index, plan, x, extended, scratch, top, logits, dense, ready
    ask.compile(kinds)
    found = ask.overloads[kinds].signature.return_type

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = context.call_conv.get_function_type(found, kinds).as_pointer()
        function = builder.inttoptr(args[0], pointer)
        status, answer = context.call_conv.call_function(builder, function, found, kinds, args[1:])
        with cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return answer

    return found(types.int64, *kinds), codegen


def address_of(
    index: Index, plan: Plan, x: Any, extended: Any, scratch: Scratch, top: Any, logits: Any, dense: Any
) -> int:
    """Return the address of `ask` for what one query has of the arguments that `ask_all` will have; arguments as there.

    Compiles `ask` if it was not before; code that comes from the cache lies elsewhere in every process.
    """
    own = _scratch_of.py_func(scratch, 0, 0)
    given = index, plan, x[0], extended[0], own, top[0], logits[0], dense[0], np.int64(0)
    kinds = tuple(map(typeof, given))
    ask.compile(kinds)
    compiled = ask.overloads[kinds]
    place: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return place


@jit_stage
def _scratch_of(shared: Scratch, query: int, thread: int) -> Scratch:
    """Return the memory for one query of those that share a pass, and for the thread that answers it."""
    return Scratch(
        shared.estimates[query], shared.largest[thread], shared.upper_ends[thread], shared.sums[thread],
        shared.corrected[thread], shared.ends[thread], shared.marks[thread], shared.rows[thread],
        shared.values[thread], shared.spreads[thread], shared.exact[thread], shared.dropped[thread],
        shared.excesses[thread], shared.y[thread], shared.probe_logits[thread], shared.probe_starts[thread],
        shared.probe_estimates[thread], shared.probe_spreads[thread], shared.tally[thread], shared.summed[thread],
        shared.alone,
    )  # fmt: skip


@jit_fast_stage
def _estimate_block(b: int, columns: Any, base: Any, y: Any, offsets: Any, estimates: Any, rows: int) -> None:
    """Estimate a block for several queries: its codes are read once, and stay in the first cache for all."""
    start, stop = b * BLOCK, min((b + 1) * BLOCK, rows)
    if b + 1 < columns.shape[0]:
        prefetch_row(columns, b + 1, np.int64(0), y.shape[1] * BLOCK)
    for i in range(y.shape[0]):
        start_block(offsets[i], base[start:stop], estimates[i, start:stop])
        add_columns(columns[b], y[i], estimates[i, start:stop])


@jit_stage
def _answer_some(
    thread: int, address: int, index: Index, plan: Plan, x: Any, extended: Any, scratch: Scratch,
    top: Any, logits: Any, dense: Any, answers: Any, taken: Any,
) -> None:  # fmt: skip
    """Answer one query after the other, from estimates that are there, until all are taken."""
    ready = index.previews[plan.first]
    while True:
        i = take(taken)
        if i >= x.shape[0]:
            break
        own, answer = _scratch_of(scratch, i, thread), answers[i]
        one: Found = _ask_at(address, index, plan, x[i], extended[i], own, top[i], logits[i], dense[i], ready)
        answer[0], answer[1], answer[2], answer[3], answer[4] = one[0], one[1], one[2], one[3], one[4]
        answer[5], answer[6], answer[7], answer[8] = one[5], one[6], one[7], one[8]
        answer[9], answer[10] = one[9], one[10]


@jit_holding
def ask_all(
    address: int, index: Index, plan: Plan, x: Any, extended: Any, scratch: Scratch, top: Any, logits: Any, dense: Any,
    answers: Any, taken: Any, y: Any, offsets: Any,
) -> None:  # fmt: skip
    """Answer queries as `ask` does each of them.

    Args:
        address: of `ask` for arguments of these types, see `address_of`.
        index, plan: as there.
        x, extended: the queries. (batch, d) and (batch, d [+ 1])
        scratch: the memory of each thread, and the estimates of each query. (threads, ...) and (batch, blocks * BLOCK)
        top, logits, dense: where answers go. (batch, k) twice and (batch, n or 0)
        answers: what `Found` has. (batch, fields)
        taken: 0. (1,)
        y, offsets: memory. (batch, length of the first preview) and (batch,)
    """
    for i in range(x.shape[0]):
        offsets[i] = np.float32(exact_row(index.centre, extended[i]))
        project(index.projection, extended[i], np.int64(0), y.shape[1], y[i])
    in_parts(
        _estimate_block, index.columns.shape[0], False,
        (index.columns, index.base, y, offsets, scratch.estimates, index.spreads.shape[1]),
    )  # fmt: skip
    in_parts(
        _answer_some, scratch.tally.shape[0], False,
        (address, index, plan, x, extended, scratch, top, logits, dense, answers, taken),
    )  # fmt: skip
