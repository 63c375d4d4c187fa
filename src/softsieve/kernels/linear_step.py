"""The step of an optimizer inside the backward pass of a linear layer: gradients some classes at a time, used at once.

A chunk of classes is read for the gradient of the hidden states before its weights are changed, and its own gradient is
thrown away after that, or never there at all. `Stepper` says what is done with a chunk; `kernels.updates` does it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from softsieve.kernels.cross_entropy_torch import accumulation_dtype
from softsieve.kernels.linear_types import Backend, Chunk, Layer, SortedEntries, Stepper

WORK = 116 << 20  # bytes that backward works with, the buffer of logits included
LISTED = 32 << 20  # bytes of gradients of classes that are listed, at a time


def step(
    layer: Layer, rows: Tensor, to_hidden: Tensor | None, differentiate: Callable[[Chunk, Tensor], None],
    entries: SortedEntries, backend: Backend, stepper: Stepper,
) -> None:  # fmt: skip
    """Hand the gradient of every class to the ``stepper``, and write that of the hidden states of these ``rows``.

    Classes without a gradient are left alone where the stepper would not change them: with no rows, all that are not
    among the entries. ``differentiate`` puts the gradient in the place of the products of a chunk of these rows.
    """
    stepper.begin()
    if not len(rows) and not stepper.everywhere:
        _step_listed(layer, entries, backend, stepper)
        return
    if stepper.multiplies(layer, len(rows)):
        _step_products(layer, rows, to_hidden, differentiate, stepper)
        _step_listed(layer, entries, backend, stepper)
        return
    part, (_, size) = layer.select(rows), layer.weight.shape
    dtype = accumulation_dtype(layer.hidden)
    sums = part.hidden.new_zeros(part.hidden.shape if to_hidden is not None else (0,), dtype=dtype)
    budget = max(WORK // 4, WORK - part.hidden.nbytes - sums.nbytes)
    gradient = begins = None
    for number, chunk in enumerate(part.chunks(budget, beside=size * layer.weight.element_size())):
        width = chunk.products.shape[1]
        if gradient is None or begins is None:  # of the first chunk, than which none is larger
            gradient, begins = layer.weight.new_empty(width, size), _cut(entries.keys, len(layer.weight), width)
        classes, grad = slice(chunk.start, chunk.start + width), gradient[:width]
        grad_bias = None if layer.bias is None else grad.new_zeros(width, dtype=dtype)
        if len(rows):
            differentiate(chunk, rows)
        add_products(chunk.products, part.hidden, layer.weight[classes], sums, grad, grad_bias, first=True)
        begin, end = begins[number : number + 2]
        if begin < end:
            own = entries.part(begin, end, entries.keys[begin:end] - chunk.start)
            backend.spread(own, layer.hidden, grad, grad_bias)
        stepper.step(layer, classes, grad, grad_bias)
    if to_hidden is not None and len(rows):
        to_hidden[rows] = sums.to(to_hidden.dtype)


def _step_products(
    layer: Layer, rows: Tensor, to_hidden: Tensor | None, differentiate: Callable[[Chunk, Tensor], None],
    stepper: Stepper,
) -> None:  # fmt: skip
    """`step` for these rows alone, with a ``stepper`` that makes the gradient of the weight where it is used."""
    part, (_, size), dtype = layer.select(rows), layer.weight.shape, accumulation_dtype(layer.hidden)
    sums = part.hidden.new_zeros(part.hidden.shape if to_hidden is not None else (0,), dtype=dtype)
    budget = max(WORK // 4, WORK - part.hidden.nbytes - sums.nbytes)
    for chunk in part.chunks(
        budget, beside=size * layer.weight.element_size()
    ):  # weights, which are to stay in a cache
        width = chunk.products.shape[1]
        classes = slice(chunk.start, chunk.start + width)
        differentiate(chunk, rows)
        grad_bias = None if layer.bias is None else sums.new_zeros(width)
        add_products(chunk.products, part.hidden, layer.weight[classes], sums, None, grad_bias, first=True)
        stepper.step_product(layer, classes, chunk.products, part.hidden, grad_bias)
    if to_hidden is not None:
        to_hidden[rows] = sums.to(to_hidden.dtype)


def _step_listed(layer: Layer, entries: SortedEntries, backend: Backend, stepper: Stepper) -> None:
    """The classes of the entries alone."""
    classes, place = torch.unique_consecutive(entries.keys, return_inverse=True)
    if not len(classes):
        return
    size, dtype = layer.weight.shape[1], accumulation_dtype(layer.hidden)
    width = max(1, LISTED // (size * dtype.itemsize))
    begins = _cut(place, len(classes), width)
    for number, some in enumerate(classes.long().split(width)):
        grad = layer.hidden.new_zeros(len(some), size, dtype=dtype)
        grad_bias = None if layer.bias is None else grad.new_zeros(len(some))
        begin, end = begins[number : number + 2]
        backend.spread(entries.part(begin, end, place[begin:end] - number * width), layer.hidden, grad, grad_bias)
        stepper.step(layer, some, grad, grad_bias)


def _cut(keys: Tensor, count: int, width: int) -> list[int]:
    """Where the keys, in order, of every ``width`` of ``count`` numbers begin, and where the last ends."""
    if count <= width:  # a device need not be asked
        return [0, len(keys)]
    starts = torch.arange(0, count + width, width, device=keys.device, dtype=keys.dtype).clamp_(max=count)
    cuts: list[int] = torch.searchsorted(keys, starts).tolist()
    return cuts


def add_products(
    gradient: Tensor, hidden: Tensor, weight: Tensor, sums: Tensor, to_weight: Tensor | None, to_bias: Tensor | None,
    *, first: bool,
) -> None:  # fmt: skip
    """Add what a chunk of the logits' gradient gives; the ``first`` block of rows writes the weight's gradient."""
    if to_weight is not None:
        if first:
            torch.mm(gradient.t(), hidden, out=to_weight)
        else:
            to_weight.addmm_(gradient.t(), hidden)
    if to_bias is not None:
        to_bias += gradient.sum(0, dtype=accumulation_dtype(gradient)).to(to_bias.dtype)
    if not sums.numel():
        return
    if gradient.dtype == sums.dtype:
        sums.addmm_(gradient, weight)
    elif gradient.is_cuda:
        torch.addmm(sums, gradient, weight, out_dtype=sums.dtype, out=sums)
    else:
        sums += gradient @ weight
