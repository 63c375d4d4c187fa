"""Layers compiled as one: the same training, and what has no layers is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import reset
from torch._dynamo.utils import counters

from softsieve.errors import InputError
from softsieve.tasks.rows import Rows
from softsieve.training.compiled import compile_layers
from tests.training.helpers import CLASSES, FEATURES, points, trainer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)])

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.parts
        return x + second(torch.relu(first(x)))  # type: ignore[no-any-return]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        features = self.first(features)
        for layer in self.layers:
            features = layer(features)
        return self.head(features)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as always, and run as it is."""
    reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def made(rows: Rows, **options: Any) -> tuple[nn.Module, list[dict[str, float]]]:
    torch.manual_seed(0)
    model = Deep()
    log = trainer(rows, model=model, validation=rows, batch_size=7, **options).fit().log
    return model, log


def test_the_same_training_compiled_twice_for_all_layers_and_lengths() -> None:
    rows = points(40)
    plain, log = made(rows)
    assert not counters["stats"]
    compiled, other = made(rows, compiled=True)  # batches of 7 and 5, and 40 to judge
    assert counters["stats"]["unique_graphs"] == 2  # for training and for evaluation
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    for ours, theirs in zip(compiled.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert [line["loss"] for line in log] == pytest.approx([line["loss"] for line in other], rel=1e-5)


def test_layers_inside_of_layers_are_parts_of_them() -> None:
    model = Deep()
    compile_layers(model)
    assert all(layer._compiled_call_impl is not None for layer in model.layers)
    assert all(part._compiled_call_impl is None for layer in model.layers for part in layer.modules() if part != layer)


@pytest.mark.parametrize("rows", [[nn.Linear(2, 2)], [nn.Linear(2, 2), nn.ReLU()]])
def test_what_repeats_nothing_is_refused(rows: list[nn.Module]) -> None:
    with pytest.raises(InputError, match="compiled: expected a model with layers of one kind in a row"):
        compile_layers(nn.Sequential(nn.ModuleList(rows), nn.Linear(2, 3)))
