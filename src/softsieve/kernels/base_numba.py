"""What the numba kernels are made of: how functions are compiled, and arithmetic that the compiler vectorises.

A zero that is passed to a function is np.int64(0): a literal has a type of its own, and is compiled for once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from softsieve._threads import follow_torch

BLOCK = 512  # rows of the preview that are worked on together: their estimates stay in the first cache
ALONE = 1 << 20  # entries up to which one thread does the work: starting more costs time, on a busy machine much
TOGETHER = 256  # rows that a thread reads one after the other
AHEAD = 4096  # bytes of rows that are prefetched before the one that is read: enough to wait for none of them
_LINE = 64  # bytes of a cache line
LOG2E = 1.4426950408889634

follow_torch()

_SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*numba*.py"))))


def compiler(**options: Any) -> Callable[[Any], Any]:
    """``numba.njit`` with a cache that is invalid when any of the numba modules has changed.

    By itself numba compares the function's own file only, and would go on with the old code of what it calls.
    """

    def compile_lazily(function: Any) -> Any:
        # Said of each: else a function would count references where the one that first called it does.
        counting = {"_nrt": True, **options}
        dispatcher = numba.njit(nogil=True, cache=True, no_cfunc_wrapper=True, **counting)(function)
        with suppress(AttributeError):  # without a folder for it there is no cache
            cache = dispatcher._cache._cache_file
            cache._source_stamp = (cache._source_stamp, _SOURCES.hexdigest())
        return dispatcher

    return compile_lazily


def is_compiled(function: Any) -> bool:
    """Whether there is code of a function for some arguments, in this process or in the cache."""
    with suppress(AttributeError):
        return bool(function.signatures or function._cache._cache_file._load_index())
    return False


jit = compiler(error_model="numpy")
# Only other functions call a stage: a half of the code, and of the time that it is compiled in. Whoever calls it holds
# the arrays, so it counts no references: one for every slice, each an atomic addition. It cannot make an array then.
jit_stage = compiler(error_model="numpy", no_cpython_wrapper=True, _nrt=False)
jit_holding = compiler(error_model="numpy", _nrt=False)  # the same for what Python calls with arrays that it holds
jit_making_stage = compiler(error_model="numpy", no_cpython_wrapper=True)
jit_fast = compiler(fastmath=True)  # sums and largest values vectorise; no infinities in them
jit_fast_stage = compiler(fastmath=True, no_cpython_wrapper=True, _nrt=False)
jit_fast_making_stage = compiler(fastmath=True, no_cpython_wrapper=True)
jit_parallel = compiler(fastmath=True, parallel=True)
jit_parallel_stage = compiler(parallel=True, no_cpython_wrapper=True, _nrt=False)
_SUMS = {"contract", "reassoc", "nsz"}  # sums vectorise; NaN and infinity are what they are
jit_sums = compiler(fastmath=_SUMS, error_model="numpy")
jit_sums_parallel = compiler(fastmath=_SUMS, error_model="numpy", parallel=True)
_jit_exact = compiler(fastmath={"contract"})


@intrinsic
def as_float(typingctx: Any, element: Any) -> Any:
    """Return an element of the weight as a float: uint16 is bfloat16, int16 is float16, int8 a code."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if element == types.uint16:
            wide = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
            return builder.bitcast(wide, ir.FloatType())
        if element == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        if element == types.int8:
            return builder.sitofp(args[0], ir.FloatType())
        return args[0]

    return (element if isinstance(element, types.Float) else types.float32)(element), codegen


def _pointer_to(kind: Any, name: str) -> Any:
    def pointer(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), codegen

    pointer.__doc__ = f"Return an address, such as `Tensor.data_ptr` gives, as a pointer to {kind}, for `carray`."
    pointer.__name__ = pointer.__qualname__ = name
    return intrinsic(pointer)


as_floats = _pointer_to(types.float32, "as_floats")
as_labels = _pointer_to(types.int64, "as_labels")


@intrinsic
def power_of_two(typingctx: Any, exponent: Any) -> Any:
    """Return 2 to a whole number in [-126, 127]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.IntType(32)
        biased = builder.add(args[0], ir.Constant(kind, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(kind, 23)), ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def trailing_zeros(typingctx: Any, word: Any) -> Any:
    """Count the lowest bits that are 0 in a word that is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), codegen


@intrinsic
def larger(typingctx: Any, one: Any, other: Any) -> Any:
    """Return the larger of two floats. Unlike with max, a loop of these over a slice vectorises."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = args[0].type
        name = "llvm.maxnum.f32" if kind == ir.FloatType() else "llvm.maxnum.f64"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind, kind]), name)
        return builder.call(function, args, fastmath=("fast",))

    return one(one, one), codegen


@intrinsic
def prefetch(typingctx: Any, array: Any, row: Any, byte: Any) -> Any:
    """Ask the memory for a byte in a row of a matrix, which will be read soon."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = context.make_array(signature.args[0])(context, builder, args[0])
        stride = cgutils.unpack_tuple(builder, matrix.strides)[0]
        start = builder.bitcast(matrix.data, ir.IntType(8).as_pointer())
        address = builder.gep(start, [builder.add(builder.mul(stride, args[1]), args[2])])
        kind = ir.FunctionType(ir.VoidType(), [address.type, *[ir.IntType(32)] * 3])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [address, *(ir.Constant(ir.IntType(32), number) for number in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), codegen


@jit_fast_stage
def prefetch_row(matrix: Any, row: int, start: int, stop: int) -> None:
    """Ask the memory for some bytes of a row, as many as are worth it: by then the processor sees what follows."""
    for byte in range(start, min(stop, start + AHEAD), _LINE):
        prefetch(matrix, np.intp(row), byte)


@jit_fast
def exp(value: float) -> float:
    """Return e to a number of at most 80, to 1e-5; below e^-80 it is that. Unlike math.exp, it vectorises."""
    scaled = np.float32(max(value, np.float32(-80.0))) * np.float32(LOG2E)
    whole = np.floor(scaled + np.float32(0.5))
    fraction = (scaled - whole) * np.float32(0.6931471805599453)  # within 0.35
    series = np.float32(1 / 120)
    series = series * fraction + np.float32(1 / 24)
    series = series * fraction + np.float32(1 / 6)
    series = series * fraction + np.float32(0.5)
    series = series * fraction + np.float32(1.0)
    series = series * fraction + np.float32(1.0)
    return series * power_of_two(np.int32(whole))


@intrinsic
def choose(typingctx: Any, condition: Any, one: Any, other: Any) -> Any:
    """Return one or the other, both of which are computed: sums of what an if gives do not vectorise."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(*args)

    return one(types.boolean, one, one), codegen


@intrinsic
def larger_of_any(typingctx: Any, one: Any, other: Any) -> Any:
    """Return the larger of two float32, which may be infinite, unlike those of `larger`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 2)
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.maxnum.f32")
        return builder.call(function, args, fastmath=("nnan", "nsz", "reassoc"))

    return types.float32(types.float32, types.float32), codegen


@_jit_exact
def exp_rounded(value: Any) -> Any:
    """Return e to a number of at most 0, rounded to float32; it vectorises."""
    whole = np.floor(value * np.float32(LOG2E) + np.float32(0.5))
    whole = whole if whole > np.float32(-126.0) else np.float32(-126.0)
    fraction = (value - whole * np.float32(0.693359375)) + whole * np.float32(2.12194440e-4)  # within 0.35
    series = np.float32(1 / 5040)
    series = series * fraction + np.float32(1 / 720)
    series = series * fraction + np.float32(1 / 120)
    series = series * fraction + np.float32(1 / 24)
    series = series * fraction + np.float32(1 / 6)
    series = series * fraction + np.float32(0.5)
    series = series * fraction + np.float32(1.0)
    series = series * fraction + np.float32(1.0)
    return np.float32(0.0) if value < np.float32(-87.0) else series * power_of_two(np.int32(whole))


@jit_fast_stage
def largest_of(values: Any) -> Any:
    """Return the largest value."""
    highest = values[0]
    for i in range(values.size):
        highest = larger(highest, values[i])
    return highest


@jit_stage
def _sink(heap: Any, place: int) -> None:
    """Move a value that may be too large for its place in a heap, the smallest first, down to where it belongs."""
    value = heap[place]
    while 2 * place + 1 < heap.size:
        child = 2 * place + 1
        child += child + 1 < heap.size and heap[child + 1] < heap[child]
        if not heap[child] < value:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = value


@jit_making_stage
def kth_largest(values: Any, k: int) -> float:
    """Return the k-th largest value."""
    if k == 1:
        return largest_of(values)
    heap = values[:k].copy()
    for place in range(k // 2 - 1, -1, -1):
        _sink(heap, place)
    for i in range(k, values.size):
        if values[i] > heap[0]:
            heap[0] = values[i]
            _sink(heap, np.int64(0))
    return heap[0]
