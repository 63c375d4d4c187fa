"""AS cross-entropy of a linear layer, without its logits: for vocabularies whose logits do not fit."""

from __future__ import annotations

import math
import os
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from softsieve import _checks, reference
from softsieve.kernels import linear as kernel
from softsieve.kernels import linear_ready, linear_rows, stepped
from softsieve.kernels.cross_entropy import HAS_TRITON, needs_op
from softsieve.kernels.cross_entropy_torch import check_labels
from softsieve.kernels.linear_types import FEWEST, Options, Stepper, Targets

BACKENDS = ("auto", "reference", "torch", "triton")
SCREENINGS = ("fp8",)


class LinearASStats(NamedTuple):
    """What `linear_as_cross_entropy` knows of every row after the forward pass, at no extra cost. Detached.

    All are 0 in a row whose label is ignored.

    Attributes:
        solved, kept, dense, lse, margin: those of `ASStats`.
        right: bool, shape of the target. No class has a larger logit than the target: its mean is the accuracy.

    Example:
        >>> states, weight = torch.eye(2), torch.tensor([[4.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
        >>> _, stats = linear_as_cross_entropy(states, weight, torch.tensor([0, 1]), return_stats=True)
        >>> stats.solved.tolist(), stats.kept.tolist(), stats.right.tolist()
        ([True, False], [1, 3], [True, False])
    """

    solved: Tensor
    kept: Tensor
    dense: Tensor
    lse: Tensor
    margin: Tensor
    right: Tensor


def choose_backend(backend: str, hidden: Tensor, group: Any) -> str:
    """The backend itself, or for "auto" the fastest that can serve; refused when it cannot."""
    reason = None
    if backend == "reference" and group is not None:
        reason = "it has no version for several shards"
    elif backend == "triton" or (backend == "auto" and hidden.is_cuda):
        if not HAS_TRITON:
            reason = "the package triton is not installed"
        elif hidden.dtype == torch.float64:
            reason = "its kernels compute in float32, and these are float64"
        elif not hidden.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            reason = f"it needs tensors on a GPU, and these are on {hidden.device}"
    if backend == "auto":
        return "triton" if hidden.is_cuda and reason is None else "torch"
    if reason is not None:
        raise ValueError(f"backend: {backend!r} cannot serve: {reason}")
    return backend


def check_options(ignore_index: int, reduction: str, backend: str) -> None:
    """Refuse options that there are not."""
    _checks.ignore_index(ignore_index)
    _checks.choice("reduction", reduction, _checks.REDUCTIONS)
    _checks.choice("backend", backend, BACKENDS)


def check_memory(memory: int, rows: int, weight: Tensor) -> int:
    """The bytes themselves, refused if a block of logits of so many rows does not fit."""
    _checks.whole_number("memory", memory, 1, 2**62)
    least = kernel.least_memory(rows, weight.element_size())
    if memory < least:
        raise ValueError(
            f"memory: expected at least {least} bytes, for {FEWEST} classes of {rows} rows at a time, found {memory}"
        )
    return memory


def check_screening(screening: str, hidden: Tensor, options: Options) -> str:
    """The format itself, refused where it cannot serve."""
    _checks.choice("screening", screening, SCREENINGS)
    reason = None
    if options.backend == "reference":
        reason = "backend='reference' holds all logits"
    elif options.group:
        reason = "it has no version for several shards"
    elif hidden.dtype == torch.float64:
        reason = "these are float64, whose rounding its bound does not know"
    elif hidden.is_cuda and options.backend == kernel.TRITON:
        found = torch.cuda.get_device_capability(hidden.device)
        if found < (9, 0):
            reason = f"its product needs a GPU of compute capability 9.0, and this one has {found[0]}.{found[1]}"
    if reason is not None:
        raise ValueError(f"screening: {screening!r} cannot serve: {reason}")
    return screening


@overload
def linear_as_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = ..., delta: float | Tensor = ...,
    ignore_index: int = ..., reduction: str = ..., class_weight: Tensor | None = ..., row_weight: Tensor | None = ...,
    softcap: float | None = ..., backend: str = ..., group: Any = ..., memory: int | None = ...,
    screening: str | None = ..., return_stats: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def linear_as_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = ..., delta: float | Tensor = ...,
    ignore_index: int = ..., reduction: str = ..., class_weight: Tensor | None = ..., row_weight: Tensor | None = ...,
    softcap: float | None = ..., backend: str = ..., group: Any = ..., memory: int | None = ...,
    screening: str | None = ..., return_stats: Literal[True],
) -> tuple[Tensor, LinearASStats]: ...  # fmt: skip
@overload
def linear_as_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = ..., delta: float | Tensor = ...,
    ignore_index: int = ..., reduction: str = ..., class_weight: Tensor | None = ..., row_weight: Tensor | None = ...,
    softcap: float | None = ..., backend: str = ..., group: Any = ..., memory: int | None = ...,
    screening: str | None = ..., return_stats: bool,
) -> Tensor | tuple[Tensor, LinearASStats]: ...  # fmt: skip
def linear_as_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, delta: float | Tensor = 0.1,
    ignore_index: int = -100, reduction: str = "mean", class_weight: Tensor | None = None,
    row_weight: Tensor | None = None, softcap: float | None = None, backend: str = "auto", group: Any = None,
    memory: int | None = None, screening: str | None = None, return_stats: bool = False,
) -> Tensor | tuple[Tensor, LinearASStats]:  # fmt: skip
    r"""AS cross-entropy of ``hidden @ weight.T + bias``, without ever holding the logits.

    Computes::

        as_cross_entropy(F.linear(hidden, weight, bias), target, delta=delta)

    some classes at a time. Only rows that are not solved take part in the backward pass, and of those only the dense
    ones take all classes. Nothing is added up in an order that depends on chance.

    Args:
        hidden: states that go into the layer, fp16, bf16, fp32 or fp64.
        weight: of the layer, in the dtype of the states (autocast casts both).
        target: class labels, any integer dtype.
        bias: of the layer.
        delta: margin in [0, 1], a number or one for each row (which are not read on a GPU).
        ignore_index: label of rows that add nothing to loss, gradient or statistics, and cost nothing; any integer.
        reduction: ``"none"``, ``"mean"`` (weighted, over the rows that count; 0 if they weigh nothing) or ``"sum"``.
        class_weight: weight of each class; a row is weighted by that of its target.
        row_weight: weight of each row; both kinds are multiplied.
        softcap: logits are ``softcap * tanh(x / softcap)``, as in Gemma 2; None for none.
        backend: ``"reference"`` (plain torch, holds the logits), ``"torch"`` (some classes at a time, any device),
            ``"triton"`` (GPU), or ``"auto"``: the last that can serve.
        group: process group of `torch.distributed` over whose ranks the rows of the weight are sharded, in order.
            All ranks give the same hidden states, targets and options; weight, bias and their gradients are this
            rank's, class weights are of all classes.
        memory: bytes beyond inputs and gradients that it may take. With None it is at most 128 MiB, or what 128 classes
            of all rows take where that is more, and on a CPU less. More memory, larger blocks. With a mean or a sum,
            rows whose logits fit have their gradients made in the forward pass, while the logits are there: three
            products of matrices instead of four, which pays where many rows are dense. On a CPU that is done where it
            is told how much to take; on a GPU where most rows are dense, or the layer is small. With most rows dense,
            512 MB save a seventh to a quarter of the time. In `torch.compile` a large layer on a GPU must be told, too.
        screening: ``"fp8"`` first multiplies in 8 bits and calls rows solved whose label leads by more than that
            product's error; all others go through the product of their own dtype. It is for large layers most of whose
            rows are solved; where logits are held, rows are not screened. A row is called solved by mistake with a
            chance of at most 1e-6, for any data. On a GPU it needs Triton and compute capability 9.0; with
            ``backend="torch"`` 8 bits are emulated, which saves nothing. Log-sum-exp and margin of the rows that it
            solves are those of the product in 8 bits.
        return_stats: also return `LinearASStats`.

    Shape:
        hidden ``(..., D)``, weight ``(C, D)``, target ``(...)``, bias and class_weight ``(C,)``, row_weight and a delta
        that is a tensor ``(...)``; loss ``()``, or ``(...)`` with ``reduction="none"``.

    Returns:
        The loss, in the dtype of the states (fp32 under autocast); with ``return_stats`` a pair.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was found. Labels out of range on a GPU
            stop the device with an assertion instead: reading them would stall the queue.
        NotImplementedError: when a gradient made with ``create_graph=True``, or by `torch.func.grad`, is differentiated
            again. ``as_cross_entropy(F.linear(hidden, weight, bias), target)`` has second derivatives, and so has
            ``backend="reference"``; both hold the logits.

    Example:
        >>> hidden, weight = torch.eye(2, 3, requires_grad=True), torch.tensor([[4.0, 0, 0], [0, 1, 0], [0, 0, 1]])
        >>> loss, stats = linear_as_cross_entropy(hidden, weight, torch.tensor([0, 2]), return_stats=True)
        >>> loss.backward()
        >>> stats.solved.tolist(), stats.right.tolist(), hidden.grad[0].tolist()
        ([True, False], [True, False], [0.0, 0.0, 0.0])

    Reference: *Adaptive Sparse Softmax*, arXiv 2508.03175.
    """
    return compute(
        hidden, weight, target, bias=bias, delta=delta, ignore_index=ignore_index, reduction=reduction,
        class_weight=class_weight, row_weight=row_weight, softcap=softcap, backend=backend, group=group,
        memory=memory, screening=screening, return_stats=return_stats,
    )  # fmt: skip


def compute(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None, delta: float | Tensor, ignore_index: int,
    reduction: str, class_weight: Tensor | None, row_weight: Tensor | None, softcap: float | None, backend: str,
    group: Any, return_stats: bool, memory: int | None = None, screening: str | None = None,
    stepper: Stepper | None = None, loss_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, LinearASStats]:  # fmt: skip
    """`linear_as_cross_entropy`, whose backward pass gives the gradient of the weight to a ``stepper``, if any.

    That stands for a layer which computes in the dtype of its weight, also under autocast. A ``loss_dtype`` is that of
    the loss where it is not to be rounded to the dtype of the states.
    """
    dtype = _checks.states(hidden)
    if stepper is not None:
        hidden = hidden.to(weight.dtype)
    _checks.linear_layer(hidden, weight, bias)
    _checks.target(target, hidden, name="hidden states")
    check_options(ignore_index, reduction, backend)
    cap = 0.0 if softcap is None else _checks.positive("softcap", softcap)
    delta = _checks.margins(delta, target) if isinstance(delta, Tensor) else _checks.number("delta", delta, 0, 1)
    if row_weight is not None:
        _checks.each_row("row_weight", row_weight, target)
        row_weight = row_weight.reshape(-1)
    if class_weight is not None:
        _checks.weight(class_weight, weight.t(), name="class_weight", sized=group is None)
    name = "" if group is None else _checks.group(group)
    options = Options(ignore_index, cap, reduction, choose_backend(backend, hidden, group), name)
    if memory is not None:
        options = options._replace(memory=check_memory(memory, target.numel(), weight))
    if screening is not None:
        options = options._replace(screening=check_screening(screening, hidden, options))

    kind = hidden.device.type
    casts = stepper is None and torch.is_autocast_enabled(kind)
    if casts and dtype != torch.float64:  # which torch's own leaves alone
        hidden, weight = (x.to(torch.get_autocast_dtype(kind)) for x in (hidden, weight))
    targets = Targets(target.reshape(-1).long(), delta, class_weight, row_weight)
    rows = hidden.reshape(-1, hidden.shape[-1])
    loss, stats = _compute(rows, weight, bias, targets, options, return_stats, stepper)
    if not torch.is_autocast_enabled(kind):
        loss = loss.to(dtype if loss_dtype is None else loss_dtype)
    if reduction == "none":
        loss = loss.view(target.shape)
    return loss if stats is None else (loss, LinearASStats(*(s.view(target.shape) for s in stats)))


@cache
def _held() -> Any:
    """The module that needs Triton, imported by the first call that needs it."""
    return import_module("softsieve.kernels.linear_held")


def _differentiable(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options
) -> tuple[Tensor, Any]:
    """The loss and what is known of the rows, by a module that holds logits where those of enough rows fit.

    A margin that is the same for all rows may be a plain number, which to write on a GPU takes a launch.
    """
    plain = not needs_op(hidden) and not torch._C._are_functorch_transforms_active()
    wanted = torch.is_grad_enabled() and (
        hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    layer = hidden, weight, bias
    found: tuple[Tensor, Any]
    if plain and options.backend == kernel.TRITON:
        height = _held().choose(*layer, targets, options, wanted)
        if height:
            found = _held().linear_as_cross_entropy(*layer, targets, options, height=height)
            return found
    targets = _with_margins(targets)
    way: Any = kernel
    if wanted and torch.compiler.is_compiling() and linear_ready.serves(hidden, weight, options):
        way = linear_ready
    elif plain and wanted and not options.screening and linear_rows.block_rows(hidden, weight, options):
        way = linear_rows
    found = way.linear_as_cross_entropy(*layer, targets, options)
    return found


def _with_margins(targets: Targets) -> Targets:
    """With a tensor of margins."""
    if isinstance(targets.delta, Tensor):
        return targets
    return targets._replace(delta=_checks.margins(targets.delta, targets.label))


def _stats(known: Any) -> LinearASStats:
    """What a way there leaves of the rows: a tensor of numbers, or `Saved`."""
    if isinstance(known, Tensor):
        threshold, kept, lse, _, _, margin, _, right = known.unbind()
        kept, right = kept.long(), right > 0
    else:
        threshold, kept, lse, margin, right = known.threshold, known.kept, known.lse, known.margin, known.right
    return LinearASStats(kept == 1, kept, (threshold == -math.inf) & (kept > 0), lse, margin, right)


def _compute(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, options: Options, return_stats: bool,
    stepper: Stepper | None,
) -> tuple[Tensor, LinearASStats | None]:  # fmt: skip
    """The loss of (rows, size), and with ``return_stats`` what is known of the rows."""
    if options.backend != "reference":
        known: Any
        if stepper is None:
            loss, known = _differentiable(hidden, weight, bias, targets, options)
        else:
            targets = _with_margins(targets)
            loss, known = stepped.linear_as_cross_entropy(hidden, weight, bias, targets, options, stepper)
        return loss, _stats(known) if return_stats else None
    label, delta, class_weight, row_weight = _with_margins(targets)
    check_labels(label, len(weight), options.ignore_index)
    shared: dict[str, Any] = {"bias": bias, "delta": delta, "ignore_index": options.ignore_index}
    shared["softcap"] = options.cap or None
    loss = reference.linear_as_cross_entropy(
        hidden, weight, label, **shared, reduction=options.reduction, class_weight=class_weight, row_weight=row_weight
    )
    if not return_stats:
        return loss, None
    with torch.no_grad():
        return loss, LinearASStats(*reference.linear_as_stats(hidden, weight, label, **shared))


class LinearASCrossEntropyLoss(nn.Module):
    """A linear layer with AS cross-entropy on top, without the logits: module form of `linear_as_cross_entropy`.

    Made as `torch.nn.LinearCrossEntropyLoss` is. ``weight`` and ``bias`` are its parameters; to tie the weight to an
    embedding, assign that: ``loss.weight = model.embedding.weight``.

    Args:
        in_features: size of the states.
        num_classes: how many there are.
        delta: margin in [0, 1]. May be changed while training.
        bias: whether the layer has one.
        class_weight: weight of each class, ``(C,)``; moves with the module.
        ignore_index, reduction, softcap, backend, memory, screening, return_stats: as there. Memory that is too little
            for the rows of a batch is refused when that comes, with what it needs.
        device, dtype: of the parameters.

    Shape:
        hidden ``(..., in_features)``, target ``(...)``; loss ``()``, or ``(...)`` with ``reduction="none"``.

    Example:
        >>> criterion = LinearASCrossEntropyLoss(8, 1000, delta=0.1)
        >>> loss = criterion(torch.randn(2, 5, 8), torch.randint(1000, (2, 5)))
        >>> loss.backward()
        >>> criterion.weight.grad.shape
        torch.Size([1000, 8])
    """

    class_weight: Tensor | None

    def __init__(
        self, in_features: int, num_classes: int, delta: float = 0.1, *, bias: bool = False,
        class_weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
        softcap: float | None = None, backend: str = "auto", memory: int | None = None, screening: str | None = None,
        return_stats: bool = False, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, size in {"in_features": in_features, "num_classes": num_classes}.items():
            _checks.whole_number(name, size, 1, 2**40)
        layer = nn.Linear(in_features, num_classes, bias, device, dtype)
        self.weight, self.bias = layer.weight, layer.bias
        self.delta = _checks.number("delta", delta, 0, 1)
        check_options(ignore_index, reduction, backend)
        self.register_buffer("class_weight", class_weight)
        self.softcap = None if softcap is None else _checks.positive("softcap", softcap)
        self.ignore_index, self.reduction, self.backend = ignore_index, reduction, backend
        if memory is not None:
            _checks.whole_number("memory", memory, 1, 2**62)
        if screening is not None:
            _checks.choice("screening", screening, SCREENINGS)
        self.memory, self.screening, self.return_stats = memory, screening, return_stats

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor | tuple[Tensor, LinearASStats]:
        return linear_as_cross_entropy(
            hidden, self.weight, target, bias=self.bias, delta=self.delta, ignore_index=self.ignore_index,
            reduction=self.reduction, class_weight=self.class_weight, softcap=self.softcap, backend=self.backend,
            memory=self.memory, screening=self.screening, return_stats=self.return_stats,
        )  # fmt: skip

    def extra_repr(self) -> str:
        classes, size = self.weight.shape
        return (
            f"in_features={size}, num_classes={classes}, bias={self.bias is not None}, delta={self.delta}, "
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, backend={self.backend!r}"
        )
