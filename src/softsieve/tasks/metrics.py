"""How good answers are: scikit-learn's and seqeval's figures, and a picture of which classes are mistaken."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from softsieve._files import replace_file
from softsieve.extras import package
from softsieve.tasks.rows import IGNORED, UNSEEN

MOST_CLASSES = 40  # that a picture of all pairs of them can show with their names


def class_metrics(decided: Tensor, target: Tensor) -> dict[str, float]:
    """Of class numbers (rows,)."""
    return {"accuracy": _share(decided == target), **_f1(target, decided, "macro", "micro")}


def _f1(target: Tensor, decided: Tensor, *averages: str) -> dict[str, float]:
    f1_score = package("sklearn.metrics", "measuring F1").f1_score
    sides = target.numpy(), decided.numpy()
    return {f"{average}_f1": float(f1_score(*sides, average=average, zero_division=0)) for average in averages}


def token_metrics(decided: Tensor, target: Tensor, labels: Sequence[str]) -> dict[str, float]:
    """Of class numbers (rows, words), without ignored targets; entities too where labels are BIO tags."""
    counted = target != IGNORED
    figures = {"accuracy": _share(decided[counted] == target[counted])}
    if are_bio(labels):
        f1_score = package("seqeval.metrics", "measuring entities").f1_score
        names = dict(enumerate(labels)) | {UNSEEN: "B-?"}  # an entity that no answer is right for
        tags = [
            [[names[i] for i in row[mask].tolist()] for row, mask in zip(side, counted, strict=True)]
            for side in (target, decided)
        ]
        figures["entity_f1"] = float(f1_score(*tags, zero_division=0))
    return figures


def are_bio(labels: Sequence[str]) -> bool:
    """Whether labels mark entities: each O, B-something or I-something.

    Example:
        >>> are_bio(["B-PER", "I-PER", "O"]), are_bio(["NOUN", "O"])
        (True, False)
    """
    return any(label != "O" for label in labels) and all(label == "O" or label[:2] in ("B-", "I-") for label in labels)


def _share(right: Tensor) -> float:
    return float(right.double().mean()) if right.numel() else 0.0


def most_mistaken(target: Tensor, predicted: Tensor, classes: int, *, most: int = MOST_CLASSES) -> Tensor:
    """The numbers, in order, of all classes or of the ``most`` that take part in most mistakes.

    Example:
        >>> most_mistaken(torch.tensor([0, 0, 1, 3]), torch.tensor([0, 3, 1, 0]), 5, most=2)
        tensor([0, 3])
    """
    if classes <= most:
        return torch.arange(classes)
    wrong = predicted != target
    often = torch.bincount(torch.cat([target[wrong], predicted[wrong]]), minlength=classes)
    return often.argsort(descending=True, stable=True)[:most].sort().values


def confusion_matrix_png(path: Path, target: Tensor, predicted: Tensor, labels: Sequence[str]) -> int:
    """Draw how often each class (a row) is taken for each (a column), as shares of the row. Ignored targets are out.

    Of more than `MOST_CLASSES` classes those that are mistaken most; returns how many are drawn.
    """
    package("matplotlib", "drawing")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    counted = target != IGNORED
    target, predicted, total = target[counted], predicted[counted], len(labels)
    drawn = most_mistaken(target, predicted, total)
    classes, labels = len(drawn), [labels[i] for i in drawn.tolist()]
    place = torch.full((total,), classes).scatter(0, drawn, torch.arange(classes))  # of a class; those left out last
    pairs = place[target] * (classes + 1) + place[predicted]
    counts = torch.bincount(pairs, minlength=(classes + 1) ** 2).view(classes + 1, classes + 1)[:classes]
    shares = (counts / counts.sum(1, keepdim=True).clamp_min(1))[:, :classes]

    side = 5 + 0.2 * classes
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    small_ones_too = PowerNorm(0.5, vmin=0, vmax=1)
    image = axes.imshow(shares.numpy(), cmap="Blues", norm=small_ones_too, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="share of the true class", fraction=0.046, pad=0.03)
    which = f"{total} classes" if classes == total else f"the {classes} of {total} classes that are mistaken most"
    figure.suptitle(f"{len(target)} examples, {which}")
    axes.set(xlabel="predicted", ylabel="true")
    names = [label if len(label) <= 20 else f"{label[:19]}…" for label in labels]
    axes.set_xticks(range(classes), names, rotation=90, parse_math=False)
    axes.set_yticks(range(classes), names, parse_math=False)
    if classes <= 10:
        for true, row in enumerate(shares.tolist()):
            for taken, share in enumerate(row):
                axes.text(
                    taken, true, f"{share:.2f}", ha="center", va="center", color="white" if share > 0.3 else "0.2"
                )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a label in a script the font lacks
        replace_file(path, lambda part: figure.savefig(part, format="png", dpi=100))
    return classes
