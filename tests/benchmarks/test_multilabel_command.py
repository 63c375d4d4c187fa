"""`python -m benchmarks multilabel`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from benchmarks import multilabel as suite
from benchmarks import multilabel_layer
from benchmarks.commands import app
from softsieve import as_multilabel_loss, linear_as_multilabel_loss

SMALL = ["multilabel", "--logits", "20x60", "--layer", "300x16", "--rows", "12", "--labels", "3", "--repeats", "1"]


def test_a_table_and_a_record(tmp_path: Path) -> None:
    out = tmp_path / "multilabel.json"
    result = CliRunner().invoke(app, [*SMALL, "--solved", "0.5", "--out", str(out)])
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert [row["method"] for row in record["results"]] == [
        multilabel_layer.CHUNKED,
        multilabel_layer.OURS,
        *suite.LOGITS,
    ]
    assert [row["size"] for row in record["results"]] == [16, 16, 0, 0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--logits", "20"], "expected two numbers such as 1024x4271, found '20'"),
        (["--layer", "0x5"], "expected at least one of each"),
        (["--device", "tpu"], "expected cpu"),
    ],
)
def test_bad_options(options: list[str], says: str) -> None:
    result = CliRunner().invoke(app, [*SMALL, *options], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize("solved", [0.0, 0.5, 1.0])
def test_rows_are_solved_as_asked(solved: float) -> None:
    logits, flags = suite.make_logits(400, 1000, 5, solved=solved, device="cpu")
    _, stats = as_multilabel_loss(logits, flags, delta=suite.DELTA, against="threshold", return_stats=True)
    assert stats.solved.float().mean() == pytest.approx(solved, abs=0.08)
    made = multilabel_layer.make_layer(400, 256, 2000, 5, solved=solved, dtype=torch.float32, device="cpu")
    _, stats = linear_as_multilabel_loss(*made, delta=suite.DELTA, return_stats=True)
    assert stats.solved.float().mean() == pytest.approx(solved, abs=0.08)
    assert (stats.kept > 1000).float().mean() == pytest.approx((1 - solved) / 2, abs=0.08)


@pytest.mark.parametrize("chunk", [100, 1000])
@pytest.mark.parametrize(
    "step",
    [
        partial(multilabel_layer.chunked_step, update=multilabel_layer.bce_chunk),
        partial(multilabel_layer.static_step, update=multilabel_layer.static_chunk),
    ],
    ids=["looked up", "compared"],
)
def test_the_rival_is_binary_cross_entropy_and_sgd(step: Callable[..., Tensor], chunk: int) -> None:
    hidden, weight, numbers = multilabel_layer.make_layer(12, 16, 300, 3, solved=0.5, dtype=torch.float32, device="cpu")
    states, exact = hidden.clone().requires_grad_(), copy.deepcopy(weight).requires_grad_()
    flags = torch.zeros(12, 300).scatter_(1, numbers, 1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(states @ exact.T, flags, reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]
    found = step(hidden, weight, numbers, chunk, 0.6)
    torch.testing.assert_close(found, states.grad, rtol=1e-4, atol=1e-5)
    assert exact.grad is not None
    torch.testing.assert_close(weight, exact.detach() - 0.05 * exact.grad, rtol=1e-4, atol=1e-6)


def test_a_compiled_rival_takes_part() -> None:
    # 2,100 classes in chunks of 2,048, of 263 and at once: five shapes
    results, missing = multilabel_layer.measure_step(
        12, 16, 2100, labels=3, solved=0.5, dtype=torch.bfloat16, device="cpu", repeats=1, compiled=True
    )
    assert not missing
    names = [multilabel_layer.COMPILED, multilabel_layer.COMPILED_EIGHT, multilabel_layer.COMPILED_WHOLE]
    assert [result.method for result in results[1:-1]] == names


def test_a_rival_that_cannot_be_had_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("out of memory\nTried to allocate")

    monkeypatch.setattr(multilabel_layer, "bce_chunk", no_memory)
    results, missing = multilabel_layer.measure_step(
        12, 16, 300, labels=3, solved=0.5, dtype=torch.float32, device="cpu", repeats=1
    )
    assert missing == {"BCE in chunks, as ELMO, 300 x 16": "OutOfMemoryError: out of memory"}
    assert [result.method for result in results] == [multilabel_layer.OURS]
