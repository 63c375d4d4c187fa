"""The loss of a linear layer whose backward pass is a step: the gradient of the weight goes to a `Stepper`.

Both losses, of one label a row and of several, with the passes of `kernels.linear` and `kernels.linear_multilabel`.
Autograd gets the gradient of the hidden states alone. Only in eager mode: a step is no function of its inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softsieve.kernels import linear, linear_multilabel
from softsieve.kernels.linear_types import Layer, Options, Saved, SavedSides, Stepper, Targets


class _Stepped(torch.autograd.Function):
    """Loss and what is known of the rows; labels of one dimension are one a row."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options,
        stepper: Stepper,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        layer = Layer(hidden, weight.detach(), None if bias is None else bias.detach(), options.cap)
        if targets.label.ndim == 1:
            loss, saved = linear.forward(layer, targets, options)
            shown = tuple(saved)
        else:
            loss, *shown, saved = linear_multilabel.forward(layer, targets, options)  # type: ignore[assignment]
        ctx.save_for_backward(hidden, targets.label, *saved)
        ctx.mark_non_differentiable(*shown)
        ctx.set_materialize_grads(False)
        ctx.parameters, ctx.options, ctx.stepper = (weight, bias), options, stepper
        ctx.versions, ctx.done = _versions(weight, bias), False
        return loss, *shown

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return (None,) * 6
        (weight, bias), options = ctx.parameters, ctx.options
        _check_first(ctx.done, ctx.versions == _versions(weight, bias))
        ctx.done = True
        hidden, label, *tensors = ctx.saved_tensors
        layer = Layer(hidden, weight.detach(), None if bias is None else bias.detach(), options.cap)
        wanted = [ctx.needs_input_grad[0], False, False]
        if label.ndim == 1:
            saved = Saved(*tensors)
            grads = linear.backward(grad_loss * saved.share, layer, label, saved, options, wanted, ctx.stepper)
        else:
            share = grad_loss / len(label) if options.reduction == "mean" else grad_loss
            factor = share.expand(len(label)).contiguous()
            grads = linear_multilabel.backward(factor, layer, label, SavedSides(*tensors), options, wanted, ctx.stepper)
        for value in (weight, bias):  # kernels change memory that torch does not see change
            if value is not None:
                torch.autograd.graph.increment_version(value)
        return grads[0] if wanted[0] else None, *[None] * 5


def _versions(*values: Tensor | None) -> list[int]:
    """How often each was changed in place."""
    return [value._version for value in values if value is not None]


def _check_first(done: bool, same: bool) -> None:
    """Refuse a backward pass that is not the one after its forward pass."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "backward: expected to be differentiated once, found create_graph=True: a step has no derivative"
        )
    if done:
        raise RuntimeError(
            "backward: expected once, found a second pass over the same graph: the first was a step, which changed the "
            "weight"
        )
    if not same:
        raise RuntimeError(
            "backward: expected the weight and bias of the forward pass, found them changed since: every backward pass "
            "is a step, so losses must not wait for each other, nor be added up: put their rows into one call. What "
            "was stepped before this stays"
        )


def linear_as_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, stepper: Stepper
) -> tuple[Tensor, Saved]:
    """`kernels.linear.linear_as_cross_entropy` with a step in its backward pass."""
    loss, *saved = _apply(hidden, weight, bias, targets, options, stepper)
    return loss, Saved(*saved)


def linear_as_multilabel_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, stepper: Stepper
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.linear_multilabel.linear_as_multilabel_loss` with a step in its backward pass."""
    loss, kept, margin = _apply(hidden, weight, bias, targets, options, stepper)
    return loss, kept, margin


def _apply(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, stepper: Stepper
) -> tuple[Tensor, ...]:
    """The function above, in the dtype of its inputs whatever autocast would like."""
    targets = Targets(*(None if value is None else value.contiguous() for value in targets))  # type: ignore[arg-type]
    with torch.autocast(hidden.device.type, enabled=False):
        outputs: tuple[Tensor, ...] = _Stepped.apply(  # type: ignore[no-untyped-call]
            hidden.contiguous(), weight, bias, targets, options, stepper
        )
        return outputs
