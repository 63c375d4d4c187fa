"""CUDA graphs for what is small, where the GPU would wait for the host."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from softsieve.errors import first_line

Outputs = tuple[Tensor, ...]
_BROKEN: list[torch.cuda.CUDAGraph] = []  # of recordings that failed: torch's allocators may still ask them


class Graphed:
    """A function of tensors, replayed as a CUDA graph for each shape of its arguments that it meets often enough.

    The first ``warmup`` calls with a shape run as they are; the next records the graph that it and all later ones
    replay. So no call is made twice or in vain, and a function that trains, trains exactly once a call. Outputs belong
    to the graph: the next call with the same shapes overwrites them.

    What cannot be recorded, because it copies from the CPU for instance, runs as it is from then on, with one warning.
    A recording does nothing on the device, so that the call which failed to record is still made once.

    Args:
        function: called with keyword tensors; all it changes must be tensors that stay where they are, and it may not
            read their values from Python.
        warmup: calls before recording, at least 1: lazily made state, such as an optimizer's, must not be made by a
            graph.
        limit: the most graphs; further shapes run without.
    """

    def __init__(self, function: Callable[..., Outputs], *, warmup: int = 2, limit: int = 4) -> None:
        self.function, self.warmup, self.limit = function, warmup, limit
        self.records = True  # until a recording fails
        self.calls: dict[tuple[object, ...], int] = {}
        self.graphs: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Outputs]] = {}

    def __call__(self, **inputs: Tensor) -> Outputs:
        key = tuple((name, value.shape, value.dtype) for name, value in inputs.items())
        if key not in self.graphs:
            self.calls[key] = self.calls.get(key, 0) + 1
            if not self.records or self.calls[key] <= self.warmup or len(self.graphs) == self.limit:
                return self._run_beside(inputs)
            try:
                self.graphs[key] = self._record(inputs)
            except RuntimeError as error:
                self.records = False
                _warn(error)
                return self._run_beside(inputs)
        graph, static, outputs = self.graphs[key]
        for name, value in inputs.items():
            static[name].copy_(value, non_blocking=True)
        graph.replay()
        return outputs

    def _run_beside(self, inputs: dict[str, Tensor]) -> Outputs:
        """Run on a stream of its own, as torch asks of whatever is recorded later."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs = self.function(**inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return outputs

    def _record(self, inputs: dict[str, Tensor]) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Outputs]:
        static = {name: value.clone() for name, value in inputs.items()}
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            # A recording that fails leaves its own stream the current one; the outer context brings ours back.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
                outputs = self.function(**static)
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
