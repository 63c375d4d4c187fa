"""Answers of the losses over logits, recorded before they were rewritten.

`python -m tests.golden.losses` writes the file again: only where a change of numbers is meant.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softsieve import as_cross_entropy, as_keep_mask, as_multilabel_loss
from softsieve.losses.objectives import MULTI_LABEL, SINGLE_LABEL, make_objective

FILE = Path(__file__).parent / "losses.npz"
ROWS, CLASSES = 12, 9
REDUCTIONS = ("none", "mean", "sum")


def _logits(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers from -3 to 3 that no generator draws, of dense, narrow and solved rows."""
    count = torch.Size(shape).numel()
    values = 3 * torch.sin(1.7 * torch.arange(count, dtype=torch.float64) ** 1.1)
    return values.view(shape).to(dtype)


def _labels(*shape: int) -> Tensor:
    """Class labels of which every fifth is ignored."""
    numbers = torch.arange(torch.Size(shape).numel())
    return torch.where(numbers % 5 == 4, -100, 5 * numbers % CLASSES).view(shape)


def _sure(logits: Tensor, target: Tensor) -> Tensor:
    """With the logit of the label larger, from row to row by more."""
    column = target.clamp_min(0).unsqueeze(-1)
    more = torch.linspace(0, 8, target.numel(), dtype=logits.dtype).view(*target.shape, 1)
    return logits.scatter_add(-1, column, more)


def _differentiated(call: Callable[[Tensor], Tensor], logits: Tensor) -> Iterator[tuple[str, Tensor]]:
    leaf = logits.clone().requires_grad_()
    loss = call(leaf)
    yield "loss", loss.detach()
    yield "grad", torch.autograd.grad(loss, leaf, torch.linspace(1, 2, loss.numel()).to(loss).view_as(loss))[0]


def _cross_entropy_cases() -> dict[str, tuple[Tensor, Tensor, dict[str, Any]]]:
    target = _labels(ROWS)
    plain = _sure(_logits(ROWS, CLASSES), target)
    weight = torch.linspace(0.1, 2, CLASSES)
    positions = _labels(3, 4)
    channels = _sure(_logits(3, 4, CLASSES), positions).movedim(-1, 1).contiguous()  # (N, C, L), as for F.cross_entropy
    cases: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
        f"delta {delta:g} {reduction}": (plain, target, {"delta": delta, "reduction": reduction})
        for delta in (0.0, 0.1, 0.5, 1.0)
        for reduction in REDUCTIONS
    }
    for reduction in REDUCTIONS:
        cases[f"weight {reduction}"] = plain, target, {"weight": weight, "reduction": reduction}
        cases[f"positions {reduction}"] = channels.movedim(1, -1), positions, {"reduction": reduction}
    cases["ignore_index"] = plain, target.where(target >= 0, 3), {"ignore_index": 3, "reduction": "none"}
    cases["all ignored"] = plain, torch.full_like(target, -100), {}
    cases["infinite"] = plain.index_fill(1, torch.tensor(4), -float("inf")), target, {"reduction": "none"}
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        cases[str(dtype)] = plain.to(dtype), target, {"reduction": "none"}
    return cases


def _kernel_answers() -> Iterator[tuple[str, Tensor]]:
    """Both kernels' outputs, Triton's interpreted."""
    from softsieve.kernels import cross_entropy_torch, cross_entropy_triton

    target = _labels(ROWS)
    logits, weight = _sure(_logits(ROWS, CLASSES), target), torch.linspace(0.1, 2, CLASSES)
    names = ("loss", "threshold", "kept", "lse", "norm", "share", "margin")
    for reduction in REDUCTIONS:
        by_triton, valid = cross_entropy_triton.forward(logits, target, weight, 0.1, -100, reduction)
        yield f"triton/{reduction}/valid", valid.bool()
        by_torch = cross_entropy_torch.forward(logits, target, weight, 0.1, -100, reduction)
        for kernel, outputs in ((cross_entropy_triton, by_triton), (cross_entropy_torch, by_torch)):
            kind = kernel.__name__.rpartition("_")[-1]
            yield from ((f"{kind}/{reduction}/{name}", value) for name, value in zip(names, outputs, strict=True))
            _, *scalars, share, _ = outputs
            yield f"{kind}/{reduction}/grad", kernel.backward(share, logits, target, *scalars)


def _each() -> Iterator[tuple[str, Tensor]]:
    for name, (logits, target, options) in _cross_entropy_cases().items():
        for what, value in _differentiated(lambda x, t=target, o=options: as_cross_entropy(x, t, **o), logits):  # type: ignore[misc]
            yield f"as_cross_entropy/{name}/{what}", value
        _, stats = as_cross_entropy(logits, target, return_stats=True, **options)
        for what, value in stats._asdict().items():
            yield f"as_cross_entropy/{name}/{what}", value
        chosen = {key: value for key, value in options.items() if key in ("delta", "ignore_index")}
        yield f"as_keep_mask/{name}", as_keep_mask(logits, target, **chosen)
    target = _labels(ROWS)
    sure = _sure(_logits(ROWS, CLASSES), target)
    flags = (_logits(ROWS, CLASSES) > 1).index_fill(0, torch.tensor([0]), False).index_fill(0, torch.tensor(1), True)
    many = _logits(ROWS, CLASSES) * torch.linspace(0.2, 3, ROWS)[:, None]
    for delta in (0.0, 0.1, 0.5, 1.0):
        for reduction in REDUCTIONS:
            for against in ("labels", "threshold"):
                options = {"delta": delta, "against": against, "reduction": reduction}
                place = f"as_multilabel_loss/{against} {delta:g} {reduction}"
                for what, value in _differentiated(lambda x, o=options: as_multilabel_loss(x, flags, **o), many):  # type: ignore[misc]
                    yield f"{place}/{what}", value
                _, stats = as_multilabel_loss(many, flags, return_stats=True, **options)
                yield from ((f"{place}/{what}", value) for what, value in stats._asdict().items())
    for multilabel, registry in ((False, SINGLE_LABEL), (True, MULTI_LABEL)):
        logits, answer = (many, flags) if multilabel else (sure, target)
        for name in registry:
            for reduction in REDUCTIONS:
                objective = make_objective(name, multilabel=multilabel, reduction=reduction)
                place = f"objective/{name}/{multilabel}/{reduction}"
                for what, value in _differentiated(lambda x, o=objective, a=answer: o(x, a).loss, logits):  # type: ignore[misc]
                    yield f"{place}/{what}", value
                for what, found in objective(logits, answer)._asdict().items():
                    if what != "loss" and found is not None:
                        yield f"{place}/{what}", found
    yield from _kernel_answers()


def answers() -> dict[str, Tensor]:
    """Values, gradients and statistics by name, in a dtype that numpy has."""
    return {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in _each()}


def pack(values: dict[str, Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """One array for each dtype, all values after each other, and their names and shapes: a small file."""
    packed: dict[str, np.ndarray[Any, Any]] = {}
    for dtype in sorted({str(value.dtype) for value in values.values()}):
        chosen = {name: value for name, value in values.items() if str(value.dtype) == dtype}
        packed[dtype] = torch.cat([value.flatten() for value in chosen.values()]).numpy()
        packed[f"{dtype} names"] = np.array([f"{name} {list(value.shape)}" for name, value in chosen.items()])
    return packed


def _write() -> None:
    torch.set_num_threads(1)
    np.savez_compressed(FILE, **pack(answers()))  # type: ignore[arg-type]


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    _write()
