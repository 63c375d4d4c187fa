"""A data set in memory, from which a batch is one indexing away."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from softsieve import _checks
from softsieve.tasks.hashing import HashedTexts

IGNORED = -100  # label of positions that do not count
UNSEEN = -101  # label that training has not seen: no loss knows it, and every answer to it is wrong


class Batch(NamedTuple):
    """What a model is called with, and what it should have said."""

    inputs: dict[str, Tensor]
    target: Tensor


class Rows:
    """Encoded examples: tensors whose first dimension counts rows, by the name under which the model takes them.

    Args:
        inputs: arguments of the model, each (rows, ...).
        target: class labels (rows,), flags (rows, classes) for multi-label or labels (rows, positions) for tokens; for
            multi-label with many classes see `LabelRows`.
        lengths: number of positions of every row, for sequences padded at the end.
        sequences: names of the inputs, or ``"target"``, whose second dimension is positions; a batch is cut to its
            longest row.
        texts: further arguments, of which a batch is made from texts; on a device other than the CPU they are inputs.
    """

    def __init__(
        self, inputs: Mapping[str, Tensor], target: Tensor, *, lengths: Tensor | None = None,
        sequences: tuple[str, ...] = (), texts: Mapping[str, HashedTexts] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        for name, value in {"target": target, **inputs}.items():
            _checks.tensor(name, value)
            if value.ndim == 0:
                raise ValueError(f"{name}: expected a tensor of rows, found a single number")
            if len(value) != len(target):
                raise ValueError(f"{name}: expected {len(target)} rows, as many as targets, found {len(value)}")
            if value.device != target.device:
                raise ValueError(f"{name}: expected a tensor on {target.device}, as the target, found {value.device}")
        self.inputs, self.target = dict(inputs), target
        self.lengths, self.sequences, self.texts = lengths, sequences, texts

    def __len__(self) -> int:
        return len(self.target)

    def to(self, device: torch.device | str) -> Rows:
        """The same rows on a device; lengths stay on the CPU, where batches are cut."""
        inputs, target = {name: value.to(device) for name, value in self.inputs.items()}, self.target.to(device)
        texts = self.texts
        if target.device.type != "cpu":
            inputs, texts = inputs | {name: value.dense(device) for name, value in texts.items()}, {}
        return Rows(inputs, target, lengths=self.lengths, sequences=self.sequences, texts=texts)

    def fingerprint(self) -> int:
        """A checksum that tells these rows from others."""
        checksum = 0
        for texts in self.texts.values():
            checksum = texts.checksum(checksum)
        for name, value in {**self.inputs, "target": self.target}.items():
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            header = f"{name} {value.dtype} {tuple(value.shape)}".encode()
            checksum = zlib.crc32(content.data, zlib.crc32(header, checksum))
        return checksum

    def positions(self, index: Tensor, *, rounded: bool = False) -> int:
        """Of the longest of the rows ``index`` (on the CPU), 0 where rows have no lengths.

        Rounded up there are at most four between a number and its double, so that many batches have the same shape.

        Example:
            >>> rows = Rows({}, torch.zeros(3), lengths=torch.tensor([3, 65, 100]))
            >>> [rows.positions(torch.tensor([row]), rounded=True) for row in range(3)]
            [8, 80, 100]
        """
        if self.lengths is None or len(index) == 0:
            return 0
        longest = int(self.lengths[index].max())
        if rounded:
            step = max(8, 1 << max(0, (longest - 1).bit_length() - 3))
            longest = min(-(-longest // step) * step, int(self.lengths.max()))
        return longest

    def batch(self, index: Tensor, *, positions: int | None = None) -> Batch:
        """The rows ``index``, cut to so many positions, or, of an index on the CPU, to the longest of them."""
        length = self.positions(index) if positions is None else positions
        index = index.to(self.target.device, non_blocking=True)

        def pick(name: str, value: Tensor) -> Tensor:
            return (value[:, :length] if name in self.sequences else value)[index]

        made = {name: texts.batch(index, length) for name, texts in self.texts.items()}
        return Batch({n: pick(n, v) for n, v in self.inputs.items()} | made, pick("target", self.target))

    def count(self, index: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Labels of the rows ``index``, or of all, that count, at least 1; those of rows with weight 0 do not.

        Flags count once a row.
        """
        counted = self._counts(self.target if index is None else self.target[index])
        return (counted if weight is None else torch.where(weight > 0, counted, 0)).sum().clamp_min(1)

    def _counts(self, target: Tensor) -> Tensor:
        """Labels of each row that count."""
        if target.dtype == torch.bool:
            return target.new_ones(len(target), dtype=torch.long)
        return (target != IGNORED).reshape(len(target), -1).sum(-1)


class LabelRows(Rows):
    """Rows with any number of labels: class numbers (rows, most), padded with -100, so many classes cost nothing.

    `UNSEEN` stands for labels that training has not seen.
    """

    def to(self, device: torch.device | str) -> LabelRows:
        moved = super().to(device)
        cut = {"lengths": self.lengths, "sequences": self.sequences}
        return LabelRows(moved.inputs, moved.target, texts=moved.texts, **cut)  # type: ignore[arg-type]

    def batch(self, index: Tensor, *, positions: int | None = None) -> Batch:
        """As of `Rows`; labels that training has not seen, which no loss knows, are left out."""
        batch = super().batch(index, positions=positions)
        if batch.target.dtype not in (torch.int32, torch.int64):  # what `Task.rows` makes
            return batch
        return batch._replace(target=batch.target.clamp_min(IGNORED))

    def _counts(self, target: Tensor) -> Tensor:
        return target.new_ones(len(target), dtype=torch.long)
