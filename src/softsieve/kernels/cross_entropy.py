"""AS cross-entropy over the rows of a logits matrix: what goes in and out, which kernel does it, and its derivatives.

The one decision, taken in the forward pass and read everywhere else, is the row's threshold: class j is kept when
logit_j >= threshold. It follows from p_t - p_j <= delta by dividing by p_t:

    threshold = logit_t + log(1 - delta / p_t)    where p_t > delta (a sparse row), else -inf (a dense row)

so the target and its ties are kept whatever the rounding. A NaN makes its row dense, and loss and gradient NaN.

The kernels are in `cross_entropy_torch` (any device and dtype), `cross_entropy_numba` (CPU, fp32 and narrower) and
`cross_entropy_triton` (CUDA, the same). They are reached in two ways, with the same derivatives: as registered custom
ops by compiled graphs and tensor subclasses, and by an autograd.Function in eager mode, where the way through the
dispatcher costs more than the work. For each of the compiled kernels that Function is one of its own, which hands on
one tensor instead of six: a small batch takes no longer than a few of torch's calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from softsieve.kernels import cross_entropy_torch
from softsieve.kernels.cross_entropy_torch import accumulation_dtype

INF = float("inf")
HAS_NUMBA = find_spec("numba") is not None
HAS_TRITON = find_spec("triton") is not None
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@cache
def _loops() -> Any:
    """The module of the compiled loops, imported by the first call that needs it."""
    return import_module("softsieve.kernels.cross_entropy_numba")


@cache
def _launches() -> Any:
    """The module of the Triton kernels, imported by the first call that needs it."""
    return import_module("softsieve.kernels.cross_entropy_triton")


def uses_numba(logits: Tensor) -> bool:
    """Whether the compiled loops are for such logits."""
    return HAS_NUMBA and logits.is_cpu and logits.dtype != torch.float64


def uses_triton(logits: Tensor) -> bool:
    """Whether the Triton kernels are for such logits."""
    return HAS_TRITON and logits.is_cuda and logits.dtype != torch.float64


def check_on_device(valid: Tensor, classes: int, ignore_index: int) -> None:
    """Stop the device, without waiting for it, where a label is out of range."""
    torch._assert_async(valid, f"target: expected labels in [0, {classes}) or {ignore_index}")


def _split(loss: Tensor, numbers: Tensor) -> Outputs:
    """What `cross_entropy_numba` knows of the rows, one by one."""
    threshold, kept, lse, norm, share, margin, _ = numbers.unbind()
    return loss, threshold, kept.long(), lse, norm, share, margin


def _forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: float, ignore_index: int, reduction: str
) -> Outputs:
    if uses_numba(logits):
        loss, numbers = _loops().forward(logits, target, weight, delta, ignore_index, reduction)
        loss, *parts = _split(loss, numbers)
        return loss, *(part.clone() for part in parts)  # type: ignore[return-value]  # an op's outputs share no memory
    if not uses_triton(logits):
        return cross_entropy_torch.forward(logits, target, weight, delta, ignore_index, reduction)
    outputs: Outputs
    outputs, valid = _launches().forward(logits, target, weight, delta, ignore_index, reduction)
    check_on_device(valid, logits.shape[1], ignore_index)
    return outputs


def _backward(
    grad_rows: Tensor, logits: Tensor, target: Tensor, threshold: Tensor, kept: Tensor, lse: Tensor, norm: Tensor
) -> Tensor:
    if uses_numba(logits):
        numbers = torch.stack((threshold, kept.float(), lse, norm, torch.ones_like(norm)))
        grad: Tensor = _loops().backward(grad_rows, logits, target, numbers)
        return grad
    if not uses_triton(logits):
        return cross_entropy_torch.backward(grad_rows, logits, target, threshold, kept, lse, norm)
    by_triton: Tensor = _launches().backward(grad_rows, logits, target, threshold, kept, lse, norm)
    return by_triton


# the registered ops


@torch.library.custom_op("softsieve::as_cross_entropy", mutates_args=())
def forward_op(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: Tensor, ignore_index: int, reduction: str
) -> Outputs:
    """`_forward` with ``delta`` as a tensor (): a compiled graph would be compiled anew for every value of a number."""
    return _forward(logits, target, weight, float(delta), ignore_index, reduction)


@forward_op.register_fake
def _(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: Tensor, ignore_index: int, reduction: str
) -> Outputs:
    row = logits.new_empty(logits.shape[0], dtype=accumulation_dtype(logits))
    loss = torch.empty_like(row) if reduction == "none" else row.new_empty(())
    threshold, lse, norm, share, margin = (torch.empty_like(row) for _ in range(5))
    return loss, threshold, torch.empty_like(row, dtype=torch.long), lse, norm, share, margin


backward_op = torch.library.custom_op("softsieve::as_cross_entropy_backward", _backward, mutates_args=())


@backward_op.register_fake
def _(
    grad_rows: Tensor, logits: Tensor, target: Tensor, threshold: Tensor, kept: Tensor, lse: Tensor, norm: Tensor
) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


# their derivatives, shared by both ways


def needs_op(logits: Tensor) -> bool:
    """Whether to go through the registered op: in a compiled graph, and for a subclass of Tensor."""
    return torch.compiler.is_compiling() or type(logits) not in (Tensor, nn.Parameter)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, *_ = inputs
    _, *scalars, margin = output
    ctx.save_for_backward(logits, target, *scalars)
    ctx.mark_non_differentiable(*scalars, margin)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None, None, None, None]:
    if grad_loss is None:
        return None, None, None, None, None, None
    logits, *scalars, share = ctx.saved_tensors
    backward: Callable[..., Tensor] = _backward
    if needs_op(logits):
        backward = backward_op
    elif torch.is_grad_enabled():  # somebody wants the second derivative
        backward = _apply_backward
    return backward(grad_loss * share, logits, *scalars), None, None, None, None, None


def _save_again(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_again(ctx: Any, grad_grad: Tensor) -> tuple[Tensor | None, ...]:
    """For gradient penalties and Hessians: plain torch, with temporaries of the size of the logits."""
    grad_rows, logits, target, threshold, kept, _, _ = ctx.saved_tensors
    live = (kept > 1).unsqueeze(1)
    label = torch.where(kept > 0, target, 0).unsqueeze(1)
    masked = (logits < threshold.unsqueeze(1)) & live
    q = torch.softmax(logits.masked_fill(masked, -INF), -1, dtype=accumulation_dtype(logits)) * live
    along = (q * grad_grad).sum(-1, keepdim=True)
    to_rows = (along - live * grad_grad.gather(1, label)).squeeze(1)
    to_logits = grad_rows.unsqueeze(1) * q * (grad_grad - along)
    return to_rows.to(grad_rows.dtype), to_logits.to(logits.dtype), None, None, None, None, None


forward_op.register_autograd(_differentiate, setup_context=_save)
backward_op.register_autograd(_differentiate_again, setup_context=_save_again)


def differentiable(forward: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]) -> Any:
    """The function ``forward`` for eager mode, with a derivative; as `register_autograd` takes the other two.

    Of a Function that saves in a method of its own, torch binds the arguments to its signature at every call, which
    takes longer than a small batch does. Only transforms of `torch.func` need one.
    """
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]  # torch asks for it at every call

    def forward_and_save(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        save(ctx, inputs, output)
        return output

    def function(**methods: Callable[..., Any]) -> Any:
        statics = {name: staticmethod(method) for name, method in methods.items()}
        return type(forward.__name__, (torch.autograd.Function,), statics).apply  # type: ignore[attr-defined]

    plain = function(forward=forward_and_save, backward=backward)
    transformable = function(forward=forward, setup_context=save, backward=backward)

    def apply(*inputs: Any) -> Any:
        return (transformable if torch._C._are_functorch_transforms_active() else plain)(*inputs)

    return apply


_apply_forward = differentiable(_forward, _save, _differentiate)
_apply_backward = differentiable(_backward, _save_again, _differentiate_again)


# On a CPU by the compiled loops: one tensor of numbers is handed on, not six.


def _forward_numbers(logits: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    loss, numbers = _loops().forward(logits, *options)
    return loss, numbers


def _save_numbers(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate_numbers(
    ctx: Any, grad_loss: Tensor | None, _: Any
) -> tuple[Tensor | None, None, None, None, None, None]:
    if grad_loss is None:
        return None, None, None, None, None, None
    logits, target, numbers = ctx.saved_tensors
    if torch.is_grad_enabled():  # somebody wants the second derivative
        threshold, kept, lse, norm, share, *_ = numbers.unbind()
        grad = _apply_backward(grad_loss * share, logits, target, threshold, kept, lse, norm)
    else:
        grad = _loops().backward(grad_loss, logits, target, numbers)
    return grad, None, None, None, None, None


_apply_loops = differentiable(_forward_numbers, _save_numbers, _differentiate_numbers)


# On a GPU by the Triton kernels: one launch forward, one backward. The time of a small batch is that of Python here, so
# the Function has few arguments and one output, and what it leaves for backward is no tensor that torch must watch.


class _Launched(torch.autograd.Function):
    """The loss; ``known`` gets the numbers of the rows and what the losses were divided by, if it is a list."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, options: tuple[Any, ...], known: list[Tensor] | None) -> Tensor:
        launches = _launches()
        target, _, _, ignore_index, _ = options
        loss, numbers, parts, valid = launches.forward_numbers(logits, *options)
        check_on_device(valid, logits.shape[1], ignore_index)
        ctx.save_for_backward(logits, target)
        ctx.known = launches, numbers, parts
        if known is not None:
            known += numbers, parts
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        logits, target = ctx.saved_tensors
        launches, numbers, parts = ctx.known
        if torch.is_grad_enabled():  # somebody wants the second derivative
            threshold, kept, lse, norm, share, *_ = numbers.unbind()
            again: Tensor = _apply_backward(grad_loss * (share / parts), logits, target, threshold, kept, lse, norm)
            return again, None, None
        return (
            launches.backward_numbers(grad_loss, logits, target, numbers, parts, torch.empty_like(logits)),
            None,
            None,
        )


def _launch(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: float, ignore_index: int, reduction: str,
    known: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    weight = None if weight is None else weight.contiguous()
    loss: Tensor = _Launched.apply(  # type: ignore[no-untyped-call]
        logits.contiguous(), (target.contiguous(), weight, delta, ignore_index, reduction), known
    )
    return loss


def _launches_serve(logits: Tensor) -> bool:
    """Whether they do it themselves; transforms of `torch.func` need a Function of another kind."""
    return uses_triton(logits) and not torch._C._are_functorch_transforms_active()


def as_cross_entropy_loss(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: float, ignore_index: int, reduction: str
) -> Tensor:
    """The first of what `as_cross_entropy` returns: taking the constants apart is a good part of a call."""
    options = logits, target, weight, delta, ignore_index, reduction
    if not needs_op(logits) and _launches_serve(logits):
        return _launch(*options)
    loss: Tensor = (_apply_loops if uses_numba(logits) and not needs_op(logits) else as_cross_entropy)(*options)[0]
    return loss


def as_cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: float, ignore_index: int, reduction: str
) -> Outputs:
    """Loss, reduced and differentiable, and for every row six constants, all of them 0 where the label is ignored.

    These are its threshold, the number of kept classes, ``lse``, the log-sum-exp over all classes, ``norm``, which
    makes ``exp((logits - lse) - norm)`` the softmax over the kept ones, its share in the loss, and its margin, the
    target's probability minus the largest of another class. The gradient of a row is ``share * (softmax over kept
    classes - one-hot target)``, and exactly 0 in solved and ignored rows.

    Args:
        logits: (rows, classes), fp16, bf16, fp32 or fp64.
        target: (rows,), int64.
        weight: (classes,) or None.
        delta: margin in [0, 1].
        ignore_index: label of rows that do not count.
        reduction: "none", "mean" or "sum".
    """
    if needs_op(logits):
        margin = torch.ones((), dtype=torch.float64) * delta  # written so, it is compiled once for any delta
        outputs: Outputs = forward_op(logits, target, weight, margin, ignore_index, reduction)
    elif uses_numba(logits):
        outputs = _split(*_apply_loops(logits, target, weight, delta, ignore_index, reduction))
    elif _launches_serve(logits):
        known: list[Tensor] = []
        loss = _launch(logits, target, weight, delta, ignore_index, reduction, known)
        numbers, parts = known
        threshold, kept, lse, norm, share, margin, *_ = numbers.unbind()
        outputs = loss, threshold, kept.long(), lse, norm, share / parts, margin
    else:
        outputs = _apply_forward(logits, target, weight, delta, ignore_index, reduction)
    return outputs
