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

With a group the weight is one of several shards of rows, in order of the ranks: two small exchanges make the normaliser
and the kept sum those of all classes, after one of the shards' sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from softsieve.kernels import linear_torch
from softsieve.kernels.cross_entropy_torch import INF, accumulation_dtype, check_labels

BUFFER = 67 << 20  # bytes of logits at a time, forward
ON_CPU = 8 << 20  # bytes of logits at a time on a CPU, forward and backward: they stay in a cache
WORK = 116 << 20  # bytes that backward works with, the buffer of logits included
ROWS = 68 << 20  # of them, in backward, for the rows with the sums of their gradient
TRITON = "triton"

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Layer(NamedTuple):
    """What makes logits."""

    hidden: Tensor  # (rows, size)
    weight: Tensor  # (classes, size)
    bias: Tensor | None  # (classes,)
    cap: float  # of logits: cap * tanh(x / cap); 0 for none

    def some(self, rows: Tensor) -> Layer:
        return self._replace(hidden=self.hidden[rows])

    def chunks(self, budget: int) -> Iterator[tuple[int, Tensor]]:
        """The products of hidden states and weight, some classes at a time, in one buffer that may be written to."""
        rows, classes = len(self.hidden), len(self.weight)
        if self.hidden.is_cpu:
            budget = min(budget, ON_CPU)
        step = min(classes, _step(rows, budget // (rows * self.weight.element_size()), self.hidden.device))
        buffer = self.hidden.new_empty(rows * step)
        for start in range(0, classes, step):
            part = self.weight[start : start + step]
            products = buffer[: rows * len(part)].view(rows, len(part))
            yield start, torch.mm(self.hidden, part.t(), out=products)


def _step(rows: int, most: int, device: torch.device) -> int:
    """Classes at a time. On a GPU, blocks of 256 x 128 logits are to be a multiple of its processors, if they can."""
    step = max(128, most - most % 128)
    if device.type == "cuda":
        blocks, processors = -(-rows // 256), torch.cuda.get_device_properties(device).multi_processor_count
        if waves := step // 128 * blocks // processors:
            step = 128 * max(1, waves * processors // blocks)
    return step


class Saved(NamedTuple):
    """What forward leaves for backward and for statistics, of every row; 0 in one that is ignored."""

    threshold: Tensor
    kept: Tensor
    lse: Tensor
    norm: Tensor
    share: Tensor
    own: Tensor  # logit of the label; -inf if it is not in this shard
    right: Tensor
    listed: Tensor
    classes: Tensor
    logits: Tensor
    counts: Tensor  # (2,) on the CPU: rows whose kept classes are not listed, and listed classes with the labels


def _kernels(backend: str) -> Any:
    if backend == TRITON:
        from softsieve.kernels import linear_triton

        return linear_triton
    return linear_torch


# -- forward -----------------------------------------------------------------------------------------------------------


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    delta: Tensor,
    class_weight: Tensor | None,
    row_weight: Tensor | None,
    ignore_index: int,
    cap: float,
    reduction: str,
    backend: str,
    group: str,
) -> Outputs:
    """Loss, reduced, and the fields of `Saved`."""
    exchange = _Exchange(group)
    first, classes = exchange.place(len(weight), hidden.device)
    if class_weight is not None and class_weight.shape != (classes,):
        raise ValueError(
            f"class_weight: expected shape ({classes},), one for each class of all shards, "
            f"found {tuple(class_weight.shape)}"
        )
    layer, rows = Layer(hidden, weight, bias, cap), len(hidden)
    if backend != TRITON or hidden.is_cpu:
        check_labels(target, classes, ignore_index)
    counted = target != ignore_index
    count = int(counted.sum())
    label = target - first if first else target
    if count == rows:
        loss, saved = _settle(
            layer, label, delta, class_weight, row_weight, first, classes, reduction, backend, exchange
        )
        return loss, *saved
    loss, saved = _nothing(hidden, reduction, backend)
    if count:
        chosen = torch.nonzero_static(counted, size=count).squeeze(1)
        delta = delta[chosen] if delta.ndim else delta
        row_weight = None if row_weight is None else row_weight[chosen]
        found, of_rows = _settle(
            layer.some(chosen), label[chosen], delta, class_weight, row_weight, first, classes, reduction, backend,
            exchange,
        )  # fmt: skip
        for all_rows, own in zip(saved[:-1], of_rows[:-1], strict=True):
            all_rows[chosen] = own
        saved = saved._replace(counts=of_rows.counts)
        if reduction == "none":
            loss[chosen] = found
        else:
            loss = found
    return loss, *saved


def _nothing(hidden: Tensor, reduction: str, backend: str) -> tuple[Tensor, Saved]:
    """What forward returns when all rows are ignored."""
    rows, listed = len(hidden), _kernels(backend).LISTED
    row = hidden.new_zeros(rows, dtype=accumulation_dtype(hidden))
    kinds = {"kept": torch.long, "right": torch.bool, "listed": torch.bool, "classes": torch.int32}
    shapes = {"classes": (rows, listed), "logits": (rows, listed)}
    fields = [row.new_zeros(shapes.get(name, (rows,)), dtype=kinds.get(name, row.dtype)) for name in Saved._fields[:-1]]
    found = Saved._make([*fields, torch.zeros(2, dtype=torch.long)])
    found.listed.fill_(True)  # there is nothing to list
    return row if reduction == "none" else row.new_zeros(()), found


def _settle(
    layer: Layer,
    label: Tensor,
    delta: Tensor,
    class_weight: Tensor | None,
    row_weight: Tensor | None,
    first: int,
    classes: int,
    reduction: str,
    backend: str,
    exchange: _Exchange,
) -> tuple[Tensor, Saved]:
    """`forward` for rows none of which is ignored. Labels count from this shard's first class."""
    kernels, rows = _kernels(backend), len(label)
    top, own = layer.hidden.new_full((2, rows), -INF, dtype=accumulation_dtype(layer.hidden)).unbind()
    total, marks = torch.zeros_like(top), kernels.marks(layer)
    for start, products in layer.chunks(BUFFER):
        kernels.scan(products, layer.bias, layer.cap, start, label, top, total, own, marks)
    del products
    state = exchange.normaliser(top, total, own)
    settled, counts = kernels.settle(layer, label, delta, state, marks)
    del marks
    unlisted, wide, entries = counts.tolist()
    if wide:
        again = ((settled.threshold > -INF) & ~settled.listed).nonzero_static(size=wide).squeeze(1)
        known = label, state[2], *settled[:3]
        for start, products in layer.some(again).chunks(BUFFER):
            kernels.sum_kept(products, layer.bias, layer.cap, start, again, *known)
    settled = exchange.kept(settled)
    if exchange.group is not None and not kernels.LISTED:  # solved here and not elsewhere: the label has a gradient
        listed = settled.listed & ~((settled.rivals > 0) & (own > -INF))
        settled, unlisted = settled._replace(listed=listed), int((~listed).sum())
    loss, kept, lse, norm, share, right = kernels.finish(
        label, class_weight, row_weight, state, settled, first, classes, reduction
    )
    numbers = torch.tensor([unlisted, entries])
    return loss, Saved(settled.threshold, kept, lse, norm, share, own, right, *settled[3:], numbers)


# -- backward ----------------------------------------------------------------------------------------------------------


def backward(
    grad_rows: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    threshold: Tensor,
    kept: Tensor,
    lse: Tensor,
    norm: Tensor,
    own: Tensor,
    listed: Tensor,
    classes: Tensor,
    logits: Tensor,
    counts: Tensor,
    cap: float,
    backend: str,
    group: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden states, weight and bias; empty where they are not wanted."""
    kernels, exchange = _kernels(backend), _Exchange(group)
    layer = Layer(hidden, weight, bias, cap)
    first, _ = exchange.place(len(weight), hidden.device)
    label = target - first if first else target
    to_hidden, to_weight, to_bias = (
        torch.empty_like(value, memory_format=torch.contiguous_format) if value is not None and want else None
        for value, want in zip((hidden, weight, bias), wanted, strict=True)
    )
    found = kernels.entries(grad_rows, label, kept, listed, own, lse, norm, classes, logits, cap, len(weight))
    unlisted, entries = counts.tolist()
    if exchange.group is not None and found is not None:  # a row may be solved here and not elsewhere
        entries = int((found.keys < found.none).sum())
    if to_hidden is not None:
        kernels.combine(found, listed, weight, to_hidden)
    rows = (~listed).nonzero_static(size=unlisted).squeeze(1)
    _by_products(kernels, layer, rows, (label, grad_rows, threshold, kept, lse, norm), to_hidden, to_weight, to_bias)
    kernels.spread(found, entries, hidden, to_weight, to_bias)
    if to_hidden is not None:
        exchange.add(to_hidden)
    return tuple(hidden.new_empty(0) if grad is None else grad for grad in (to_hidden, to_weight, to_bias))  # type: ignore[return-value]


def _by_products(
    kernels: Any,
    layer: Layer,
    rows: Tensor,
    known: tuple[Tensor, ...],
    to_hidden: Tensor | None,
    to_weight: Tensor | None,
    to_bias: Tensor | None,
) -> None:
    """Gradients of rows in which many classes are kept, some rows at a time; those of the weight are all written."""
    for grad in (to_weight if not len(rows) else None, to_bias):
        if grad is not None:
            grad.zero_()
    if not len(rows):
        return
    item = layer.hidden.element_size() + accumulation_dtype(layer.hidden).itemsize
    groups = -(-len(rows) * layer.hidden.shape[1] * item // ROWS)
    for number, some in enumerate(rows.chunk(groups)):
        sums = _of_group(
            kernels, layer.some(some), (some, *known), to_hidden is not None, to_weight, to_bias, number > 0
        )
        if to_hidden is not None:
            to_hidden[some] = sums.to(to_hidden.dtype)
        del sums  # before there are those of the next


def _of_group(
    kernels: Any,
    layer: Layer,
    known: tuple[Tensor, ...],
    wanted: bool,
    to_weight: Tensor | None,
    to_bias: Tensor | None,
    more: bool,
) -> Tensor:
    """The sums of the hidden states' gradient, if wanted; others are written, or added to what there is."""
    dtype = accumulation_dtype(layer.hidden)
    sums = layer.hidden.new_zeros(layer.hidden.shape if wanted else (0,), dtype=dtype)
    for start, products in layer.chunks(WORK - layer.hidden.nbytes - sums.nbytes):
        kernels.differentiate(products, layer.bias, layer.cap, start, *known)
        these = slice(start, start + products.shape[1])
        if to_weight is not None:
            if more:
                to_weight[these].addmm_(products.t(), layer.hidden)
            else:
                torch.mm(products.t(), layer.hidden, out=to_weight[these])
        if to_bias is not None:
            to_bias[these] += products.sum(0, dtype=dtype).to(to_bias.dtype)
        if wanted:
            _add_product(sums, products, layer.weight[these])
    return sums


def _add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """``sums += left @ right``, the sums in their own dtype."""
    if left.dtype == sums.dtype:
        sums.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(sums, left, right, out_dtype=sums.dtype, out=sums)
    else:
        sums += left @ right


# -- several shards ----------------------------------------------------------------------------------------------------


class _Exchange:
    """What shards of the weight tell each other; nothing without a group."""

    def __init__(self, group: str) -> None:
        self.group: Any = None
        if group:
            from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

            self.group = _resolve_process_group(group)  # type: ignore[arg-type]

    def _gather(self, values: Tensor) -> Tensor:
        """Of all ranks, in order. (ranks, ...)"""
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.stack(parts)

    def place(self, classes: int, device: torch.device) -> tuple[int, int]:
        """The first class of this shard, and the number of all classes."""
        if self.group is None:
            return 0, classes
        sizes = self._gather(torch.tensor([classes], device=device)).flatten().tolist()
        return sum(sizes[: dist.get_rank(self.group)]), sum(sizes)

    def normaliser(self, top: Tensor, total: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Largest logit, mass over e^largest and logit of the label, over all classes."""
        if self.group is None:
            return top, total, own
        tops, totals, owns = self._gather(torch.stack([top, total, own])).unbind(1)
        top = tops.amax(0)
        base = top.masked_fill(top == -INF, 0)
        return top, (totals * (tops - base).exp()).sum(0), owns.amax(0)

    def kept(self, settled: linear_torch.Settled) -> linear_torch.Settled:
        """With the kept classes of all shards."""
        if self.group is None:
            return settled
        counts, masses = self._gather(torch.stack([settled.rivals.to(settled.mass.dtype), settled.mass])).unbind(1)
        return settled._replace(rivals=counts.sum(0).to(settled.rivals.dtype), mass=masses.sum(0))

    def add(self, values: Tensor) -> None:
        if self.group is not None:
            dist.all_reduce(values, group=self.group)


# -- two ways there ----------------------------------------------------------------------------------------------------
#
# As registered custom ops for compiled graphs and tensor subclasses, by an autograd.Function in eager mode.

forward_op = torch.library.custom_op("softsieve::linear_as_cross_entropy", forward, mutates_args=())
backward_op = torch.library.custom_op("softsieve::linear_as_cross_entropy_backward", backward, mutates_args=())


@forward_op.register_fake
def _(hidden: Tensor, *more: Any) -> Outputs:
    *_, reduction, backend, _ = more
    rows, listed = hidden.shape[0], _kernels(backend).LISTED
    row = hidden.new_empty(rows, dtype=accumulation_dtype(hidden))
    loss = torch.empty_like(row) if reduction == "none" else row.new_empty(())
    threshold, lse, norm, share, own = (torch.empty_like(row) for _ in range(5))
    right, whole = (torch.empty_like(row, dtype=torch.bool) for _ in range(2))
    kept, classes = torch.empty_like(row, dtype=torch.long), row.new_empty((rows, listed), dtype=torch.int32)
    logits, counts = row.new_empty((rows, listed)), torch.empty(2, dtype=torch.long)
    return loss, threshold, kept, lse, norm, share, own, right, whole, classes, logits, counts


@backward_op.register_fake
def _(
    grad_rows: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(  # type: ignore[return-value]
        torch.empty_like(value, memory_format=torch.contiguous_format)
        if value is not None and want
        else hidden.new_empty(0)
        for value, want in zip((hidden, weight, bias), more[-1], strict=True)
    )


def _by_op(hidden: Tensor) -> bool:
    return torch.compiler.is_compiling() or type(hidden) not in (Tensor, nn.Parameter)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, target, *_, cap, _, backend, group = inputs
    ctx.save_for_backward(hidden, weight, bias, target, *output[1:])
    ctx.options = cap, backend, group
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * 12
    hidden, weight, bias, target, *saved = ctx.saved_tensors
    threshold, kept, lse, norm, share, own, _, listed, classes, logits, counts = saved
    wanted = list(ctx.needs_input_grad[:3])
    call: Callable[..., tuple[Tensor, ...]] = backward
    if _by_op(hidden):
        call = backward_op
    elif torch.is_grad_enabled():  # somebody may want the second derivative, and must hear that there is none
        call = _Backward.apply
    grads = call(
        grad_loss * share, hidden, weight, bias, target, threshold, kept, lse, norm, own, listed, classes, logits,
        counts, *ctx.options, wanted,
    )  # fmt: skip
    return *(grad if want else None for grad, want in zip(grads, wanted, strict=True)), *[None] * 9


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _refuse(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "linear_as_cross_entropy: expected to be differentiated once, found a second derivative: "
        "take as_cross_entropy(F.linear(hidden, weight, bias), target) or backend='reference', which have it"
    )


forward_op.register_autograd(_differentiate, setup_context=_save)
backward_op.register_autograd(_refuse, setup_context=_save_nothing)


class _Forward(torch.autograd.Function):
    forward = staticmethod(forward)
    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)


class _Backward(torch.autograd.Function):
    forward = staticmethod(backward)
    setup_context = staticmethod(_save_nothing)
    backward = staticmethod(_refuse)


def linear_as_cross_entropy(hidden: Tensor, *more: Any) -> Outputs:
    """The loss, reduced and differentiable, and the fields of `Saved`.

    Args:
        hidden: (rows, size).
        weight: (classes, size), of the same dtype.
        bias: (classes,) or None.
        target: (rows,), int64.
        delta: margins in [0, 1], () or (rows,).
        class_weight, row_weight: (classes,) and (rows,) or None.
        ignore_index: label of rows that do not count.
        cap: logits are ``cap * tanh(x / cap)``; 0 for none.
        reduction: "none", "mean" or "sum".
        backend: "torch" or "triton".
        group: name of the process group over which the weight is sharded; empty for none.
    """
    found: Outputs = forward_op(hidden, *more) if _by_op(hidden) else _Forward.apply(hidden, *more)  # type: ignore[no-untyped-call]
    return found
