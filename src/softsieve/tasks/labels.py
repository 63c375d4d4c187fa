"""Any number of labels a row, out of many: as numbers, as flags, in the order of their logits, and how good that is.

Nothing here takes memory of the size of rows times classes but `label_flags`, which is for one batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from softsieve.tasks.rows import IGNORED, UNSEEN

RANKED = 128  # classes of a row that are kept, those of the largest logits; a row has at most so many labels
TOP = (1, 3, 5)  # that a reader sees of them
# Of propensities (Jain et al., KDD 2016): for data in general.
A, B = 0.55, 1.5


def label_flags(numbers: Tensor, classes: int) -> Tensor:
    """Class numbers (rows, most), negative ones for none, as flags (rows, classes).

    Example:
        >>> label_flags(torch.tensor([[2, 0], [1, -100]]), 3).int()
        tensor([[1, 0, 1],
                [0, 1, 0]], dtype=torch.int32)
    """
    none = classes  # a column that is cut off again
    flags = numbers.new_zeros(len(numbers), classes + 1, dtype=torch.bool)
    return flags.scatter_(1, torch.where(numbers < 0, none, numbers).long(), True)[:, :classes]


def rank_labels(logits: Tensor, *, least: int = 0) -> Tensor:
    """The classes of the `RANKED` largest logits (..., C), the largest first; of those not above 0 the complement.

    With ``least`` 1 the first is a label anyway.

    Example:
        >>> rank_labels(torch.tensor([[-1.0, 3.0, 2.0]]))  # 1 and 2 are labels, ~0 is not
        tensor([[ 1,  2, -1]], dtype=torch.int32)
    """
    top = logits.topk(min(RANKED, logits.shape[-1]), -1)
    taken = top.values > 0
    taken[..., :least] = True
    return torch.where(taken, top.indices, ~top.indices).int()


class Threshold(NamedTuple):
    """A logit above which classes are labels, how many of the best are labels anyway, and the micro F1 of that."""

    logit: float
    least: int
    micro_f1: float


def best_logits(logits: Tensor) -> Tensor:
    """The `RANKED` largest logits (rows, C) and their classes as numbers (rows, RANKED, 2), for `fit_threshold`."""
    top = logits.topk(min(RANKED, logits.shape[-1]), -1)
    return torch.stack([top.values.double(), top.indices.double()], -1)


def fit_threshold(best: Tensor, target: Tensor) -> Threshold:
    """The threshold with the best micro F1 on rows with labels (rows, most) whose `best_logits` are given.

    A row of which no class is above it has no label, or its best one where that makes more of the decisions right.

    Example:
        >>> logits = torch.tensor([[2.0, -1.0, -3.0], [-2.0, -1.0, -4.0]])
        >>> fit_threshold(best_logits(logits), torch.tensor([[0, 1], [1, -100]]))
        Threshold(logit=-1.5, least=0, micro_f1=1.0)
    """
    values, classes = best.unbind(-1)
    hit = _find(classes.long(), target)
    true = int(((target >= 0) | (target == UNSEEN)).sum())

    def search(least: int) -> Threshold:
        sure = int(hit[:, :least].sum())
        ordered, order = values[:, least:].flatten().sort(descending=True)
        found = torch.cat([torch.zeros(1), hit[:, least:].flatten()[order].cumsum(0)]) + sure
        decided = torch.arange(len(ordered) + 1) + least * len(values)
        scores = 2 * found / (decided + true).clamp_min(1)
        here = int(scores.argmax())  # so many are above
        around = [*ordered[max(0, here - 1) : here + 1].tolist()] or [0.0]
        edge = around[0] + 1.0 if here == 0 else sum(around) / len(around)
        return Threshold(edge if here < len(ordered) else edge - 1.0, least, float(scores[here]))

    none, one = search(0), search(1)
    return one if one.micro_f1 > none.micro_f1 else none


def propensities(counts: Tensor, rows: int) -> Tensor:
    """How likely a label is to be noted where it is true, by how many of the training rows have it (Jain et al.)."""
    scale = (torch.tensor(max(rows, 3), dtype=torch.float64).log() - 1) * (B + 1) ** A
    return torch.reciprocal(1 + scale * (counts.double() + B) ** -A)


def label_metrics(
    ranked: Tensor, target: Tensor, classes: int, *, propensity: Tensor | None = None
) -> dict[str, float]:
    """How good ranked classes (`rank_labels`) are for labels (rows, most), numbers padded with -100.

    Labels that training has not seen (`UNSEEN`) are labels that no answer finds.

    F1 over all decisions and its mean over classes; exact match: all labels of the row and no other; P@k: the share of
    the first k that are labels; nDCG@k; PSP@k: P@k with labels weighted by their propensities, over the best there is.
    The last three are means over the rows that have labels.
    """
    hit = _find(ranked, target)
    numbers, predicted, labelled = torch.where(ranked < 0, ~ranked, ranked), ranked >= 0, target != IGNORED
    found, decided, true = (
        torch.bincount(some.long(), minlength=classes).double()
        for some in (numbers[predicted & hit], numbers[predicted], target[target >= 0])
    )
    unseen = (target == UNSEEN).sum()
    all_right = ((predicted & hit).sum(1) == labelled.sum(1)) & (predicted.sum(1) == labelled.sum(1))
    figures = {
        "micro_f1": _ratio(2 * found.sum(), decided.sum() + true.sum() + unseen),
        "macro_f1": float((2 * found / (decided + true).clamp_min(1)).mean()),
        "exact_match": float(all_right.double().mean()) if len(target) else 0.0,
    }
    some = labelled.any(1)
    hit, counts = hit[some].double(), labelled[some].sum(1)
    for k in TOP:
        figures[f"p@{k}"] = _ratio(hit[:, :k].sum(), torch.tensor(k * len(hit)))
    worth = 1 / torch.arange(2, TOP[-1] + 2).double().log2()  # of each place
    best = torch.where(torch.arange(TOP[-1]) < counts[:, None], worth, 0).sum(1)
    gained = (hit[:, : TOP[-1]] * worth[: hit.shape[1]]).sum(1)
    figures[f"ndcg@{TOP[-1]}"] = _ratio((gained / best).sum(), torch.tensor(len(hit)))
    if propensity is not None:
        weight = 1 / propensity.double()
        weight_of = torch.where(target >= 0, weight[target.clamp_min(0)], weight.max())  # a label never seen is rare
        own = torch.where(labelled, weight_of, 0)[some].sort(1, descending=True).values
        gained = hit * weight[numbers[some].long()]
        for k in TOP:
            figures[f"psp@{k}"] = _ratio(gained[:, :k].sum(), own[:, :k].sum())
    return figures


def _find(ranked: Tensor, target: Tensor, *, block: int = 2**22) -> Tensor:
    """Which of the ranked classes are labels of their row, bool; some rows at a time."""
    size = max(1, block // max(1, ranked.shape[1] * target.shape[1]))
    numbers = torch.where(ranked < 0, ~ranked, ranked)
    parts = zip(torch.split(numbers, size), torch.split(target, size), strict=True)
    return torch.cat([(some[:, :, None] == own[:, None]).any(2) for some, own in parts])


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if whole > 0 else 0.0
