"""Rows of a pass that is recorded: filled up to few different numbers, and cut off again."""

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
