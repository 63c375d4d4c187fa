"""The basis in which prefixes of rows are the best previews of logits, for queries like the sample queries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

RIDGE = 1e-2  # part of the mean second moment that is added in all directions: samples are finite


class Moments:
    """The first and second moment of queries that come some at a time, in memory that does not grow with their number.

    Example:
        >>> moments = Moments(2)
        >>> moments.update(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
        >>> moments.count, moments.mean.tolist()
        (2, [[5.0, 0.0], [0.0, 0.0]])
    """

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.count = 0
        self._first = torch.zeros(size, dtype=torch.float64, device=device)
        self._second = torch.zeros(size, size, dtype=torch.float64, device=device)

    def update(self, queries: Tensor) -> None:
        """Add queries (N, size)."""
        self.count += len(queries)
        self._first += queries.sum(0, dtype=torch.float64)
        self._second += (queries.T @ queries).double()

    @property
    def first(self) -> Tensor:
        """The mean query. (size,)"""
        return self._first / self.count

    @property
    def mean(self) -> Tensor:
        """The mean of ``x x'``. (size, size)"""
        return self._second / self.count


class Basis(NamedTuple):
    """``rows = (A - centre) expand`` and ``y = project x`` with ``rows @ y = (A - centre) @ x``."""

    expand: Tensor  # (d, d)
    project: Tensor  # (d, d)


def joint_basis(query_moment: Tensor, row_moment: Tensor) -> Basis:
    """The basis whose prefixes lose least of ``(A - centre) x``, in the mean over rows and queries.

    With ``query_moment = F F'`` and ``F' row_moment F = R diag(lambda) R'``, lambda falling: rows become ``A F R`` and
    queries ``R' F^-1 x``, which have the identity as second moment. The first m coordinates are then the best rank-m
    approximation of all logits (Eckart and Young), and what they lack of row i has, over queries, the variance
    ``|rest of row i|^2``.
    """
    # Above this size, float64 takes minutes, and prefixes need no more than float32.
    dtype = torch.float64 if len(query_moment) <= 2048 else torch.float32
    scale = _mean(query_moment)
    ridge = RIDGE * torch.eye(len(query_moment), dtype=torch.float64, device=query_moment.device)
    factor = torch.linalg.cholesky(query_moment.double() / scale + ridge).to(dtype)
    rows = (row_moment.double() / _mean(row_moment)).to(dtype)
    rotation = torch.linalg.eigh(factor.T @ rows @ factor).eigenvectors.flip(1)
    back = torch.linalg.solve_triangular(factor.T, rotation, upper=True).T
    return Basis((factor @ rotation).float() * scale**0.5, back.float() / scale**0.5)


def _mean(moment: Tensor) -> float:
    """Mean square of a coordinate, 1 if all are 0."""
    return float(moment.diagonal().double().mean()) or 1.0


def second_moment(parts: Iterable[Tensor], size: int) -> Tensor:
    """The mean of ``a a'`` over rows that come some at a time. (size, size)"""
    moments = Moments(size)
    for part in parts:
        moments.update(part)
    return moments.mean
