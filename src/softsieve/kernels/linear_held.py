"""The linear loss whose logits are held, some rows at a time, on a GPU: three products of matrices instead of four.

`kernels.linear` makes the logits of dense rows a second time in its backward pass. Here a block of rows has the logits
of all classes, and the gradients are made while these are there.

    one block     All logits fit the memory that is allowed. They wait for the backward pass, which puts their gradient
                  in their place. Nothing is read on the host, so that a CUDA graph can capture both passes.
    many blocks   The gradients of a block are made in the forward pass, of the reduced loss, and wait for the backward
                  pass, which multiplies them. That pays where most rows are dense, as at the start of a training: a
                  sample of rows says whether they are. The gradient of the weight is rounded once for each block.

What is known of the rows is the tensor of `kernels.cross_entropy_triton`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    if options.backend != linear.TRITON or options.group:
        return 0
    rows, classes = hidden.shape[0], weight.shape[0]
    beside = 4 * (cross_entropy_triton.NUMBERS + 4) * rows
    most: int = ((options.memory or MEMORY) - beside) // (classes * weight.element_size())
    if most >= rows:
        return rows
    if most < FEWEST or options.reduction == "none" or hidden.dtype == torch.float16:
        return 0
    return most - most % UNIT


def pays(share: float, height: int) -> bool:
    """Whether blocks of so many rows are faster than `kernels.linear` where this share of the rows is dense.

    That takes 1 + 3 * share products. Blocks take 3, and for each block the gradient of the weight is read and written,
    which takes the time of a product of some 200 rows.
    """
    return share > FREE + SUMMED / height


def choose(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, wanted: bool
) -> int:
    """The rows of a block, 0 for `kernels.linear`.

    Where not all rows fit and gradients are ``wanted``, a sample of the rows says whether blocks pay.
    """
    height = block_rows(hidden, weight, options)
    rows = hidden.shape[0]
    if height >= rows:
        return height
    if not (wanted and height and pays(1.0, height)):
        return 0
    with torch.no_grad():
        some = torch.arange(SAMPLED, device=hidden.device) * rows // SAMPLED
        products = torch.mm(hidden[some], weight.t())
        sample = _solve(products, bias, _select(targets, some)._replace(class_weight=None, row_weight=None), options)
        kept = sample.numbers[cross_entropy_triton.KEPT]
        return height if pays(float((kept > LISTED).sum() / (kept != 0).sum()), height) else 0


def _select(targets: Targets, rows: slice | Tensor) -> Targets:
    """Of some rows; a margin may be a plain number here."""
    label, delta, class_weight, row_weight = targets
    delta = delta[rows] if isinstance(delta, Tensor) and delta.ndim else delta
    return Targets(label[rows], delta, class_weight, None if row_weight is None else row_weight[rows])


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
    count, units, first = -(-rows // height), -(-rows // UNIT), 0
    for number in range(count):
        last = min(rows, units * (number + 1) // count * UNIT) if number + 1 < count else rows
        yield slice(first, last)
        first = last


def _add_products(gradient: Tensor, hidden: Tensor, weight: Tensor, grads: Held, first: bool) -> None:
    """What a block of the logits' gradient gives; the first block writes, others add to weight and bias."""
    to_hidden, to_weight, to_bias = grads
    if to_hidden is not None:
        torch.mm(gradient, weight, out=to_hidden)
    if to_weight is not None and first:
        torch.mm(gradient.t(), hidden, out=to_weight)
    elif to_weight is not None:
        to_weight.addmm_(gradient.t(), hidden)
    if to_bias is not None:
        sums = gradient.sum(0, dtype=torch.float32)
        to_bias.copy_(sums if first else to_bias + sums)


def _forward_blocks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, wanted: list[bool],
    height: int,
) -> tuple[Tensor, Tensor, Tensor, Held]:  # fmt: skip
    """Loss, numbers, what the losses were divided by, and the gradients, of rows none of which is ignored."""
    rows, classes = hidden.shape[0], weight.shape[0]
    numbers = torch.empty((cross_entropy_triton.NUMBERS, rows), dtype=torch.float32, device=hidden.device)
    parts = one = numbers.new_ones(())
    if options.reduction == "mean":
        parts = linear_torch.make_shares(targets, 0, hidden).sum()
        parts = torch.where(parts == 0, one, parts)
    to_hidden, *others = grads = linear.empty_gradients((hidden, weight, bias), wanted)
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
        own = None if to_hidden is None else to_hidden[block]
        _add_products(products, hidden[block], weight, [own, *others], block.start == 0)
    return loss / parts, numbers, parts, grads


def _forward_counted(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, wanted: list[bool],
    height: int,
) -> tuple[Tensor, Tensor, Tensor, Held]:  # fmt: skip
    """`_forward_blocks`, of the rows that count alone; others have numbers and gradients of 0."""
    counted = targets.label != options.ignore_index
    count, all_rows = int(counted.sum()), hidden.shape[0]
    if count in (0, all_rows):
        return _forward_blocks(hidden, weight, bias, targets, options, wanted, height)
    rows = torch.nonzero_static(counted, size=count).squeeze(1)
    loss, some, parts, grads = _forward_blocks(
        hidden[rows], weight, bias, _select(targets, rows), options, wanted, min(height, count)
    )
    numbers = some.new_zeros(some.shape[0], all_rows)
    numbers[:, rows] = some
    if grads[0] is not None:
        to_hidden, grads[0] = grads[0], torch.zeros_like(hidden)
        grads[0][rows] = to_hidden
    return loss, numbers, parts, grads


def _backward(
    grad_loss: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, label: Tensor, numbers: Tensor,
    parts: Tensor, cap: float, height: int, wanted: list[bool], products: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients that are wanted, from the products of all rows or from new ones."""
    to_hidden, *others = grads = linear.empty_gradients((hidden, weight, bias), wanted)
    for block in _blocks(hidden.shape[0], height):
        made = torch.mm(hidden[block], weight.t()) if products is None else products
        factor = grad_loss[block] if grad_loss.ndim else grad_loss
        cross_entropy_triton.backward_numbers(
            factor, made, label[block], numbers[:, block], parts, made, bias=bias, cap=cap
        )
        own = None if to_hidden is None else to_hidden[block]
        _add_products(made, hidden[block], weight, [own, *others], block.start == 0)
        del made  # before there are those of the next
    return tuple(grad for grad in grads if grad is not None)


_apply_backward = differentiable(_backward, linear._save_nothing, linear._refuse)


class _Loss(torch.autograd.Function):
    """The loss; ``known`` gets the numbers of the rows.

    Small layers take the time of Python here, so it has one output, and what it leaves for backward beside its inputs
    is nothing that torch must watch.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options,
        wanted: list[bool], height: int, known: list[Tensor],
    ) -> Tensor:  # fmt: skip
        held: Held = []
        if height < hidden.shape[0]:
            loss, numbers, parts, held = _forward_counted(hidden, weight, bias, targets, options, wanted, height)
        else:
            products = torch.mm(hidden, weight.t())
            loss, numbers, parts, _ = _solve(products, bias, targets, options)
            if True in wanted:
                held = [products]
        ctx.save_for_backward(hidden, weight, bias, targets.label)
        ctx.held, ctx.known = held, (numbers, parts, options.cap, height, wanted)
        known.append(numbers)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        held, ctx.held = ctx.held, []
        tensors = ctx.saved_tensors  # torch refuses here what was changed since
        again = torch.is_grad_enabled()  # somebody may want the second derivative, and must hear that there is none
        if len(held) == 3 and not again:
            for grad in held:
                if grad is not None:
                    cross_entropy_triton.scale(grad, grad_loss)
            return *held, None, None, None, None, None
        call: Callable[..., tuple[Tensor, ...]] = _apply_backward if again else _backward
        made = iter(call(grad_loss, *tensors, *ctx.known, held[0] if len(held) == 1 else None))
        return *(next(made) if want else None for want in ctx.known[-1]), None, None, None, None, None


def linear_as_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, *, height: int
) -> tuple[Tensor, Tensor]:
    """The loss, differentiable, and the numbers of the rows; a block has as many rows as `choose` says."""
    wanted = [False] * 3
    if torch.is_grad_enabled():
        wanted = [value is not None and value.requires_grad for value in (hidden, weight, bias)]
    label, delta, class_weight, row_weight = targets
    delta = delta.contiguous() if isinstance(delta, Tensor) else delta
    class_weight, row_weight = (None if x is None else x.contiguous() for x in (class_weight, row_weight))
    targets = Targets(label.contiguous(), delta, class_weight, row_weight)
    bias = None if bias is None else bias.contiguous()
    known: list[Tensor] = []
    loss: Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
        hidden.contiguous(), weight.contiguous(), bias, targets, options, wanted, height, known
    )
    return loss, known[0]
