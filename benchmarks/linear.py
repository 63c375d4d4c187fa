"""Forward + backward of a linear layer with its loss: softsieve against the dense rivals, all in one process.

To add a rival: a line in `RIVALS`, a function that imports it and returns the loss of (hidden, weight, target).
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from logging import Logger
from random import Random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import peak_bytes, percentiles, turns
from softsieve import reference
from softsieve.losses import linear_as_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
OURS, PLAIN = "softsieve", "AS-Softmax in eager torch"
LEAN = 128  # MB: rivals that take less are compared among themselves, too


class Result(NamedTuple):
    """One method at one shape."""

    rows: int
    size: int
    classes: int
    dense: float  # share of the rows
    solved: float
    method: str
    ms: float
    ms_p20: float
    ms_p80: float
    ms_mean: float
    extra_mb: float  # at the peak, above inputs and gradients
    loss: float
    time_ratio: float  # to the fastest rival
    lean_ratio: float  # to the fastest rival that takes less than `LEAN`
    hidden_error: float  # |gradient - float64's| / |float64's|, over some rows; of the loss that the method is for
    weight_error: float  # the same over some classes


def _eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def _compiled() -> Loss:
    return torch.compile(_eager, dynamic=False)


def _cut() -> Loss:
    found: Loss = import_module("cut_cross_entropy").linear_cross_entropy
    return found


def _liger(kernels: str) -> Loss:
    """With its cross-entropy in these kernels; those of CuTe need a package of their own."""
    if kernels == "nvidia-cutedsl":
        import_module("cutlass.cute")
    apply = import_module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction.apply
    chosen = (None, None, -100, 0.0, 0.0, "mean", None, False, None, False, False, False, kernels)

    def call(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = apply(hidden, weight, target, *chosen)[0]
        return loss

    return call


def _torch_own() -> Loss:
    return partial(F.linear_cross_entropy, options=nn.LinearCrossEntropyOptions())


def _quack() -> Loss:
    # QuACK 0.6.5 wants to know of all that a kernel reads whether it changes the result, and does not know loggers
    Logger.__quack_semantic_key__ = lambda self: self.name  # type: ignore[attr-defined]
    found: Loss = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return found


RIVALS: dict[str, Callable[[], Loss]] = {
    "torch eager": lambda: _eager,
    "torch.compile": _compiled,
    "cut-cross-entropy": _cut,
    "Liger": partial(_liger, "nvidia-triton"),
    "Liger, CuTe": partial(_liger, "nvidia-cutedsl"),
    "QuACK": _quack,
    "torch.nn.LinearCrossEntropyLoss": _torch_own,
}


def rivals(names: list[str] | None = None) -> tuple[dict[str, Loss], dict[str, str]]:
    """Those that can be had, and why others cannot."""
    there, missing = {}, {}
    for name in names or RIVALS:
        try:
            there[name] = RIVALS[name]()
        except Exception as error:  # whatever a rival may raise
            missing[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return there, missing


def make_layer(
    rows: int, size: int, classes: int, *, dense: float, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and labels, with a share of the rows dense at delta 0.1.

    Rows of the weight are random, of length 1. A dense row is noise with a random label. Another is noise with its
    label's row added, such that the label alone has a probability from 0.4 to nearly 1; half of these also have one to
    four rivals, with up to 0.6 times as much. Labels and rivals are drawn as words are, small numbers more often.
    """
    generator = torch.Generator(device).manual_seed(seed)
    draw = partial(torch.rand, generator=generator, device=device)
    weight = torch.empty(classes, size, device=device, dtype=dtype)
    for part in torch.split(weight, 16384):
        part.copy_(torch.randn(part.shape, generator=generator, device=device) * size**-0.5)
    hidden = 1.5 * torch.randn(rows, size, generator=generator, device=device)
    crowd = torch.tensor(float(classes)).log().item() + 1.5**2 / 2  # log-sum-exp of the noise

    def some_class(*shape: int) -> Tensor:
        return (classes ** draw(*shape)).long().clamp_(max=classes - 1)

    target = some_class(rows)
    about = draw(rows) >= dense
    height = crowd - 0.5 + 6 * draw(rows, 1)
    own = weight[target].float()
    hidden += about[:, None] * (height - (hidden * own).sum(1, keepdim=True)) * own
    for number in range(4):
        rival = (5 * some_class(rows) + number) % classes  # different ones
        present = about & (draw(rows) < 0.5 / (1 + number)) & (rival != target)
        own = weight[rival].float()
        lower = height - 0.5 - 3 * draw(rows, 1) - (hidden * own).sum(1, keepdim=True)
        hidden += present[:, None] * lower * own
    return hidden.to(dtype), weight, target


def _exact_gradients(
    hidden: Tensor, weight: Tensor, target: Tensor, delta: float, rows: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the reference in float64, of some hidden states and some rows of the weight; delta 1 is cross-entropy."""
    states, exact = hidden.detach().double(), weight.detach().double().requires_grad_()
    to_hidden = torch.empty_like(states)
    for some in torch.split(torch.arange(len(states), device=states.device), 256):
        own = states[some].requires_grad_()
        loss = reference.linear_as_cross_entropy(own, exact, target[some], delta=delta, reduction="sum")
        (loss / len(states)).backward()  # type: ignore[no-untyped-call]
        to_hidden[some] = own.grad  # type: ignore[assignment]
    return to_hidden[rows], exact.grad[columns]  # type: ignore[index]


def _forward_backward(loss: Callable[..., Tensor], hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    hidden.grad = weight.grad = None
    value = loss(hidden, weight, target)
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def _errors(call: Callable[[], Tensor], hidden: Tensor, weight: Tensor, truth: Truth) -> tuple[float, float]:
    """How far the gradients of some hidden states and some classes are from float64's, as a share of these."""
    call()
    found = hidden.grad[truth.rows], weight.grad[truth.classes]  # type: ignore[index]
    to_hidden, to_weight = (
        float((ours.double() - true).norm() / true.norm())
        for ours, true in zip(found, (truth.to_hidden, truth.to_weight), strict=True)
    )
    return to_hidden, to_weight


class Truth(NamedTuple):
    """Gradients in float64 of some hidden states and some rows of the weight."""

    rows: Tensor
    classes: Tensor
    to_hidden: Tensor
    to_weight: Tensor


def _truths(hidden: Tensor, weight: Tensor, target: Tensor, deltas: Sequence[float], device: str) -> dict[float, Truth]:
    shuffle = partial(torch.randperm, generator=torch.Generator(device).manual_seed(0), device=device)
    some = shuffle(len(hidden))[:512].sort().values
    columns = torch.cat([torch.unique(target[some])[:256], shuffle(len(weight))[:256]])
    return {
        delta: Truth(some, columns, *_exact_gradients(hidden, weight, target, delta, some, columns)) for delta in deltas
    }


def _working(
    methods: dict[str, Loss], hidden: Tensor, weight: Tensor, target: Tensor, missing: dict[str, str]
) -> dict[str, Loss]:
    """Those that can be run; why others cannot goes to ``missing``."""
    working = {}
    for method, loss in methods.items():
        try:
            _forward_backward(loss, hidden, weight, target)
            working[method] = loss
        except Exception as error:  # whatever a rival may raise
            first = (str(error).splitlines() or [""])[0]
            missing[f"{method}, {len(hidden)} x {hidden.shape[1]} x {len(weight)}"] = f"{type(error).__name__}: {first}"
    return working


def measure(
    rows: int,
    size: int,
    classes: int,
    *,
    dense: float,
    methods: dict[str, Loss],
    delta: float = 0.1,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    repeats: int = 15,
    check: bool = True,
    memory: Sequence[int] = (),
    screening: bool = False,
    backends: Sequence[str] = (),
    missing: dict[str, str] | None = None,
) -> list[Result]:
    """Ours and the rivals on the same layer, taking turns.

    Args:
        rows, size, classes: of hidden states and weight.
        dense: share of the rows.
        methods: the rivals.
        delta, dtype, device, repeats: as they are.
        check: compare gradients with float64's.
        memory: MB that ours is allowed, once for each.
        screening: ours also with screening in 8 bits, once for each memory.
        backends: ours also with each of these, to see whether "auto" takes the fastest.
        missing: gets the rivals that cannot be run, with the reason.

    Example:
        >>> small = measure(32, 8, 200, dense=0.3, methods={"torch eager": _eager}, dtype=torch.float32, device="cpu")
        >>> [result.method for result in small], small[-1].hidden_error < 1e-5
        (['torch eager', 'AS-Softmax in eager torch', 'softsieve'], True)
    """
    hidden, weight, target = make_layer(rows, size, classes, dense=dense, dtype=dtype, device=device)
    ours: Callable[..., Tensor] = partial(linear_as_cross_entropy, delta=delta)
    _, stats = linear_as_cross_entropy(hidden, weight, target, delta=delta, return_stats=True)
    hidden.requires_grad_()
    weight.requires_grad_()
    methods = _working(methods, hidden, weight, target, {} if missing is None else missing)
    plain = {PLAIN: partial(ours, backend="reference")} if check else {}  # for its errors: it takes all the memory
    allowed = {f"{OURS}, {most} MB": partial(ours, memory=most * 10**6) for most in memory}
    if screening:
        allowed |= {f"{name}, fp8": partial(call, screening="fp8") for name, call in allowed.items()}
        allowed[f"{OURS}, fp8"] = partial(ours, screening="fp8")
    allowed |= {f"{OURS}, {name}": partial(ours, backend=name) for name in backends}
    everything: dict[str, Callable[..., Tensor]] = {**methods, **plain, **allowed, OURS: ours}
    calls = {name: partial(_forward_backward, loss, hidden, weight, target) for name, loss in everything.items()}
    taken = dict(zip(calls, turns(list(calls.values()), repeats=repeats, device=device, order=Random(0)), strict=True))
    truths = _truths(hidden, weight, target, (delta, 1.0), device) if check else {}
    results = []
    for method, call in calls.items():
        hidden.grad = weight.grad = None
        gc.collect()
        peak = peak_bytes(call, device=device)
        errors = (math.nan, math.nan)
        if check:
            errors = _errors(call, hidden, weight, truths[1.0 if method in methods else delta])
        low, ms, high = percentiles(taken[method])
        shares = stats.dense.float().mean().item(), stats.solved.float().mean().item()
        extra = (peak - hidden.nbytes - weight.nbytes) / 1e6
        results.append(
            Result(
                rows, size, classes, *shares, method, ms, low, high, statistics.mean(taken[method]), extra,
                float(call()), math.nan, math.nan, *errors,
            )
        )  # fmt: skip
    return _with_ratios(results, list(methods))


def _with_ratios(results: list[Result], rivals: Sequence[str]) -> list[Result]:
    """Times as ratios to the fastest rival, and to the fastest that takes little memory."""
    theirs = [result for result in results if result.method in rivals]
    fastest = min((result.ms for result in theirs), default=math.nan)
    lean = min((result.ms for result in theirs if result.extra_mb < LEAN), default=math.nan)
    return [result._replace(time_ratio=result.ms / fastest, lean_ratio=result.ms / lean) for result in results]
