"""Multi-label losses over many classes, against dense binary cross-entropy: on logits, and with the layer's step.

The rival of the second part is binary cross-entropy some classes at a time, as ELMO (arXiv 2510.11168) trains: logits
of a chunk, the gradient in their place, its share of the states' gradient, and SGD with stochastic rounding at once. It
computes no loss. It is written here in plain torch, and compiled by torch.compile where that is asked for.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import peak_bytes, times
from softsieve import HeadSGD, SieveLinear
from softsieve.losses import as_multilabel_loss

LOGITS = ("F.binary_cross_entropy_with_logits", "softsieve")
CHUNKED, COMPILED, OURS = "BCE in chunks, as ELMO", "the same, torch.compile", "softsieve, SieveLinear"
CHUNK = {"cpu": 2048, "cuda": 32768}  # classes of the rival at a time
LOGIT_SHAPES = {
    "cpu": ["1024x1000", "1024x4271", "256x30000", "64x131072"],
    "cuda": ["1024x1000", "4096x4271", "4096x30000", "1024x131072", "1024x1048576"],
}
LAYER_SHAPES = {"cpu": ["65536x256"], "cuda": ["1048576x768", "3000000x768"]}
RATE = 1e-5  # so small that labels stay as they are made
DELTA = 0.5


class Result(NamedTuple):
    """One method at one shape: forward + backward of the loss on logits (size 0), or with the update of the layer."""

    rows: int
    size: int
    classes: int
    labels: int  # of a row
    solved: float  # share of the rows
    dense: float  # share of the rows with a gradient of most classes
    method: str
    ms: float
    ms_p20: float
    ms_p80: float
    time_ratio: float  # to the fastest rival
    extra_mb: float  # at the peak, above logits, or above states, weight and state of the optimizer


def make_logits(
    rows: int, classes: int, labels: int, *, solved: float, device: str, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits and flags: a share of the rows is solved; of others, half have noise around 0, half wrong labels only."""
    generator = torch.Generator().manual_seed(seed)
    low = -4.0 - torch.tensor(float(classes)).log()
    logits = torch.randn(rows, classes, generator=generator)
    numbers = torch.randint(classes, (rows, labels), generator=generator)
    kind = torch.rand(rows, generator=generator)
    quiet = kind < solved + (1 - solved) / 2
    logits += torch.where(quiet, low, 0.0)[:, None]
    flags = torch.zeros(rows, classes).scatter_(1, numbers, 1.0)
    high = torch.where(kind < solved, 6.0, -2.0)[:, None].expand(-1, labels)
    logits[quiet] = logits[quiet].scatter(1, numbers[quiet], high[quiet])
    return logits.to(device), flags.to(device)


def measure_logits(
    rows: int, classes: int, *, labels: int = 5, solved: float, device: str, repeats: int
) -> list[Result]:
    """The loss on logits against binary cross-entropy, taking turns.

    Example:
        >>> [r.method for r in measure_logits(16, 50, labels=2, solved=0.5, device="cpu", repeats=1)]
        ['F.binary_cross_entropy_with_logits', 'softsieve']
    """
    logits, flags = make_logits(rows, classes, labels, solved=solved, device=device)
    _, stats = as_multilabel_loss(logits, flags, delta=DELTA, against="threshold", return_stats=True)
    logits.requires_grad_()
    losses: dict[str, Callable[[], Tensor]] = {
        LOGITS[0]: lambda: F.binary_cross_entropy_with_logits(logits, flags),
        LOGITS[1]: lambda: as_multilabel_loss(logits, flags, delta=DELTA, against="threshold"),
    }

    def forward_backward(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def call() -> None:
            logits.grad = None
            loss().backward()  # type: ignore[no-untyped-call]

        return call

    shares = float(stats.solved.float().mean()), float((stats.kept > classes // 2).float().mean())
    calls = {method: forward_backward(loss) for method, loss in losses.items()}
    return _measured(
        calls, (rows, 0, classes, labels, *shares), 1, device, repeats, lambda: setattr(logits, "grad", None)
    )


def make_layer(
    rows: int, size: int, classes: int, labels: int, *, solved: float, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """States, weight and class numbers, with rows as `make_logits` has them.

    Rows of the weight are random, but for the first column, which moves all logits of a row.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.empty(classes, size, device=device, dtype=dtype)
    for part in torch.split(weight, 16384):
        part.copy_(torch.randn(part.shape, generator=generator, device=device) * size**-0.5)
    weight[:, 0] = 1
    numbers = torch.stack(
        [torch.randint(classes // labels, (rows,), generator=generator, device=device) + i * (classes // labels)
         for i in range(labels)], 1
    )  # fmt: skip
    kind = torch.rand(rows, generator=generator, device=device)
    low, high = -math.log(classes) - 2.0, 3.0  # logits of other classes and of labels in solved rows
    for _ in range(20):  # labels that are lifted spread the others, whose exponentials are to add up to little
        low = max(-50.0, -math.log(classes) - 2.0 - labels * (high - low) ** 2 / size / 2)
    hidden = 0.3 * torch.randn(rows, size, generator=generator, device=device)
    quiet = kind < solved + (1 - solved) / 2
    hidden[:, 0] = torch.where(quiet, low, 0.0)
    lift = torch.where(kind < solved, high - low, 0.0)
    for i in range(8 * labels):  # one label after the other, several times, for lifting one moves the others
        own = weight[numbers[:, i % labels]].float()
        own[:, 0] = 0
        missing = (lift - (hidden * own).sum(1)) / own.square().sum(1)
        hidden += (missing * (kind < solved))[:, None] * own
    return hidden.to(dtype), weight, numbers


def chunked_step(
    hidden: Tensor, weight: Tensor, numbers: Tensor, chunk: int, rate: float, update: Callable[..., Tensor]
) -> Tensor:
    """One step of binary cross-entropy over all classes, some at a time; returns the gradient of the states."""
    rows = torch.arange(len(hidden), device=hidden.device).repeat_interleave(numbers.shape[1])
    flat, to_hidden = numbers.flatten(), torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for start in range(0, len(weight), chunk):
        part = weight[start : start + chunk]
        inside = (flat >= start) & (flat < start + len(part))
        to_hidden += update(hidden, part, rows[inside], flat[inside] - start, rate)
    return to_hidden


def bce_chunk(hidden: Tensor, part: Tensor, rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Change the weights of a chunk of classes in place; returns its share of the states' gradient."""
    gradient = torch.sigmoid_(hidden @ part.T)
    gradient[rows, columns] -= 1
    to_hidden = gradient @ part
    exact = part.float() - rate / len(hidden) * (gradient.T @ hidden).float()
    if part.dtype == torch.bfloat16:  # rounded stochastically
        noise = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32, device=exact.device)
        exact = ((exact.view(torch.int32) + noise) & -65536).view(torch.float32)
    part.copy_(exact)
    return to_hidden


def measure_step(
    rows: int, size: int, classes: int, *, labels: int = 5, solved: float, dtype: torch.dtype, device: str,
    repeats: int, compiled: bool = False,
) -> list[Result]:  # fmt: skip
    """Forward, backward and update of a layer, taking turns.

    Example:
        >>> small = measure_step(8, 4, 300, solved=0.5, dtype=torch.bfloat16, device="cpu", repeats=1)
        >>> [r.method for r in small]
        ['BCE in chunks, as ELMO', 'softsieve, SieveLinear']
    """
    hidden, weight, numbers = make_layer(rows, size, classes, labels, solved=solved, dtype=dtype, device=device)
    chunk, updates = CHUNK[device], {CHUNKED: bce_chunk}
    if compiled:
        updates[COMPILED] = torch.compile(bce_chunk, dynamic=True)
    with torch.device("meta"):
        layer = SieveLinear(size, classes, bias=False, dtype=dtype)
    layer = SieveLinear.from_linear(_with_weight(layer, weight), optimizer=HeadSGD(RATE))
    states = hidden.clone().requires_grad_()
    _, stats = layer.loss(states, numbers, delta=DELTA, return_stats=True)

    def ours() -> None:
        states.grad = None
        layer.loss(states, numbers, delta=DELTA).backward()  # type: ignore[no-untyped-call]

    def rival(update: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: chunked_step(hidden, weight, numbers, chunk, RATE, update)

    shares = float(stats.solved.float().mean()), float((stats.kept > classes // 2).float().mean())
    calls = {**{method: rival(update) for method, update in updates.items()}, OURS: ours}
    return _measured(calls, (rows, size, classes, labels, *shares), len(updates), device, repeats, gc.collect)


def _with_weight(layer: torch.nn.Linear, weight: Tensor) -> torch.nn.Linear:
    layer.weight = torch.nn.Parameter(weight)
    return layer


def _measured(
    calls: Mapping[str, Callable[[], object]], configuration: tuple[int, int, int, int, float, float], rivals: int,
    device: str, repeats: int, between: Callable[[], object],
) -> list[Result]:  # fmt: skip
    """Times, peaks and ratios to the fastest of the first ``rivals``."""
    timed = times(list(calls.values()), repeats=repeats, device=device)
    fastest = min(ms for _, ms, _ in timed[:rivals])
    results = []
    for (method, call), (low, ms, high) in zip(calls.items(), timed, strict=True):
        between()
        peak = peak_bytes(call, device=device)
        results.append(Result(*configuration, method, ms, low, high, ms / fastest, peak / 1e6))
    return results
