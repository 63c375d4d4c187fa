"""A rotation keeps products and spreads what stands out."""

from __future__ import annotations

import pytest
import torch
from scipy.linalg import hadamard

from softsieve.heads.coordinates.hadamard import padded, random_signs, rotate


@pytest.mark.parametrize(("size", "power"), [(1, 1), (2, 2), (3, 4), (576, 1024), (1024, 1024), (1025, 2048)])
def test_padded(size: int, power: int) -> None:
    assert padded(size) == power


def test_signs() -> None:
    signs = random_signs(1000, generator=torch.Generator().manual_seed(0))
    assert set(signs.tolist()) == {1.0, -1.0}
    assert abs(float(signs.sum())) < 150


@pytest.mark.parametrize("d", [1, 2, 8, 13, 64])
def test_against_the_matrix(d: int) -> None:
    g = torch.Generator().manual_seed(d)
    rows = torch.randn(2, 5, d, generator=g, dtype=torch.float64)
    signs = random_signs(padded(d), generator=g)
    size = padded(d)
    filled = torch.nn.functional.pad(rows, (0, size - d))
    expected = (filled * signs) @ torch.from_numpy(hadamard(size)).double() / size**0.5
    torch.testing.assert_close(rotate(rows, signs), expected)


def test_products_stay() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 100, generator=g), torch.randn(3, 100, generator=g)
    signs = random_signs(128, generator=g)
    torch.testing.assert_close(rotate(a, signs) @ rotate(b, signs).T, a @ b.T, rtol=1e-4, atol=1e-4)


def test_spreads() -> None:
    spike = torch.zeros(1, 256)
    spike[0, 7] = 1
    assert rotate(spike, random_signs(256)).abs().max() == pytest.approx(1 / 16)
