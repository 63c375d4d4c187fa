"""softsieve: a softmax without the classes that cannot matter.

Training: AS-Softmax losses, in which a class that the target already beats by a margin has exactly zero gradient, and
what to do with the time that saves: `ASSpeed` and `SolvedSampler`.
Inference: `AdaptiveSoftmax`, the largest softmax values of a linear head from a part of its weight.
Both: `SieveLinear`, a last layer of very many classes that is trained and served by one object.
"""

from softsieve.heads import AdaptiveSoftmax, TopK
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

__all__ = [
    "ASCrossEntropyLoss", "ASMultiLabelLoss", "ASSpeed", "ASStats", "AdaptiveSoftmax", "DeltaSchedule",
    "HeadAdamW", "HeadSGD", "LinearASCrossEntropyLoss", "LinearASMultiLabelLoss", "LinearASStats", "MultiLabelStats",
    "SieveLinear", "SolvedSampler", "TopK",
    "as_cross_entropy", "as_keep_mask", "as_multilabel_loss", "linear_as_cross_entropy", "linear_as_multilabel_loss",
]  # fmt: skip
__version__ = "0.2.0"
