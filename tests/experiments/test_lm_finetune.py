"""`python -m experiments lm-finetune` on a tiny random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip("transformers")

from experiments import lm_finetune as suite
from experiments import lm_rivals
from experiments.commands import app
from softsieve.comparisons.output import read_table
from softsieve.errors import InputError
from tests.docs.stand_ins import WORDS, write_language_model
from tests.integrations.architectures import make

SMALL = ["--steps", "3", "--batch", "2", "--length", "8", "--held-out", "2", "--rounds", "1", "--no-compiled"]


def test_a_table_of_costs_and_of_held_out_text(tmp_path: Path) -> None:
    write_language_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(WORDS[2:] * 2))
    arguments = [str(tmp_path / "model"), str(tmp_path / "text.txt"), *SMALL, "--delta", "1", "--delta", "0.1"]
    done = CliRunner().invoke(app, ["lm-finetune", *arguments, "--rate", "0.01", "--out", str(tmp_path / "found")])
    assert done.exit_code == 0, done.output
    about, rows = read_table(tmp_path / "found.csv")
    assert about["experiment"] == "lm-finetune"
    by_way = {row["way"]: row for row in rows}
    assert list(by_way) == ["before", "dense", "ours, delta 1", "ours, delta 0.1"]
    same = float(by_way["ours, delta 1"]["perplexity"])
    assert same == pytest.approx(float(by_way["dense"]["perplexity"]), rel=1e-3)
    assert float(by_way["ours, delta 1"]["apart"]) < 1e-4
    assert same != pytest.approx(float(by_way["before"]["perplexity"]), rel=1e-3)
    assert all(float(row["seconds"]) > 0 for row in rows[1:])
    _, curves = read_table(tmp_path / "found.curves.csv")
    assert len(curves) == 9
    if not torch.cuda.is_available():
        assert "Liger: not measured, needs a GPU" in done.output


def test_lora_on_attention_and_output_layer(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    write_language_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(WORDS[2:] * 2))
    arguments = [str(tmp_path / "model"), str(tmp_path / "text.txt"), *SMALL, "--delta", "1", "--lora", "2"]
    done = CliRunner().invoke(app, ["lm-finetune", *arguments, "--rate", "0.01", "--out", str(tmp_path / "found")])
    assert done.exit_code == 0, done.output
    about, rows = read_table(tmp_path / "found.csv")
    assert about["lora"] == "2"
    assert float(rows[-1]["apart"]) < 1e-4
    assert float(rows[-1]["perplexity"]) != float(rows[0]["perplexity"])


def test_other_packages_and_a_compiled_model_are_trained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for both, which compute what they are to compute."""

    def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), target)

    monkeypatch.setitem(lm_rivals.LOSSES, "Liger", plain)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    model = make("Llama").eval()
    windows = suite.cut(torch.arange(600) % 70 + 3, steps=3, batch=2, length=8, held_out=2, seed=0)
    settings: dict[str, Any] = {"rounds": 1, "rate": 0.01, "precision": "float32"}
    found = list(
        suite.measure(model, windows, deltas=[1.0, 0.1], compiled=True, rivals=["Liger"], memory=90, **settings)
    )
    by_way = {row["way"]: row for row, _ in found}
    assert [row["way"] for row, _ in found[1:6]] == [row["way"] for row, _ in found[6:11]]  # costs, then whole rows
    ours = ["ours, delta 1", "ours, delta 0.1", "ours, delta 1, 90 MB", "ours, delta 1, 90 MB, compiled"]
    assert list(by_way) == ["before", "dense", "Liger", *ours[:3], "torch.compile", ours[3]]
    assert all(row["seconds"] > 0 for row, _ in found[1:])
    for name in ("torch.compile", "Liger", "ours, delta 1", *ours[2:]):
        assert by_way[name]["apart"] < 1e-4
        assert by_way[name]["perplexity"] == pytest.approx(by_way["dense"]["perplexity"], rel=1e-3)
    assert by_way["ours, delta 0.1"]["apart"] is None
    assert by_way[ours[-1]]["solved"] == 0
    assert by_way["before"]["perplexity"] != pytest.approx(by_way["dense"]["perplexity"], rel=1e-2)
    assert [len(curve) for _, curve in found] == [0] * 6 + [3] * 5 + [0] * 2 + [3] * 2


def test_what_cannot_be_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(lm_rivals, "find_spec", lambda name: None if name == "liger_kernel" else object())
    assert lm_rivals.left_out("bfloat16", "float32", 0) == {"Liger": "liger_kernel is not installed"}
    assert lm_rivals.left_out("float32", "float32", 0)["cut-cross-entropy"] == "takes 16 bits alone"
    assert "LoRA" in lm_rivals.left_out("float32", "bfloat16", 8)["cut-cross-entropy"]


def test_random_weights(tmp_path: Path) -> None:
    write_language_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "text.txt").write_text(" ".join(WORDS[2:] * 2))
    arguments = [str(tmp_path / "model"), str(tmp_path / "text.txt"), *SMALL, "--delta", "1", "--random"]
    done = CliRunner().invoke(app, ["lm-finetune", *arguments, "--out", str(tmp_path / "found")])
    assert done.exit_code == 0, done.output
    about, rows = read_table(tmp_path / "found.csv")
    assert about["random"] == "true"
    assert float(rows[0]["perplexity"]) > 1


def test_windows_of_a_text() -> None:
    tokens = torch.arange(200)
    windows = suite.cut(tokens, steps=4, batch=2, length=8, held_out=2, seed=0)
    assert windows.training.shape == (4, 2, 8)
    assert int(windows.training.max()) < 180
    assert windows.held_out.flatten().tolist() == list(range(180, 196))
    with pytest.raises(InputError, match="text: expected 240 tokens at least, found 200"):
        suite.cut(tokens, steps=4, batch=2, length=8, held_out=3, seed=0)


def test_the_peak_of_memory_is_seen() -> None:
    with suite.Peak("cpu") as peak:
        kept = torch.ones(40_000_000)
        for _ in range(20):
            kept.add_(1.0)
    assert 120 < peak.mb < 400
