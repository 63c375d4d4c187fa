"""AS cross-entropy over the rows of a logits matrix: what goes in and out, which kernel does it, and its derivatives.

The one decision, taken in the forward pass and read everywhere else, is the row's threshold: class j is kept when
logit_j >= threshold. It follows from p_t - p_j <= delta by dividing by p_t:

    threshold = logit_t + log(1 - delta / p_t)    where p_t > delta (a sparse row), else -inf (a dense row)

so the target and its ties are kept whatever the rounding. A NaN makes its row dense, and loss and gradient NaN.

The kernels are in `cross_entropy_torch` (any device and dtype), `cross_entropy_numba` (CPU, fp32 and narrower) and
`cross_entropy_triton` (CUDA, the same). They are reached in two ways, with the same derivatives: as registered custom
ops by compiled graphs and tensor subclasses, and by an autograd.Function in eager mode, where the way through the
dispatcher costs more than the work. Compiled kernels have a Function of their own, which hands on one tensor instead of
six: a small batch takes little longer than the few calls to torch in it.
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
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C._functorch import is_functorch_wrapped_tensor

from softsieve.kernels import cross_entropy_torch
from softsieve.kernels.cross_entropy_torch import accumulation_dtype

INF = float("inf")
HAS_NUMBA = find_spec("numba") is not None
HAS_TRITON = find_spec("triton") is not None
PLAIN = (Tensor, nn.Parameter)
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


def _split(numbers: Tensor, parts: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What compiled kernels know of the rows, one by one, shares as they are in the loss."""
    threshold, kept, lse, norm, share, margin, *_ = numbers.unbind()
    return threshold, kept.long(), lse, norm, share / parts, margin


def _forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: float, ignore_index: int, reduction: str
) -> Outputs:
    if uses_numba(logits):
        loss, numbers, (parts,) = _loops().forward_numbers(logits, target, weight, delta, ignore_index, reduction)
        constants = (part.clone() for part in _split(numbers, parts))  # an op's outputs share no memory
        return loss, *constants
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
        empty = torch.empty_like(logits, memory_format=torch.contiguous_format)
        grad: Tensor = _loops().backward_numbers(grad_rows, logits, target, numbers, (1.0,), empty)
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
    return torch.compiler.is_compiling() or type(logits) not in PLAIN


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
        return (transformable if transforms_active() else plain)(*inputs)

    return apply


_apply_forward = differentiable(_forward, _save, _differentiate)
_apply_backward = differentiable(_backward, _save_again, _differentiate_again)


# By compiled kernels. The time of a small batch is that of Python here, so the Function has few arguments and one
# output, and leaves one tensor for backward beside its inputs.


class _ByKernels(torch.autograd.Function):
    """The loss; ``known`` gets the numbers of the rows and what the losses were divided by, if it is a list."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, kernels: Any, options: tuple[Any, ...], known: list[Any] | None) -> Tensor:
        loss, numbers, work = kernels.forward_numbers(logits, *options)
        if logits.is_cuda:  # the loops read the labels
            check_on_device(work[kernels.VALID], logits.shape[1], options[3])
        ctx.save_for_backward(logits, options[0], numbers)
        ctx.by = kernels, work
        if known is not None:
            known += numbers, work[0]
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target, numbers = ctx.saved_tensors
        kernels, work = ctx.by
        if torch.is_grad_enabled():  # somebody wants the second derivative
            threshold, kept, lse, norm, share, _ = _split(numbers, work[0])
            grad: Tensor = _apply_backward(grad_loss * share, logits, target, threshold, kept, lse, norm)
        else:
            empty = torch.empty_like(logits, memory_format=torch.contiguous_format)
            grad = kernels.backward_numbers(grad_loss, logits, target, numbers, work, empty)
        return grad, None, None, None


# Without what `torch.autograd.Function.apply` does in Python at every call, which is a twentieth of the time of a small
# batch: looking for transforms of `torch.func`, and for tensors that are left of one. `_eager_kernels` does both.
_apply_kernels: Any = super(torch.autograd.Function, _ByKernels).apply


def _eager_kernels(logits: Tensor) -> Any:
    """The module of compiled kernels for such logits, or None; transforms need a Function of another kind."""
    if needs_op(logits) or transforms_active() or is_functorch_wrapped_tensor(logits):
        return None
    return _loops() if uses_numba(logits) else _launches() if uses_triton(logits) else None


def as_cross_entropy_loss(
    logits: Tensor, target: Tensor, weight: Tensor | None, delta: float, ignore_index: int, reduction: str,
    known: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The first of what `as_cross_entropy` returns; a list gets the rest, which takes a good part of a small call."""
    kernels = _eager_kernels(logits)
    if kernels is not None:
        if logits.is_cuda:  # the loops take what they get, block by block
            logits, target = logits.contiguous(), target.contiguous()
            weight = None if weight is None else weight.contiguous()
        left: list[Any] = []
        options = target, weight, delta, ignore_index, reduction
        loss: Tensor = _apply_kernels(logits, kernels, options, None if known is None else left)
        if known is not None:
            known += _split(*left)
        return loss
    if needs_op(logits):
        margin = torch.ones((), dtype=torch.float64) * delta  # written so, it is compiled once for any delta
        loss, *constants = forward_op(logits, target, weight, margin, ignore_index, reduction)
    else:
        loss, *constants = _apply_forward(logits, target, weight, delta, ignore_index, reduction)
    if known is not None:
        known += constants
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
    known: list[Tensor] = []
    loss = as_cross_entropy_loss(logits, target, weight, delta, ignore_index, reduction, known)
    return loss, *known  # type: ignore[return-value]
