"""What readers of data are asked for, and hand over: examples with their labels and places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from softsieve.errors import InputError
from softsieve.tasks.reading import Reading
from softsieve.tasks.texts import pick_cells

KINDS = ("text", "multilabel", "tokens", "image", "audio")
MEDIA = {"image": (".png", ".jpg", ".jpeg", ".bmp", ".webp"), "audio": (".wav", ".flac", ".ogg", ".mp3")}
PARTS = {"train": ("train",), "validation": ("validation", "valid", "dev", "val"), "test": ("test",)}  # and aliases


class Examples(NamedTuple):
    """One part of a data set: inputs, labels and places of equal length, the labels maybe missing (an empty list).

    Inputs by kind. text, multilabel: str; tokens: list[str] (words or characters); image: Path, bytes of such a file,
    or uint8 array (H, W) or (H, W, 3); audio: Path, bytes of such a file, or (float32 mono samples, rate).
    Labels by kind. text, image, audio: str; multilabel: list[str], may be empty; tokens: list[str], one per word.
    """

    inputs: Sequence[Any]
    labels: Sequence[Any]
    where: Sequence[str]  # for error messages: "train.csv:17" or a file name
    others: Mapping[str, Sequence[Any]] = MappingProxyType({})  # columns of no use here, cell by cell as they were read
    notes: tuple[str, ...] = ()  # what a user should know of how they were read

    def pick(self, rows: Sequence[int]) -> Examples:
        """Some of the examples, in the order of ``rows``.

        Example:
            >>> Examples(["a", "b"], ["x", "y"], ["1", "2"]).pick([1]).inputs
            ['b']
        """
        inputs, labels, where = (pick_cells(cells, rows) if len(cells) else [] for cells in self[:3])
        others = {name: pick_cells(cells, rows) for name, cells in self.others.items()}
        return Examples(inputs, labels, where, others, self.notes)


class Data(NamedTuple):
    """A data set of one kind (of KINDS)."""

    name: str
    kind: str
    train: Examples
    validation: Examples | None
    test: Examples | None
    labels: list[str] | None = None  # the full label set, where it is known beyond what training shows
    notes: tuple[str, ...] = ()  # what a user should know of how they were read: rows left out, labels not seen


def label_names(data: Data) -> list[str]:
    """The sorted label set: `data.labels` where given, otherwise the labels of the training examples."""
    if data.labels is not None:
        return sorted(set(data.labels))
    return sorted({label for labels in data.train.labels for label in as_list(labels)})


def as_list(labels: Any) -> list[Any]:
    """The labels of an example as a list, of one label too."""
    return labels if isinstance(labels, list) else [labels]


class Wanted(NamedTuple):
    """What the caller said of the data."""

    kind: str | None
    text_column: str | None
    label_column: str | None
    how: Reading = Reading()  # objects in memory leave no notes on it

    def expect_no_columns(self, place: object) -> None:
        """Refuse the name of a column where there are none."""
        for name in ("text_column", "label_column"):
            if getattr(self, name) is not None:
                raise InputError(f"{name}: expected with a table, found with {place}, which has no named columns")


class Part(NamedTuple):
    """One part as read: its kind, its examples and the label set its source declares."""

    kind: str
    examples: Examples
    labels: list[str] | None = None


def media_kind(file: object) -> str | None:
    """The kind that the end of a file's name tells, of anything else None."""
    end = Path(file).suffix.lower() if isinstance(file, str) else ""
    return next((kind for kind, extensions in MEDIA.items() if end in extensions), None)
