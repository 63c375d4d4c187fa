"""Multi-label AS-Softmax against the threshold over the rows of a logits matrix: the ops and their derivatives.

The loss of a row is two cross-entropies whose target is the threshold, a class of logit 0. The rivals on the first side
are the negatives, with their logits z = o, those on the second the positives, with z = -o. As in
`kernels.cross_entropy`, what is kept follows from one number for each side, decided in the forward pass and read
everywhere else: with q_0 the threshold's probability, a rival is kept when

    z >= cut    where cut = log(1 - delta / q_0), or -inf where q_0 <= delta (a dense side)

Six numbers of a row, its ``sides``, are all that backward needs: cuts, bases and norms, each of negatives and of
positives. ``exp((z - base) - norm)`` is the softmax over the threshold and the kept rivals; base + norm is the side's
loss. A base is the largest rival's logit, or 0: in one number, norms of large logits would lose their digits.

The kernels are in `multilabel_torch` (any device), `multilabel_numba` (CPU) and `multilabel_triton` (CUDA), reached in
two ways, as those of `kernels.cross_entropy` are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from softsieve.kernels import multilabel_torch
from softsieve.kernels.cross_entropy import HAS_TRITON, differentiable, needs_op
from softsieve.kernels.cross_entropy_torch import accumulation_dtype
from softsieve.kernels.multilabel_torch import WRONG, check_flags, soft_weights

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("softsieve::positives", mutates_args=())
def positives(target: Tensor) -> Tensor:
    """0/1 targets as bool. An op of its own, because a compiled graph cannot read the values to refuse others."""
    return check_flags(target)


@positives.register_fake
def _(target: Tensor) -> Tensor:
    return torch.empty_like(target, dtype=torch.bool)


def _uses_triton(logits: Tensor) -> bool:
    return HAS_TRITON and logits.is_cuda and logits.dtype != torch.float64


def _forward(logits: Tensor, target: Tensor, delta: float, reduction: str) -> Outputs:
    if not _uses_triton(logits):
        loss, sides, kept, margin = multilabel_torch.forward(logits, target, delta)
        if reduction != "none":
            loss = loss.mean() if reduction == "mean" else loss.sum()
        return loss, sides, kept, margin
    from softsieve.kernels import multilabel_triton

    outputs, valid = multilabel_triton.forward(logits, target, delta, reduction)
    if target.dtype != torch.bool:
        torch._assert_async(valid, WRONG)
    return outputs


def _backward(factor: Tensor, logits: Tensor, target: Tensor, sides: Tensor, kept: Tensor) -> Tensor:
    if not _uses_triton(logits):
        return multilabel_torch.backward(factor, logits, target, sides, kept)
    from softsieve.kernels import multilabel_triton

    return multilabel_triton.backward(factor, logits, target, sides, kept)


@torch.library.custom_op("softsieve::as_multilabel_loss", mutates_args=())
def forward_op(logits: Tensor, target: Tensor, delta: Tensor, reduction: str) -> Outputs:
    """`_forward` with ``delta`` as a tensor (): a compiled graph would be compiled anew for every value of a number."""
    return _forward(logits, target, float(delta), reduction)


@forward_op.register_fake
def _(logits: Tensor, target: Tensor, delta: Tensor, reduction: str) -> Outputs:
    row = logits.new_empty(logits.shape[0], dtype=accumulation_dtype(logits))
    loss = torch.empty_like(row) if reduction == "none" else row.new_empty(())
    return loss, row.new_empty(len(row), 6), torch.empty_like(row, dtype=torch.long), torch.empty_like(row)


backward_op = torch.library.custom_op("softsieve::as_multilabel_loss_backward", _backward, mutates_args=())


@backward_op.register_fake
def _(factor: Tensor, logits: Tensor, target: Tensor, sides: Tensor, kept: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, _, ctx.reduction = inputs
    _, sides, kept, margin = output
    ctx.save_for_backward(logits, target, sides, kept)
    ctx.mark_non_differentiable(sides, kept, margin)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None, None]:
    if grad_loss is None:
        return None, None, None, None
    logits, target, sides, kept = ctx.saved_tensors
    others = target, sides, kept
    backward: Callable[..., Tensor] = _backward
    if needs_op(logits):
        backward = backward_op
    elif torch.is_grad_enabled():  # somebody wants the second derivative
        backward = _apply_backward
    rows = logits.shape[0]
    if backward is _backward and _uses_triton(logits):
        from softsieve.kernels import multilabel_triton

        scale = 1 / rows if ctx.reduction == "mean" else 1.0
        return multilabel_triton.backward(grad_loss, logits, target, sides, kept, scale), None, None, None
    if ctx.reduction == "mean":
        grad_loss = grad_loss / rows
    return backward(grad_loss.expand(rows), logits, *others), None, None, None


def _save_again(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_again(ctx: Any, grad_grad: Tensor) -> tuple[Tensor | None, ...]:
    """For gradient penalties and Hessians: plain torch, with temporaries of the size of the logits."""
    factor, logits, target, sides, kept = ctx.saved_tensors
    weights, positive = soft_weights(logits, target, sides, kept)
    signed = torch.where(positive, -weights, weights)
    along = signed * grad_grad
    both = torch.stack([along.masked_fill(positive, 0).sum(-1), along.masked_fill(~positive, 0).sum(-1)], 1)
    mean = torch.where(positive, both[:, 1:], both[:, :1])
    to_logits = factor.unsqueeze(1) * (weights * grad_grad - signed * mean)
    return both.sum(1).to(factor.dtype), to_logits.to(logits.dtype), None, None, None


forward_op.register_autograd(_differentiate, setup_context=_save)
backward_op.register_autograd(_differentiate_again, setup_context=_save_again)

_apply_forward = differentiable(_forward, _save, _differentiate)
_apply_backward = differentiable(_backward, _save_again, _differentiate_again)


def as_multilabel_loss(logits: Tensor, target: Tensor, delta: float, reduction: str) -> Outputs:
    """Loss, reduced and differentiable; and for every row constants: its sides, the number of kept classes, its margin.

    Args:
        logits: (rows, classes), fp16, bf16, fp32 or fp64.
        target: (rows, classes), 0 and 1 in any dtype.
        delta: margin in [0, 1].
        reduction: "none", "mean" or "sum".
    """
    if needs_op(logits):
        margin = torch.ones((), dtype=torch.float64) * delta  # written so, it is compiled once for any delta
        outputs: Outputs = forward_op(logits, target, margin, reduction)
    else:
        outputs = _apply_forward(logits, target, delta, reduction)
    return outputs
