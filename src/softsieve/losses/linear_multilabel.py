"""Multi-label AS-Softmax of a linear layer, without its logits: for more classes than a matrix of flags can have."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from softsieve import _checks, reference
from softsieve.kernels import linear_multilabel as kernel
from softsieve.kernels import stepped
from softsieve.kernels.linear_types import Options, Stepper, Targets
from softsieve.losses.linear import check_memory, check_options, choose_backend
from softsieve.losses.multilabel import RULES, MultiLabelStats


def check_rule(against: str) -> None:
    """Refuse every rule but that of the threshold."""
    _checks.choice("against", against, RULES)
    if against != "threshold":
        raise ValueError(
            f"against: expected 'threshold', found {against!r}, whose margins are of a softmax over all classes: "
            "as_multilabel_loss(F.linear(hidden, weight, bias), flags) has it, with the logits"
        )


@overload
def linear_as_multilabel_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = ..., delta: float | Tensor = ...,
    against: str = ..., ignore_index: int = ..., reduction: str = ..., backend: str = ..., group: Any = ...,
    memory: int | None = ...,
    return_stats: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def linear_as_multilabel_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = ..., delta: float | Tensor = ...,
    against: str = ..., ignore_index: int = ..., reduction: str = ..., backend: str = ..., group: Any = ...,
    memory: int | None = ...,
    return_stats: Literal[True],
) -> tuple[Tensor, MultiLabelStats]: ...  # fmt: skip
@overload
def linear_as_multilabel_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = ..., delta: float | Tensor = ...,
    against: str = ..., ignore_index: int = ..., reduction: str = ..., backend: str = ..., group: Any = ...,
    memory: int | None = ...,
    return_stats: bool,
) -> Tensor | tuple[Tensor, MultiLabelStats]: ...  # fmt: skip
def linear_as_multilabel_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, delta: float | Tensor = 0.5,
    against: str = "threshold", ignore_index: int = -100, reduction: str = "mean", backend: str = "auto",
    group: Any = None, memory: int | None = None, return_stats: bool = False,
) -> Tensor | tuple[Tensor, MultiLabelStats]:  # fmt: skip
    r"""Multi-label AS-Softmax loss of ``hidden @ weight.T + bias``, with neither the logits nor a matrix of flags.

    Computes::

        flags = torch.zeros(rows, classes + 1).scatter(1, labels.where(labels != ignore_index, classes), 1)[:, :-1]
        as_multilabel_loss(F.linear(hidden, weight, bias), flags, delta=delta, against="threshold")

    some classes at a time, for ``rows`` hidden states. Rows whose classes are all on their side of 0 by the margin
    (*solved*) take no part in the backward pass, those of which only the labels are not take part with these, and only
    the ones with many wrong negatives take all classes. Nothing is added up in an order that depends on chance.

    Args:
        hidden: states that go into the layer, fp16, bf16, fp32 or fp64.
        weight: of the layer, in the dtype of the states (autocast casts both).
        labels: numbers of the classes that apply, any integer dtype, at least one a row and none twice; the rest of a
            row is ``ignore_index``. A row to which no class applies is refused: leave it out, or give it a class of its
            own.
        bias: of the layer.
        delta: margin in [0, 1], a number or one for each row (which are not read on a GPU).
        against: ``"threshold"``, the rule of `as_multilabel_loss` that needs no softmax over all classes.
        ignore_index: what rows of labels are padded with; any integer.
        reduction: ``"none"``, ``"mean"`` or ``"sum"`` over the rows.
        backend: ``"reference"`` (plain torch, holds the logits), ``"torch"`` (some classes at a time, any device),
            ``"triton"`` (GPU), or ``"auto"``: the last that can serve.
        group: process group of `torch.distributed` over whose ranks the rows of the weight are sharded, in order.
            All ranks give the same hidden states, labels and options; weight, bias and their gradients are this rank's.
        memory: bytes beyond inputs and gradients that it may take, as in `linear_as_cross_entropy`: more memory, larger
            blocks. No row's logits are kept for the backward pass.
        return_stats: also return `MultiLabelStats`.

    Shape:
        hidden ``(..., D)``, weight ``(C, D)``, labels ``(..., L)``, bias ``(C,)``, a delta that is a tensor ``(...)``;
        loss ``()``, or ``(...)`` with ``reduction="none"``.

    Returns:
        The loss, in the dtype of the states (fp32 under autocast); with ``return_stats`` a pair.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was found. Labels that are out of range,
            repeated or missing on a GPU stop the device with an assertion instead: reading them would stall the queue.
        NotImplementedError: when a gradient is differentiated again, as by `linear_as_cross_entropy`.

    Example:
        >>> hidden, weight = torch.eye(2, requires_grad=True), torch.tensor([[4.0, -4.0], [-4.0, 1.0], [-4.0, 1.0]])
        >>> labels = torch.tensor([[0, -100], [2, 1]])
        >>> loss, stats = linear_as_multilabel_loss(hidden, weight, labels, return_stats=True)
        >>> loss.backward()
        >>> stats.solved.tolist(), stats.kept.tolist(), hidden.grad[0].tolist()
        ([True, False], [0, 2], [0.0, 0.0])

    Reference: *Adaptive Sparse Softmax*, arXiv 2508.03175, whose loss it is with the threshold as the target.
    """
    return compute(
        hidden, weight, labels, bias=bias, delta=delta, against=against, ignore_index=ignore_index,
        reduction=reduction, backend=backend, group=group, memory=memory, return_stats=return_stats,
    )  # fmt: skip


def compute(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None, delta: float | Tensor, against: str,
    ignore_index: int, reduction: str, backend: str, group: Any, return_stats: bool, memory: int | None = None,
    stepper: Stepper | None = None,
) -> Tensor | tuple[Tensor, MultiLabelStats]:  # fmt: skip
    """`linear_as_multilabel_loss`, with a ``stepper`` as `losses.linear.compute` has."""
    dtype = _checks.states(hidden)
    if stepper is not None:
        hidden = hidden.to(weight.dtype)
    _checks.linear_layer(hidden, weight, bias)
    _checks.class_numbers(labels, hidden)
    check_rule(against)
    check_options(ignore_index, reduction, backend)
    rows = labels[..., 0]
    margins = _checks.margins(delta, rows)
    name = "" if group is None else _checks.group(group)
    options = Options(ignore_index, 0.0, reduction, choose_backend(backend, hidden, group), name)
    if memory is not None:
        options = options._replace(memory=check_memory(memory, rows.numel(), weight))

    kind = hidden.device.type
    casts = stepper is None and torch.is_autocast_enabled(kind)
    if casts and dtype != torch.float64:  # which torch's own leaves alone
        hidden, weight = (x.to(torch.get_autocast_dtype(kind)) for x in (hidden, weight))
    targets = Targets(labels.reshape(-1, labels.shape[-1]).long(), margins)
    states = hidden.reshape(-1, hidden.shape[-1])
    loss, stats = _compute(states, weight, bias, targets, options, return_stats, stepper)
    if not torch.is_autocast_enabled(kind):
        loss = loss.to(dtype)
    if reduction == "none":
        loss = loss.view(rows.shape)
    return loss if stats is None else (loss, MultiLabelStats(*(s.view(rows.shape) for s in stats)))


def _compute(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, return_stats: bool,
    stepper: Stepper | None,
) -> tuple[Tensor, MultiLabelStats | None]:  # fmt: skip
    """The loss of (rows, size), and with ``return_stats`` what is known of the rows."""
    if options.backend != "reference":
        if stepper is None:
            loss, kept, margin = kernel.linear_as_multilabel_loss(hidden, weight, bias, targets, options)
        else:
            loss, kept, margin = stepped.linear_as_multilabel_loss(hidden, weight, bias, targets, options, stepper)
        return loss, MultiLabelStats(kept == 0, kept, margin) if return_stats else None
    kernel.check_class_numbers(targets.label, len(weight), options.ignore_index)
    shared: dict[str, Any] = {"bias": bias, "delta": targets.delta, "ignore_index": options.ignore_index}
    loss = reference.linear_as_multilabel_loss(hidden, weight, targets.label, **shared, reduction=options.reduction)
    if not return_stats:
        return loss, None
    with torch.no_grad():
        return loss, MultiLabelStats(*reference.linear_as_multilabel_stats(hidden, weight, targets.label, **shared))
