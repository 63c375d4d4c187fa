"""Forward + backward of the losses on logits: softsieve, and the same in plain torch, against F.cross_entropy.

On a GPU in eager mode, where a small batch takes the time of the host, and as CUDA graphs, which take that of the GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import captured, peak_bytes, percentiles, turns
from softsieve import reference
from softsieve.losses import as_cross_entropy


class Result(NamedTuple):
    """One method at one shape. Ratios are to `F.cross_entropy`; the peak is above the logits, gradient included."""

    rows: int
    classes: int
    solved: float
    dense: float
    method: str
    ms: float
    ms_p20: float
    ms_p80: float
    ms_mean: float
    time_ratio: float
    graph_ms: float  # as a CUDA graph; not a number on a CPU
    graph_ratio: float
    peak_mb: float
    memory_ratio: float
    loss: float


METHODS = ("F.cross_entropy", "softsieve", "plain torch")


def make_logits(
    rows: int, classes: int, *, solved: float, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Normal logits with random labels, of which a share is put far above its rivals, in random order."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=generator)
    target = torch.randint(classes, (rows,), generator=generator)
    chosen = torch.randperm(rows, generator=generator)[: round(solved * rows)]
    logits[chosen, target[chosen]] = logits[chosen].amax(-1) + 10
    return logits.to(device, dtype), target.to(device)


def measure(
    rows: int, classes: int, *, solved: float, delta: float, dtype: torch.dtype, device: str, repeats: int
) -> list[Result]:
    """All methods on the same logits, taking turns.

    Example:
        >>> results = measure(64, 10, solved=0.5, delta=0.1, dtype=torch.float32, device="cpu", repeats=1)
        >>> [r.method for r in results]
        ['F.cross_entropy', 'softsieve', 'plain torch']
    """
    logits, target = make_logits(rows, classes, solved=solved, dtype=dtype, device=device)
    _, stats = as_cross_entropy(logits, target, delta=delta, return_stats=True)
    logits.requires_grad_()
    losses: dict[str, Callable[[], Tensor]] = {
        METHODS[0]: lambda: F.cross_entropy(logits, target),
        METHODS[1]: lambda: as_cross_entropy(logits, target, delta=delta),
        METHODS[2]: lambda: reference.as_cross_entropy(logits, target, delta=delta),
    }

    def forward_backward(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def call() -> None:
            logits.grad = None
            loss().backward()  # type: ignore[no-untyped-call]

        return call

    calls = [forward_backward(loss) for loss in losses.values()]
    taken = turns(calls, repeats=repeats, device=device)
    timed = [percentiles(milliseconds) for milliseconds in taken]
    replayed = [float("nan")] * len(calls)
    if device != "cpu":
        logits.grad = None
        graphs = [captured(call) for call in calls]
        replayed = [statistics.median(milliseconds) for milliseconds in turns(graphs, repeats=repeats, device=device)]
    logits.grad = None
    peaks = []
    for call in calls:
        peaks.append(peak_bytes(call, device=device))
        logits.grad = None
    return [
        Result(
            rows=rows,
            classes=classes,
            solved=stats.solved.float().mean().item(),
            dense=stats.dense.float().mean().item(),
            method=method,
            ms=median,
            ms_p20=low,
            ms_p80=high,
            ms_mean=statistics.mean(milliseconds),
            time_ratio=median / timed[0][1],
            graph_ms=replay,
            graph_ratio=replay / replayed[0],
            peak_mb=peak / 1e6,
            memory_ratio=peak / peaks[0],
            loss=loss().item(),
        )
        for (method, loss), (low, median, high), milliseconds, replay, peak in zip(
            losses.items(), timed, taken, replayed, peaks, strict=True
        )
    ]
