"""What a report says of a model's answers to held-out rows: how good each class is, which are confused, which rows.

All of it is small, whatever the data: no more than some dozens of rows are quoted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softsieve.tasks.examples import Examples
from softsieve.tasks.rows import IGNORED
from softsieve.tasks.task import Task

JUDGED = "judged.json"  # in the folder of a run
MOST_CLASSES, MOST_PAIRS, MOST_MISTAKES = 1000, 40, 24
LONGEST = 300  # characters of an input
AT_ONCE = 4096  # rows


def judged(
    task: Task, examples: Examples, decided: Tensor, target: Tensor, probability: Tensor | None
) -> dict[str, Any]:
    """Classes, the worst first, and of rows with one label the pairs mistaken most and the most confident mistakes.

    Args:
        task: what was learnt.
        examples: the rows, for their words.
        decided, target: as of `Task.by_word`.
        probability: of what was decided, (rows,), where a row has one label.

    Example:
        >>> from softsieve.tasks.encode import built_in
        >>> data = Examples(["a", "b", "c"], ["x", "y", "y"], ["1", "2", "3"])
        >>> task = Task("text", ["x", "y"], built_in("text", data, 8, 2))
        >>> found = judged(task, data, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), torch.tensor([0.9, 0.8, 0.7]))
        >>> found["classes"][0]
        {'label': 'y', 'precision': 1.0, 'recall': 0.5, 'f1': 0.6667, 'support': 2}
        >>> found["mistakes"]
        [{'input': 'b', 'label': 'y', 'prediction': 'x', 'probability': 0.8}]
    """
    known, found, right = _counts(task, decided, target)
    precision, recall = right / found.clamp_min(1), right / known.clamp_min(1)
    f1 = 2 * right / (known + found).clamp_min(1)
    order = sorted((known + found).nonzero().flatten().tolist(), key=lambda i: (float(f1[i]), -int(known[i]), i))
    classes = [
        {
            "label": task.labels[i],
            **{name: round(float(v[i]), 4) for name, v in (("precision", precision), ("recall", recall), ("f1", f1))},
            "support": int(known[i]),
        }
        for i in order[:MOST_CLASSES]
    ]
    result: dict[str, Any] = {"rows": len(target), "classes": classes, "pairs": [], "mistakes": []}
    if probability is not None and target.ndim == 1:
        wrong = ((decided != target) & (target >= 0)).nonzero().flatten()
        result["pairs"] = _pairs(task, decided[wrong], target[wrong], known)
        confident = wrong[probability[wrong].argsort(descending=True, stable=True)][:MOST_MISTAKES].tolist()
        result["mistakes"] = [
            {
                "input": _shown(examples, row),
                "label": task.labels[int(target[row])],
                "prediction": task.labels[int(decided[row])],
                "probability": round(float(probability[row]), 4),
            }
            for row in confident
        ]
    return result


def _counts(task: Task, decided: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every class how often it is the label, the answer, and both."""
    if task.multilabel:
        parts = zip(torch.split(decided, AT_ONCE), torch.split(target, AT_ONCE), strict=True)
        hit = torch.cat([(d[:, :, None] == t[:, None, :]).any(2) for d, t in parts])
        sides = target, decided, torch.where(hit, decided, -1)
    else:
        counted = target != IGNORED
        sides = target[counted], decided[counted], torch.where(decided == target, target, -1)[counted]
    known, found, right = (torch.bincount(side[side >= 0].long(), minlength=len(task.labels)) for side in sides)
    return known, found, right


def _pairs(task: Task, decided: Tensor, target: Tensor, known: Tensor) -> list[dict[str, Any]]:
    """Which classes are taken for which others, the most frequent first."""
    pairs, counts = torch.unique(torch.stack([target.long(), decided.long()], 1), dim=0, return_counts=True)
    order = counts.argsort(descending=True, stable=True)[:MOST_PAIRS].tolist()
    return [
        {
            "label": task.labels[int(pairs[i, 0])],
            "prediction": task.labels[int(pairs[i, 1])],
            "rows": int(counts[i]),
            "share": round(float(counts[i] / known[pairs[i, 0]]), 4),
        }
        for i in order
    ]


def _shown(examples: Examples, row: int) -> str:
    """A text, cut, or the name of a file."""
    value = examples.inputs[row]
    text = str(value) if isinstance(value, str | Path) else examples.where[row]
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
