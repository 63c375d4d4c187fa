"""Hashed features of many texts at once, and of a batch of texts when it is asked for."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softsieve._progress import ProgressCallback, no_progress

BLOCK = 4096  # texts that are worked on together
AT_HAND = 2**27  # bytes of features that are made once and kept; beyond, they are made for every batch anew

SIGNS = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # of scripts that put no spaces between words: a word each
WORD = re.compile(rf"[{SIGNS}]|[^\W{SIGNS}]+|[^\w\s]")


class HashedTexts:
    """Texts that stand for their features: ``(texts, most of them)`` whole numbers, padded with 0.

    `Rows` makes batches of them anew every time, for there is no room for all features.

    Args:
        texts: strings.
        max_length: how many words of each are read.
        most: features of each, at most.
        buckets: features are numbers from 1 to below this.
        progress: called while they are counted.
    """

    def __init__(
        self, texts: Sequence[str], max_length: int, *, most: int, buckets: int,
        progress: ProgressCallback = no_progress,
    ) -> None:  # fmt: skip
        self.texts, self.max_length, self.most, self.buckets = texts, max_length, most, buckets
        counts = []
        for first in range(0, len(texts), BLOCK):
            some = texts[first : first + BLOCK]
            counts.append(self._count(*_to_points(some)))
            progress("counting the features of texts", len(some) / len(texts))
        self.lengths = torch.from_numpy(np.concatenate(counts)) if counts else torch.zeros(0, dtype=torch.long)
        self.longest = max(1, int(self.lengths.max())) if counts else 1

    def __len__(self) -> int:
        return len(self.texts)

    def _count(self, points: Any, starts: Any) -> Any:
        from softsieve.kernels.texts_numba import count_ids  # takes a while to import

        counts = np.empty(len(starts) - 1, np.int64)
        count_ids(points, starts, point_kinds(), self.max_length, self.most, counts)
        return counts

    def batch(self, index: Tensor | Sequence[int], length: int | None = None) -> Tensor:
        """The features of the texts ``index``, int32 (rows, length); without a length, as many as any text has."""
        from softsieve.kernels.texts_numba import fill_ids

        rows = index.tolist() if isinstance(index, Tensor) else index
        points, starts = _to_points([self.texts[row] for row in rows])
        ids = np.zeros((len(rows), self.longest if length is None else length), np.int32)
        counts = self.lengths[torch.as_tensor(rows, dtype=torch.long)].numpy()
        fill_ids(points, starts, point_kinds(), self.max_length, self.most, self.buckets, counts, ids)
        return torch.from_numpy(ids)

    def dense(self, device: torch.device | str = "cpu", *, progress: ProgressCallback = no_progress) -> Tensor:
        """All features as one tensor."""
        out = torch.zeros(len(self), self.longest, dtype=torch.int32, device=device)
        for first in range(0, len(self), BLOCK):
            rows = range(first, min(first + BLOCK, len(self)))
            out[first : first + len(rows)] = self.batch(rows).to(device)
            progress("encoding texts", len(rows) / len(self))
        return out

    def checksum(self, start: int) -> int:
        """One that tells these texts from others, and goes on from another."""
        for text in self.texts:
            start = zlib.crc32(text.encode("utf-8", "surrogatepass"), start)
        return start


def _to_points(texts: Sequence[str]) -> tuple[Any, Any]:
    """The code points of texts in lower case, one after the other, and where each begins."""
    raw = [text.lower().encode("utf-32-le", "surrogatepass") for text in texts]
    starts = np.zeros(len(raw) + 1, np.int64)
    np.cumsum([len(one) // 4 for one in raw], out=starts[1:])
    return np.frombuffer(b"".join(raw), np.uint32), starts


@cache
def point_kinds() -> Any:
    """What every code point is for: 0 divides words, 1 is part of a word, 2 is a word of its own (`WORD`)."""
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    kinds = np.zeros(len(every), np.uint8)
    for kind, pattern in ((1, rf"[^\W{SIGNS}]+"), (2, rf"(?:[{SIGNS}]|[^\w\s])+")):
        for found in re.finditer(pattern, every):
            kinds[found.start() : found.end()] = kind
    return kinds
