"""softsieve: a softmax without the classes that cannot matter.

Training: AS-Softmax losses, in which a class that the target already beats by a margin has exactly zero gradient, and
what to do with the time that saves: `ASSpeed` and `SolvedSampler`.
Inference: `AdaptiveSoftmax`, the largest softmax values of a linear head from a part of its weight.
Both: `SieveLinear`, a last layer of very many classes that is trained and served by one object.
From data to a model: `Classifier`, with the conventions of scikit-learn; it needs the extra ``train``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from softsieve.extras import missing
from softsieve.heads import Above, AdaptiveSoftmax, TopK
from softsieve.layers import HeadAdamW, HeadSGD, SieveLinear
from softsieve.losses import (
    ASCrossEntropyLoss,
    ASMultiLabelLoss,
    ASStats,
    DeltaSchedule,
    LinearASCrossEntropyLoss,
    LinearASMultiLabelLoss,
    LinearASStats,
    MultiLabelStats,
    as_cross_entropy,
    as_keep_mask,
    as_multilabel_loss,
    linear_as_cross_entropy,
    linear_as_multilabel_loss,
)
from softsieve.training import ASSpeed, SolvedSampler

if TYPE_CHECKING:
    from softsieve.training.classifier import Classifier as Classifier

__all__ = [
    "ASCrossEntropyLoss", "ASMultiLabelLoss", "ASSpeed", "ASStats", "Above", "AdaptiveSoftmax", "DeltaSchedule",
    "HeadAdamW", "HeadSGD", "LinearASCrossEntropyLoss", "LinearASMultiLabelLoss", "LinearASStats", "MultiLabelStats",
    "SieveLinear", "SolvedSampler", "TopK",
    "as_cross_entropy", "as_keep_mask", "as_multilabel_loss", "linear_as_cross_entropy", "linear_as_multilabel_loss",
]  # fmt: skip
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """`Classifier`, which is imported where it is used: its packages are an extra, and not in ``__all__`` for that."""
    if name != "Classifier":
        raise AttributeError(f"module 'softsieve' has no attribute {name!r}")
    try:
        from softsieve.training.classifier import Classifier
    except ModuleNotFoundError as error:
        raise ImportError(f"softsieve.Classifier needs {missing(error.name, 'train')}") from error
    return Classifier


def __dir__() -> list[str]:
    return sorted([*globals(), "Classifier"])
