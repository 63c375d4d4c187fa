"""What rows weigh in the loss, by their class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from softsieve import _checks
from softsieve.errors import InputError, shown

BALANCED = "balanced"


def check_class_weights(asked: Any) -> str | tuple[tuple[str, float], ...] | None:
    """What `Settings.class_weights` may be, a mapping as sorted pairs, which can be hashed.

    Raises:
        TypeError, ValueError: naming the label, what was expected and what was found.

    Example:
        >>> check_class_weights({"no": 1, "yes": 5})
        (('no', 1.0), ('yes', 5.0))
    """
    if asked is None or asked == BALANCED:
        return None if asked is None else BALANCED
    if not isinstance(asked, Mapping | tuple):
        raise TypeError(f"class_weights: expected {BALANCED!r} or weights by label, found {shown(asked)}")
    pairs = dict(asked)
    for label, weight in pairs.items():
        if not isinstance(label, str):
            raise TypeError(f"class_weights: expected labels as str, found {shown(label)}")
        _checks.number(f"class_weights: {shown(label)}", weight, 0)
    return tuple(sorted((label, float(weight)) for label, weight in pairs.items()))


def class_weights(asked: str | Sequence[tuple[str, float]], labels: Sequence[str], target: Tensor) -> Tensor:
    """The weight of every class, such that the training labels ``target`` weigh 1 on average.

    ``"balanced"``: the same weight for all classes together, one over the count of each, as scikit-learn has it. Of
    weights by label only the ratios matter, and labels that are not named have weight 1 before they are scaled.

    Raises:
        InputError: when a label is not one of ``labels``, or all training labels weigh 0.

    Example:
        >>> class_weights("balanced", ["no", "yes"], torch.tensor([0, 0, 0, 1]))
        tensor([0.6667, 2.0000])
    """
    counts = torch.bincount(target[target >= 0].flatten().cpu(), minlength=len(labels)).double()
    if asked == BALANCED:
        weight = 1 / counts.clamp_min(1)
    else:
        number = {label: i for i, label in enumerate(labels)}
        weight = torch.ones(len(labels), dtype=torch.float64)
        for label, value in dict(asked).items():  # type: ignore[arg-type]
            if label not in number:
                raise InputError(f"class_weights: expected labels of the data, found {shown(label)}, which is none")
            weight[number[label]] = value
    total = (weight * counts).sum()
    if total == 0:
        raise InputError("class_weights: expected a class of the training data to weigh more than 0, found none")
    return (weight * counts.sum() / total).float()
