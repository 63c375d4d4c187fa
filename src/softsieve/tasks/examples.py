"""What every reader of data hands over: examples with their labels and places."""

from __future__ import annotations

from typing import Any, NamedTuple

KINDS = ("text", "multilabel", "tokens", "image", "audio")


class Examples(NamedTuple):
    """One part of a data set; three lists of equal length.

    Inputs by kind. text, multilabel: str; tokens: list[str] (words or characters); image: Path, bytes of an
    encoded image, or uint8 array (H, W) or (H, W, 3); audio: Path or (float32 mono samples, rate).
    Labels by kind. text, image, audio: str; multilabel: list[str], may be empty; tokens: list[str], one per word.
    """

    inputs: list[Any]
    labels: list[Any]
    where: list[str]  # for error messages: "train.csv:17" or a file name


class Data(NamedTuple):
    """A data set of one kind (of KINDS)."""

    name: str
    kind: str
    train: Examples
    validation: Examples | None
    test: Examples | None
    labels: list[str] | None = None  # the full label set, where it is known beyond what training shows


def label_names(data: Data) -> list[str]:
    """The sorted label set: `data.labels` where given, otherwise the labels of the training examples."""
    if data.labels is not None:
        return sorted(set(data.labels))
    if data.kind in ("multilabel", "tokens"):
        return sorted({label for labels in data.train.labels for label in labels})
    return sorted(set(data.train.labels))
