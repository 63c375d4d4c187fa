"""Rows whose logits are above a threshold: what engines find of them, and how the exact product finds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from softsieve.heads.results import Above

AT_ONCE = 1 << 24  # logits that are in memory at a time
SHARE = 2  # when more than one in so many rows is to be read in full, all are


class RowsAbove(NamedTuple):
    """What an engine found for queries (batch, d): pairs of a query and a row, in any order."""

    query: Tensor  # (pairs,) int64
    row: Tensor  # (pairs,) int64
    logit: Tensor  # (pairs,), times beta
    bytes_read: Tensor  # (batch,) int64
    exact: Tensor  # (batch,) bool: every row was read in full

    @classmethod
    def join(cls, parts: Sequence[RowsAbove]) -> RowsAbove:
        """What was found for several batches, one after the other.

        Example:
            >>> one = RowsAbove(*map(torch.tensor, ([0], [5], [1.0], [8], [True])))
            >>> RowsAbove.join([one, one]).query.tolist()
            [0, 1]
        """
        start, queries = 0, []
        for part in parts:
            queries.append(part.query + start)
            start += len(part.exact)
        return cls(torch.cat(queries), *map(torch.cat, zip(*(part[1:] for part in parts), strict=True)))

    def ordered(self, shape: Sequence[int]) -> Above:
        """Query after query, the largest logit first, equal ones by their rows; for queries of this leading shape.

        Example:
            >>> found = RowsAbove(*map(torch.tensor, ([1, 0, 1], [7, 3, 2], [1.0, 5.0, 1.0], [8, 8], [True, True])))
            >>> found.ordered((2,)).indices.tolist()
            [3, 2, 7]
        """
        order = self.row.argsort(stable=True)
        order = order[self.logit[order].argsort(stable=True, descending=True)]
        order = order[self.query[order].argsort(stable=True)]
        counts = torch.bincount(self.query, minlength=len(self.exact))
        numbers = (value.reshape(tuple(shape)) for value in (counts, self.bytes_read, self.exact))
        counts, bytes_read, exact = numbers
        return Above(counts, self.row[order], self.logit[order], bytes_read, exact)
