"""CUDA graphs for what is small, where the GPU would wait for the host."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from softsieve.errors import first_line

Outputs = tuple[Tensor, ...]
_BROKEN: list[torch.cuda.CUDAGraph] = []  # of recordings that failed: torch's allocators may still ask them


class Graphed:
    """A function of tensors, replayed as a CUDA graph for each shape of its arguments that it meets often enough.

    Positional arguments are no tensors and are part of what is recorded: every value of them has graphs of its own.

    The first ``warmup`` calls with a shape run as they are; the next records the graph that it and all later ones
    replay. So no call is made twice or in vain, and a function that trains, trains exactly once a call. Outputs belong
    to the graph: the next call overwrites them, for all graphs of a function share their memory.

    What cannot be recorded, because it copies from the CPU for instance, runs as it is from then on, with one warning.
    A recording does nothing on the device, so that the call which failed to record is still made once.

    Args:
        function: called with what it is given; all it changes must be tensors that stay where they are, and it may
            not read their values from Python.
        warmup: calls before recording, at least 1: lazily made state, such as an optimizer's, must not be made by a
            graph.
        limit: the most graphs; further shapes run without.
    """

    def __init__(self, function: Callable[..., Outputs], *, warmup: int = 2, limit: int = 4) -> None:
        self.function, self.warmup, self.limit = function, warmup, limit
        self.records = True  # until a recording fails
        self.calls: dict[tuple[object, ...], int] = {}
        self.graphs: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Outputs]] = {}
        self.stream: Any = None  # beside ours, for what is not recorded
        self.pool: Any = None  # of memory, made with the first graph

    def __call__(self, *fixed: Hashable, **inputs: Tensor) -> Outputs:
        key = (*fixed, *((name, value.shape, value.dtype) for name, value in inputs.items()))
        if key not in self.graphs:
            self.calls[key] = self.calls.get(key, 0) + 1
            if not self.records or self.calls[key] <= self.warmup or len(self.graphs) == self.limit:
                return self._run_beside(fixed, inputs)
            try:
                self.graphs[key] = self._record(fixed, inputs)
            except RuntimeError as error:
                self.records = False
                _warn(error)
                return self._run_beside(fixed, inputs)
        graph, static, outputs = self.graphs[key]
        for name, value in inputs.items():
            static[name].copy_(value, non_blocking=True)
        graph.replay()
        return outputs

    def _run_beside(self, fixed: tuple[Hashable, ...], inputs: dict[str, Tensor]) -> Outputs:
        """Run on a stream of its own, as torch asks of whatever is recorded later."""
        if self.stream is None:  # one for all calls: memory that one stream gave back is of no use to another
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream = self.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs = self.function(*fixed, **inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return outputs

    def _record(
        self, fixed: tuple[Hashable, ...], inputs: dict[str, Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Outputs]:
        static = {name: value.clone() for name, value in inputs.items()}
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph, pool = torch.cuda.CUDAGraph(), self.pool
        try:
            # A recording that fails leaves its own stream the current one; the outer context brings ours back.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
                outputs = self.function(*fixed, **static)
        except RuntimeError:
            graph.reset()
            _BROKEN.append(graph)
            _clean_up(pool, *static.values())
            raise
        return graph, static, outputs


def _warn(error: RuntimeError) -> None:
    """Say why there is no graph: what the function did, not that the recording could not be ended after it."""
    cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
    warnings.warn(f"graphs: runs without, for it cannot be recorded: {first_line(cause)}", stacklevel=3)


def _clean_up(pool: tuple[int, int], *some: Tensor) -> None:
    """End what torch ends only after a recording that succeeds: the use of its memory, and of the generators."""
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # refused when the recording could be ended
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    # The generators of earlier versions of torch draw nothing until another recording has ended.
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        for value in some:
            value.clone()
