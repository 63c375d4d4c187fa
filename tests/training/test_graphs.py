"""CUDA graphs: what the function gives, call by call, and the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve._graphs import Graphed
from softsieve.tasks.rows import Rows
from softsieve.training.checkpoint import checkpoints
from tests.training.helpers import Net, equal_weights, flags, points, tokens, trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")


def close(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-2, atol=1e-3)


# -- Graphed -----------------------------------------------------------------------------------------------------------


class Counted:
    """A function that counts how often it is called, and how often its work is done."""

    def __init__(self) -> None:
        self.calls = 0
        self.done = torch.zeros((), device="cuda")

    def __call__(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        self.done += 1
        return a * 2 + b, (a - b).sum()


def test_gives_what_the_function_gives() -> None:
    function = Counted()
    graphed = Graphed(function, warmup=2, limit=4)
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(6):
        for shape in ((3,), (2, 5), (128, 7)):
            a, b = (torch.randn(shape, device="cuda", generator=generator) for _ in range(2))
            first, second = graphed(a=a, b=b)
            torch.testing.assert_close(first, a * 2 + b)
            torch.testing.assert_close(second, (a - b).sum())
    assert len(graphed.graphs) == 3
    assert function.calls == 3 * 3  # two to warm up and one to record, of each shape
    assert float(function.done) == 3 * 6  # the work is done once a call all the same


def test_dtypes_are_told_apart() -> None:
    graphed = Graphed(Counted(), warmup=1)
    for _ in range(3):
        for dtype in (torch.float32, torch.float64):
            first, _ = graphed(a=torch.ones(4, device="cuda", dtype=dtype), b=torch.ones(4, device="cuda", dtype=dtype))
            assert first.dtype == dtype
            assert first.tolist() == [3.0] * 4
    assert len(graphed.graphs) == 2


def test_limit() -> None:
    function = Counted()
    graphed = Graphed(function, warmup=1, limit=1)
    for size in (3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4, 5):
        a, b = torch.rand(size, device="cuda"), torch.rand(size, device="cuda")
        torch.testing.assert_close(graphed(a=a, b=b)[0], a * 2 + b)
    assert len(graphed.graphs) == 1
    assert function.calls == 2 + 4 + 4
    assert float(function.done) == 12


def test_inputs_are_left_alone_and_outputs_belong_to_the_graph() -> None:
    graphed = Graphed(Counted(), warmup=1)
    kept = []
    for value in range(4):
        a = torch.full((5,), float(value), device="cuda")
        kept.append(graphed(a=a, b=a)[0])
        assert a.tolist() == [float(value)] * 5
    assert kept[0].tolist() == [0.0] * 5  # without a graph
    assert kept[2].tolist() == kept[3].tolist() == [9.0] * 5


def train(steps: int, *, graphs: bool) -> tuple[dict[str, Tensor], float]:
    """Steps of two sizes with a learning rate that changes."""
    model, rows = Net(), points(400)
    model.cuda()
    rate = torch.tensor(0.01, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)

    def step(features: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features), target)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return (loss.detach(),)

    call = Graphed(step) if graphs else step
    for number in range(steps):
        size = 16 if number % 3 else 8
        part = slice(number * 16, number * 16 + size)
        optimizer.param_groups[0]["lr"].fill_(0.01 * (1 - number / steps))
        (loss,) = call(features=rows.inputs["features"][part].cuda(), target=rows.target[part].cuda())
        assert loss.isfinite()
    done = {float(state["step"]) for state in optimizer.state.values()}
    assert len(done) == 1
    return {name: value.cpu() for name, value in model.state_dict().items()}, done.pop()


def test_training_step() -> None:
    eager, _ = train(20, graphs=False)
    graphed, steps = train(20, graphs=True)
    assert steps == 20  # those that warm up are steps, and recording is none
    for name, value in eager.items():
        torch.testing.assert_close(graphed[name], value, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(eager["head.weight"], Net().head.weight, atol=1e-2)


def test_dropout_is_drawn_anew() -> None:
    x = torch.ones(1000, device="cuda")
    graphed = Graphed(lambda x: (F.dropout(x, 0.5),), warmup=1)
    drawn = {tuple(graphed(x=x)[0].tolist()) for _ in range(6)}
    assert len(drawn) == 6


def test_what_cannot_be_recorded_runs_without_and_harms_no_other() -> None:
    host = torch.ones(1000)

    def copying(x: Tensor) -> tuple[Tensor, ...]:
        return (F.dropout(x, 0.5) * host.to(x.device),)

    x = torch.ones(1000, device="cuda")
    before = Graphed(lambda x: (F.dropout(x, 0.5),), warmup=1)
    before(x=x), before(x=x)
    stream, graphed = torch.cuda.current_stream(), Graphed(copying, warmup=1)
    with pytest.warns(UserWarning, match="graphs: runs without"):
        drawn = {tuple(graphed(x=x)[0].tolist()) for _ in range(4)}
    assert len(drawn) == 4
    assert graphed.graphs == {}
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()  # which refuses while a recording is under way
    after = Graphed(lambda x: (F.dropout(x, 0.5),), warmup=1)
    for other in (before, after):
        assert len({tuple(other(x=x)[0].tolist()) for _ in range(4)}) == 4
        assert len(other.graphs) == 1


# -- the trainer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [points(203, noise=0.1), tokens(203), flags(203)], ids=["points", "tokens", "flags"])
@pytest.mark.parametrize("options", [{}, {"speed_steps": 3}], ids=["plain", "speed"])
def test_trainer(rows: Rows, options: dict[str, Any]) -> None:
    kind = flags if rows.target.dtype == torch.bool else tokens if rows.target.ndim > 1 else points
    ends, results = [], []
    for graphs in (False, True):
        made = trainer(rows, validation=kind(45, seed=1), epochs=3, graphs=graphs, **options)
        assert made.replica.device.type == "cuda"
        assert made.replica.graphs == graphs
        results.append(made.fit())
        ends.append(made.weights())
    eager, graphed = results
    if not options:  # otherwise a row solved by a hair may make a window longer
        close(*ends)
        for name in ("steps", "trained", "best_step"):
            assert getattr(graphed, name) == getattr(eager, name)
        for here, there in zip(graphed.log, eager.log, strict=True):
            assert here["kind"] == there["kind"]
            assert here["loss"] == pytest.approx(there["loss"], rel=0.02, abs=2e-3)
    assert graphed.trained == eager.trained == 3 * 203
    assert graphed.best["accuracy"] == pytest.approx(eager.best["accuracy"], abs=0.05)


def test_trainer_that_skips() -> None:
    results = []
    for graphs in (False, True):
        made = trainer(points(1000), validation=points(50, seed=1), epochs=6, skip="solved", graphs=graphs)
        results.append(made.fit())
    eager, graphed = results
    assert graphed.best["accuracy"] > 0.97
    assert graphed.screened > 0
    assert graphed.trained < 0.6 * 6000
    assert graphed.trained == pytest.approx(eager.trained, rel=0.15)


@pytest.mark.parametrize("options", [{"graphs": True}, {"precision": "fp16"}, {"precision": "bf16"}])
def test_resume_on_the_gpu(tmp_path: Path, options: dict[str, Any]) -> None:
    settings: dict[str, Any] = {
        "validation": points(45, seed=1),
        "epochs": 4,
        "save_steps": 7,
        "save_total_limit": 99,
        **options,
    }
    dropout = 0.0 if "graphs" in options else 0.1  # a graph may draw other numbers than its first steps without
    whole = trainer(points(203, noise=0.1), model=Net(dropout=dropout), output=tmp_path, **settings)
    expected = whole.fit()
    made = trainer(points(203, noise=0.1), model=Net(dropout=dropout), output=tmp_path, **settings)
    result = made.fit(checkpoints(tmp_path)[2])
    assert (result.steps, result.trained) == (expected.steps, expected.trained)
    assert [line["step"] for line in result.log] == [line["step"] for line in expected.log]
    for here, there in zip(result.log, expected.log, strict=True):
        assert here.get("learning_rate") == there.get("learning_rate")
        assert here["loss"] == pytest.approx(there["loss"], rel=0.1, abs=0.02)
    close(whole.weights(), made.weights())
    assert not equal_weights(whole.weights(), Net().cuda().state_dict())
