"""The losses as modules. ``delta`` is a plain attribute: change it while training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from softsieve import _checks
from softsieve.losses.cross_entropy import ASStats, as_cross_entropy
from softsieve.losses.linear import check_options
from softsieve.losses.linear_multilabel import check_rule, linear_as_multilabel_loss
from softsieve.losses.multilabel import RULES, MultiLabelStats, as_multilabel_loss


class ASCrossEntropyLoss(nn.Module):
    """Module form of `as_cross_entropy`, with the arguments of `torch.nn.CrossEntropyLoss` where both have them.

    Args:
        delta: margin in [0, 1]. May be changed while training.
        weight: weight of each class, ``(C,)``; moves with the module.
        ignore_index: label of rows that do not count.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        return_stats: return the pair of loss and `ASStats`.

    Shape:
        logits ``(..., C)``, classes last, target ``(...)``; loss ``()``, or ``(...)`` with ``reduction="none"``.

    Example:
        >>> criterion = ASCrossEntropyLoss(delta=0.1)
        >>> logits, target = torch.tensor([[1.2, 1.5, 1.0, -0.35]]), torch.tensor([1])
        >>> criterion(logits, target)
        tensor(0.)
        >>> criterion.delta = 1.0  # from here on plain cross-entropy
        >>> criterion(logits, target)
        tensor(0.9181)
    """

    weight: Tensor | None

    def __init__(
        self, delta: float = 0.1, *, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
        return_stats: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.delta = _checks.number("delta", delta, 0, 1)
        _checks.ignore_index(ignore_index)
        _checks.choice("reduction", reduction, _checks.REDUCTIONS)
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.return_stats = ignore_index, reduction, return_stats

    def forward(self, logits: Tensor, target: Tensor) -> Tensor | tuple[Tensor, ASStats]:
        return as_cross_entropy(
            logits, target, delta=self.delta, ignore_index=self.ignore_index, reduction=self.reduction,
            weight=self.weight, return_stats=self.return_stats,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"delta={self.delta}, ignore_index={self.ignore_index}, reduction={self.reduction!r}"


class ASMultiLabelLoss(nn.Module):
    """Module form of `as_multilabel_loss`.

    Args:
        delta: margin in [0, 1]. May be changed while training.
        against: ``"labels"``, the published rule, or ``"threshold"``.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        return_stats: return the pair of loss and `MultiLabelStats`.

    Shape:
        logits and target ``(..., C)``; loss ``()``, or ``(...)`` with ``reduction="none"``.

    Example:
        >>> criterion = ASMultiLabelLoss(delta=0.1)
        >>> criterion(torch.tensor([[3.0, 2.0, -4.0]]), torch.tensor([[1, 0, 0]]))
        tensor(0.)
    """

    def __init__(
        self, delta: float = 0.1, *, against: str = "labels", reduction: str = "mean", return_stats: bool = False
    ) -> None:
        super().__init__()
        self.delta = _checks.number("delta", delta, 0, 1)
        _checks.choice("against", against, RULES)
        _checks.choice("reduction", reduction, _checks.REDUCTIONS)
        self.against, self.reduction, self.return_stats = against, reduction, return_stats

    def forward(self, logits: Tensor, target: Tensor) -> Tensor | tuple[Tensor, MultiLabelStats]:
        return as_multilabel_loss(
            logits, target, delta=self.delta, against=self.against, reduction=self.reduction,
            return_stats=self.return_stats,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"delta={self.delta}, against={self.against!r}, reduction={self.reduction!r}"


class LinearASMultiLabelLoss(nn.Module):
    """A linear layer with the multi-label AS-Softmax loss on top: module form of `linear_as_multilabel_loss`.

    Made as `LinearASCrossEntropyLoss` is. ``weight`` and ``bias`` are its parameters.

    Args:
        in_features: size of the states.
        num_classes: how many there are.
        delta: margin in [0, 1]. May be changed while training.
        bias: whether the layer has one.
        against: ``"threshold"``.
        ignore_index, reduction, backend, memory, return_stats: as there. Memory that is too little for the rows of a
            batch is refused when that comes, with what it needs.
        device, dtype: of the parameters.

    Shape:
        hidden ``(..., in_features)``, labels ``(..., L)``; loss ``()``, or ``(...)`` with ``reduction="none"``.

    Example:
        >>> criterion = LinearASMultiLabelLoss(8, 1000, delta=0.5)
        >>> loss = criterion(torch.randn(2, 8), torch.tensor([[7, 400], [12, -100]]))
        >>> loss.backward()
        >>> criterion.weight.grad.shape
        torch.Size([1000, 8])
    """

    def __init__(
        self, in_features: int, num_classes: int, delta: float = 0.5, *, bias: bool = False,
        against: str = "threshold", ignore_index: int = -100, reduction: str = "mean", backend: str = "auto",
        memory: int | None = None, return_stats: bool = False, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, size in {"in_features": in_features, "num_classes": num_classes}.items():
            _checks.whole_number(name, size, 1, 2**40)
        layer = nn.Linear(in_features, num_classes, bias, device, dtype)
        self.weight, self.bias = layer.weight, layer.bias
        self.delta = _checks.number("delta", delta, 0, 1)
        check_rule(against)
        check_options(ignore_index, reduction, backend)
        self.against, self.ignore_index, self.reduction = against, ignore_index, reduction
        if memory is not None:
            _checks.whole_number("memory", memory, 1, 2**62)
        self.backend, self.memory, self.return_stats = backend, memory, return_stats

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, MultiLabelStats]:
        return linear_as_multilabel_loss(
            hidden, self.weight, labels, bias=self.bias, delta=self.delta, against=self.against,
            ignore_index=self.ignore_index, reduction=self.reduction, backend=self.backend, memory=self.memory,
            return_stats=self.return_stats,
        )  # fmt: skip

    def extra_repr(self) -> str:
        classes, size = self.weight.shape
        return (
            f"in_features={size}, num_classes={classes}, bias={self.bias is not None}, delta={self.delta}, "
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, backend={self.backend!r}"
        )
