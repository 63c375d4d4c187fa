"""Reading a weight: columns of all rows, entries of some rows, rows in full. Counts nothing, decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from softsieve.heads.quantised import QuantisedWeight, Weight

LANES = 8  # parts that a column is cut into, so that several threads can add up one query
CHUNK = 1 << 22  # entries gathered at a time
CONVERTED = 1 << 20  # entries converted at a time: they are multiplied while they are in a cache
FEW = 8  # queries for which converting rows of a weight once for each takes less time than once for all, in torch


class Reader:
    """A matrix (n, d) that can be read by columns and by rows.

    Rows stay where the caller has them, quantised ones quantised. The copy by columns, in which a coordinate of all
    rows is one contiguous read, is made when it is first used, in float32 (float64 for a float64 weight); a quantised
    matrix is not read so.
    """

    def __init__(self, weight: Weight) -> None:
        self.weight: Any = weight
        self.rows, self.size = weight.shape
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32

    def parts(self) -> Iterator[Tensor]:
        """The rows, some at a time, in the dtype that is computed with."""
        step = max(1, CHUNK // self.size)
        for start in range(0, self.rows, step):
            yield self.weight[start : start + step].to(self.dtype)

    @cached_property
    def centre(self) -> Tensor:
        """The mean row, (d,). All logits have it in common, so the softmax does not depend on it."""
        return (torch.stack([part.sum(0, dtype=torch.float64) for part in self.parts()]).sum(0) / self.rows).to(
            self.dtype
        )

    @cached_property
    def _columns(self) -> Tensor:
        """(d * LANES, n / LANES), filled up with zeros."""
        lane = -(-self.rows // LANES)
        columns = torch.zeros(self.size, LANES * lane, dtype=self.dtype, device=self.weight.device)
        columns[:, : self.rows].T.copy_(self.weight)
        columns[:, : self.rows] -= self.centre[:, None]
        return columns.view(self.size * LANES, lane)

    @property
    def column_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        size: int = self.weight.dtype.itemsize
        return size

    def columns(self, index: Tensor, factor: Tensor) -> Tensor:
        """``sum over m of factor_m (A - centre)[:, index_m]`` for every query: (batch, m) twice to (batch, n)."""
        batch, size = index.shape
        lanes = torch.arange(LANES, device=index.device)
        bags = (index[:, None] * LANES + lanes[:, None]).reshape(-1, size)
        factors = factor[:, None].expand(batch, LANES, size).reshape(-1, size)
        summed = F.embedding_bag(bags, self._columns, mode="sum", per_sample_weights=factors)
        return summed.view(batch, -1)[:, : self.rows]

    def entries(
        self, query: Tensor, row: Tensor, index: Tensor, factor: Tensor, root: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The same for pairs of a query and a row, and in float64 ``sum (root_m (A - centre)[row, index_m])^2``."""
        values, squares = [], []
        for part in self._parts(len(query), index.shape[1]):
            q = query[part]
            read = self.weight[row[part, None], index[q]].to(self.dtype) - self.centre[index[q]]
            values.append((read * factor[q]).sum(-1))
            if root is not None:
                squares.append((read.double() * root[q]).square().sum(-1))
        return torch.cat(values), torch.cat(squares) if root is not None else None

    def full(self, x: Tensor) -> Tensor:
        """The exact product with all rows: (batch, d) to (batch, n)."""
        if self.weight.dtype == self.dtype:
            return F.linear(x, self.weight)
        if self.weight.is_cuda and not isinstance(self.weight, QuantisedWeight):
            return self._full_in_parts(x)
        if self.weight.is_cpu and len(x) <= FEW:
            return _product_by_rows(self.weight, x)
        if self.weight.is_cpu and not isinstance(self.weight, QuantisedWeight):
            return self._full_converted(x)
        return torch.cat([x @ part.T for part in self.parts()], -1)

    def blocks(self, x: Tensor, at_once: int) -> Iterator[tuple[int, Tensor]]:
        """The same, some rows at a time, with the number of the first: each row is converted once for all queries.

        No more than ``at_once`` numbers at a time, but for those of one row.
        """
        step = max(1, at_once // max(1, len(x)))
        if not self.weight.is_cuda and self.weight.dtype != self.dtype:
            step = min(step, max(1, CHUNK // self.size))
        for start in range(0, self.rows, step):
            yield start, Reader(self.weight[start : start + step]).full(x)

    def _full_converted(self, x: Tensor) -> Tensor:
        """With some rows at a time converted, always to the same memory: new memory takes longer than the product."""
        out, step = x.new_empty(len(x), self.rows), max(1, CONVERTED // self.size)
        room = x.new_empty(min(step, self.rows), self.size)
        for start in range(0, self.rows, step):
            part = self.weight[start : start + step]
            torch.mm(x, room[: len(part)].copy_(part).T, out=out[:, start : start + step])
        return out

    def _full_in_parts(self, x: Tensor) -> Tensor:
        """With queries as sums of three of the weight's dtype, so that one pass over the weight is exact enough."""
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30).log2().ceil().exp2()
        rest, parts = x / scale, []
        for _ in range(3):
            parts.append(rest.to(self.weight.dtype))
            rest = rest - parts[-1]
        product = torch.mm(torch.cat(parts), self.weight.T, out_dtype=self.dtype)
        return product.view(3, len(x), -1).sum(0) * scale

    def pairs(self, query: Tensor, row: Tensor, x: Tensor) -> Tensor:
        """The exact product for pairs of a query and a row, (p,)."""
        parts = self._parts(len(query), self.size)
        return torch.cat([(self.weight[row[p]].to(self.dtype) * x[query[p]]).sum(-1) for p in parts])

    @staticmethod
    def _parts(count: int, size: int) -> Iterator[slice]:
        step = max(1, CHUNK // max(1, size))
        for start in range(0, max(1, count), step):
            yield slice(start, start + step)


def _product_by_rows(weight: Weight, x: Tensor) -> Tensor:
    """The exact product of some queries (batch, d) with all rows of 16 bits or less, converted number by number."""
    from softsieve.heads.cascade.cpu import one_at_a_time, raw_bits  # these need numba
    from softsieve.kernels.base_numba import ALONE
    from softsieve.kernels.rows_numba import exact_rows

    out = torch.empty(len(x), len(weight), dtype=x.dtype)
    arrays, every, none = raw_bits(weight), torch.arange(len(weight)).int().numpy(), x.new_zeros(0).numpy()
    with one_at_a_time():
        for query, logits in zip(x.contiguous().numpy(), out.numpy(), strict=True):
            exact_rows(arrays, query, every, none, logits, ALONE)  # left out, it would be compiled once more
    return out
