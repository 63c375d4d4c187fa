"""Training objectives: AS-Softmax losses, their schedule, and the registry of rivals."""

from softsieve.losses.cross_entropy import ASStats, as_cross_entropy, as_keep_mask
from softsieve.losses.linear import LinearASCrossEntropyLoss, LinearASStats, linear_as_cross_entropy
from softsieve.losses.linear_multilabel import linear_as_multilabel_loss
from softsieve.losses.modules import ASCrossEntropyLoss, ASMultiLabelLoss, LinearASMultiLabelLoss
from softsieve.losses.multilabel import MultiLabelStats, as_multilabel_loss
from softsieve.losses.objectives import make_objective
from softsieve.losses.schedule import DeltaSchedule

__all__ = [
    "ASCrossEntropyLoss", "ASMultiLabelLoss", "ASStats", "DeltaSchedule", "LinearASCrossEntropyLoss",
    "LinearASMultiLabelLoss", "LinearASStats", "MultiLabelStats", "as_cross_entropy", "as_keep_mask",
    "as_multilabel_loss", "linear_as_cross_entropy", "linear_as_multilabel_loss", "make_objective",
]  # fmt: skip
