"""Time and peak memory of a call, on whatever device it runs."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]


def _milliseconds(call: Call, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def times(calls: Sequence[Call], *, repeats: int, device: str = "cpu") -> list[tuple[float, float, float]]:
    """20th, 50th and 80th percentile of the milliseconds that each call takes.

    The calls take turns, so that a slow spell of the machine falls on all of them.

    Example:
        >>> (low, median, high), = times([lambda: sum(range(1000))], repeats=5)
        >>> 0 < low <= median <= high
        True
    """
    return [percentiles(milliseconds) for milliseconds in turns(calls, repeats=repeats, device=device)]


def turns(calls: Sequence[Call], *, repeats: int, device: str = "cpu") -> list[list[float]]:
    """All the milliseconds that each call takes, when they take turns; the first turn warms up and does not count.

    Example:
        >>> [len(taken) for taken in turns([list, dict], repeats=5)]
        [5, 5]
    """
    for call in calls:
        call()
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, milliseconds in zip(calls, taken, strict=True):
            milliseconds.append(_milliseconds(call, device))
    return taken


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """The 20th, the 50th and the 80th."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return fifths[0], statistics.median(values), fifths[3]


def captured(call: Call, *, warmups: int = 3) -> Call:
    """The same work as a CUDA graph: what it costs without the time of the host."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Some builds of torch announce the profiler on the standard error of the process, past Python's."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def peak_bytes(call: Call, *, device: str = "cpu") -> int:
    """Most tensor memory that ``call`` holds at once, above what was held before it.

    Example:
        >>> peak_bytes(lambda: torch.ones(1024).add(1)) // 1024  # two vectors of 4096 bytes and change
        8
    """
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    record = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _silent_stderr():
        record.start()
    try:
        call()
    finally:
        with _silent_stderr():
            record.stop()
    held = peak = 0
    events: list[Any] = record.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
