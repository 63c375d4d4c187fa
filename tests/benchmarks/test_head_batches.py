"""`python -m benchmarks head-batches`: its table and its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.commands import app
from softsieve.data.synthetic_heads import make_head
from softsieve.integrations.head_file import write_head
from softsieve.integrations.hidden_states import Corpus, Head

pytestmark = pytest.mark.compiles


def test_all_methods_for_each_batch(tmp_path: Path) -> None:
    made = make_head(3000, 64, rank=16, calibration=400, test=80)
    head, out = tmp_path / "head.safetensors", tmp_path / "batches.json"
    states = {"text": Corpus(made.calibration, made.test)}
    write_head(head, Head(made.weight, None, 1.0, None, states), notes={"model": "made"})
    small = ("--delta", "0.1", "--calibration", "300", "--test-queries", "64", "--batch", "1", "--batch", "4")
    done = CliRunner().invoke(app, ["head-batches", str(head), *small, "--out", str(out)])
    assert done.exit_code == 0, done.output
    results = json.loads(out.read_text())["results"]
    assert [(one["batch"], one["groups"]) for one in results] == [(1, 64)] * 3 + [(4, 16)] * 3
    for one in results:
        assert 0 < one["ms"] <= one["ms_p99"]
        assert one["ms_mean"] > 0
        assert one["right"] > 0.85
    assert results[0]["mean_over_product"] == results[1]["mean_over_whole"] == 1
