"""Models of every kind as ONNX files, asked by onnxruntime; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from softsieve.cli import app
from softsieve.errors import InputError
from softsieve.losses.objectives import make_objective
from softsieve.tasks.encode import AudioEncoder, Encoder, ImageEncoder, TextEncoder, TokensEncoder
from softsieve.tasks.examples import Examples
from softsieve.tasks.hf import PretrainedEncoder
from softsieve.tasks.task import Task

onnxruntime = pytest.importorskip("onnxruntime")
onnx_file = pytest.importorskip("softsieve.integrations.onnx_file")
TOLERANCE, export_onnx = onnx_file.TOLERANCE, onnx_file.export_onnx

LABELS = ["Ärger", "a b", "c"]
BUILT_IN: dict[str, Encoder] = {
    "text": TextEncoder(16),
    "multilabel": TextEncoder(16, 256),
    "tokens": TokensEncoder(16),
    "image": ImageEncoder(20, 1),
    "audio": AudioEncoder(4000),
}


def saved(folder: Path, kind: str, encoder: Encoder, loss: str = "softmax") -> Path:
    objective = make_objective(loss if kind != "multilabel" else "as-softmax", multilabel=kind == "multilabel")
    from softsieve.training.run import save_model

    task = Task(kind, LABELS, encoder, objective=objective)
    torch.manual_seed(0)
    save_model(folder, task, objective, task.model(objective).eval().state_dict(), {})
    return folder


def inputs_of(kind: str) -> list[Any]:
    """Eleven rows, longer ones than the file was made with."""
    draw = np.random.default_rng(5)
    words = [draw.choice(["one", "two", "C"], 1 + 2 * row).tolist() for row in range(11)]
    return {
        "tokens": words,
        "image": [draw.integers(0, 256, (20, 20, 3), dtype=np.uint8) for _ in range(11)],
        "audio": [(draw.normal(0, 0.1, 9000).astype(np.float32), 8000) for _ in range(11)],
    }.get(kind, [" ".join(some) for some in words])


def compare(folder: Path, out: Path, kind: str) -> None:
    """What the file says by itself, against the model in the folder, for rows that the export did not see."""
    from softsieve.training.run import load_model

    assert export_onnx(folder, out) <= TOLERANCE
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    told = session.get_modelmeta().custom_metadata_map
    assert json.loads(told["labels"]) == LABELS
    assert told["kind"] == kind
    task, model = load_model(folder)
    inputs = inputs_of(kind)
    rows = task.rows(Examples(inputs, [], [""] * len(inputs)))
    [logits] = session.run(["logits"], {name: value.numpy() for name, value in rows.inputs.items()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(logits), model(**rows.inputs), rtol=1e-4, atol=1e-5)
    text = out.with_name(f"{out.name}.md").read_text()
    assert f"float32 (rows, {'positions, ' if kind == 'tokens' else ''}3)" in text


@pytest.mark.parametrize("kind", BUILT_IN)
def test_built_in_models(tmp_path: Path, kind: str) -> None:
    compare(saved(tmp_path / "model", kind, BUILT_IN[kind]), tmp_path / "deep" / "model.onnx", kind)


@pytest.mark.parametrize(
    ("kind", "name", "own_head"), [("text", "mpnet", 0), ("text", "bert", 1), ("tokens", "mpnet", 1)]
)
def test_encoders(tmp_path: Path, kind: str, name: str, own_head: int) -> None:
    from tests.tasks.test_transformers_folder import make_encoder

    source = make_encoder(tmp_path / "encoder", name)
    words = kind == "tokens"
    encoder = PretrainedEncoder.load(str(source), max_length=32, per_word=words, own_head=own_head)
    loss = "softmax" if own_head else "am-softmax"
    compare(saved(tmp_path / "model", kind, encoder, loss), tmp_path / "model.onnx", kind)


def test_a_file_that_says_something_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = saved(tmp_path / "model", "image", BUILT_IN["image"]), tmp_path / "model.onnx"
    exact = onnx_file._expressible

    def off(model: Any) -> Any:
        changed = exact(model)
        with torch.no_grad():
            changed.get_parameter("head.bias").add_(0.01)
        return changed

    monkeypatch.setattr(onnx_file, "_expressible", off)
    with pytest.raises(InputError, match=r"onnxruntime is 1\.0e-02 off, expected at most 1e-04: nothing is written"):
        export_onnx(folder, out)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "--to", "onnx", "--out", "m.onnx"], "nowhere: expected a folder with a trained model, found none"),
        (["model", "--to", "coffee", "--out", "m.onnx"], "to: expected"),
        (["model", "--to", "onnx", "--out", "m.pt"], "out: expected a file .onnx, found m.pt"),
        (["model", "--to", "transformers", "--out", "folder"], "the built-in models are softsieve's own"),
        (["empty", "--to", "onnx", "--out", "m.onnx"], "task.json"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "model", "text", BUILT_IN["text"])
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["export", *arguments])
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("softsieve: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"model", "empty"}


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        InputError, match=r"an ONNX file needs the package onnxruntime: pip install 'softsieve\[export\]'"
    ):
        export_onnx(saved(tmp_path / "model", "text", BUILT_IN["text"]), tmp_path / "m.onnx")
