"""The losses that training runs compare, by name: AS-Softmax and the rivals of the paper's tables.

An objective is a loss together with the head it wants, so that a trainer needs to know nothing else of it::

    objective = make_objective("am-softmax", margin=0.2)
    head = objective.head(hidden_size, num_classes)
    loss, solved, margin = objective(head(hidden), target)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve import _checks
from softsieve.extras import missing
from softsieve.kernels.cross_entropy_torch import check_labels, sum_rows
from softsieve.losses.cross_entropy import as_cross_entropy
from softsieve.losses.linear import linear_as_cross_entropy
from softsieve.losses.linear_multilabel import check_rule, linear_as_multilabel_loss
from softsieve.losses.multilabel import RULES, as_multilabel_loss, positives

TINY = 1e-12  # powers of less have no slope


class Outcome(NamedTuple):
    """A loss and, from objectives that solve rows, which of them are, and by how much they are right.

    A solved row has no loss and no gradient, and the right answer. Both are None from other objectives.

    Attributes:
        loss: reduced as the objective says.
        solved: bool, shape of the leading dimensions.
        margin: float32 or float64, shape of the leading dimensions, in [-1, 1]: that of `ASStats` or `MultiLabelStats`.
    """

    loss: Tensor
    solved: Tensor | None = None
    margin: Tensor | None = None


@dataclass(kw_only=True)
class Objective(ABC):
    """What a trainer knows of a loss. Options are fields, so an objective prints and serialises with its settings."""

    reduction: str = "mean"
    takes_hidden: ClassVar[bool] = False  # whether `linear` is there, for a plain linear head
    limits: ClassVar[tuple[tuple[str, float, float], ...]] = ()  # what the numbers among the fields may be

    def __post_init__(self) -> None:
        _checks.choice("reduction", self.reduction, _checks.REDUCTIONS)
        for name, low, high in self.limits:
            setattr(self, name, _checks.number(name, getattr(self, name), low, high))

    def head(self, in_features: int, num_classes: int) -> nn.Module:
        """The layer that makes this objective's logits from features."""
        return nn.Linear(in_features, num_classes)

    @abstractmethod
    def __call__(self, logits: Tensor, target: Tensor) -> Outcome:
        """Loss of logits ``(..., C)`` against a target: labels ``(...)``, or flags ``(..., C)`` for multi-label."""

    def linear(self, hidden: Tensor, head: nn.Linear, target: Tensor) -> Outcome:
        """Loss of ``head(hidden)`` without ever holding it; the target of multi-label is class numbers ``(..., L)``."""
        raise NotImplementedError(f"{type(self).__name__} needs the logits")


def _layer_loss(loss: Callable[..., Any], hidden: Tensor, head: nn.Linear, target: Tensor, **options: Any) -> Any:
    """The loss of ``head(hidden)``; a head with a ``loss`` of its own, as `SieveLinear` has, is asked for that."""
    own = getattr(head, "loss", None)
    if own is not None:
        return own(hidden, target, **options)
    return loss(hidden, head.weight, target, bias=head.bias, **options)


@dataclass(kw_only=True)
class SingleLabel(Objective):
    """One label a row, some of which may be ignored."""

    ignore_index: int = -100

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.ignore_index(self.ignore_index)


class Rival(SingleLabel):
    """A loss that only says what a row costs: cross-entropy of logits that a rival changes, or one of its own."""

    smoothing = 0.0

    def change(self, logits: Tensor, target: Tensor) -> Tensor:
        """The logits (rows, classes) of which cross-entropy is taken, for labels (rows,) that are all classes."""
        return logits

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Loss of every row of logits (rows, classes) with labels (rows,), all of them classes."""
        changed = self.change(logits, target)
        return F.cross_entropy(changed, target, reduction="none", label_smoothing=self.smoothing)

    def __call__(self, logits: Tensor, target: Tensor) -> Outcome:
        _checks.logits(logits)
        _checks.target(target, logits)
        _checks.class_last(logits)
        label, counted = check_labels(target.reshape(-1).long(), logits.shape[-1], self.ignore_index)
        rows = self.rows(logits.reshape(-1, logits.shape[-1]), label)
        if self.reduction == "none":
            return Outcome(torch.where(counted, rows, 0).view(target.shape))
        total = sum_rows(rows, counted)
        return Outcome(total if self.reduction == "sum" else total / counted.sum().clamp_min(1))


class Softmax(Rival):
    """Plain cross-entropy."""

    takes_hidden = True

    def linear(self, hidden: Tensor, head: nn.Linear, target: Tensor) -> Outcome:
        options: dict[str, Any] = {"ignore_index": self.ignore_index, "reduction": self.reduction}
        return Outcome(_layer_loss(linear_as_cross_entropy, hidden, head, target, delta=1.0, **options))


@dataclass(kw_only=True)
class LabelSmoothing(Rival):
    """Cross-entropy against the target mixed with the uniform distribution."""

    smoothing: float = 0.1
    limits = (("smoothing", 0, 1),)


@dataclass(kw_only=True)
class TSoftmax(Rival):
    """Cross-entropy of ``logits / temperature``."""

    temperature: float = 2.0
    limits = (("temperature", 1e-6, math.inf),)

    def change(self, logits: Tensor, target: Tensor) -> Tensor:
        return logits / self.temperature


@dataclass(kw_only=True)
class SparseSoftmax(Rival):
    """Cross-entropy over the ``k`` largest logits and the target (arXiv 2112.12433)."""

    k: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.whole_number("k", self.k, 1, 2**63 - 1)

    def change(self, logits: Tensor, target: Tensor) -> Tensor:
        top = logits.topk(min(self.k, logits.shape[-1]), -1).indices
        keep = torch.zeros_like(logits, dtype=torch.bool).scatter(1, torch.cat([top, target.unsqueeze(1)], 1), True)
        return torch.where(keep, logits, -math.inf)


class _FromEntmax(Rival):
    """A loss of the ``entmax`` package, missed when the objective is made, not in the middle of training."""

    function: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        if find_spec("entmax") is None:
            raise ImportError(f"{self.function} comes from {missing('entmax')}")

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        import entmax

        unknown = ~logits.detach().amax(-1).isfinite()  # it would search an order of these in vain
        rows: Tensor = self.loss_of(entmax)(logits.masked_fill(unknown[:, None], 0), target)
        return rows.masked_fill(unknown, float("nan"))

    def loss_of(self, entmax: Any) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of rows that the package has."""
        loss: Callable[[Tensor, Tensor], Tensor] = getattr(entmax, self.function)
        return loss


class Sparsemax(_FromEntmax):
    """Sparsemax loss (arXiv 1602.02068)."""

    function = "sparsemax_loss"


@dataclass(kw_only=True)
class Entmax15(_FromEntmax):
    """Entmax loss (arXiv 1905.05702): between softmax, ``alpha`` 1, and sparsemax, 2; exactly 1.5 is the fastest."""

    alpha: float = 1.5
    function = "entmax15_loss"
    limits = (("alpha", 1.01, 2),)

    def loss_of(self, entmax: Any) -> Callable[[Tensor, Tensor], Tensor]:
        if self.alpha == 1.5:
            return super().loss_of(entmax)
        return partial(entmax.entmax_bisect_loss, alpha=self.alpha)


class CosineHead(nn.Module):
    """``scale * cos(features, class weight)``: a linear head on normalised features and weights, without bias."""

    def __init__(self, in_features: int, num_classes: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_classes, in_features))
        nn.init.xavier_uniform_(self.weight)
        self.scale = scale

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(features, dim=-1), F.normalize(self.weight, dim=-1))


@dataclass(kw_only=True)
class AMSoftmax(Rival):
    """Additive margin softmax (arXiv 1801.05599): the target's cosine must win by ``margin``.

    Its logits come from its own head, a `CosineHead`; the margin is taken off the target in the loss only, so a trained
    model predicts by its logits like any other.
    """

    scale: float = 30.0
    margin: float = 0.35
    limits = (("scale", 1e-6, 3e4), ("margin", 0, 2))  # fp16 holds their product

    def head(self, in_features: int, num_classes: int) -> nn.Module:
        return CosineHead(in_features, num_classes, self.scale)

    def change(self, logits: Tensor, target: Tensor) -> Tensor:
        margin = torch.full_like(logits[:, :1], -self.scale * self.margin)
        return logits.scatter_add(1, target.unsqueeze(1), margin)


@dataclass(kw_only=True)
class ASSoftmax(SingleLabel):
    """AS-Softmax (arXiv 2508.03175). ``delta`` may be changed while training."""

    delta: float = 0.1
    takes_hidden = True
    limits = (("delta", 0, 1),)

    def __call__(self, logits: Tensor, target: Tensor) -> Outcome:
        loss, stats = as_cross_entropy(
            logits, target, delta=self.delta, ignore_index=self.ignore_index, reduction=self.reduction,
            return_stats=True,
        )  # fmt: skip
        return Outcome(loss, stats.solved, stats.margin)

    def linear(self, hidden: Tensor, head: nn.Linear, target: Tensor) -> Outcome:
        loss, stats = _layer_loss(
            linear_as_cross_entropy, hidden, head, target, delta=self.delta, ignore_index=self.ignore_index,
            reduction=self.reduction, return_stats=True,
        )  # fmt: skip
        return Outcome(loss, stats.solved, stats.margin)


class MultiLabelSoftmax(Objective):
    """The plain multi-label softmax loss, also known as ZLPR (arXiv 2208.02955). Logits above 0 are predicted.

    It is AS with a margin that nothing reaches.
    """

    takes_hidden = True

    def __call__(self, logits: Tensor, target: Tensor) -> Outcome:
        return Outcome(as_multilabel_loss(logits, target, delta=1.0, against="threshold", reduction=self.reduction))

    def linear(self, hidden: Tensor, head: nn.Linear, target: Tensor) -> Outcome:
        options: dict[str, Any] = {"delta": 1.0, "reduction": self.reduction}
        return Outcome(_layer_loss(linear_as_multilabel_loss, hidden, head, target, **options))


@dataclass(kw_only=True)
class MultiLabelASSoftmax(Objective):
    """Multi-label AS-Softmax. ``delta`` may be changed while training. Logits above 0 are predicted.

    With ``against="labels"``, the published rule, labels can be a margin apart and yet on one side of 0: such a row has
    no gradient but is not solved.
    """

    delta: float = 0.7
    against: str = "threshold"
    takes_hidden = True
    limits = (("delta", 0, 1),)

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.choice("against", self.against, RULES)

    def linear(self, hidden: Tensor, head: nn.Linear, target: Tensor) -> Outcome:
        check_rule(self.against)
        options: dict[str, Any] = {"delta": self.delta, "reduction": self.reduction, "return_stats": True}
        loss, stats = _layer_loss(linear_as_multilabel_loss, hidden, head, target, **options)
        return Outcome(loss, stats.solved, stats.margin)

    def __call__(self, logits: Tensor, target: Tensor) -> Outcome:
        loss, stats = as_multilabel_loss(
            logits, target, delta=self.delta, against=self.against, reduction=self.reduction, return_stats=True
        )
        return Outcome(loss, stats.solved, stats.margin)


class MultiLabelRival(Objective):
    """A loss of every class by itself, added up over the classes of a row. Logits above 0 are predicted."""

    def classes(self, logits: Tensor, target: Tensor) -> Tensor:
        """Loss of every class, (..., C), for flags that are floating-point numbers."""
        return F.binary_cross_entropy_with_logits(logits, target, reduction="none")

    def __call__(self, logits: Tensor, target: Tensor) -> Outcome:
        _checks.logits(logits)
        _checks.target(target, logits, multilabel=True)
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows = self.classes(logits.to(wide), positives(target).to(wide)).sum(-1)
        if self.reduction == "none":
            return Outcome(rows)
        return Outcome(rows.sum() if self.reduction == "sum" else rows.sum() / max(1, rows.numel()))


class BCE(MultiLabelRival):
    """Binary cross-entropy of every class."""


@dataclass(kw_only=True)
class FocalBCE(MultiLabelRival):
    """Binary cross-entropy times ``(1 - p) ** gamma``, with p the probability of what is right (arXiv 1708.02002)."""

    gamma: float = 2.0
    limits = (("gamma", 0, 100),)

    def classes(self, logits: Tensor, target: Tensor) -> Tensor:
        loss = super().classes(logits, target)
        return loss * (1 - (-loss).exp()).clamp_min(TINY) ** self.gamma


@dataclass(kw_only=True)
class Asymmetric(MultiLabelRival):
    """Asymmetric loss (arXiv 2009.14119): a focal loss with a ``gamma`` for each side and easy negatives cut off.

    The formula and the defaults are those of ``timm.loss.AsymmetricLossMultiLabel``, which only knows the sum of a
    batch and needs torchvision.
    """

    gamma_negative: float = 4.0
    gamma_positive: float = 1.0
    clip: float = 0.05
    limits = (("gamma_negative", 0, 100), ("gamma_positive", 0, 100), ("clip", 0, 0.5))

    def classes(self, logits: Tensor, target: Tensor) -> Tensor:
        positive, negative = logits.sigmoid(), ((-logits).sigmoid() + self.clip).clamp(max=1)
        p = torch.where(target == 1, positive, negative)
        gamma = torch.where(target == 1, self.gamma_positive, self.gamma_negative)
        return -((1 - p).clamp_min(TINY) ** gamma) * p.clamp(min=1e-8).log()


SINGLE_LABEL: dict[str, type[Objective]] = {
    "softmax": Softmax,
    "t-softmax": TSoftmax,
    "sparse-softmax": SparseSoftmax,
    "sparsemax": Sparsemax,
    "entmax-1.5": Entmax15,
    "label-smoothing": LabelSmoothing,
    "am-softmax": AMSoftmax,
    "as-softmax": ASSoftmax,
}
MULTI_LABEL: dict[str, type[Objective]] = {
    "softmax": MultiLabelSoftmax,
    "bce": BCE,
    "focal-bce": FocalBCE,
    "asymmetric": Asymmetric,
    "as-softmax": MultiLabelASSoftmax,
}


def make_objective(name: str, *, multilabel: bool = False, **options: object) -> Objective:
    """The objective of that name, for one label a row or for any number of them.

    Args:
        name: one of ``SINGLE_LABEL``, or with ``multilabel`` of ``MULTI_LABEL``.
        multilabel: whether a row has any number of labels.
        **options: its settings; every objective takes ``reduction``, those for one label also ``ignore_index``.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was found.

    Example:
        >>> make_objective("am-softmax", margin=0.2)
        AMSoftmax(reduction='mean', ignore_index=-100, scale=30.0, margin=0.2)
        >>> make_objective("as-softmax")(torch.tensor([[9.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        Outcome(loss=tensor(0.3466), solved=tensor([ True, False]), margin=tensor([0.9998, 0.0000]))
    """
    registry = MULTI_LABEL if multilabel else SINGLE_LABEL
    _checks.choice("name", name, registry)
    known = [f.name for f in fields(registry[name])]
    for option in options:
        if option not in known:
            raise TypeError(f"{name}: expected options among {', '.join(known)}, found {option!r}")
    return registry[name](**options)  # type: ignore[arg-type]
