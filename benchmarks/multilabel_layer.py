"""Forward, backward and update of a layer of very many classes, against binary cross-entropy in chunks of classes.

The rival trains as ELMO (arXiv 2510.11168) does: logits of some classes, the gradient in their place, its share of the
states' gradient, and SGD with stochastic rounding at once. It computes no loss, which ELMO skips too. It is written in
plain torch; on a GPU also with the update in one kernel of ours, as ELMO has one, with chunks of as many classes as the
others and with ELMO's eight chunks. Where that is asked for, torch.compile fuses it: in chunks of both sizes, and with
all classes at once, which takes logits and a gradient of the weight of full size and is left out where they do not fit.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from benchmarks.multilabel import DELTA, Case, Result, measured
from softsieve import HeadSGD, SieveLinear, reference
from softsieve.errors import first_line
from softsieve.kernels import updates

CHUNKED = "BCE in chunks, as ELMO"
FUSED, EIGHT = "the same, update in one kernel", "the same, 8 chunks"
COMPILED, COMPILED_EIGHT = "BCE in chunks, torch.compile", "BCE in 8 chunks, torch.compile"
COMPILED_WHOLE = "BCE at once, torch.compile"
OURS = "softsieve, SieveLinear"
CHUNK = {"cpu": 2048, "cuda": 32768}  # classes of the rival at a time
LAYER_SHAPES = {"cpu": ["65536x256"], "cuda": ["1048576x768", "3000000x768"]}
RATE = 1e-5  # so small that labels stay as they are made
CHECKED = 1e12  # a rate with which the weight's change is all that there is of the weight
AT_ONCE = 64  # rows of the exact gradient at a time
GRAPHS = 64  # shapes that torch.compile may make code for, at most: two for each layer and size of chunks


def make_layer(
    rows: int, size: int, classes: int, labels: int, *, solved: float, dtype: torch.dtype, device: str,
    dense: float | None = None, seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """States, weight and class numbers: rows are solved, or dense (noise around 0), or have wrong labels only.

    Without a share of dense rows they are half of those that are not solved. Rows of the weight are random, but for the
    first column, which moves all logits of a row.
    """
    dense = (1 - solved) / 2 if dense is None else dense
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
    hidden[:, 0] = torch.where(kind < 1 - dense, low, 0.0)
    lift = torch.where(kind < solved, high - low, 0.0)
    for i in range(8 * labels):  # one label after the other, several times, for lifting one moves the others
        own = weight[numbers[:, i % labels]].float()
        own[:, 0] = 0
        missing = (lift - (hidden * own).sum(1)) / own.square().sum(1)
        hidden += (missing * (kind < solved))[:, None] * own
    return hidden.to(dtype), weight, numbers


# -- the rival ---------------------------------------------------------------------------------------------------------


def chunked_step(
    hidden: Tensor, weight: Tensor, numbers: Tensor, chunk: int, rate: float, update: Callable[..., Tensor]
) -> Tensor:
    """One step of binary cross-entropy over all classes, some at a time; returns the gradient of the states.

    Labels are put in order of their classes first, so that a chunk's are known without asking the device.
    """
    flat, order = numbers.flatten().sort()
    rows = order // numbers.shape[1]
    starts = range(0, len(weight) + chunk, chunk)
    cuts = torch.searchsorted(flat, torch.tensor(starts, device=flat.device)).tolist()
    to_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for start, begin, end in zip(starts, cuts, cuts[1:], strict=False):
        part = weight[start : start + chunk]
        to_hidden += update(hidden, part, rows[begin:end], flat[begin:end] - start, rate)
    return to_hidden


def bce_chunk(hidden: Tensor, part: Tensor, rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Change the weights of a chunk of classes in place; returns its share of the states' gradient."""
    gradient = torch.sigmoid_(hidden @ part.T)
    gradient[rows, columns] -= 1
    to_hidden = gradient @ part
    _sgd(hidden, part, gradient, rate)
    return to_hidden


def _sgd(hidden: Tensor, part: Tensor, gradient: Tensor, rate: float) -> None:
    exact = part.float() - rate / len(hidden) * (gradient.T @ hidden).float()
    if part.dtype == torch.bfloat16:  # rounded stochastically
        noise = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32, device=exact.device)
        exact = ((exact.view(torch.int32) + noise) & -65536).view(torch.float32)
    part.copy_(exact)


def fused_chunk(hidden: Tensor, part: Tensor, rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """The same with the update in one kernel."""
    gradient = torch.sigmoid_(hidden @ part.T)
    gradient[rows, columns] -= 1
    to_hidden = gradient @ part
    seed = int(part.storage_offset()) if part.dtype == torch.bfloat16 else None
    updates.update(part, gradient.T @ hidden, [], updates.SGD(rate / len(hidden), 0.0, 0.0), seed)
    return to_hidden


def static_step(
    hidden: Tensor, weight: Tensor, numbers: Tensor, chunk: int, rate: float, update: Callable[..., Tensor]
) -> Tensor:
    """`chunked_step` for a compiler: every chunk has all labels, so that all but the last have the same shapes."""
    to_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for start in range(0, len(weight), chunk):
        to_hidden += update(hidden, weight[start : start + chunk], numbers - start, rate)
    return to_hidden


def static_chunk(hidden: Tensor, part: Tensor, columns: Tensor, rate: float) -> Tensor:
    """`bce_chunk` with the columns (rows, labels) of all labels, of which those outside of the chunk do not count.

    They are compared, not looked up: so all that is done with a logit is one pass over it.
    """
    at = torch.arange(len(part), device=part.device)
    hit = columns[:, :1] == at
    for label in range(1, columns.shape[1]):
        hit = hit | (columns[:, label : label + 1] == at)
    gradient = (torch.sigmoid((hidden @ part.T).float()) - hit.float()).to(part.dtype)
    to_hidden = gradient @ part
    _sgd(hidden, part, gradient, rate)
    return to_hidden


def _rivals(
    hidden: Tensor, weight: Tensor, numbers: Tensor, compiled: bool
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Steps of the rivals, each tried once; and why one cannot be had."""
    device, classes = hidden.device.type, len(weight)
    eight = -(-classes // 8)
    ways: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], int]] = {
        CHUNKED: (chunked_step, bce_chunk, CHUNK[device])
    }
    if device == "cuda":
        ways |= {FUSED: (chunked_step, fused_chunk, CHUNK[device]), EIGHT: (chunked_step, fused_chunk, eight)}
    if compiled:  # fullgraph: with too many shapes it says so, and does not run without being compiled
        update = torch.compile(static_chunk, dynamic=False, fullgraph=True)
        sizes = {COMPILED: CHUNK[device], COMPILED_EIGHT: eight, COMPILED_WHOLE: classes}
        ways |= {method: (static_step, update, chunk) for method, chunk in sizes.items()}
    there: dict[str, Callable[[], object]] = {}
    missing: dict[str, str] = {}
    for method, (step_by, update, chunk) in ways.items():
        step = partial(step_by, hidden, weight, numbers, chunk, RATE, update)
        try:
            with torch._dynamo.config.patch(recompile_limit=GRAPHS) if compiled else nullcontext():
                step()
            _wait(device)
        except Exception as error:  # of a compiler, or no memory: the others are still to be measured
            missing[f"{method}, {classes} x {hidden.shape[1]}"] = f"{type(error).__name__}: {first_line(error)}"
        else:
            there[method] = step
        gc.collect()  # of a compiler that failed, which holds what it was to compile with
    return there, missing


def _wait(device: str) -> None:
    """What a GPU refuses is said when it is waited for."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# -- ours --------------------------------------------------------------------------------------------------------------


def measure_step(
    rows: int, size: int, classes: int, *, labels: int = 5, solved: float, dtype: torch.dtype, device: str,
    repeats: int, dense: float | None = None, delta: float = DELTA, compiled: bool = False, check: bool = False,
) -> tuple[list[Result], dict[str, str]]:  # fmt: skip
    """Forward, backward and update of a layer, taking turns; and which rivals could not be run, and why.

    Example:
        >>> small, _ = measure_step(8, 4, 300, solved=0.5, dtype=torch.float32, device="cpu", repeats=1, check=True)
        >>> [r.method for r in small], small[-1].weight_error < 1e-4
        (['BCE in chunks, as ELMO', 'softsieve, SieveLinear'], True)
    """
    hidden, weight, numbers = make_layer(
        rows, size, classes, labels, solved=solved, dense=dense, dtype=dtype, device=device
    )
    layer = _sieve(weight)
    states = hidden.clone().requires_grad_()
    with torch.no_grad():
        _, stats = layer.loss(states, numbers, delta=delta, return_stats=True)
    shares = float(stats.solved.float().mean()), float((stats.kept > classes // 2).float().mean())
    case = Case(rows, size, classes, labels, str(dtype).removeprefix("torch."), delta, *shares)
    del stats

    def ours() -> None:
        states.grad = None
        layer.loss(states, numbers, delta=delta).backward()  # type: ignore[no-untyped-call]

    rivals, missing = _rivals(hidden, weight, numbers, compiled)
    results = measured({**rivals, OURS: ours}, case, len(rivals), device, repeats, gc.collect)
    if check:
        hidden_error, weight_error = _errors(layer, states, numbers, delta)
        results[-1] = results[-1]._replace(hidden_error=hidden_error, weight_error=weight_error)
    return results, missing


def _sieve(weight: Tensor) -> SieveLinear:
    """A layer of this weight, without a copy."""
    classes, size = weight.shape
    with torch.device("meta"):
        plain = torch.nn.Linear(size, classes, bias=False)
    plain.weight = torch.nn.Parameter(weight)
    return SieveLinear.from_linear(plain, optimizer=HeadSGD(RATE))


def _errors(layer: SieveLinear, states: Tensor, numbers: Tensor, delta: float) -> tuple[float, float]:
    """Of the states' gradient and of some classes' weights after a step, which leaves the weight spoilt."""
    classes, device = len(layer.weight), states.device
    others = torch.randperm(classes, generator=torch.Generator(device).manual_seed(0), device=device)[:256]
    own = torch.unique(numbers[:64])
    columns = own, others[~torch.isin(others, numbers)]
    to_hidden, to_weight = _exact_gradients(layer, states, numbers, delta, torch.cat(columns))
    before = layer.weight.detach()[torch.cat(columns)].double()
    layer.optimizer.lr = CHECKED  # type: ignore[union-attr]
    states.grad = None
    layer.loss(states, numbers, delta=delta).backward()  # type: ignore[no-untyped-call]
    change = (before - layer.weight.detach()[torch.cat(columns)].double()) / CHECKED
    parts = zip(*(torch.split(values, [*map(len, columns)]) for values in (change, to_weight)), strict=True)
    return _relative(states.grad, to_hidden), max(_relative(*part) for part in parts)  # type: ignore[arg-type]


def _relative(found: Tensor, right: Tensor) -> float:
    """|difference| / |right|; |found| where nothing is right but 0."""
    norm = right.norm()
    return float((found.double() - right).norm() / (norm if norm > 0 else 1.0))


def _exact_gradients(
    layer: SieveLinear, states: Tensor, numbers: Tensor, delta: float, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the reference in float64: all states' gradient, and that of some classes' weights."""
    exact = layer.weight.detach().double().requires_grad_()
    own = states.detach().double().requires_grad_()
    for some in torch.split(torch.arange(len(states), device=states.device), AT_ONCE):
        loss = reference.linear_as_multilabel_loss(own[some], exact, numbers[some], delta=delta, reduction="sum")
        (loss / len(states)).backward()  # type: ignore[no-untyped-call]
    return own.grad, exact.grad[columns]  # type: ignore[return-value, index]
