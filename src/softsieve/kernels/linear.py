"""Linear layer and AS cross-entropy in one, without the logits: the passes over the vocabulary and the derivatives.

Logits exist some classes at a time, in one buffer that is used again and again; products of matrices are the vendor's.
Forward scans them once for every row's log-sum-exp, the logit of its label and, in Triton, the largest logit of each
tile of classes. That settles which rows are

    dense     the label has a probability of at most delta: nothing is masked
    solved    no other class reaches the row's threshold (see `kernels.cross_entropy`): loss and gradient are 0
    narrow    few do. Their tiles are visited again, and the classes that are kept are listed (Triton only)
    wide      many do. Forward adds them up in a second pass over these rows alone

Backward takes dense and wide rows together, gathered, through products of matrices, and adds for narrow rows what is
listed. Nothing is added up in an order that depends on chance.

With a group the weight is one of several shards of rows, in order of the ranks: two small exchanges make the partition
function and the kept sum those of all classes, after one of the shards' sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from softsieve.kernels import linear_step, linear_torch
from softsieve.kernels.cross_entropy import differentiable, needs_op
from softsieve.kernels.cross_entropy_torch import INF, accumulation_dtype, check_labels
from softsieve.kernels.linear_types import (
    FEWEST,
    MEMORY,
    Backend,
    Chunk,
    Entries,
    Layer,
    Options,
    Saved,
    Scan,
    Settled,
    Stepper,
    Targets,
)

# Where MEMORY bytes are allowed, in proportion elsewhere:
BUFFER = 67 << 20  # bytes of logits at a time, forward
WORK = linear_step.WORK
ROWS = 68 << 20  # of them, in backward, for the rows with the sums of their gradient
TRITON = "triton"


def load_backend(name: str) -> Backend:
    """The module of that name."""
    if name == TRITON:
        from softsieve.kernels import linear_triton

        return linear_triton
    return linear_torch


ForwardCounted = Callable[[Layer, Targets, Options, "Shards"], tuple[Tensor, Saved]]


def least_memory(rows: int, item: int) -> int:
    """The fewest bytes with which logits of so many rows fit their buffer, of ``item`` bytes each."""
    return -(-rows * FEWEST * item * MEMORY // BUFFER)


def forward(
    layer: Layer, targets: Targets, options: Options, of_counted: ForwardCounted | None = None
) -> tuple[Tensor, Saved]:
    """The loss, reduced, and what else is known of every row; rows that count may go another way."""
    if of_counted is None:
        of_counted = _screened() if options.screening else forward_counted
    hidden, target = layer.hidden, targets.label
    shards = Shards(options.group, len(layer.weight), hidden.device)
    weights = targets.class_weight
    if weights is not None and weights.shape != (shards.classes,):
        raise ValueError(
            f"class_weight: expected shape ({shards.classes},), one for each class of all shards, "
            f"found {tuple(weights.shape)}"
        )
    if options.backend != TRITON or hidden.is_cpu:
        check_labels(target, shards.classes, options.ignore_index)
    counted = target != options.ignore_index
    count = int(counted.sum())
    targets = targets._replace(label=shards.own_labels(target))
    if count == len(hidden):
        return of_counted(layer, targets, options, shards)
    loss, saved = _forward_ignored(hidden, options)
    if count:
        rows = torch.nonzero_static(counted, size=count).squeeze(1)
        loss_counted, saved_counted = of_counted(layer.select(rows), targets.select(rows), options, shards)
        for value, part in zip(saved[:-1], saved_counted[:-1], strict=True):
            value[rows] = part
        saved = saved._replace(counts=saved_counted.counts)
        if options.reduction == "none":
            loss[rows] = loss_counted
        else:
            loss = loss_counted
    return loss, saved


def _forward_ignored(hidden: Tensor, options: Options) -> tuple[Tensor, Saved]:
    """`forward` for rows that are all ignored."""
    rows, listed = hidden.shape[0], load_backend(options.backend).LISTED
    row = hidden.new_zeros(rows, dtype=accumulation_dtype(hidden))
    dtypes = {"kept": torch.long, "right": torch.bool, "listed": torch.bool, "classes": torch.int32}
    shapes = {"classes": (rows, listed), "logits": (rows, listed)}
    fields = {name: row.new_zeros(shapes.get(name, (rows,)), dtype=dtypes.get(name)) for name in Saved._fields[:-1]}
    fields["listed"].fill_(True)  # there is nothing to list
    saved = Saved(**fields, counts=torch.zeros(2, dtype=torch.long))
    return row if options.reduction == "none" else row.new_zeros(()), saved


@cache
def _screened() -> ForwardCounted:
    """The way of rows that are screened first."""
    found: ForwardCounted = import_module("softsieve.kernels.linear_screening").forward_counted
    return found


def forward_counted(layer: Layer, targets: Targets, options: Options, shards: Shards) -> tuple[Tensor, Saved]:
    """`forward` for rows none of which is ignored. Labels count from this shard's first class."""
    backend, label = load_backend(options.backend), targets.label
    top, own, rival = layer.hidden.new_full((3, len(label)), -INF, dtype=accumulation_dtype(layer.hidden)).unbind()
    own_scan = Scan(top, torch.zeros_like(top), own, rival)
    marks = backend.make_marks(layer, own_scan)
    budget = BUFFER * (options.memory or MEMORY) // MEMORY
    for chunk in layer.chunks(budget):
        backend.scan(chunk, label, own_scan, marks)
    del chunk
    state = shards.merge_scans(own_scan)
    settled = backend.settle(layer, targets, state, marks)
    del marks
    unlisted, wide, entries = settled.counts.tolist()
    if wide:
        rows = ((settled.threshold > -INF) & ~settled.listed).nonzero_static(size=wide).squeeze(1)
        for chunk in layer.select(rows).chunks(budget):
            backend.sum_kept(chunk, rows, label, state.own, settled)
    settled = shards.merge_kept(settled)
    if shards.group is not None and not backend.LISTED:  # solved here and not elsewhere: the label has a gradient
        listed = settled.listed & ~((settled.rivals > 0) & (own > -INF))
        settled, unlisted = settled._replace(listed=listed), int((~listed).sum())
    loss, kept, lse, norm, share, margin, right = backend.finish(
        targets, state, settled, shards.first, shards.classes, options.reduction
    )
    counts = torch.tensor([unlisted, entries])
    lists = settled.listed, settled.classes, settled.logits
    return loss, Saved(settled.threshold, kept, lse, norm, share, own, margin, right, *lists, counts)


def backward(
    factor: Tensor, layer: Layer, target: Tensor, saved: Saved, options: Options, wanted: list[bool],
    stepper: Stepper | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of hidden states, weight and bias, each row's times ``factor``; empty where they are not wanted.

    With a ``stepper`` those of weight and bias go there, some classes at a time.
    """
    backend, shards = load_backend(options.backend), Shards(options.group, len(layer.weight), target.device)
    label = shards.own_labels(target)
    to_hidden, *_ = grads = empty_gradients(layer[:3], wanted)
    entries = backend.make_entries(layer, label, factor, saved)
    unlisted, count = saved.counts.tolist()
    if shards.group is not None:  # a row may be solved here and not elsewhere
        count = int((entries.keys < entries.none).sum())
    if to_hidden is not None:
        backend.combine(entries, saved.listed, layer.weight, to_hidden)
    rows = (~saved.listed).nonzero_static(size=unlisted).squeeze(1)
    pass_on(
        layer, rows, grads, lambda chunk, block: backend.differentiate(chunk, block, label, factor, saved),
        entries, count, backend, stepper, options.memory,
    )  # fmt: skip
    if to_hidden is not None and shards.group is not None:
        dist.all_reduce(to_hidden, group=shards.group)
    to_hidden, to_weight, to_bias = (layer.hidden.new_empty(0) if grad is None else grad for grad in grads)
    return to_hidden, to_weight, to_bias


Differentiate = Callable[[Chunk, Tensor], None]


def pass_on(
    layer: Layer, rows: Tensor, grads: Sequence[Tensor | None], differentiate: Differentiate,
    entries: Entries, count: int, backend: Backend, stepper: Stepper | None,
    memory: int = 0,
) -> None:  # fmt: skip
    """Gradients of rows that are not listed, and of ``count`` entries to weight and bias or to their ``stepper``."""
    to_hidden, to_weight, to_bias = grads
    ordered = entries.in_order(count)
    if stepper is not None:
        linear_step.step(layer, rows, to_hidden, differentiate, ordered, backend, stepper)
        return
    add_rows(layer, rows, grads, differentiate, memory)
    backend.spread(ordered, layer.hidden, to_weight, to_bias)


def add_rows(
    layer: Layer, rows: Tensor, grads: Sequence[Tensor | None], differentiate: Differentiate, memory: int
) -> None:
    """Write the gradient of the hidden states of these rows, and, as the first to do so, those of weight and bias.

    ``differentiate`` puts the gradient in the place of the products of a chunk of these rows.
    """
    to_hidden, to_weight, to_bias = grads
    for grad in (None if len(rows) else to_weight, to_bias):  # products write the weight's before they add to it
        if grad is not None:
            grad.zero_()
    gathered = len(rows) < len(layer.hidden)
    item = gathered * layer.hidden.element_size() + accumulation_dtype(layer.hidden).itemsize
    work, most = (share * (memory or MEMORY) // MEMORY for share in (WORK, ROWS))
    height = -(-len(rows) // max(1, -(-len(rows) * layer.hidden.shape[1] * item // max(1, most))))
    for number, start in enumerate(range(0, len(rows), height or 1)):
        block = rows[start : start + height]
        part = layer.select(block if gathered else slice(start, start + height))
        sums = part.hidden.new_zeros(
            part.hidden.shape if to_hidden is not None else (0,), dtype=accumulation_dtype(part.hidden)
        )
        for chunk in part.chunks(work - gathered * part.hidden.nbytes - sums.nbytes):
            differentiate(chunk, block)
            classes = slice(chunk.start, chunk.start + chunk.products.shape[1])
            chunk_grads = (None if grad is None else grad[classes] for grad in (to_weight, to_bias))
            linear_step.add_products(
                chunk.products, part.hidden, layer.weight[classes], sums, *chunk_grads, first=number == 0
            )
        del chunk  # before the sums are rounded into a copy
        if to_hidden is not None:
            to_hidden[block] = sums.to(to_hidden.dtype)
        del part, sums  # before there are those of the next


def empty_gradients(values: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Memory for the gradients of hidden states, weight and bias; None for those that are not wanted."""
    make = partial(torch.empty_like, memory_format=torch.contiguous_format)
    return [make(x) if x is not None and want else None for x, want in zip(values, wanted, strict=True)]


class Shards:
    """The shards of the weight, and what they tell each other; one that has all classes without a group."""

    def __init__(self, group: str, classes: int, device: torch.device) -> None:
        self.group: Any = None
        self.own = classes
        self.first, self.classes = 0, classes  # first class of this shard, and number of all classes
        if group:
            from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

            self.group = _resolve_process_group(group)  # type: ignore[arg-type]
            sizes = self._gather(torch.tensor([classes], device=device)).flatten().tolist()
            self.first, self.classes = sum(sizes[: dist.get_rank(self.group)]), sum(sizes)

    def _gather(self, values: Tensor) -> Tensor:
        """Of all ranks, in order. (ranks, ...)"""
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.stack(parts)

    def own_labels(self, target: Tensor) -> Tensor:
        """Labels that count from this shard's first class."""
        return target - self.first if self.first else target

    def merge_scans(self, state: Scan) -> Scan:
        """The same over the classes of all shards."""
        if self.group is None:
            return state
        tops, totals, owns, rivals = self._gather(torch.stack(state)).unbind(1)
        top = tops.amax(0)
        base = top.masked_fill(top == -INF, 0)
        return Scan(top, (totals * (tops - base).exp()).sum(0), owns.amax(0), rivals.amax(0))

    def merge_largest(self, values: Tensor) -> Tensor:
        """The largest of all shards'."""
        return values if self.group is None else self._gather(values).amax(0)

    def merge_kept(self, settled: Settled) -> Settled:
        """With the kept classes of all shards."""
        if self.group is None:
            return settled
        counts, odds = self._gather(torch.stack([settled.rivals.to(settled.odds.dtype), settled.odds])).unbind(1)
        return settled._replace(rivals=counts.sum(0).to(settled.rivals.dtype), odds=odds.sum(0))


# -- two ways there ----------------------------------------------------------------------------------------------------
#
# As registered custom ops for compiled graphs and tensor subclasses, by an autograd.Function in eager mode. Both take
# tensors and plain values alone, so here, and only here, `Targets`, `Options` and `Saved` are taken apart.

Outputs = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]  # fmt: skip


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None,
    label: Tensor, delta: Tensor, class_weight: Tensor | None, row_weight: Tensor | None,
    ignore_index: int, cap: float, reduction: str, backend: str, group: str, memory: int,
    screening: str,
) -> Outputs:  # fmt: skip
    targets = Targets(label, delta, class_weight, row_weight)
    options = Options(ignore_index, cap, reduction, backend, group, memory, screening)
    loss, saved = forward(Layer(hidden, weight, bias, cap), targets, options)
    return loss, *saved


def _backward(
    factor: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, saved: list[Tensor],
    cap: float, backend: str, group: str, memory: int, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = Options(cap=cap, backend=backend, group=group, memory=memory)
    return backward(factor, Layer(hidden, weight, bias, cap), target, Saved(*saved), options, wanted)


forward_op = torch.library.custom_op("softsieve::linear_as_cross_entropy", _forward, mutates_args=())
backward_op = torch.library.custom_op("softsieve::linear_as_cross_entropy_backward", _backward, mutates_args=())


@forward_op.register_fake
def _(hidden: Tensor, *others: Any) -> Outputs:
    loss, saved = _forward_ignored(hidden, Options(*others[-len(Options._fields) :]))
    return loss, *saved


@backward_op.register_fake
def _(factor: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    grads = empty_gradients(others[:3], others[-1])
    return tuple(others[0].new_empty(0) if grad is None else grad for grad in grads)  # type: ignore[return-value]


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save what `differentiate` reads."""
    hidden, weight, bias, target, *_ = inputs
    ctx.save_for_backward(hidden, weight, bias, target, *output[1:])
    ctx.options = Options(*inputs[-len(Options._fields) :])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """The gradients of what went into `_forward`."""
    if grad_loss is None:
        return (None,) * 14
    hidden, weight, bias, target, *tensors = ctx.saved_tensors
    saved = Saved(*tensors)
    wanted = list(ctx.needs_input_grad[:3])
    call: Callable[..., tuple[Tensor, ...]] = _backward
    if needs_op(hidden):
        call = backward_op
    elif torch.is_grad_enabled():  # somebody may want the second derivative, and must hear that there is none
        call = _apply_backward
    options: Options = ctx.options
    grads = call(
        grad_loss * saved.share, hidden, weight, bias, target, tensors,
        options.cap, options.backend, options.group, options.memory, wanted,
    )  # fmt: skip
    return *(grad if want else None for grad, want in zip(grads, wanted, strict=True)), *[None] * 11


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def refuse(ctx: Any, *_: Any) -> None:
    """Say that there is no second derivative."""
    raise NotImplementedError(
        "linear_as_cross_entropy: expected to be differentiated once, found a second derivative: "
        "take as_cross_entropy(F.linear(hidden, weight, bias), target) or backend='reference', which have it"
    )


forward_op.register_autograd(differentiate, setup_context=save)
backward_op.register_autograd(refuse, setup_context=_save_nothing)


_apply_forward = differentiable(_forward, save, differentiate)
_apply_backward = differentiable(_backward, _save_nothing, refuse)


def linear_as_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options
) -> tuple[Tensor, Saved]:
    """`forward` of (rows, size), (classes, size) and (classes,) or None, with a differentiable loss."""
    call: Callable[..., Outputs] = forward_op if needs_op(hidden) else _apply_forward
    tensors = (value if value is None else value.contiguous() for value in (hidden, weight, bias, *targets))
    loss, *saved = call(*tensors, *options)
    return loss, Saved(*saved)
