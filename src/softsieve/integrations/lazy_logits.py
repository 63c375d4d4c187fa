"""Logits that nobody has made yet: the states of the tokens, and what the model does after its output layer.

A model's own code scales, soft-caps, slices and reshapes them and gives them to `F.cross_entropy`, and never sees that
they are not there. The loss then comes from the states and the weight of the layer, some classes at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from softsieve.errors import InputError

_MADE_AT_ONCE = 1 << 24  # logits that `argmax` and the like hold at a time


class Product(NamedTuple):
    """A linear layer as the loss takes it: logits are ``softcap * tanh(x / softcap)`` of ``hidden @ weight.T + bias``.

    Without a softcap they are x itself.
    """

    hidden: Tensor  # (..., d)
    weight: Tensor  # (classes, d)
    bias: Tensor | None
    softcap: float | None

    def logits(self) -> Tensor:
        made = F.linear(self.hidden, self.weight)
        made = made if self.bias is None else made + self.bias
        return made if self.softcap is None else self.softcap * torch.tanh(made / self.softcap)


class After(NamedTuple):
    """What follows the layer: ``cap * tanh(scale * x + shift)``, or ``scale * x + shift`` where there is no cap."""

    scale: float | Tensor = 1.0
    shift: Tensor | None = None  # of each class
    cap: float | None = None

    def times(self, factor: Any) -> After:
        if isinstance(factor, bool) or not isinstance(factor, int | float | Tensor):
            raise refused("a product with " + type(factor).__name__)
        if isinstance(factor, Tensor) and factor.numel() != 1:
            raise refused(f"a product with a tensor {tuple(factor.shape)}")
        if self.cap is not None:
            if isinstance(factor, Tensor) or factor <= 0:
                raise refused(f"a product of soft-capped logits with {factor}")
            return self._replace(cap=self.cap * factor)
        return After(self.scale * factor, None if self.shift is None else self.shift * factor)

    def plus(self, added: Any, classes: int) -> After:
        if not isinstance(added, Tensor) or added.numel() != classes or added.shape[-1] != classes:
            raise refused("a sum with something other than one number for each class")
        if self.cap is not None:
            raise refused("a sum after a tanh")
        added = added.reshape(-1)
        return self._replace(shift=added if self.shift is None else self.shift + added)

    def of(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Product:
        """The layer's own product with this in it."""
        scale = self.scale if self.cap is None else self.scale * self.cap
        if isinstance(scale, Tensor) or scale != 1:
            hidden = (hidden * scale).to(hidden.dtype)
            bias = None if bias is None else bias * scale
        if self.shift is not None:
            shift = self.shift if self.cap is None else self.shift * self.cap
            bias = shift.to(weight.dtype) if bias is None else bias + shift
        return Product(hidden, weight, bias, self.cap)


def refused(what: str) -> InputError:
    """The error of an operation that needs logits, in the model's code or after it."""
    return InputError(
        f"logits: expected a model that scales, soft-caps or slices them before its cross-entropy, found {what}: they "
        "are not made while it trains with labels; outputs.logits.materialise() makes them"
    )


class LazyLogits:
    """Stands for the logits of a model that trains by `accelerate_loss`, as ``outputs.logits``.

    Its shape is theirs, ``(..., classes)``. Rows can be sliced and reshaped, logits scaled and soft-capped, and
    `F.cross_entropy` taken. What needs the logits themselves is refused: ask `materialise` for them.

    Attributes:
        hidden: what the output layer was given, one row for each token.
        dtype: that of the logits.

    Example:
        >>> weight = torch.tensor([[4.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        >>> logits = LazyLogits.of_layer(torch.eye(2), weight)
        >>> logits.shape, logits.argmax(-1).tolist(), (logits / 2).materialise().tolist()
        (torch.Size([2, 3]), [0, 1], [[2.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
    """

    def __init__(
        self, hidden: Tensor, classes: int, run: Callable[..., Any], judge: Callable[..., Tensor], *,
        after: After | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.hidden, self.classes = hidden, classes
        self._run = run  # with states and a function of a `Product`: inside the layer, where its weight is whole
        self._judge = judge  # the loss of these logits, given what `F.cross_entropy` is
        self.after = After() if after is None else after
        self.dtype = hidden.dtype if dtype is None else dtype

    @classmethod
    def of_layer(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> LazyLogits:
        """Those of a plain layer, with the dense loss."""

        def judge(logits: LazyLogits, target: Tensor, **options: Any) -> Tensor:
            return F.cross_entropy(logits.materialise(), target, **options)

        def run(hidden: Tensor, after: After, work: Callable[[Product], Any]) -> Any:
            return work(after.of(hidden, weight, bias))

        return cls(hidden, len(weight), run, judge)

    # -- what they are without being made ------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.classes))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    @property
    def requires_grad(self) -> bool:
        return self.hidden.requires_grad

    @property
    def is_cuda(self) -> bool:
        return self.hidden.is_cuda

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.hidden.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return len(self.hidden)

    def __repr__(self) -> str:
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    # -- what a model does with them -----------------------------------------------------------------------------------

    def _with(
        self, *, hidden: Tensor | None = None, after: After | None = None, dtype: torch.dtype | None = None
    ) -> LazyLogits:
        return LazyLogits(
            self.hidden if hidden is None else hidden, self.classes, self._run, self._judge,
            after=self.after if after is None else after, dtype=self.dtype if dtype is None else dtype,
        )  # fmt: skip

    def to(self, *args: Any, **options: Any) -> LazyLogits:
        wanted = [*args, *options.values()]
        dtype = next((value for value in wanted if isinstance(value, torch.dtype)), None)
        for value in wanted:
            if isinstance(value, Tensor):
                dtype = value.dtype
            device = value.device if isinstance(value, Tensor) else value
            if isinstance(device, str | int | torch.device) and not isinstance(device, bool):
                place = torch.device(device)
                if place.type != self.device.type or place.index not in (None, self.device.index):
                    raise refused(f"a move to {place}")
        return self._with(dtype=dtype)

    def float(self) -> LazyLogits:
        return self._with(dtype=torch.float32)

    def double(self) -> LazyLogits:
        return self._with(dtype=torch.float64)

    def type(self, dtype: torch.dtype) -> LazyLogits:
        return self._with(dtype=dtype)

    def contiguous(self) -> LazyLogits:
        return self

    def detach(self) -> LazyLogits:
        run = torch.no_grad()(self._run)  # the weight has no gradient from these, either
        return LazyLogits(self.hidden.detach(), self.classes, run, self._judge, after=self.after, dtype=self.dtype)

    def view(self, *shape: Any) -> LazyLogits:
        return self.reshape(*shape)

    def reshape(self, *shape: Any) -> LazyLogits:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if not sizes or (sizes[-1] != self.classes and not (sizes[-1] == -1 and -1 not in sizes[:-1])):
            raise refused(f"a reshape to {tuple(sizes)}, whose last dimension is not the {self.classes} classes")
        if sizes[-1] == -1 and torch.Size(sizes[:-1]).numel() != self.shape[:-1].numel():
            raise refused(f"a reshape to {tuple(sizes)}, whose last dimension is not the {self.classes} classes")
        return self._with(hidden=self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> LazyLogits:
        if end_dim in (-1, self.ndim - 1):
            raise refused("flatten over the classes")
        return self._with(hidden=self.hidden.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> LazyLogits:
        parts = index if isinstance(index, tuple) else (index,)
        taken = sum(part.ndim if _is_mask(part) else 1 for part in parts if part is not None and part is not Ellipsis)
        dots = any(part is Ellipsis for part in parts)
        if taken == self.ndim or (dots and taken > 0 and parts[-1] is not Ellipsis):  # the last is of the classes
            whole = parts[-1]
            if not isinstance(whole, slice) or whole.indices(self.classes) != (0, self.classes, 1):
                raise refused("an index into the classes")
            parts = (*parts[:-1], slice(None))
        return self._with(hidden=self.hidden[parts])

    def __setitem__(self, index: Any, value: Any) -> None:
        raise refused("an assignment to some of them")

    def __mul__(self, factor: Any) -> LazyLogits:
        return self._with(after=self.after.times(factor))

    __rmul__ = __imul__ = __mul__
    mul = mul_ = __mul__

    def __truediv__(self, divisor: Any) -> LazyLogits:
        if not isinstance(divisor, int | float | Tensor):
            raise refused("a quotient with " + type(divisor).__name__)
        return self._with(after=self.after.times(1 / divisor))

    __itruediv__ = div = div_ = __truediv__

    def __add__(self, added: Any) -> LazyLogits:
        if isinstance(added, int | float) and added == 0:
            return self
        return self._with(after=self.after.plus(added, self.classes))

    __radd__ = __iadd__ = __add__

    def tanh(self) -> LazyLogits:
        if self.after.cap is not None:
            raise refused("a second tanh")
        return self._with(after=self.after._replace(cap=1.0))

    tanh_ = tanh

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func is F.cross_entropy:
            return _cross_entropy(*args, **given)
        if func is torch.tanh or func is F.tanh:
            return args[0].tanh()
        if func in (torch.mul, torch.multiply):
            left, right = args
            return left * right
        if func in (torch.div, torch.true_divide) and not given:
            return args[0] / args[1]
        if func is torch.add and not given:
            left, right = args
            return left + right
        if func is torch.argmax:
            return args[0].argmax(*args[1:], **given)
        if func in (torch.reshape, torch.flatten):
            return getattr(args[0], func.__name__)(*args[1:], **given)
        raise refused(getattr(func, "__name__", str(func)))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Tensor, name):
            raise refused(name)
        raise AttributeError(name)

    # -- what is known of them -----------------------------------------------------------------------------------------

    def materialise(self) -> Tensor:
        """The logits themselves, as the model without `accelerate_loss` makes them."""
        made: Tensor = self._run(self.hidden, self.after, Product.logits)
        return made.to(self.dtype)

    def argmax(self, dim: int = -1, keepdim: bool = False) -> Tensor:
        """The class of the largest logit of each row, with only some rows' logits in memory."""
        if dim not in (-1, self.ndim - 1):
            raise refused(f"argmax over dimension {dim}")
        with torch.no_grad():
            best = self.by_rows(lambda logits: logits.argmax(-1))
        return best.unsqueeze(-1) if keepdim else best

    def entropy(self) -> Tensor:
        """The entropy of each row's softmax, in nats, with only some rows' logits in memory; differentiable."""
        return self.by_rows(_entropy)

    def by_rows(self, work: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of the logits of some rows at a time, (rows, classes) to (rows,); a backward pass remakes them."""

        def all_rows(product: Product) -> Tensor:
            def some_rows(hidden: Tensor) -> Tensor:
                return work(product._replace(hidden=hidden).logits())

            rows = product.hidden.reshape(-1, product.hidden.shape[-1])
            parts = torch.split(rows, max(1, _MADE_AT_ONCE // self.classes))
            if torch.is_grad_enabled():
                return torch.cat([checkpoint(some_rows, part, use_reentrant=False) for part in parts])
            return torch.cat([some_rows(part) for part in parts])

        found: Tensor = self._run(self.hidden, self.after, all_rows)
        return found.view(self.hidden.shape[:-1])

    def judged(self, work: Callable[[Product], Any]) -> Any:
        """A function of the `Product` that these are, called where the layer's weight is whole."""
        return self._run(self.hidden, self.after, work)


def _entropy(logits: Tensor) -> Tensor:
    log_p = logits.float().log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _cross_entropy(
    input: Any, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """`F.cross_entropy` of lazy logits."""
    if not isinstance(input, LazyLogits):
        raise refused("labels that are logits")
    if label_smoothing != 0:
        raise refused(f"label_smoothing={label_smoothing}")
    if size_average is not None or reduce is not None:
        raise refused("size_average or reduce, which torch has replaced by reduction")
    if target.is_floating_point() or target.ndim != input.ndim - 1:
        raise refused(f"labels {tuple(target.shape)} of {target.dtype} for logits {tuple(input.shape)}")
    return input._judge(input, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
