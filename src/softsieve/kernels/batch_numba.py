"""Several queries through the cascade on the CPU: one pass over the preview's codes, then a thread for each query.

One query is shared among all threads at every step, and each step ends with waiting for the slowest of them. Of
several, each thread answers some from beginning to end, and takes the next one when it is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, typeof, types
from numba.core import cgutils
from numba.extending import intrinsic

from softsieve.kernels.base_numba import BLOCK, jit_fast_stage, jit_parallel_stage, jit_stage, jit_workers, prefetch_row
from softsieve.kernels.cascade_numba import Found, Index, Plan, Scratch, Usual, ask
from softsieve.kernels.quantised_numba import exact_row
from softsieve.kernels.rows_numba import SPREADS, add_columns, project

_NUMBERS = 9  # of a plan before what is usual
_NEVER = 1 << 62  # entries up to which one thread does the work: all


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

    Called by its name, all of it would be compiled again in every function around the call, of which there are four.
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


def numbers_of(plan: Plan) -> Any:
    """A plan as an array: what a parallel loop is given has no tuples in tuples."""
    return np.array([*plan[:_NUMBERS], *plan.usual, plan.upper, plan.level, *plan.gap], np.float64)


@jit_stage
def _plan_of(numbers: Any) -> Plan:
    first, usual = numbers[:_NUMBERS], numbers[_NUMBERS:]
    return Plan(
        np.int64(first[0]), np.int64(first[1]), np.int64(first[2]), first[3], first[4], first[5], first[6], first[7],
        first[8], Usual(usual[0], usual[1], usual[2], usual[3], usual[4], usual[5], usual[6]), usual[7] != 0, usual[8],
        (usual[9], usual[10]),
    )  # fmt: skip


def room_for(blocks: int, longest: int, probes: int) -> int:
    """Numbers of float32 that `cut_scratch` takes for one query."""
    return 4 * blocks + 4 * (blocks * BLOCK + 1) + SPREADS + longest + 3 * probes


@jit_stage
def cut_scratch(
    estimates: Any, floats: Any, marks: Any, rows: Any, exact: Any, tally: Any, blocks: int, longest: int, probes: int
) -> Scratch:
    """Return the memory for one query, cut out of few arrays."""
    size, count = blocks * BLOCK, 0
    largest, count = floats[count : count + blocks], count + blocks
    upper_ends, count = floats[count : count + blocks], count + blocks
    sums, count = floats[count : count + blocks], count + blocks
    corrected, count = floats[count : count + blocks], count + blocks
    values, count = floats[count : count + size], count + size
    spreads, count = floats[count : count + size], count + size
    dropped, count = floats[count : count + size + 1], count + size + 1
    excesses, count = floats[count : count + size + 1], count + size + 1
    y, count = floats[count : count + SPREADS + longest], count + SPREADS + longest
    starts, count = floats[count : count + probes], count + probes
    probe_estimates, count = floats[count : count + probes], count + probes
    probe_spreads = floats[count : count + probes]
    return Scratch(
        estimates, largest, upper_ends, sums, corrected, marks, rows, values, spreads, exact[probes:], dropped,
        excesses, y, exact[:probes], starts, probe_estimates, probe_spreads, tally, floats[:0], _NEVER,
    )  # fmt: skip


@jit_fast_stage
def _start_block(offset: Any, base: Any, values: Any) -> None:
    values[:] = offset
    for i in range(base.size):
        values[i] += np.float32(base[i])


@jit_parallel_stage
def _estimate_together(columns: Any, base: Any, y: Any, offsets: Any, estimates: Any, rows: int) -> None:
    """Estimate all rows for several queries: a block of codes is read once, and stays in the first cache for all."""
    for b in prange(columns.shape[0]):
        start, stop = b * BLOCK, min((b + 1) * BLOCK, rows)
        if b + 1 < columns.shape[0]:
            prefetch_row(columns, np.int64(b) + 1, np.int64(0), y.shape[1] * BLOCK)
        for i in range(y.shape[0]):
            values = estimates[i, start:stop]
            _start_block(offsets[i], base[start:stop], values)
            add_columns(columns[b], y[i], values)


@jit_stage
def _answer(
    address: int, weight: Any, codes: Any, samples: Any, numbers: Any, x: Any, extended: Any, estimates: Any,
    floats: Any, marks: Any, rows: Any, exact: Any, tally: Any, top: Any, logits: Any, dense: Any, answer: Any,
) -> None:  # fmt: skip
    """Answer one query by one thread, from estimates that are there."""
    index, plan = Index(weight, *codes, samples), _plan_of(numbers)
    scratch = cut_scratch(
        estimates, floats, marks, rows, exact, tally,
        index.columns.shape[0], index.projection.shape[0], index.probes.size,
    )  # fmt: skip
    one: Found = _ask_at(address, index, plan, x, extended, scratch, top, logits, dense, index.previews[plan.first])
    answer[0], answer[1], answer[2], answer[3], answer[4] = one[0], one[1], one[2], one[3], one[4]
    answer[5], answer[6], answer[7], answer[8], answer[9], answer[10] = one[5], one[6], one[7], one[8], one[9], one[10]


def address_of(
    weight: Any, codes: Any, samples: Any, numbers: Any, x: Any, extended: Any, estimates: Any, floats: Any,
    marks: Any, rows: Any, exact: Any, tally: Any, top: Any, logits: Any, dense: Any,
) -> int:  # fmt: skip
    """Return the address of `ask` for arguments of the types that `ask_all` will have; arguments as there.

    They are made here by the functions that make them there, so that their types are the same. Compiles `ask` if it was
    not before; code that comes from the cache lies elsewhere in every process.
    """
    index, plan = Index(weight, *codes, samples), _plan_of.py_func(numbers)
    scratch = cut_scratch.py_func(
        estimates[0], floats[0], marks[0], rows[0], exact[0], tally[0],
        index.columns.shape[0], index.projection.shape[0], index.probes.size,
    )  # fmt: skip
    given = index, plan, x[0], extended[0], scratch, top[0], logits[0], dense[0], np.int64(0)
    kinds = tuple(map(typeof, given))
    ask.compile(kinds)
    compiled = ask.overloads[kinds]
    place: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return place


@jit_workers
def ask_all(
    address: int, weight: Any, codes: Any, samples: Any, numbers: Any, x: Any, extended: Any, estimates: Any,
    floats: Any, marks: Any, rows: Any, exact: Any, tally: Any, top: Any, logits: Any, dense: Any, answers: Any,
    taken: Any,
) -> None:  # fmt: skip
    """Answer queries as `ask` does each of them.

    Args:
        address: of `ask` for arguments of these types, see `address_of`.
        weight, codes, samples: the first, the middle and the last of what `Index` has.
        numbers: the plan, see `numbers_of`.
        x, extended: the queries. (batch, d) and (batch, d [+ 1])
        estimates: memory. (batch, blocks * BLOCK)
        floats, marks, rows, exact, tally: memory of each thread. (threads, ...)
        top, logits, dense: where answers go. (batch, k) twice and (batch, n or 0)
        answers: what `Found` has. (batch, fields)
        taken: 0. (1,)
    """
    _, base, projection, centre, _, previews, columns, spreads = codes[:8]
    length, batch = previews[np.int64(numbers[1])], x.shape[0]
    y, offsets = np.empty((batch, length), np.float32), np.empty(batch, np.float32)
    for i in range(batch):
        offsets[i] = np.float32(exact_row(centre, extended[i]))
        project(projection, extended[i], np.int64(0), length, y[i])
    _estimate_together(columns, base, y, offsets, estimates, spreads.shape[1])
    for thread in prange(tally.shape[0]):
        while True:
            i = take(taken)
            if i >= batch:
                break
            _answer(
                address, weight, codes, samples, numbers, x[i], extended[i], estimates[i], floats[thread],
                marks[thread], rows[thread], exact[thread], tally[thread], top[i], logits[i], dense[i], answers[i],
            )  # fmt: skip
