"""The linear loss of rows whose logits are held: their gradients are made while the logits are there.

That takes three products for a dense row instead of the four of `kernels.linear`, which makes the logits again; where
few rows are dense, memory that is written for the first time costs more than that. So it is done where a caller allows
memory for it, which says how many rows a block has. A block has all classes; its logits are worked on some rows at a
time, which stay in the cache, and what is left of them are the gradients of the rows that are not solved.

The gradients are of the reduced loss, and wait for the backward pass, which multiplies them. They are made once: a
second backward pass over the same graph takes the other way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softsieve.kernels import linear, linear_torch
from softsieve.kernels.cross_entropy import differentiable
from softsieve.kernels.cross_entropy_torch import INF, accumulation_dtype
from softsieve.kernels.linear_types import ON_CPU, Chunk, Layer, Options, Saved, Scan, Targets

SCRATCH = 3  # copies of what is worked on at a time
FEWEST = 256  # rows of a block: with fewer, products read and write more than they compute
Gradients = list[Tensor | None]


def block_rows(hidden: Tensor, weight: Tensor, options: Options) -> int:
    """How many rows' logits are to be held at a time; 0 where `kernels.linear` is to do it.

    Sums of several blocks are rounded to the dtype of the weight, so that one that is narrower than fp32 must have all
    rows in one block. In float16 gradients wait for the factor, a scaled loss's: without it most of them would be 0.
    """
    rows, classes = hidden.shape[0], weight.shape[0]  # of which a compiled graph may not know the number
    if not hidden.is_cpu or options.backend != "torch" or options.group or options.reduction == "none":
        return 0
    if hidden.dtype == torch.float16:
        return 0
    scratch = SCRATCH * min(ON_CPU, rows * classes * accumulation_dtype(hidden).itemsize)
    most = max(0, options.memory - scratch) // (classes * hidden.element_size())
    if most >= rows:
        return rows
    return most if most >= FEWEST and hidden.dtype == accumulation_dtype(hidden) else 0


def _forward_counted(
    layer: Layer, targets: Targets, options: Options, wanted: list[bool]
) -> tuple[Tensor, Saved, Gradients]:
    """`kernels.linear.forward` for rows none of which is ignored, and the gradients of hidden states, weight, bias."""
    rows, classes = len(layer.hidden), len(layer.weight)
    share = linear_torch.make_shares(targets, 0, layer.hidden)
    if options.reduction == "mean":
        total = share.sum()
        share = share / total.masked_fill(total == 0, 1)
    to_hidden, to_weight, to_bias = grads = linear.empty_gradients(layer[:3], wanted)
    if to_bias is not None:
        to_bias.zero_()
    height = min(rows, max(1, block_rows(layer.hidden, layer.weight, options)))
    buffer = layer.hidden.new_empty(height * classes)
    losses, parts = [], []
    for first in range(0, rows, height):
        block = slice(first, min(first + height, rows))
        hidden = layer.hidden[block]
        products = buffer[: len(hidden) * classes].view(len(hidden), classes)
        torch.mm(hidden, layer.weight.t(), out=products)
        count = 0
        for loss, saved, made in _solve_rows(layer, targets, share, products, first):
            losses.append(loss)
            parts.append(saved)
            count += made
        gradient, listed = products[:count], torch.cat([part.listed for part in parts])[block]
        live = hidden if count == len(hidden) else hidden[~listed]
        if to_weight is not None and first == 0:
            torch.mm(gradient.t(), live, out=to_weight)
        elif to_weight is not None:
            to_weight.addmm_(gradient.t(), live)
        if to_bias is not None:
            to_bias += gradient.sum(0, dtype=share.dtype).to(to_bias.dtype)
        if to_hidden is not None and count == len(hidden):
            torch.mm(gradient, layer.weight, out=to_hidden[block])
        elif to_hidden is not None:
            to_hidden[block] = 0
            to_hidden[block][~listed] = gradient @ layer.weight
    values = [torch.cat(values) for values in zip(*(part[:-1] for part in parts), strict=True)]
    counts = torch.stack([part.counts for part in parts]).sum(0)
    saved = Saved(*values, counts)._replace(share=share)  # type: ignore[call-arg]
    return (torch.cat(losses) * share).sum(), saved, grads


def _solve_rows(layer: Layer, targets: Targets, share: Tensor, products: Tensor, first: int) -> Any:
    """Go over a block of products, some rows at a time: their losses, what is known of them, how many have a gradient.

    The gradients of these are put in the place of the first products, one after the other.
    """
    classes, done = products.shape[1], 0
    step = max(1, ON_CPU // (classes * share.dtype.itemsize))
    scratch = products.new_empty(min(step, len(products)), classes)  # once: fresh memory costs more than the work on it
    for start in range(0, len(products), step):
        x = products[start : start + step]
        place = slice(first + start, first + start + len(x))
        own_targets = targets.select(torch.arange(place.start, place.stop))._replace(class_weight=None, row_weight=None)
        label = own_targets.label
        top, own, rival = x.new_full((3, len(x)), -INF, dtype=share.dtype).unbind()
        state = Scan(top, torch.zeros_like(top), own, rival)
        linear_torch.scan(Chunk(scratch[: len(x)].copy_(x), layer.bias, layer.cap, 0), label, state, rival)
        settled = linear_torch.settle(layer, own_targets, state, rival)
        unlisted, wide, entries = settled.counts.tolist()
        if wide:
            rows = ((settled.threshold > -INF) & ~settled.listed).nonzero().squeeze(1)
            linear_torch.sum_kept(Chunk(x[rows], layer.bias, layer.cap, 0), rows, label, own, settled)
        loss, kept, lse, norm, ones, margin, right = linear_torch.finish(
            own_targets, state, settled, 0, classes, "none"
        )
        lists, counts = (settled.listed, settled.classes, settled.logits), torch.tensor([unlisted, entries])
        saved = Saved(settled.threshold, kept, lse, norm, ones, own, margin, right, *lists, counts)
        rows = (~settled.listed).nonzero().squeeze(1)
        target = products[done : done + unlisted]
        if done < start or unlisted < len(x):
            target.copy_(x[rows])
        linear_torch.differentiate(Chunk(target, layer.bias, layer.cap, 0), rows, label, share[place], saved)
        done += unlisted
        yield loss, saved, unlisted


def forward(layer: Layer, targets: Targets, options: Options, wanted: list[bool]) -> tuple[Tensor, Saved, Gradients]:
    """`kernels.linear.forward`, and the gradients."""
    ready: Gradients = []

    def forward_counted(layer: Layer, targets: Targets, options: Options, _: Any) -> tuple[Tensor, Saved]:
        loss, saved, grads = _forward_counted(layer, targets, options, wanted)
        ready.extend(grads)
        return loss, saved

    loss, saved = linear.forward(layer, targets, options, forward_counted)
    if not ready:  # all rows are ignored
        ready.extend(None if grad is None else grad.zero_() for grad in linear.empty_gradients(layer[:3], wanted))
    if ready[0] is not None and len(ready[0]) < len(layer.hidden):
        some, ready[0] = ready[0], torch.zeros_like(layer.hidden)
        ready[0][targets.label != options.ignore_index] = some
    return loss, saved, ready


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None,
    label: Tensor, delta: Tensor, class_weight: Tensor | None, row_weight: Tensor | None,
    options: Options, wanted: list[bool], ready: Gradients,
) -> linear.Outputs:  # fmt: skip
    """`forward`, which leaves the gradients in ``ready``."""
    targets = Targets(label, delta, class_weight, row_weight)
    loss, saved, grads = forward(Layer(hidden, weight, bias, options.cap), targets, options, wanted)
    ready.extend(grads)
    return loss, *saved


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, options, _, ctx.ready = inputs
    linear.save(ctx, (*tensors, *options), output)


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * 10
    ready = list(ctx.ready)
    ctx.ready.clear()
    if not ready or torch.is_grad_enabled():
        return *linear.differentiate(ctx, grad_loss)[:7], None, None, None
    _ = ctx.saved_tensors  # torch refuses here what was changed since
    factor = float(grad_loss)
    for grad in ready:
        if grad is not None and factor != 1:
            grad.mul_(factor)
    return *ready, *[None] * 7


_apply = differentiable(_forward, _save, _differentiate)


def linear_as_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options
) -> tuple[Tensor, Saved]:
    """`kernels.linear.linear_as_cross_entropy`, with gradients that are there when it returns."""
    wanted = [value is not None and value.requires_grad for value in (hidden, weight, bias)]
    ready: Gradients = []
    tensors = (value if value is None else value.contiguous() for value in (hidden, weight, bias, *targets))
    loss, *saved = _apply(*tensors, options, wanted, ready)
    return loss, Saved(*saved)
