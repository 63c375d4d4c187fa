"""AdamW by rows: what it changes, and that sparse and dense gradients come to the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve.tasks.models import TextBody
from softsieve.training.row_adamw import RowAdamW, clip_gradients


def steps(sparse: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    table = nn.Parameter(torch.randn(9, 3, generator=generator))
    optimizer = RowAdamW([{"params": [table], "by_rows": True}], lr=0.1, weight_decay=0.1)
    aim = torch.randn(9, 3, generator=generator)
    for batch in ([1, 2, 2], [2, 5], [1, 7]):
        ids = torch.tensor(batch)
        optimizer.zero_grad()
        (F.embedding(ids, table, sparse=sparse) - aim[ids]).square().sum().backward()  # type: ignore[no-untyped-call]
        clip_gradients([table], 1.0)
        assert table.grad is not None
        assert table.grad.is_sparse == sparse
        optimizer.step()
    return table.detach(), optimizer.state[table]["exp_avg"]


def test_sparse_and_dense_gradients_come_to_the_same() -> None:
    for ours, dense in zip(steps(True), steps(False), strict=True):
        torch.testing.assert_close(ours, dense)


def test_rows_without_a_gradient_stay() -> None:
    start = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    table, mean = steps(True)
    same = (table == start).all(1)
    assert same.nonzero().flatten().tolist() == [0, 3, 4, 6, 8]
    assert (mean[same] == 0).all()


def test_where_all_rows_have_a_gradient_it_is_adamw() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(4, 2)) for _ in range(2))
    both = RowAdamW([{"params": [ours], "by_rows": True}], lr=0.1), torch.optim.AdamW([theirs], lr=0.1)
    for _ in range(5):
        ours.grad = torch.randn(4, 2, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in both:
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_clipping_counts_sparse_gradients() -> None:
    table, bias = nn.Parameter(torch.ones(5, 2)), nn.Parameter(torch.ones(2))
    (3 * F.embedding(torch.tensor([1, 1, 2]), table, sparse=True).sum() + bias.sum()).backward()  # type: ignore[no-untyped-call]
    clip_gradients([table, bias], 0.5)
    assert table.grad is not None
    assert bias.grad is not None
    total = torch.cat([table.grad.to_dense().flatten(), bias.grad]).norm()
    torch.testing.assert_close(total, torch.tensor(0.5), rtol=1e-5, atol=0)


def test_a_text_body_by_rows_is_the_same_body() -> None:
    body = TextBody()
    ids = torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(0))
    body.fit([{"ids": ids}])
    found = []
    for by_rows in (False, True):
        body.by_rows = by_rows
        body.zero_grad()
        torch.manual_seed(3)
        hidden = body(ids=ids)
        hidden.square().sum().backward()
        grad = body.table.weight.grad
        assert grad is not None
        found.append((hidden.detach(), grad.to_dense()))
    torch.testing.assert_close(*found)
