"""Every way of reading gives what plain arithmetic does."""

from __future__ import annotations

import pytest
import torch

from softsieve.heads import reader as module
from softsieve.heads.reader import FEW, Reader


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 8, 21])
def test_against_arithmetic(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHUNK", "CONVERTED"):
        monkeypatch.setattr(module, name, 50)  # in several parts
    g = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, 30, generator=g).to(dtype)
    reader = Reader(weight)
    exact = weight.to(reader.dtype)
    x = torch.randn(3, 30, generator=g, dtype=reader.dtype)
    index = torch.randint(30, (3, 11), generator=g)
    factor, root = (torch.rand(3, 11, generator=g, dtype=reader.dtype) for _ in range(2))
    torch.testing.assert_close(reader.full(x), x @ exact.T)
    many = torch.randn(FEW + 1, 30, generator=g, dtype=reader.dtype)
    torch.testing.assert_close(reader.full(many), many @ exact.T)
    torch.testing.assert_close(reader.centre, exact.mean(0))
    by_columns = torch.einsum("nbm,bm->bn", (exact - exact.mean(0))[:, index], factor)
    torch.testing.assert_close(reader.columns(index, factor), by_columns)
    query, row = torch.randint(3, (9,), generator=g), torch.randint(rows, (9,), generator=g)
    values, squares = reader.entries(query, row, index, factor, root.double())
    torch.testing.assert_close(values, by_columns[query, row])
    centred = (exact - exact.mean(0))[:, index].square()
    assert squares is not None
    expected = torch.einsum("nbm,bm->bn", centred, root.square())[query, row]
    torch.testing.assert_close(squares.to(expected.dtype), expected)
    assert reader.entries(query, row, index, factor, None)[1] is None
    torch.testing.assert_close(reader.pairs(query, row, x), (x @ exact.T)[query, row])
