"""The linear loss with the gradients that its forward pass makes, as a registered op: how compiled graphs hold logits.

In eager mode `kernels.linear_rows` and `kernels.linear_held` leave these gradients where autograd does not look. A
graph knows only the outputs of an op, whose shapes are the same each time. So here the gradients are among them,
whichever way the op takes when it runs: that of `kernels.linear`, too, whose backward pass comes at once. The graph
multiplies them by the gradient of the loss, in the memory where they are if its compiler uses that again.

That multiplication reads and writes the gradient of the weight. So the op is for layers whose logits are likely to be
held (`serves`), and for losses that are reduced: gradients of rows with factors of their own have to wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from softsieve.kernels import linear, linear_rows
from softsieve.kernels.cross_entropy_torch import accumulation_dtype
from softsieve.kernels.linear_types import NUMBERS, SMALL, Layer, Options, Saved, Targets

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@cache
def _held() -> Any:
    """The module that needs Triton, imported by the first run that needs it."""
    return import_module("softsieve.kernels.linear_held")


def serves(hidden: Tensor, weight: Tensor, options: Options) -> bool:
    """Whether the op is for such a layer, as far as shapes tell: its logits may fit the memory, or it is small."""
    if options.group or options.screening or options.reduction == "none":
        return False
    if options.backend != linear.TRITON:
        return linear_rows.block_rows(hidden, weight, options) > 0
    small = hidden.shape[0] * hidden.shape[1] * weight.shape[0] <= SMALL
    return hidden.dtype != torch.float16 and (options.memory > 0 or small)  # in float16 gradients wait for the factor


def forward(
    layer: Layer, targets: Targets, options: Options, wanted: list[bool]
) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
    """The loss, the numbers of the rows as `kernels.linear_held` has them, and the gradients of what makes logits."""
    hidden, weight, bias, _ = layer
    if options.backend == linear.TRITON:
        height = _held().choose(hidden, weight, bias, targets, options, True)
        if height:
            loss, numbers, _, grads = _held().forward(hidden, weight, bias, targets, options, wanted, height)
            return loss, numbers, grads
    ready: Sequence[Tensor | None]
    if linear_rows.block_rows(hidden, weight, options):
        loss, saved, ready = linear_rows.forward(layer, targets, options, wanted)
    else:
        loss, saved = linear.forward(layer, targets, options)
        ready = linear.backward(saved.share, layer, targets.label, saved, options, wanted)
    return loss, _numbers(saved), ready


def _numbers(saved: Saved) -> Tensor:
    """What `kernels.cross_entropy_triton` knows of the rows, but for their losses."""
    dtype = saved.lse.dtype
    parts = saved.threshold, saved.kept, saved.lse, saved.norm, saved.share, saved.margin, saved.own, saved.right
    return torch.stack([part.to(dtype) for part in parts])


# -- the op ------------------------------------------------------------------------------------------------------------


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None,
    label: Tensor, delta: Tensor, class_weight: Tensor | None, row_weight: Tensor | None,
    ignore_index: int, cap: float, reduction: str, backend: str, group: str, memory: int, screening: str,
    wanted: list[bool],
) -> Outputs:  # fmt: skip
    targets = Targets(label, delta, class_weight, row_weight)
    options = Options(ignore_index, cap, reduction, backend, group, memory, screening)
    loss, numbers, grads = forward(Layer(hidden, weight, bias, cap), targets, options, wanted)
    to_hidden, to_weight, to_bias = (hidden.new_empty(0) if grad is None else grad for grad in grads)
    return loss, numbers, to_hidden, to_weight, to_bias


forward_op = torch.library.custom_op("softsieve::linear_as_cross_entropy_ready", _forward, mutates_args=())


@forward_op.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> Outputs:
    row = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden))
    grads = linear.empty_gradients((hidden, weight, bias), others[-1])
    to_hidden, to_weight, to_bias = (hidden.new_empty(0) if grad is None else grad for grad in grads)
    return row.new_empty(()), row.new_empty(NUMBERS, hidden.shape[0]), to_hidden, to_weight, to_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    ctx.save_for_backward(*output[2:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.wanted = inputs[-1]


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * 15
    if torch.is_grad_enabled():  # somebody wants the second derivative
        linear.refuse(ctx)
    ready = zip(ctx.saved_tensors, ctx.wanted, strict=True)
    wide = grad_loss.dtype
    return *((grad.to(wide) * grad_loss).to(grad.dtype) if want else None for grad, want in ready), *[None] * 12


forward_op.register_autograd(_differentiate, setup_context=_save)


def linear_as_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options
) -> tuple[Tensor, Tensor]:
    """The loss, reduced and differentiable once, and the numbers of the rows."""
    wanted = [value is not None and value.requires_grad for value in (hidden, weight, bias)]
    tensors = (value if value is None else value.contiguous() for value in (hidden, weight, bias, *targets))
    loss, numbers, *_ = forward_op(*tensors, *options, wanted)
    return loss, numbers
