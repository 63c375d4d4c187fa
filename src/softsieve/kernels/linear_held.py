"""The linear loss whose logits are held, some rows at a time, on a GPU: three products of matrices instead of four.

`kernels.linear` makes the logits of dense rows a second time in its backward pass. Here a block of rows has the logits of
all classes, and the gradients are made while these are there.

    one block     All logits fit the memory that is allowed. They wait for the backward pass, which puts their gradient
                  in their place. Nothing is read on the host, so that a CUDA graph can capture both passes.
    many blocks   The gradients of a block are made in the forward pass, of the reduced loss, and wait for the backward
                  pass, which multiplies them. That pays where most rows are dense, as at the start of a training: a
                  sample of rows says whether they are. The gradient of the weight is rounded once for each block.

What is known of the rows is the tensor of `kernels.cross_entropy_triton`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from softsieve.kernels import cross_entropy_triton, linear, linear_torch
from softsieve.kernels.cross_entropy import check_on_device, differentiable
from softsieve.kernels.linear_types import MEMORY, Options, Targets

UNIT = 128  # rows that a product takes at a time, at least
FEWEST = 256  # rows of a block, unless it has all
SAMPLED = 128  # rows that say whether most are dense
LISTED = 16  # a row with more classes has its gradient from products of matrices, also in `kernels.linear`
FREE, SUMMED = 2 / 3, 100  # see `pays`
Held = list[Tensor | None]


def block_rows(hidden: Tensor, weight: Tensor, options: Options) -> int:
    """How many rows' logits fit the memory that is allowed; 0 where `kernels.linear` is to do it.

    Blocks that are not all rows have the gradient of the reduced loss made before the factor is known with which it is
    to be multiplied. In float16, such gradients are below its smallest number.
    """
    rows, classes = len(hidden), len(weight)
    if options.backend != linear.TRITON or options.group:
        return 0
    beside = 4 * (cross_entropy_triton.NUMBERS + 4) * rows
    most = ((options.memory or MEMORY) - beside) // (classes * weight.element_size())
    if most >= rows:
        return rows
    if most < FEWEST or options.reduction == "none" or hidden.dtype == torch.float16:
        return 0
    return int(most - most % UNIT)


def pays(share: float, height: int) -> bool:
    """Whether blocks of so many rows are faster than `kernels.linear` where this share of the rows is dense.

    That takes 1 + 3 * share products, blocks take 3, and the time in which the gradient of the weight is read and written
    for each block, which is that of a product of some 200 rows.
    """
    return share > FREE + SUMMED / height


def choose(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, wanted: bool
) -> bool:
    """Whether to hold logits; where not all fit and gradients are ``wanted``, that is read from a sample of the rows."""
    height = block_rows(hidden, weight, options)
    if height >= len(hidden):
        return True
    if not (wanted and height and pays(1.0, height)):
        return False
    with torch.no_grad():
        some = torch.arange(SAMPLED, device=hidden.device) * len(hidden) // SAMPLED
        products = torch.mm(hidden[some], weight.t())
        rows = _solve(products, bias, targets.select(some)._replace(class_weight=None, row_weight=None), options)
        kept = rows.numbers[cross_entropy_triton.KEPT]
        return pays(float((kept > LISTED).sum() / (kept != 0).sum()), height)


def _solve(
    products: Tensor, bias: Tensor | None, targets: Targets, options: Options, numbers: Tensor | None = None
) -> cross_entropy_triton.Rows:
    """Loss and numbers of the rows with these products."""
    label, delta, class_weight, row_weight = targets
    rows = cross_entropy_triton.forward_numbers(
        products, label, class_weight, delta, options.ignore_index, options.reduction,
        bias=bias, row_weight=row_weight, cap=options.cap, numbers=numbers,
    )  # fmt: skip
    check_on_device(rows.valid, products.shape[1], options.ignore_index)
    return rows


def _blocks(rows: int, height: int) -> Iterator[slice]:
    """As few as there can be, and as even as whole units can be."""
    count = -(-rows // height)
    units, first = -(-rows // UNIT), 0
    for number in range(count):
        last = min(rows, (units * (number + 1) // count) * UNIT) if height >= UNIT else min(rows, first + height)
        yield slice(first, last)
        first = last


def _add_products(gradient: Tensor, hidden: Tensor, weight: Tensor, grads: Held, block: slice) -> None:
    """What a block of the logits' gradient gives; the first block writes, others add to weight and bias."""
    to_hidden, to_weight, to_bias = grads
    if to_hidden is not None:
        torch.mm(gradient, weight, out=to_hidden[block])
    if to_weight is not None and block.start == 0:
        torch.mm(gradient.t(), hidden[block], out=to_weight)
    elif to_weight is not None:
        to_weight.addmm_(gradient.t(), hidden[block])
    if to_bias is not None:
        sums = gradient.sum(0, dtype=torch.float32)
        to_bias.copy_(sums if block.start == 0 else to_bias + sums)


def _forward_blocks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, wanted: list[bool],
    height: int,
) -> tuple[Tensor, Tensor, Tensor, Held]:  # fmt: skip
    """Loss, numbers, what the losses were divided by, and the gradients, of rows none of which is ignored."""
    rows, classes = len(hidden), len(weight)
    numbers = torch.empty((cross_entropy_triton.NUMBERS, rows), dtype=torch.float32, device=hidden.device)
    parts = one = numbers.new_ones(())
    if options.reduction == "mean":
        parts = linear_torch.make_shares(targets, 0, hidden).sum()
        parts = torch.where(parts == 0, one, parts)
    grads = linear.empty_gradients((hidden, weight, bias), wanted)
    buffer = hidden.new_empty(height * classes)
    loss = numbers.new_zeros(())
    summed = options._replace(reduction="sum")
    for block in _blocks(rows, height):
        count = block.stop - block.start
        products = buffer[: count * classes].view(count, classes)
        torch.mm(hidden[block], weight.t(), out=products)
        some = _select(targets, block)
        loss += _solve(products, bias, some, summed, numbers[:, block]).loss
        cross_entropy_triton.backward_numbers(
            one, products, some.label, numbers[:, block], parts, products, bias=bias, cap=options.cap
        )
        _add_products(products, hidden, weight, grads, block)
    return loss / parts, numbers, parts, grads


def _select(targets: Targets, block: slice) -> Targets:
    label, delta, class_weight, row_weight = targets
    delta = delta[block] if delta.ndim else delta
    return Targets(label[block], delta, class_weight, None if row_weight is None else row_weight[block])


def _forward_counted(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, wanted: list[bool],
    height: int,
) -> tuple[Tensor, Tensor, Tensor, Held]:  # fmt: skip
    """`_forward_blocks`, of the rows that count alone; others have numbers and gradients of 0."""
    counted = targets.label != options.ignore_index
    count = int(counted.sum())
    if count == len(hidden):
        return _forward_blocks(hidden, weight, bias, targets, options, wanted, height)
    rows = torch.nonzero_static(counted, size=count).squeeze(1)
    loss, some, parts, grads = _forward_blocks(
        hidden[rows], weight, bias, targets.select(rows), options, wanted, min(height, max(count, 1))
    )
    numbers = some.new_zeros(len(some), len(hidden))
    numbers[:, rows] = some
    if grads[0] is not None:
        to_hidden, grads[0] = grads[0], torch.zeros_like(hidden)
        grads[0][rows] = to_hidden
    return loss, numbers, parts, grads


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None,
    label: Tensor, delta: Tensor, class_weight: Tensor | None, row_weight: Tensor | None,
    options: Options, wanted: list[bool], held: Held,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss, numbers and what the losses were divided by; ``held`` gets the products, or the gradients."""
    targets = Targets(label, delta, class_weight, row_weight)
    height = block_rows(hidden, weight, options)
    if height < len(hidden):
        loss, numbers, parts, grads = _forward_counted(hidden, weight, bias, targets, options, wanted, height)
        held.extend(grads)
        return loss, numbers, parts
    products = torch.mm(hidden, weight.t())
    rows = _solve(products, bias, targets, options)
    if any(wanted):
        held.append(products)
    return rows.loss, rows.numbers, rows.parts


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, label, *_, options, wanted, held = inputs
    ctx.save_for_backward(hidden, weight, bias, label, *output[1:])
    ctx.options, ctx.wanted, ctx.held = options, wanted, held
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(
    grad_loss: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, label: Tensor, numbers: Tensor,
    parts: Tensor, options: Options, wanted: list[bool], products: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients that are wanted, from the products of all rows or from new ones."""
    grads = linear.empty_gradients((hidden, weight, bias), wanted)
    rows = len(hidden)
    for block in _blocks(rows, block_rows(hidden, weight, options)):
        made = torch.mm(hidden[block], weight.t()) if products is None else products
        factor = grad_loss[block] if grad_loss.ndim else grad_loss
        cross_entropy_triton.backward_numbers(
            factor, made, label[block], numbers[:, block], parts, made, bias=bias, cap=options.cap
        )
        _add_products(made, hidden, weight, grads, block)
        del made  # before there are those of the next
    return tuple(grad for grad in grads if grad is not None)


_apply_backward = differentiable(_backward, linear._save_nothing, linear._refuse)


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * 10
    held = list(ctx.held)
    ctx.held.clear()
    hidden, weight, bias, label, numbers, parts = ctx.saved_tensors  # torch refuses here what was changed since
    again = torch.is_grad_enabled()  # somebody may want the second derivative, and must hear that there is none
    if len(held) == 3 and not again:
        for grad in held:
            if grad is not None:
                cross_entropy_triton.scale(grad, grad_loss)
        return *held, *[None] * 7
    products = held[0] if len(held) == 1 else None
    del held
    call = _apply_backward if again else _backward
    made = iter(call(grad_loss, hidden, weight, bias, label, numbers, parts, ctx.options, ctx.wanted, products))
    return *(next(made) if want else None for want in ctx.wanted), *[None] * 7


_apply = differentiable(_forward, _save, _differentiate)


def linear_as_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options
) -> tuple[Tensor, Tensor]:
    """The loss, differentiable, and the numbers of the rows."""
    wanted = [value is not None and torch.is_grad_enabled() and value.requires_grad for value in (hidden, weight, bias)]
    tensors = (value if value is None else value.contiguous() for value in (hidden, weight, bias, *targets))
    loss, numbers, _ = _apply(*tensors, options, wanted, [])
    return loss, numbers
