"""Rows of a pass: filled up to few different numbers where it is recorded, fewer on a CPU where each has much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import softsieve.training.evaluator as module
from tests.training.helpers import points, trainer


@pytest.mark.parametrize(
    ("rows", "shapes"),
    [(1, [32]), (33, [64]), (64, [64]), (100, [100]), (130, [100, 32]), (250, [100, 100, 64])],
)
def test_recorded_passes_are_over_powers_of_two(rows: int, shapes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def recorder(function: Callable[..., tuple[Tensor, ...]], **_: Any) -> Callable[..., tuple[Tensor, ...]]:
        def call(*fixed: Any, index: Tensor) -> tuple[Tensor, ...]:
            seen.append(len(index))
            return function(*fixed, index=index)

        return call

    monkeypatch.setattr(module, "Graphed", recorder)
    data = points(300)
    made = trainer(data)
    index = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:rows]
    expected = made.evaluator.screen(data, index)
    made.replica.graphs = True
    found = module.Evaluator(made.replica, made.evaluator.judge, 100, keep=(data,)).screen(data, index)
    assert seen == shapes
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_batch_on_a_cpu_has_no_more_inputs_than_stay_in_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    data = points(300)
    made = trainer(data, eval_batch_size=100)
    seen: list[int] = []
    expected, batch = made.evaluator.screen(data, torch.arange(300)), data.batch

    def noted(index: Tensor, **options: Any) -> Any:
        seen.append(len(index))
        return batch(index, **options)

    monkeypatch.setattr(data, "batch", noted)
    for numbers, rows in ((10**6, 100), (40 * data.inputs["features"][0].numel(), 40), (1, 1)):
        seen.clear()
        monkeypatch.setattr(module, "NUMBERS", numbers)
        found = made.evaluator.screen(data, torch.arange(300))
        assert set(seen[:-1]) == {rows}
        assert sum(seen) == 300
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
