"""What cannot be recorded as a CUDA graph runs without, once a call, and says so once; on a made-up device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from softsieve._graphs import Graphed
from softsieve.training.steps import GraphSteps
from tests.training.helpers import Net, equal_weights, points, trainer

COPY = "Cannot copy between CPU and CUDA tensors during CUDA graph capture"


class Device:
    """Stands in for CUDA: streams that do nothing, and recordings that cannot be ended."""

    def __init__(self) -> None:
        self.recording = False
        self.current = "ours"
        self.ended: list[str] = []

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: Any = None) -> Iterator[None]:
        before, self.current = self.current, "recording"
        self.recording = pool is not None
        try:
            yield
        finally:
            self.recording = False
            if pool is not None:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.current = before

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self.current
        try:
            yield
        finally:
            self.current = before


class Nothing:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, Nothing)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *_, name=name: made.ended.append(name), raising=False)
    return made


class Counted:
    """Counts what is done; while it is recorded, nothing is, as on a GPU."""

    def __init__(self, device: Device) -> None:
        self.device, self.done = device, 0

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.device.recording:
            raise RuntimeError(f"{COPY}\nand more")
        self.done += 1
        return (2 * x,)


def test_a_failed_recording_is_said_once_and_every_call_is_made_once(device: Device) -> None:
    function = Counted(device)
    graphed = Graphed(function, warmup=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(1, 6):
            for size in (3, 4):  # of two shapes: the second is not tried
                assert torch.equal(graphed(x=torch.full((size,), float(number)))[0], torch.full((size,), 2.0 * number))
    assert [str(one.message) for one in said] == [f"graphs: runs without, for it cannot be recorded: {COPY}"]
    assert function.done == 10
    assert graphed.graphs == {}
    assert device.current == "ours"
    assert device.ended == ["_cuda_endAllocateToPool", "_cuda_releasePool"]


def test_a_function_with_a_fault_of_its_own_raises_it(device: Device) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        if float(x[0]) > 1:
            raise ValueError("not this")
        return (x,)

    graphed = Graphed(function, warmup=1)
    graphed(x=torch.ones(2))
    with pytest.warns(UserWarning, match="operation failed"), pytest.raises(ValueError, match="not this"):
        graphed(x=torch.full((2,), 2.0))
    assert graphed(x=torch.ones(2))[0].tolist() == [1.0, 1.0]


def test_training_steps_are_made_once_each(device: Device) -> None:
    """Recording is tried at the third step, after two that warm up."""

    class Recorded(Net):
        def forward(self, features: Tensor) -> Tensor:
            if device.recording:
                raise RuntimeError(COPY)
            return super().forward(features)

    ends, counts = [], []
    for plain in (True, False):
        made = trainer(points(64), model=Recorded(dropout=0.2))
        steps = GraphSteps(made.replica, made.train, made.results, made.settings)
        torch.manual_seed(0)
        with contextlib.nullcontext() if plain else pytest.warns(UserWarning, match=COPY):
            for index in torch.split(torch.arange(64), 8):
                if plain:
                    steps.step(0, index)
                else:
                    steps.run(index, 1)
        ends.append(made.weights())
        counts.append({float(state["step"]) for state in made.replica.optimizer.state.values()})
    assert counts == [{8.0}, {8.0}]
    assert equal_weights(*ends)
