"""Linear layer and multi-label AS-Softmax against the threshold in one, without the logits.

The negatives of a row are the rivals of the threshold, a class of logit 0 (see `kernels.multilabel`). So their side of
the loss is that of `kernels.linear`, with the threshold as the label and with the logits of the row's labels taken out
of every chunk before anything reads it: dense, solved, narrow and wide rows are what they are there, and the same
backends do the work. The logits that are taken out, some for each row, are the positives; their side is settled by
`multilabel_torch.settle_side`.

Backward takes rows whose negatives are dense or wide through products of matrices, with the gradient of their positives
put where these were taken out. Positives of other rows are entries of a list, as the kept classes of narrow rows are: a
row whose negatives are solved costs no more than its labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from softsieve.kernels import linear
from softsieve.kernels.cross_entropy import differentiable, needs_op
from softsieve.kernels.cross_entropy_torch import INF, accumulation_dtype
from softsieve.kernels.linear_types import (
    MEMORY,
    Chunk,
    Entries,
    Layer,
    Options,
    SavedSides,
    Scan,
    Settled,
    Stepper,
    Targets,
)
from softsieve.kernels.multilabel_torch import settle_side

MOST_COMPARED = 128  # labels a row, at most, that a launch compares with each other or holds beside a tile of logits


def check_class_numbers(labels: Tensor, classes: int, ignore_index: int) -> Tensor:
    """Where labels, (rows, so many), are not padding; refused out of range, twice in a row, or in an empty row.

    Done beside the kernel: a compiled graph cannot read values before it. On a GPU the device asserts it.
    """
    present = labels != ignore_index
    outside = present & ((labels < 0) | (labels >= classes))
    places = torch.arange(labels.shape[1], device=labels.device)
    ordered = torch.where(present, labels, -1 - places).sort(-1).values  # padding differs in every place
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    empty = ~present.any(-1)
    if not labels.is_cpu:
        wrong = outside.any() | twice.any() | empty.any()
        torch._assert_async(~wrong, f"labels: expected different class numbers in [0, {classes}) in every row")
        return present
    padded = f"padded with ignore_index={ignore_index}"
    if labels.shape[1] == classes > 2 and bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError(
            f"labels: expected class numbers (rows, labels), {padded}, found 0/1 flags of shape {tuple(labels.shape)}, "
            "one a class: labels of different lengths are made of flags by flags.nonzero()"
        )
    if bool(outside.any()):
        row, place = outside.nonzero()[0].tolist()
        raise ValueError(
            f"labels: expected class numbers in [0, {classes}), {padded}, found {int(labels[row, place])} in row {row}"
        )
    if bool(twice.any()):
        row, place = twice.nonzero()[0].tolist()
        raise ValueError(
            f"labels: expected different class numbers in a row, found {int(ordered[row, place])} twice in row {row}"
        )
    if bool(empty.any()):
        raise ValueError(
            f"labels: expected a class number in every row, {padded}, found none in row {int(empty.nonzero()[0])}"
        )
    return present


# -- labels in chunks --------------------------------------------------------------------------------------------------


def _take_labels(chunk: Chunk, label: Tensor, own: Tensor, backend: str) -> None:
    """Write the logits of labels that are in the chunk to ``own``, and -inf in their place. Both (rows, labels)."""
    if backend == linear.TRITON:
        from softsieve.kernels import linear_multilabel_triton

        linear_multilabel_triton.take_labels(chunk, label, own)
        return
    column = label - chunk.start
    row, place = ((column >= 0) & (column < chunk.products.shape[1])).nonzero(as_tuple=True)
    column = column[row, place]
    logits = chunk.products[row, column].to(own.dtype)
    own[row, place] = logits if chunk.bias is None else logits + chunk.bias[column + chunk.start].to(own.dtype)
    chunk.products[row, column] = -INF


def _put_labels(chunk: Chunk, rows: Tensor, label: Tensor, values: Tensor | None, backend: str) -> None:
    """Put values (rows of all, labels) in the place of labels, -inf for None; the chunk is of ``rows`` alone."""
    if backend == linear.TRITON:
        from softsieve.kernels import linear_multilabel_triton

        linear_multilabel_triton.put_labels(chunk, rows, label, values)
        return
    column = label[rows] - chunk.start
    row, place = ((column >= 0) & (column < chunk.products.shape[1])).nonzero(as_tuple=True)
    put = -INF if values is None else values[rows[row], place].to(chunk.products.dtype)
    chunk.products[row, column[row, place]] = put


# -- the passes --------------------------------------------------------------------------------------------------------


def forward(layer: Layer, targets: Targets, options: Options) -> tuple[Tensor, Tensor, Tensor, SavedSides]:
    """The loss, reduced; of every row how many classes are kept, and its margin; and what backward needs."""
    backend, hidden = linear.load_backend(options.backend), layer.hidden
    shards = linear.Shards(options.group, len(layer.weight), hidden.device)
    label = _own_labels(targets.label, shards, options, check=True)
    none = label.new_full((len(label),), -1)
    zeros = hidden.new_zeros(len(label), dtype=accumulation_dtype(hidden))
    own = zeros.new_full(label.shape, -INF)
    budget = linear.BUFFER * (options.memory or MEMORY) // MEMORY
    scanned, marks = _scan(layer, label, own, options.backend, budget)
    top, total, _, rival = shards.merge_scans(scanned)
    own = shards.merge_largest(own)
    settled = backend.settle(
        layer, targets._replace(label=label), Scan(top, total + torch.exp(-top), zeros, rival), marks
    )
    del marks
    unlisted, wide, _ = settled.counts.tolist()
    if wide:
        rows = ((settled.threshold > -INF) & ~settled.listed).nonzero_static(size=wide).squeeze(1)
        for chunk in layer.select(rows).chunks(budget):
            _put_labels(chunk, rows, label, None, options.backend)
            backend.sum_kept(chunk, rows, none, zeros, settled)
    settled = shards.merge_kept(settled)
    state = Scan(top, total, own, rival)
    if options.backend == linear.TRITON:
        from softsieve.kernels import linear_multilabel_rows_triton as rows_triton

        loss, kept, margin, saved = rows_triton.finish(
            state, settled, targets.label, targets.delta, shards.classes, unlisted, options.ignore_index
        )
    else:
        present = targets.label != options.ignore_index
        loss, kept, margin, saved = _finish(state, settled, present, targets.delta, shards.classes, unlisted)
    if options.reduction != "none":
        loss = loss.mean() if options.reduction == "mean" else loss.sum()
    return loss, kept, margin, saved


def _scan(layer: Layer, label: Tensor, own: Tensor, backend: str, budget: int) -> tuple[Scan, Tensor]:
    """A pass over all logits: of the negatives, with 0 in ``top`` but without the threshold's 1 in ``total``.

    Also the backend's marks; logits of the labels are written to ``own``, both (rows, labels).
    """
    if backend == linear.TRITON and label.shape[1] <= MOST_COMPARED:
        from softsieve.kernels import linear_multilabel_triton

        if linear_multilabel_triton.scans_layer(layer):
            return linear_multilabel_triton.scan_layer(layer, label, own)
    loaded = linear.load_backend(backend)
    none = label.new_full((len(label),), -1)
    zeros = own.new_zeros(len(label))
    scanned = Scan(zeros.clone(), zeros.clone(), zeros, torch.full_like(zeros, -INF))
    marks = loaded.make_marks(layer, scanned)
    for chunk in layer.chunks(budget):
        _take_labels(chunk, label, own, backend)
        loaded.scan(chunk, none, scanned, marks)
    return scanned, marks


def _own_labels(labels: Tensor, shards: linear.Shards, options: Options, *, check: bool) -> Tensor:
    """Labels that count from this shard's first class; -1 for those of other shards, and for padding."""
    if options.backend == linear.TRITON and labels.shape[1] <= MOST_COMPARED and not (check and labels.is_cpu):
        from softsieve.kernels import linear_multilabel_rows_triton as rows_triton

        return rows_triton.own_labels(
            labels, shards.first, shards.own, shards.classes, options.ignore_index, check=check
        )
    if check:
        present = check_class_numbers(labels, shards.classes, options.ignore_index)
    else:
        present = labels != options.ignore_index
    label = shards.own_labels(labels)
    return label.masked_fill(~present | (label < 0) | (label >= shards.own), -1)


def _finish(
    state: Scan, settled: Settled, present: Tensor, delta: Tensor, classes: int, unlisted: int
) -> tuple[Tensor, Tensor, Tensor, SavedSides]:
    """Of every row from what all shards know, without reduction; ``state.own`` has the labels' logits."""
    top, total, own, rival = state
    log_total = torch.where(top > 0, torch.log(torch.exp(-top) + total), torch.log1p(total))
    lse = top + log_total
    sparse = settled.threshold > -INF
    negative_loss = torch.where(sparse, torch.minimum(settled.odds.log1p(), lse), lse)
    norm = (negative_loss - lse).masked_fill_(~sparse, 0) + ((top - lse) + log_total)  # with what lse lost in rounding
    count = present.sum(-1)
    negatives = torch.where(sparse, settled.rivals.to(count.dtype), classes - count)
    positive, keep = settle_side(-own, present, delta.to(own.dtype))
    unusable = (present & ~(own < INF)).any(-1)  # an infinite positive would cost nothing: NaN, as in cross-entropy
    loss = (negative_loss + positive.loss).masked_fill(unusable, float("nan"))
    margin = torch.minimum(torch.exp(-lse) - torch.exp((rival - top) - log_total), positive.margin)
    margin = margin.masked_fill(unusable, float("nan"))
    kept = (negatives + positive.kept).masked_fill(unusable, classes)
    gradient = torch.exp((-own - positive.base[:, None]) - positive.norm[:, None]).neg_().masked_fill_(~keep, 0)
    gradient.masked_fill_(present & unusable[:, None], float("nan"))
    saved = SavedSides(
        settled.threshold, negatives + 1, lse, norm, settled.listed, settled.classes, settled.logits,
        torch.tensor(unlisted), gradient,
    )  # fmt: skip
    return loss, kept, margin, saved


def backward(
    factor: Tensor, layer: Layer, labels: Tensor, saved: SavedSides, options: Options, wanted: list[bool],
    stepper: Stepper | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of hidden states, weight and bias, each row's times ``factor``; empty where they are not wanted.

    With a ``stepper`` those of weight and bias go there, some classes at a time.
    """
    backend = linear.load_backend(options.backend)
    shards = linear.Shards(options.group, len(layer.weight), labels.device)
    label = _own_labels(labels, shards, options, check=False)
    none = label.new_full((len(label),), -1)
    to_hidden, *_ = grads = linear.empty_gradients(layer[:3], wanted)
    if options.backend == linear.TRITON:
        from softsieve.kernels import linear_multilabel_rows_triton as rows_triton

        entries, values = rows_triton.list_entries(label, factor, saved, len(layer.weight))
    else:
        values = saved.positives * factor[:, None]
        entries = _list_entries(label, values, factor, saved, len(layer.weight))
    if to_hidden is not None:
        backend.combine(entries, saved.listed, layer.weight, to_hidden)
    rows = (~saved.listed).nonzero_static(size=int(saved.unlisted)).squeeze(1)

    def differentiate(chunk: Chunk, block: Tensor) -> None:  # labels are as negatives first, and then written over
        backend.differentiate(chunk, block, none, factor, saved)
        _put_labels(chunk, block, label, values, options.backend)

    count = int((entries.keys < entries.none).sum())
    linear.pass_on(layer, rows, grads, differentiate, entries, count, backend, stepper, options.memory)
    if to_hidden is not None and shards.group is not None:
        dist.all_reduce(to_hidden, group=shards.group)
    to_hidden, to_weight, to_bias = (layer.hidden.new_empty(0) if grad is None else grad for grad in grads)
    return to_hidden, to_weight, to_bias


def _list_entries(label: Tensor, values: Tensor, factor: Tensor, saved: SavedSides, none: int) -> Entries:
    """The gradient of the kept classes of listed rows, of both sides."""
    q = torch.exp((saved.logits - saved.lse[:, None]) - saved.norm[:, None]) * factor[:, None]
    classes = torch.cat([saved.classes, label.to(saved.classes.dtype)], 1)
    coefficients = torch.cat([q, values], 1)
    used = (classes >= 0) & saved.listed[:, None]
    used[:, saved.classes.shape[1] :] &= saved.positives != 0
    missing = 0, (1 << (classes.shape[1] - 1).bit_length()) - classes.shape[1]  # kernels are compiled for few widths
    coefficients, classes = coefficients.masked_fill(~used, 0), classes.masked_fill(~used, none)
    return Entries(F.pad(coefficients, missing), F.pad(classes, missing, value=none), none)


# -- two ways there, as in `kernels.linear` ----------------------------------------------------------------------------

Outputs = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]  # fmt: skip


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, delta: Tensor,
    ignore_index: int, reduction: str, backend: str, group: str, memory: int,
) -> Outputs:  # fmt: skip
    options = Options(ignore_index, 0.0, reduction, backend, group, memory)
    loss, kept, margin, saved = forward(Layer(hidden, weight, bias, 0.0), Targets(labels, delta), options)
    return loss, kept, margin, *saved


def _backward(
    factor: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, saved: list[Tensor],
    ignore_index: int, backend: str, group: str, memory: int, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = Options(ignore_index, backend=backend, group=group, memory=memory)
    return backward(factor, Layer(hidden, weight, bias, 0.0), labels, SavedSides(*saved), options, wanted)


forward_op = torch.library.custom_op("softsieve::linear_as_multilabel_loss", _forward, mutates_args=())
backward_op = torch.library.custom_op("softsieve::linear_as_multilabel_loss_backward", _backward, mutates_args=())


@forward_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, delta: Tensor,
    ignore_index: int, reduction: str, backend: str, group: str, memory: int,
) -> Outputs:  # fmt: skip
    rows, listed = hidden.shape[0], linear.load_backend(backend).LISTED
    row = hidden.new_empty(rows, dtype=accumulation_dtype(hidden))
    count = torch.empty_like(row, dtype=torch.long)
    saved = SavedSides(
        torch.empty_like(row), torch.empty_like(count), torch.empty_like(row), torch.empty_like(row),
        torch.empty_like(row, dtype=torch.bool), row.new_empty((rows, listed), dtype=torch.int32),
        row.new_empty(rows, listed), torch.empty((), dtype=torch.long), row.new_empty(labels.shape),
    )  # fmt: skip
    return torch.empty_like(row) if reduction == "none" else row.new_empty(()), count, torch.empty_like(row), *saved


@backward_op.register_fake
def _(factor: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    grads = linear.empty_gradients(others[:3], others[-1])
    return tuple(others[0].new_empty(0) if grad is None else grad for grad in grads)  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, labels, _, *options = inputs
    ctx.save_for_backward(hidden, weight, bias, labels, *output[3:])
    ctx.options = options
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * 10
    hidden, weight, bias, labels, *saved = ctx.saved_tensors
    ignore_index, reduction, backend, group, memory = ctx.options
    wanted = list(ctx.needs_input_grad[:3])
    call: Callable[..., tuple[Tensor, ...]] = _backward
    if needs_op(hidden):
        call = backward_op
    elif torch.is_grad_enabled():  # somebody may want the second derivative, and must hear that there is none
        call = _apply_backward
    if reduction == "mean":
        grad_loss = grad_loss / hidden.shape[0]
    factor = grad_loss.expand(hidden.shape[0]).contiguous()
    grads = call(factor, hidden, weight, bias, labels, saved, ignore_index, backend, group, memory, wanted)
    return *(grad if want else None for grad, want in zip(grads, wanted, strict=True)), *[None] * 7


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _refuse(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "linear_as_multilabel_loss: expected to be differentiated once, found a second derivative: "
        "take as_multilabel_loss of F.linear(hidden, weight, bias) or backend='reference', which have it"
    )


forward_op.register_autograd(_differentiate, setup_context=_save)
backward_op.register_autograd(_refuse, setup_context=_save_nothing)

_apply_forward = differentiable(_forward, _save, _differentiate)
_apply_backward = differentiable(_backward, _save_nothing, _refuse)


def linear_as_multilabel_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiable loss, kept and margin of (rows, size), (classes, size), (classes,) or None, (rows, labels)."""
    call: Callable[..., Outputs] = forward_op if needs_op(hidden) else _apply_forward
    tensors = (value if value is None else value.contiguous() for value in (hidden, weight, bias, *targets[:2]))
    plain = options.ignore_index, options.reduction, options.backend, options.group, options.memory
    loss, kept, margin, *_ = call(*tensors, *plain)
    return loss, kept, margin
