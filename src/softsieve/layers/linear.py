"""`SieveLinear`: a linear layer over very many classes, trained without logits and served without reading all of it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve import _checks
from softsieve.heads import AdaptiveSoftmax, TopK
from softsieve.heads.watching import changed_rows
from softsieve.kernels.cross_entropy_torch import accumulation_dtype
from softsieve.layers.optimizers import HeadOptimizer
from softsieve.losses import linear, linear_multilabel
from softsieve.losses.linear import LinearASStats
from softsieve.losses.multilabel import MultiLabelStats

MOST_CHANGED = 0.5  # share of the classes beyond which an index is better built anew

Stats = LinearASStats | MultiLabelStats


class SieveLinear(nn.Linear):
    """A linear layer with its loss, its step and its answers: one object for training and serving.

    `loss` is `linear_as_cross_entropy` or `linear_as_multilabel_loss` of the layer: never rows x classes logits. With
    an ``optimizer`` the gradient of the weight is not held either: the backward pass makes it some classes at a time,
    changes their weights at once, and throws it away. What is there of the size of the weight is the weight and the
    optimizer's state. The result is that of `torch.optim` on the whole gradient, to rounding.

    So **every backward pass is a step**, also of a loss that is added to others or scaled. What needs the gradient
    before that cannot have it: accumulation over several backward passes, clipping, loss scaling for fp16. The layer's
    parameters must not be given to another optimizer; there they have no gradient and are left alone.

    `serve` makes an index of the same weight, without a copy; `topk` and `above` ask it. Before, they are answered by
    the exact product.

    Args:
        in_features: size of the states.
        num_classes: how many there are; with ``group`` of `loss` those of this rank.
        bias: whether the layer has one.
        optimizer: `HeadSGD` or `HeadAdamW`; None: the layer has gradients as any other.
        device, dtype: of the parameters. Losses are computed in this dtype, also under autocast where there is an
            optimizer: bfloat16 takes half the memory and is rounded stochastically.

    Example:
        >>> from softsieve import HeadSGD
        >>> _ = torch.manual_seed(0)
        >>> layer = SieveLinear(16, 5000, optimizer=HeadSGD(4.0))
        >>> states, target = torch.randn(32, 16), torch.randint(5000, (32,))
        >>> for _ in range(50):
        ...     loss, stats = layer.loss(states, target, delta=0.1, return_stats=True)
        ...     loss.backward()  # and the step
        >>> stats.solved.all().item(), layer.weight.grad
        (True, None)
        >>> (layer.topk(states).indices[:, 0] == target).all().item()
        True
    """

    def __init__(
        self, in_features: int, num_classes: int, bias: bool = True, *, optimizer: HeadOptimizer | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        for name, size in {"in_features": in_features, "num_classes": num_classes}.items():
            _checks.whole_number(name, size, 1, 2**40)
        if not isinstance(bias, bool):
            raise TypeError(f"bias: expected a bool, found {type(bias).__name__}")
        super().__init__(in_features, num_classes, bias, device, dtype)
        self._set_optimizer(optimizer)

    @classmethod
    def from_linear(cls, layer: nn.Linear, *, optimizer: HeadOptimizer | None = None) -> SieveLinear:
        """The same for a layer that is there: its parameters are shared, not copied.

        Example:
            >>> plain = torch.nn.Linear(4, 1000)
            >>> SieveLinear.from_linear(plain).weight is plain.weight
            True
        """
        if not isinstance(layer, nn.Linear):
            raise TypeError(f"layer: expected a torch.nn.Linear, found {type(layer).__name__}")
        classes, size = layer.weight.shape
        with torch.device("meta"):
            made = cls(size, classes, layer.bias is not None)
        made.weight, made.bias = layer.weight, layer.bias
        made._set_optimizer(optimizer)
        return made

    def _set_optimizer(self, optimizer: HeadOptimizer | None) -> None:
        if optimizer is not None:
            if not isinstance(optimizer, HeadOptimizer):
                raise TypeError(f"optimizer: expected HeadSGD or HeadAdamW, found {type(optimizer).__name__}")
            self._refuse_float16()
            optimizer.attach(self.weight, self.bias)
        self.optimizer = optimizer
        self._head: AdaptiveSoftmax | None = None

    def _refuse_float16(self) -> None:
        if self.weight.dtype == torch.float16:
            raise ValueError(
                "dtype: expected float32 or bfloat16, found float16, whose gradients need a scale that a step inside "
                "backward does not know"
            )

    def forward(self, hidden: Tensor) -> Tensor:
        """All logits, in the dtype of the weight; with gradients only where there is no optimizer."""
        if self.optimizer is None:
            return super().forward(hidden)
        bias = None if self.bias is None else self.bias.detach()
        return F.linear(hidden.to(self.weight.dtype), self.weight.detach(), bias)

    # -- training ------------------------------------------------------------------------------------------------------

    @overload
    def loss(
        self, hidden: Tensor, target: Tensor, *, delta: float | Tensor | None = ..., ignore_index: int = ...,
        reduction: str = ..., backend: str = ..., group: Any = ..., return_stats: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def loss(
        self, hidden: Tensor, target: Tensor, *, delta: float | Tensor | None = ..., ignore_index: int = ...,
        reduction: str = ..., backend: str = ..., group: Any = ..., return_stats: Literal[True],
    ) -> tuple[Tensor, Stats]: ...  # fmt: skip
    def loss(
        self, hidden: Tensor, target: Tensor, *, delta: float | Tensor | None = None, ignore_index: int = -100,
        reduction: str = "mean", backend: str = "auto", group: Any = None, return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, Stats]:  # fmt: skip
        """The loss of the layer's logits, whose backward pass is a step of the optimizer, if there is one.

        The gradient of the hidden states is that of the weights before the step.

        Args:
            hidden: states, cast to the dtype of the weight where there is an optimizer.
            target: class labels, one a row, as `linear_as_cross_entropy` takes them; or with one dimension more the
                class numbers of `linear_as_multilabel_loss`, any number a row.
            delta: margin in [0, 1]; None: 0.1 for one label a row, 0.5 for several.
            ignore_index, reduction, backend, group, return_stats: as there. With a group, over whose ranks classes are
                sharded, each rank steps its own.

        Shape:
            hidden ``(..., in_features)``, target ``(...)`` or ``(..., L)``; loss ``()``, or ``(...)`` with
            ``reduction="none"``.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was found.
            RuntimeError: in the backward pass, when the weight is not that of the forward pass any more, or when the
                same graph is differentiated a second time.
            NotImplementedError: in the backward pass with ``create_graph=True``, and in compiled graphs.
        """
        several = isinstance(target, Tensor) and isinstance(hidden, Tensor) and target.ndim == hidden.ndim
        stepper = self.optimizer
        if stepper is not None and torch.is_grad_enabled():
            self._check_step(backend, group)
        elif stepper is not None and backend == "reference":  # nothing steps, so it may hold all logits
            stepper, hidden = None, hidden.to(self.weight.dtype)
        shared: dict[str, Any] = {
            "bias": self.bias, "ignore_index": ignore_index, "reduction": reduction, "backend": backend,
            "group": group, "return_stats": return_stats, "stepper": stepper,
        }  # fmt: skip
        if several:
            margin = 0.5 if delta is None else delta
            return linear_multilabel.compute(hidden, self.weight, target, delta=margin, against="threshold", **shared)
        margin = 0.1 if delta is None else delta
        return linear.compute(
            hidden, self.weight, target, delta=margin, class_weight=None, row_weight=None, softcap=None, **shared
        )

    def _check_step(self, backend: str, group: Any) -> None:
        """Refuse what a step inside the backward pass would do wrong."""
        self._refuse_float16()
        if torch.compiler.is_compiling():
            raise NotImplementedError("loss: expected eager mode, found a compiled graph: compile the model before it")
        if backend == "reference":
            raise ValueError("backend: expected one that goes by classes, found 'reference', which has all logits")
        for name, value in {"weight": self.weight, "bias": self.bias}.items():
            if value is not None and not value.requires_grad:
                raise ValueError(f"{name}: expected one that requires a gradient, found a frozen one")
        if not self.weight.is_contiguous():
            raise ValueError("weight: expected a contiguous one, which can be changed in place, found another stride")
        for name, value in self.optimizer.named_buffers():  # type: ignore[union-attr]
            if value.dtype != accumulation_dtype(self.weight) or value.device != self.weight.device:
                expected = f"{accumulation_dtype(self.weight)} on {self.weight.device}"
                raise ValueError(f"optimizer: {name}: expected {expected}, found {value.dtype} on {value.device}")
        kind = self.weight.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            raise ValueError(
                "autocast: expected bfloat16 or none, found float16, which goes with a scaled loss: a step inside the "
                "backward pass would be as many times too long"
            )
        if group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"group: expected the group over which classes are sharded, found None with {dist.get_world_size()} "
                "processes: each would step its own copy, and the copies would differ"
            )

    # -- serving -------------------------------------------------------------------------------------------------------

    def serve(
        self, queries: Tensor, *, basis: Tensor | None = None, k: int | Sequence[int] = 1,
        threshold: float | None = None, eps: float = 0.3, delta: float = 0.01, method: str = "auto",
        generator: torch.Generator | None = None,
    ) -> AdaptiveSoftmax:  # fmt: skip
        """Make an index of the weight for queries like these, which `topk` and `above` then ask.

        Args:
            queries: hidden states, (N, in_features), what later ones will be like.
            basis: others that the index is made for, such as those of training; None: a half of the queries.
            k, threshold: what will be asked for, as `AdaptiveSoftmax.calibrate` takes it.
            eps, delta, method: as `AdaptiveSoftmax` takes them.
            generator: of what is drawn.

        Returns:
            The `AdaptiveSoftmax`, which has the layer's own weight: no copy.

        Example:
            >>> _ = torch.manual_seed(0)
            >>> layer = SieveLinear(64, 2000)
            >>> head = layer.serve(torch.randn(2000, 64), k=5)
            >>> layer.topk(torch.randn(64), k=5).indices.shape, head.weight.data_ptr() == layer.weight.data_ptr()
            (torch.Size([5]), True)
        """
        head = AdaptiveSoftmax(self.weight, self.bias, eps=eps, delta=delta, method=method)
        if method != "exact":
            if basis is not None:
                head.build(basis)
            head.calibrate(queries, k, threshold=threshold, generator=generator)
        self._head = head
        return head

    @property
    def served(self) -> AdaptiveSoftmax | None:
        """The head with the index of `serve`; None without, or when the layer has another weight by now."""
        head = self._head
        if head is None or head.index is None or head.weight.data_ptr() != self.weight.data_ptr():
            return None
        return head

    def save_index(self, path: str | os.PathLike[str]) -> None:
        """Write the index of `serve` to a file, without the weight, which stays with the model.

        Raises:
            RuntimeError: when there is no index.
            InputError: when it cannot be written.
            WeightChanged: when the layer was trained after `serve`: call `refresh`.
        """
        if self.served is None:
            raise RuntimeError("save_index: expected an index, found none: call serve(queries) first")
        self.served.save(path, weight=False)

    def load_index(self, path: str | os.PathLike[str]) -> AdaptiveSoftmax:
        """Take up an index that `save_index` wrote.

        Raises:
            InputError: when the file cannot be read, or was made for another weight.

        Example:
            >>> from tempfile import TemporaryDirectory
            >>> layer, same = SieveLinear(64, 2000), SieveLinear(64, 2000)
            >>> same.load_state_dict(layer.state_dict())
            <All keys matched successfully>
            >>> _ = layer.serve(torch.randn(2000, 64))
            >>> with TemporaryDirectory() as folder:
            ...     layer.save_index(f"{folder}/index.safetensors")
            ...     same.load_index(f"{folder}/index.safetensors")
            AdaptiveSoftmax(2000 x 64, eps=0.3, delta=0.01, method='auto', guarantee='calibrated')
        """
        bias = None if self.bias is None else self.bias.detach()
        self._head = AdaptiveSoftmax.load(path, weight=self.weight.detach(), bias=bias)
        return self._head

    def topk(self, hidden: Tensor, k: int = 1) -> TopK:
        """The k largest softmax values of every state: by the index of `serve`, or the exact product without one.

        Raises:
            WeightChanged: when the layer was trained after `serve`: call `refresh`.
        """
        return self._asked().topk(hidden, k)

    def above(self, hidden: Tensor, threshold: float = 0.0) -> Any:
        """The classes whose logit is above the threshold: what `AdaptiveSoftmax.above` returns."""
        head: Any = self._asked()
        return head.above(hidden, threshold)

    def _asked(self) -> AdaptiveSoftmax:
        """The head of `serve`, or the exact one."""
        if self._head is None or self._head.weight.data_ptr() != self.weight.data_ptr():
            self._head = AdaptiveSoftmax(self.weight, self.bias, method="exact")
        return self._head

    def refresh(self) -> int:
        """Bring the index of `serve` up to date after more training; returns how many classes had changed.

        Only these are encoded anew; the basis of the index and its calibrations stay, which is right for small changes.
        Warns when more than half of the classes changed: `serve` again then. An index of another weight than the layer
        has by now is not in use, and nothing is done.

        Example:
            >>> _ = torch.manual_seed(0)
            >>> layer = SieveLinear(64, 2000)
            >>> head = layer.serve(torch.randn(2000, 64))
            >>> with torch.no_grad():
            ...     layer.bias[[7, 30]] += 1
            >>> layer.refresh()
            2
        """
        head = self.served
        if head is None or head.index is None:
            return 0
        bias = None if self.bias is None else self.bias.detach()
        rows = changed_rows(self.weight.detach(), bias, head.index.checksums)
        if len(rows) > MOST_CHANGED * len(self.weight):
            share = f"{len(rows)} of {len(self.weight)} classes changed since the index was made"
            warnings.warn(f"refresh: {share}: serve(queries) makes one that suits them", stacklevel=2)
        if len(rows):
            head.update_rows(rows)
        return len(rows)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_classes={self.out_features}, bias={self.bias is not None}"
