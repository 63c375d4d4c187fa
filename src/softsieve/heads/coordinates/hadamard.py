"""The randomized Hadamard rotation: products stay what they are, and no coordinate stands out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def random_signs(size: int, *, generator: torch.Generator | None = None) -> Tensor:
    """So many numbers that are 1 or -1."""
    return torch.randint(2, (size,), generator=generator, dtype=torch.float32) * 2 - 1


def padded(size: int) -> int:
    """The power of two that a vector of so many entries is filled up to."""
    return 1 << max(0, size - 1).bit_length()


def rotate(matrix: Tensor, signs: Tensor) -> Tensor:
    """Rows filled up with zeros, their signs changed, and rotated: ``rotate(a, s) @ rotate(b, s).T`` is ``a @ b.T``.

    Args:
        matrix: rows to rotate.
        signs: `random_signs` of `padded` size.

    Shape:
        ``(..., d)`` and ``(padded(d),)`` to ``(..., padded(d))``.

    Example:
        >>> a = torch.tensor([[3.0, 0.0, 4.0]])
        >>> rotate(a, torch.ones(4))
        tensor([[ 3.5000,  3.5000, -0.5000, -0.5000]])
    """
    size = len(signs)
    rows = F.pad(matrix, (0, size - matrix.shape[-1])) * signs.to(matrix)
    step = 1
    while step < size:
        first, second = rows.reshape(*rows.shape[:-1], -1, 2, step).unbind(-2)
        rows = torch.stack([first + second, first - second], dim=-2).reshape(rows.shape)
        step *= 2
    turned: Tensor = rows / size**0.5
    return turned
