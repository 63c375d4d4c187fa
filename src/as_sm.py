"""Drop-in for the `as_sm` module published with AS-Softmax (arXiv 2508.03175): same names, same outputs.

Written anew on `softsieve`. It differs only where the published module breaks: logits of any stride and any finite
size, rows without positives or without negatives, and batches in which every row is solved are fine.
New code should use `softsieve.as_cross_entropy` and `softsieve.as_multilabel_loss`, which need no second pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from softsieve import _checks
from softsieve.losses.cross_entropy import as_keep_mask
from softsieve.losses.multilabel import masks_against_labels, multilabel_rows, positives

__all__ = ["AS_Softmax", "Multi_label_AS_Softmax", "compute_accumulation_step"]

INF = float("inf")

delta = 0.10
"""The margin of the published module, and the default of both classes."""


class AS_Softmax(nn.Module):
    """Masks with -inf the classes that the label beats by more than ``delta``.

    Example:
        >>> logits = torch.tensor([[1.2, 1.5, 1.0, -0.35], [2.5, 3.5, 0.4, 0.3], [2.5, 3.5, 0.4, 0.3]])
        >>> as_logits, labels = AS_Softmax(delta=0.10)(logits, torch.tensor([1, 2, -100]))
        >>> as_logits
        tensor([[  -inf, 1.5000,   -inf,   -inf],
                [2.5000, 3.5000, 0.4000, 0.3000],
                [2.5000, 3.5000,   -inf,   -inf]])
    """

    def __init__(self, delta: float = delta) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Masked logits (rows, classes) and labels (rows,); rows labelled -100 are masked as if their label were 0."""
        _checks.logits(logits)
        _checks.tensor("labels", labels)
        logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        keep = as_keep_mask(logits, torch.where(labels == -100, 0, labels), delta=self.delta)
        return torch.where(keep, logits, -INF), labels


class Multi_label_AS_Softmax(nn.Module):
    """The two masks of multi-label AS-Softmax, and the loss over what they keep.

    Example:
        >>> logits = torch.tensor([[1.2, 1.5, 1.0, -0.35], [2.5, 3.5, 0.4, 0.3], [2.5, 3.5, 0.4, 0.3]])
        >>> labels = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 1]])
        >>> softmax = Multi_label_AS_Softmax(delta=0.10)
        >>> mask_neg, mask_pos = softmax(logits, labels)
        >>> softmax.as_multilabel_categorical_crossentropy(logits, labels, mask_neg, mask_pos)
        tensor(2.0778)
    """

    def __init__(self, delta: float = delta) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Where a class would be kept as a negative, and where as a positive, each (rows, classes)."""
        _checks.logits(logits)
        _checks.target(labels, logits, multilabel=True)
        delta = _checks.number("delta", self.delta, 0, 1)
        negative, positive, _ = masks_against_labels(logits, positives(labels), delta)
        return negative, positive

    def as_multilabel_categorical_crossentropy(
        self, y_pred: Tensor, y_true: Tensor, mask_neg: Tensor, mask_pos: Tensor
    ) -> Tensor:
        """Mean over the rows of the loss over kept negatives and kept positives."""
        positive = positives(y_true)
        return multilabel_rows(y_pred, mask_neg & ~positive, mask_pos & positive).mean()


def compute_accumulation_step(logits: Tensor, lamb: float, speedup: bool = True) -> tuple[int, int, int]:
    """Solved samples, masked classes and accumulation steps of a batch of logits masked by `AS_Softmax`.

    The steps are ``round(lamb * samples / (unsolved samples + 1e-8))``, at least 1, so an exact half is rounded down;
    with every sample solved they are as many as with one left.

    Example:
        >>> masked = torch.tensor([[-INF, 1.5, -INF], [2.5, 3.5, 0.4], [-INF, 3.5, 0.4]])
        >>> compute_accumulation_step(masked, 1.0)
        (1, 3, 1)
    """
    _checks.logits(logits)
    _checks.in_memory("logits", logits)
    lamb = _checks.number("lamb", lamb, -1e18, 1e18)
    masked = logits.reshape(-1, logits.shape[-1]) == -INF
    samples, classes = masked.shape
    solved = int((masked.sum(-1) == classes - 1).sum())
    ratio = samples / (max(1, samples - solved) + 1e-8)
    steps = max(1, round(lamb * ratio)) if speedup else 1
    return solved, int(masked.sum()), steps
