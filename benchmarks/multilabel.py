"""Multi-label losses on logits against dense binary cross-entropy, in eager mode and in CUDA graphs.

`benchmarks.multilabel_layer` measures the layer whose step is in its backward pass.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import peak_bytes, percentiles, turns
from softsieve.losses import as_multilabel_loss

LOGITS = ("F.binary_cross_entropy_with_logits", "softsieve")
IN_GRAPH = ", CUDA graph"
LOGIT_SHAPES = {
    "cpu": ["1024x1000", "1024x4271", "256x30000", "64x131072"],
    "cuda": ["1024x1000", "4096x4271", "4096x30000", "64x131072", "1024x131072", "1024x1048576"],
}
DELTA = 0.5


class Result(NamedTuple):
    """One method at one shape: forward + backward of the loss on logits (size 0), or with the update of the layer."""

    rows: int
    size: int
    classes: int
    labels: int  # of a row
    dtype: str
    delta: float
    solved: float  # share of the rows
    dense: float  # share of the rows with a gradient of most classes
    method: str
    ms: float
    ms_mean: float
    ms_p20: float
    ms_p80: float
    time_ratio: float  # to the fastest rival
    extra_mb: float  # at the peak, above logits, or above states, weight and state of the optimizer
    hidden_error: float = float("nan")  # of the states' gradient against float64's, |difference| / |float64's|
    weight_error: float = float(
        "nan"
    )  # the same of the change of some classes' weights; of labels or others, the worse


class Case(NamedTuple):
    """What all methods of a comparison share, as `Result` has it."""

    rows: int
    size: int
    classes: int
    labels: int
    dtype: str
    delta: float
    solved: float
    dense: float


def make_logits(
    rows: int, classes: int, labels: int, *, solved: float, device: str, dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Logits and flags: a share of the rows is solved; of others, half have noise around 0, half wrong labels only."""
    generator = torch.Generator(device).manual_seed(seed)
    low = -4.0 - torch.tensor(float(classes)).log().item()
    logits = torch.randn(rows, classes, generator=generator, device=device)
    numbers = torch.randint(classes, (rows, labels), generator=generator, device=device)
    kind = torch.rand(rows, generator=generator, device=device)
    quiet = kind < solved + (1 - solved) / 2
    logits += torch.where(quiet, low, 0.0)[:, None]
    flags = torch.zeros(rows, classes, device=device, dtype=dtype).scatter_(1, numbers, 1.0)
    high = torch.where(kind < solved, 6.0, -2.0)[:, None].expand(-1, labels)
    logits[quiet] = logits[quiet].scatter(1, numbers[quiet], high[quiet])
    return logits.to(dtype), flags


def measure_logits(
    rows: int, classes: int, *, labels: int = 5, solved: float, device: str, repeats: int, delta: float = DELTA,
    dtype: torch.dtype = torch.float32,
) -> list[Result]:  # fmt: skip
    """The loss on logits against binary cross-entropy, taking turns; on a GPU also as graphs, taking turns.

    Example:
        >>> [r.method for r in measure_logits(16, 50, labels=2, solved=0.5, device="cpu", repeats=1)]
        ['F.binary_cross_entropy_with_logits', 'softsieve']
    """
    logits, flags = make_logits(rows, classes, labels, solved=solved, device=device, dtype=dtype)
    _, stats = as_multilabel_loss(logits, flags, delta=delta, against="threshold", return_stats=True)
    logits.requires_grad_()
    losses: dict[str, Callable[[], Tensor]] = {
        LOGITS[0]: lambda: F.binary_cross_entropy_with_logits(logits, flags),
        LOGITS[1]: lambda: as_multilabel_loss(logits, flags, delta=delta, against="threshold"),
    }

    def forward_backward(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def call() -> None:
            logits.grad = None
            loss().backward()  # type: ignore[no-untyped-call]

        return call

    shares = float(stats.solved.float().mean()), float((stats.kept > classes // 2).float().mean())
    case = Case(rows, 0, classes, labels, str(dtype).removeprefix("torch."), delta, *shares)
    calls = {method: forward_backward(loss) for method, loss in losses.items()}

    def forget() -> None:
        logits.grad = None

    results = measured(calls, case, 1, device, repeats, forget)
    if device == "cuda":
        del stats
        graphs = {method + IN_GRAPH: _captured(call, forget) for method, call in calls.items()}
        results += measured(graphs, case, 1, device, repeats, forget)
    return results


def _captured(call: Callable[[], None], forget: Callable[[], None]) -> Callable[[], None]:
    """The call as a CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measured(
    calls: Mapping[str, Callable[[], object]], case: Case, rivals: int, device: str, repeats: int,
    between: Callable[[], object], errors: Mapping[str, tuple[float, float]] | None = None,
) -> list[Result]:  # fmt: skip
    """Times, peaks and ratios to the fastest of the first ``rivals``."""
    taken = turns(list(calls.values()), repeats=repeats, device=device)
    fastest = min((percentiles(times)[1] for times in taken[:rivals]), default=math.nan)
    results = []
    for (method, call), times in zip(calls.items(), taken, strict=True):
        between()
        peak = peak_bytes(call, device=device)
        low, ms, high = percentiles(times)
        found = (errors or {}).get(method, (float("nan"), float("nan")))
        mean = statistics.fmean(times)
        results.append(Result(*case, method, ms, mean, low, high, ms / fastest, peak / 1e6, *found))
    return results
