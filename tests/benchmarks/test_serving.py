"""`python -m benchmarks serving`: what it makes up, how it judges, and its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import serving, serving_layer
from benchmarks.commands import app
from softsieve.heads import Above, TopK
from softsieve.reference import heads as reference


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_labels_are_above_zero_and_others_are_not() -> None:
    g = generator()
    layer = serving_layer.make_layer(2000, 96, rank=48, generator=g)
    hidden, families = layer.rows(200, g)
    logits = reference.logits(layer.weight, hidden, layer.bias)
    flags = layer.families == families[:, None]
    assert (logits[flags] > 0).double().mean() > 0.95
    assert (logits[~flags] > 0).double().mean() < 0.001
    assert 3 < flags.sum(1).double().mean() < 8


def test_exact_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "BLOCK", 7)
    weight, bias, x = (torch.randn(size, generator=generator()) for size in ((30, 4), (30,), (5, 4)))
    truth = serving.exact_answers(weight, bias, x, 3)
    assert truth.above == [set(rows) for rows, _ in reference.above(weight, x, 0.0, bias)]
    torch.testing.assert_close(truth.best, reference.topk_softmax(weight, x, 3, bias).logits)


def test_judges() -> None:
    truth = serving.Truth(torch.tensor([[2.0, 1.0], [5.0, 4.0]]), [{1, 2}, {3, 4}], [set(), {4}])
    found = [torch.tensor([1]), torch.tensor([3, 9])]  # a miss; one too many
    none = torch.zeros(())
    answers = [Above(none, rows, none, none, none) for rows in found]
    judged = serving._judge_above(answers, truth)
    assert judged == {"recall": 2 / 3, "precision": 2 / 3, "complete": 0.5}
    tops = [TopK(none, none, torch.tensor([row]), *[none] * 5) for row in ([2.0, 1.0], [5.0, 3.9])]
    assert serving._judge_topk(tops, truth) == {"success": 0.5}


def test_the_command_writes_a_record(tmp_path: Path) -> None:
    out = tmp_path / "serving.json"
    options = ["--shape", "3000x64", "--rank", "16", "--delta", "0.1", "--calibration", "100", "--test-queries", "6"]
    result = CliRunner().invoke(app, ["serving", *options, "--k", "2", "--fp32", "--out", str(out)])
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert record["provenance"]["versions"]["torch"]
    assert record["settings"]["n"] == 3000
    assert record["settings"]["calibrate_s"] > 0
    methods = {one["method"]: one for one in record["results"]}
    assert list(methods) == [
        "product, bf16", "product + topk, bf16", "product, fp32", "head.topk", "head.above"
    ]  # fmt: skip
    assert methods["product, bf16"]["faster"] == 1
    assert methods["head.above"]["precision"] == 1


def test_a_rank_beyond_the_size_is_refused() -> None:
    result = CliRunner().invoke(app, ["serving", "--shape", "30x4", "--rank", "5"])
    assert result.exit_code == 2
    assert "expected at most 4" in result.output
