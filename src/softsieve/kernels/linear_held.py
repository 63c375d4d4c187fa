"""The linear loss whose logits are held, some rows at a time, on a GPU: three products of matrices instead of four.

`kernels.linear` makes the logits of dense rows a second time in its backward pass. Here a block of rows has the logits
of all classes, and their gradient takes their place while they are there. So gradients are made in the forward pass, of
the reduced loss, and wait for the backward pass, which multiplies them by the loss's. Where that is not to be done,
all rows must be in one block, whose logits wait for the backward pass.

A small layer is always held: nothing is read on the host then, so that a CUDA graph can capture both passes. Of a large
one, a sample of the rows says whether most are dense, as at the start of a training; with few dense rows
`kernels.linear` is faster. The gradient of the weight is rounded once for each block: the memory that sums in float32
would take makes blocks larger, and so fewer, by twice the layer's size in rows.

What is known of the rows is the tensor of `kernels.cross_entropy_triton`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softsieve.kernels import cross_entropy_triton, linear, linear_torch
from softsieve.kernels.cross_entropy import check_on_device, differentiable
from softsieve.kernels.cross_entropy_triton import VALID, Rows
from softsieve.kernels.linear_types import MEMORY, NUMBERS, SMALL, Options, Targets

UNIT = 192  # rows that a product takes at a time
FEWEST = 256  # rows of a block, unless it has all
LINE = 64  # a multiple of so many logits lies between rows, and a product has so many: others take three times as long
FIT = 8  # classes of which a multiple needs no other product
SAMPLED = 128  # rows that say whether most are dense
LISTED = 16  # a row with more classes has its gradient from products of matrices, also in `kernels.linear`
FREE, SUMMED = 2 / 3, 100  # see `pays`
Held = list[Tensor | None]


def block_rows(hidden: Tensor, weight: Tensor, options: Options) -> int:
    """How many rows' logits fit the memory that is allowed; 0 where `kernels.linear` is to do it."""
    if options.backend != linear.TRITON or options.group:
        return 0
    rows, classes = hidden.shape[0], weight.shape[0]
    beside = 4 * (NUMBERS + 4) * rows
    most: int = ((options.memory or MEMORY) - beside) // (_line(classes) * weight.element_size())
    if most >= rows:
        return rows
    return 0 if most < FEWEST or _waits(hidden, options) else most - most % UNIT


def _line(classes: int) -> int:
    """Logits from the start of a row to that of the next."""
    return -(-classes // LINE) * LINE


def _padding(products: Tensor) -> int:
    """How many numbers there are between two rows."""
    return _line(products.shape[1]) - products.shape[1]


def _waits(hidden: Tensor, options: Options) -> bool:
    """Whether gradients must wait for the factor: rows have different ones, or float16 is too coarse without."""
    return options.reduction == "none" or hidden.dtype == torch.float16


def pays(share: float, height: int) -> bool:
    """Whether blocks of so many rows are faster than `kernels.linear` where this share of the rows is dense.

    That takes 1 + 3 * share products. Blocks take 3, and for each block the gradient of the weight is read and written,
    which takes the time of a product of some 200 rows.
    """
    return share > FREE + SUMMED / height


def choose(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, wanted: bool
) -> int:
    """The rows of a block, 0 for `kernels.linear`; ``wanted`` says whether gradients are."""
    height = block_rows(hidden, weight, options)
    rows, size = hidden.shape
    if height == 0 or not (wanted or height == rows):
        return 0
    if rows * size * weight.shape[0] <= SMALL or (hidden.is_cuda and torch.cuda.is_current_stream_capturing()):
        return height
    if not pays(1.0, height):
        return 0
    with torch.no_grad():
        some = torch.arange(SAMPLED, device=hidden.device) * rows // SAMPLED
        sample = _select(targets, some)._replace(class_weight=None, row_weight=None)
        products = Weight.split(weight).multiply(hidden[some], weight.shape[0])
        kept = _solve(products, bias, sample, options).numbers[cross_entropy_triton.KEPT]
        return height if pays(float((kept > LISTED).sum() / (kept != 0).sum()), height) else 0


class Weight(NamedTuple):
    """A weight in two parts, each of which makes products of a size that the vendor's kernels are fast with."""

    body: Tensor
    tail: Tensor | None  # what is left over, with rows of 0 up to a whole line; None where nothing is

    @classmethod
    def split(cls, weight: Tensor) -> Weight:
        classes, size = weight.shape
        last = classes % LINE
        if classes % FIT == 0 or classes < LINE:
            return cls(weight, None)
        tail = weight.new_zeros(LINE, size)
        tail[:last] = weight[classes - last :]
        return cls(weight[: classes - last], tail)

    def multiply(self, hidden: Tensor, classes: int, buffer: Tensor | None = None) -> Tensor:
        """The products of some rows. (rows, classes)"""
        rows, line = hidden.shape[0], _line(classes)
        if buffer is None and line == classes:
            return torch.mm(hidden, self.body.t())
        buffer = hidden.new_empty(rows * line) if buffer is None else buffer[: rows * line]
        lines, body = buffer.view(rows, line), self.body.shape[0]
        torch.mm(hidden, self.body.t(), out=lines[:, :body])
        if self.tail is not None:
            torch.mm(hidden, self.tail.t(), out=lines[:, body:])
        return lines[:, :classes]

    def add(
        self, gradient: Tensor, hidden: Tensor, to_hidden: Tensor | None, to_weight: Tensor | None, first: bool
    ) -> None:
        """What the gradient of these products gives; the ``first`` writes the weight's, others add to it."""
        (rows, classes), body = gradient.shape, self.body.shape[0]
        ours, rest = gradient[:, :body], None
        if self.tail is not None:
            rest = gradient.as_strided((rows, LINE), gradient.stride(), gradient.storage_offset() + body)
        if to_hidden is not None:
            torch.mm(ours, self.body, out=to_hidden)
            if rest is not None and self.tail is not None:
                to_hidden.addmm_(rest, self.tail)
        if to_weight is not None and first:
            torch.mm(ours.t(), hidden, out=to_weight[:body])
        elif to_weight is not None:
            to_weight[:body].addmm_(ours.t(), hidden)
        if to_weight is not None and rest is not None:
            last = torch.mm(rest.t(), hidden)[: classes - body]
            to_weight[body:] = last if first else to_weight[body:] + last


def _select(targets: Targets, rows: slice | Tensor) -> Targets:
    """Of some rows; a margin may be a plain number here."""
    label, delta, class_weight, row_weight = targets
    delta = delta[rows] if isinstance(delta, Tensor) and delta.ndim else delta
    return Targets(label[rows], delta, class_weight, None if row_weight is None else row_weight[rows])


def _solve(
    products: Tensor, bias: Tensor | None, targets: Targets, options: Options, numbers: Tensor | None = None
) -> Rows:
    """Loss and numbers of the rows with these products."""
    label, delta, class_weight, row_weight = targets
    rows = cross_entropy_triton.forward_numbers(
        products, label, class_weight, delta, options.ignore_index, options.reduction,
        bias=bias, row_weight=row_weight, cap=options.cap, numbers=numbers, padding=_padding(products),
    )  # fmt: skip
    check_on_device(rows.work[VALID], products.shape[1], options.ignore_index)
    return rows


def _blocks(rows: int, height: int) -> Iterator[slice]:
    return (slice(first, min(first + height, rows)) for first in range(0, rows, height))


def _add_products(gradient: Tensor, hidden: Tensor, weight: Weight, grads: Held, block: slice) -> None:
    """What a block of the logits' gradient gives; the first block writes, others add to weight and bias."""
    to_hidden, to_weight, to_bias = grads
    weight.add(gradient, hidden, None if to_hidden is None else to_hidden[block], to_weight, block.start == 0)
    if to_bias is not None:
        sums = gradient.sum(0, dtype=torch.float32)
        to_bias.copy_(sums if block.start == 0 else to_bias + sums)


def _forward_whole(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Held]:
    """Loss, numbers, work and the gradients of all rows at once; or, of those that wait, the products alone."""
    parts = Weight.split(weight)
    products = parts.multiply(hidden, weight.shape[0])
    loss, numbers, work = _solve(products, bias, targets, options)
    if True not in wanted:
        return loss, numbers, work, []
    if _waits(hidden, options):
        return loss, numbers, work, [products]
    grads = linear.empty_gradients((hidden, weight, bias), wanted)
    cross_entropy_triton.backward_numbers(
        None, products, targets.label, numbers, work, products, bias=bias, cap=options.cap,
        padding=_padding(products),
    )  # fmt: skip
    _add_products(products, hidden, parts, grads, slice(0, hidden.shape[0]))
    return loss, numbers, work, grads


def _forward_blocks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, wanted: list[bool],
    height: int,
) -> tuple[Tensor, Tensor, Tensor, Held]:  # fmt: skip
    """`_forward_whole` block by block."""
    rows = hidden.shape[0]
    numbers = torch.empty((NUMBERS, rows), dtype=torch.float32, device=hidden.device)
    parts = numbers.new_ones(())
    if options.reduction == "mean":
        ignored = targets.label == options.ignore_index
        shares = linear_torch.make_shares(targets._replace(label=targets.label.masked_fill(ignored, 0)), 0, hidden)
        parts = shares.masked_fill_(ignored, 0).sum()
        parts = parts.masked_fill(parts == 0, 1)
    work = parts.expand(1)
    grads = linear.empty_gradients((hidden, weight, bias), wanted)
    classes, pieces = weight.shape[0], Weight.split(weight)
    buffer = hidden.new_empty(height * _line(classes))
    summed = options._replace(reduction="sum")
    losses = []
    for block in _blocks(rows, height):
        some, states = _select(targets, block), hidden[block]
        products = pieces.multiply(states, classes, buffer)
        losses.append(_solve(products, bias, some, summed, numbers[:, block]).loss)
        cross_entropy_triton.backward_numbers(
            None, products, some.label, numbers[:, block], work, products, bias=bias, cap=options.cap,
            padding=_padding(products),
        )  # fmt: skip
        _add_products(products, states, pieces, grads, block)
    return torch.stack(losses).sum() / parts, numbers, work, grads


def _forward_counted(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, wanted: list[bool],
    height: int,
) -> tuple[Tensor, Tensor, Tensor, Held]:  # fmt: skip
    """`_forward_blocks`, of a large layer of the rows that count alone; others have numbers and gradients of 0."""
    all_rows, size = hidden.shape
    if all_rows * size * weight.shape[0] <= SMALL or torch.cuda.is_current_stream_capturing():
        return _forward_blocks(hidden, weight, bias, targets, options, wanted, height)
    counted = targets.label != options.ignore_index
    count = int(counted.sum())
    if count in (0, all_rows):
        return _forward_blocks(hidden, weight, bias, targets, options, wanted, height)
    rows = torch.nonzero_static(counted, size=count).squeeze(1)
    loss, some, work, grads = _forward_blocks(
        hidden[rows], weight, bias, _select(targets, rows), options, wanted, min(height, count)
    )
    numbers = some.new_zeros(some.shape[0], all_rows)
    numbers[:, rows] = some
    if grads[0] is not None:
        to_hidden, grads[0] = grads[0], torch.zeros_like(hidden)
        grads[0][rows] = to_hidden
    return loss, numbers, work, grads


def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, wanted: list[bool],
    height: int,
) -> tuple[Tensor, Tensor, Tensor, Held]:  # fmt: skip
    """`_forward_whole` or `_forward_counted`, by the rows of a block."""
    layer = hidden, weight, bias
    if height < hidden.shape[0]:
        return _forward_counted(*layer, targets, options, wanted, height)
    return _forward_whole(*layer, targets, options, wanted)


def _backward(
    grad_loss: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, label: Tensor, numbers: Tensor,
    work: Tensor, cap: float, height: int, wanted: list[bool], products: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients that are wanted, from the products of all rows or from new ones."""
    grads, pieces = linear.empty_gradients((hidden, weight, bias), wanted), Weight.split(weight)
    for block in _blocks(hidden.shape[0], height):
        made = pieces.multiply(hidden[block], weight.shape[0]) if products is None else products
        factor = grad_loss[block] if grad_loss.ndim else grad_loss
        cross_entropy_triton.backward_numbers(
            factor, made, label[block], numbers[:, block], work, made, bias=bias, cap=cap,
            padding=_padding(made),
        )  # fmt: skip
        _add_products(made, hidden[block], pieces, grads, block)
        del made  # before there are those of the next
    return tuple(grad for grad in grads if grad is not None)


_apply_backward = differentiable(_backward, linear._save_nothing, linear.refuse)


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
        layer = hidden, weight, bias
        loss, numbers, work, held = forward(*layer, targets, options, wanted, height)
        ctx.save_for_backward(*layer, targets.label)
        ctx.held, ctx.known = held, (numbers, work, options.cap, height, wanted)
        known.append(numbers)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        held, ctx.held = ctx.held, []
        tensors = ctx.saved_tensors  # torch refuses here what was changed since
        again = torch.is_grad_enabled()  # somebody may want the second derivative, and must hear that there is none
        if len(held) == 3 and not again:
            cross_entropy_triton.scale(held, grad_loss)
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
