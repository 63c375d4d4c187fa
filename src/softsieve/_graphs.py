"""CUDA graphs for what is small, where the GPU would wait for the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]


class Graphed:
    """A function of tensors, replayed as a CUDA graph for each shape of its arguments that it meets often enough.

    The first ``warmup`` calls with a shape run as they are; the next records the graph that it and all later ones
    replay. So no call is made twice or in vain, and a function that trains, trains exactly once a call. Outputs belong
    to the graph: the next call with the same shapes overwrites them.

    Args:
        function: called with keyword tensors; all it changes must be tensors that stay where they are, and it may not
            read their values from Python.
        warmup: calls before recording, at least 1: lazily made state, such as an optimizer's, must not be made by a
            graph.
        limit: the most graphs; further shapes run without.
    """

    def __init__(self, function: Callable[..., Outputs], *, warmup: int = 2, limit: int = 4) -> None:
        self.function, self.warmup, self.limit = function, warmup, limit
        self.calls: dict[tuple[object, ...], int] = {}
        self.graphs: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Outputs]] = {}

    def __call__(self, **inputs: Tensor) -> Outputs:
        key = tuple((name, value.shape, value.dtype) for name, value in inputs.items())
        if key not in self.graphs:
            self.calls[key] = self.calls.get(key, 0) + 1
            if self.calls[key] <= self.warmup or len(self.graphs) == self.limit:
                return self._run_beside(inputs)
            self.graphs[key] = self._record(inputs)
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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.function(**static)
        return graph, static, outputs
