"""The logits of an evaluation as a tensor whose numbers are made when something first needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from softsieve.integrations.lazy_logits import LazyLogits

_TOLD = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex)
_ATTRIBUTES = tuple(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse")
)


class DeferredLogits(Tensor):
    """The logits of a model that evaluates by `accelerate_loss`, as ``outputs.logits``: made when they are first used.

    Whatever is done with it is done with the tensor that the model would have returned; where only the loss is asked
    for, that is never made. Sizes, dtype and device are known without, a cast waits as well, and `argmax` and `entropy`
    have only some rows in memory at a time. The logits are of the model's weights when they are made; processes that
    have parts of these make logits together.

    Example:
        >>> lazy = LazyLogits.of_layer(torch.eye(2), torch.tensor([[4.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
        >>> logits = DeferredLogits(lazy)
        >>> logits.shape, logits.argmax(-1).tolist(), (logits / 2).tolist()
        (torch.Size([2, 3]), [0, 1], [[2.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
    """

    _lazy: LazyLogits
    _made: Tensor | None
    _differentiable: bool

    @staticmethod
    def __new__(cls: type[DeferredLogits], lazy: LazyLogits) -> DeferredLogits:
        tensor: DeferredLogits = Tensor._make_wrapper_subclass(cls, lazy.shape, dtype=lazy.dtype, device=lazy.device)
        tensor._lazy, tensor._made, tensor._differentiable = lazy, None, torch.is_grad_enabled()
        return tensor

    def materialise(self) -> Tensor:
        """The logits, a plain tensor, the same one each time."""
        if self._made is None:
            with torch.set_grad_enabled(self._differentiable):
                self._made = self._lazy.materialise()
        return self._made

    def entropy(self) -> Tensor:
        """The entropy of each row's softmax, in nats."""
        with torch.set_grad_enabled(self._differentiable):
            return self._lazy.entropy()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func in _TOLD or func in _ATTRIBUTES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        first = args[0] if args else None
        if isinstance(first, DeferredLogits) and first._made is None:
            others = (*args[1:], *given.values())
            if func is Tensor.float and not others:
                return DeferredLogits(first._lazy.float())
            if func is Tensor.to and len(others) == 1 and isinstance(others[0], torch.dtype):
                return DeferredLogits(first._lazy.to(others[0]))
            if func in (Tensor.argmax, torch.argmax) and others in ((-1,), (first.dim() - 1,)):
                return first._lazy.argmax()
        return func(*tree_map(_plain, args), **tree_map(_plain, given))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))


@torch.compiler.disable(  # type: ignore[no-untyped-call,untyped-decorator]
    reason="evaluate=True: a compiled graph ends before logits that are made later; 'tokens' is whole"
)
def defer(lazy: LazyLogits) -> DeferredLogits:
    """These logits as a tensor."""
    return DeferredLogits(lazy)


def _plain(value: Any) -> Any:
    return value.materialise() if isinstance(value, DeferredLogits) else value
