"""A model folder of an encoder is one of transformers: its classes and pipelines load it, and say what ours says."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from softsieve.cli import app
from softsieve.errors import InputError
from softsieve.tasks.examples import Examples
from softsieve.training.run import load_model

transformers = pytest.importorskip("transformers")

WORDS = ["good", "bad", "film", "a", "the", "rome", "oslo", "in", "at"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
SIZES: dict[str, Any] = {
    "vocab_size": len(PIECES),
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertConfig(**SIZES),
    "mpnet": lambda: transformers.MPNetConfig(**SIZES),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=len(PIECES), dim=16, n_layers=1, n_heads=2, hidden_dim=16
    ),
    "modernbert": lambda: transformers.ModernBertConfig(**SIZES, pad_token_id=0),
    "deberta": lambda: transformers.DebertaV2Config(**SIZES),
}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def make_encoder(folder: Path, name: str) -> Path:
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(str(folder))
    torch.manual_seed(0)
    transformers.AutoModel.from_config(CONFIGS[name]()).save_pretrained(str(folder))
    return folder


def make_data(folder: Path, kind: str) -> Path:
    if kind == "tokens":
        path = folder / "data.conll"
        path.write_text("in O\nrome B-LOC\n\nat O\nthe O\noslo B-LOC\n\n" * 10)
    else:
        several = kind == "multilabel"
        rows = [{"text": f"a {w} film", "labels": [w, "film"] if several else w} for w in ("good", "bad")] * 10
        path = folder / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained(folder: Path, kind: str, name: str = "bert", *more: str) -> Path:
    encoder = make_encoder(folder / name, name)
    command = ["train", "--data", str(make_data(folder, kind)), "--model_name_or_path", str(encoder), "--quiet"]
    pooling = [] if kind == "tokens" or "--pooling" in more else ["--pooling", "model"]
    command += [*pooling, "--output_dir", str(folder / "run"), "--num_train_epochs", "1", *more]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return folder / "run" / "model"


def logits_of(folder: Path, kind: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The model of transformers, its logits and ours of the same inputs; theirs from their tokenizer."""
    task, model = load_model(folder)
    words = kind == "tokens"
    texts: list[Any] = [["in", "rome"], ["at", "the", "oslo"]] if words else ["a good film", "bad", "the bad good film"]
    rows = task.rows(Examples(texts, [], ["a place"] * len(texts)))
    auto = transformers.AutoModelForTokenClassification if words else transformers.AutoModelForSequenceClassification
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    theirs, report = auto.from_pretrained(str(folder), output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    inputs = tokenizer(texts, padding=True, return_tensors="pt", is_split_into_words=words)
    with torch.no_grad():
        return theirs.eval(), theirs(**inputs).logits, model(**rows.inputs)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_transformers_says_the_same(tmp_path: Path, kind: str, name: str) -> None:
    folder = trained(tmp_path, kind, name)
    theirs, logits, ours = logits_of(folder, kind)
    torch.testing.assert_close(logits, ours, rtol=1e-5, atol=1e-6)
    assert logits.std() > 0
    labels = ["B-LOC", "O"] if kind == "tokens" else ["bad", "good"]
    assert theirs.config.id2label == dict(enumerate(labels))
    assert theirs.config.label2id == {label: number for number, label in enumerate(labels)}


def test_pipelines_name_the_labels(tmp_path: Path) -> None:
    folder = trained(tmp_path, "text")
    pipe = transformers.pipeline("text-classification", str(folder), top_k=None)
    text = "a good film"
    answer = CliRunner().invoke(app, ["predict", str(folder), "--text", text]).stdout
    row = next(iter(csv.DictReader(answer.splitlines())))
    best, other = pipe([text])[0]
    assert {best["label"], other["label"]} == {"good", "bad"}
    assert best["label"] == row["prediction"]
    assert best["score"] == pytest.approx(float(row["probability"]), abs=2e-6)
    assert pipe("film " * 1000, truncation=True)  # cut to what the model was trained with


def test_several_labels_are_scored_one_by_one(tmp_path: Path) -> None:
    folder = trained(tmp_path, "multilabel")
    theirs, logits, ours = logits_of(folder, "multilabel")
    torch.testing.assert_close(logits, ours, rtol=1e-5, atol=1e-6)
    assert theirs.config.problem_type == "multi_label_classification"
    scores = transformers.pipeline("text-classification", str(folder), top_k=None)(["a good film"])[0]
    by_label = {one["label"]: one["score"] for one in scores}
    expected = dict(zip(["bad", "film", "good"], logits[0].sigmoid().tolist(), strict=True))
    assert by_label == pytest.approx(expected, abs=1e-6)


def test_a_head_that_transformers_has_not_stays_ours(tmp_path: Path) -> None:
    folder = trained(tmp_path, "text", "bert", "--loss", "am-softmax")
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["export", str(folder), "--to", "transformers", "--out", str(out)])
    assert result.exit_code == 1
    assert "transformers has no class for this model: a CosineHead is no linear layer" in result.stderr
    assert not out.exists()
    assert not (folder / "config.json").exists()
    task, model = load_model(folder)
    assert task.objective is not None
    assert "CosineHead" in str(task.reason_against_transformers(task.objective))
    assert model(**task.rows(Examples(["good"], [], ["a place"])).inputs).shape == (1, 2)


def test_a_mean_of_states_stays_ours(tmp_path: Path) -> None:
    folder = trained(tmp_path, "text", "bert", "--pooling", "mean")
    assert not (folder / "config.json").exists()
    card = (folder / "README.md").read_text()
    assert "its mean of hidden states is softsieve's own" in card
    assert "library_name: softsieve\n" in card


@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_a_mean_of_states_leaves_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder, out = trained(tmp_path, "text", name, "--pooling", "mean"), tmp_path / "out"
    result = CliRunner().invoke(app, ["export", str(folder), "--to", "transformers", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "trust_remote_code=True" in result.stdout
    again = CliRunner().invoke(app, ["export", str(folder), "--to", "transformers", "--out", str(out)])
    assert again.exit_code == 0, again.output
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    auto = transformers.AutoModelForSequenceClassification
    theirs, report = auto.from_pretrained(str(out), trust_remote_code=True, output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    texts = ["a good film", "bad", "the bad good film"]
    task, model = load_model(folder)
    inputs = transformers.AutoTokenizer.from_pretrained(str(out))(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        ours = model(**task.rows(Examples(texts, [], texts)).inputs)
        torch.testing.assert_close(theirs.eval()(**inputs).logits, ours, rtol=1e-5, atol=1e-6)
    pipe = transformers.pipeline("text-classification", str(out), trust_remote_code=True, top_k=None)
    scores = {one["label"]: one["score"] for one in pipe([texts[0]])[0]}
    expected = dict(zip(task.labels, ours[0].softmax(-1).tolist(), strict=True))
    assert scores == pytest.approx(expected, abs=1e-6)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = trained(tmp_path, "text")
    transformers.BertForSequenceClassification(CONFIGS["bert"]()).save_pretrained(str(tmp_path / "other"))
    (folder / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    assert load_model(folder)  # a classifier of the same sizes, as it happens
    other = transformers.BertConfig(**{**SIZES, "hidden_size": 8}, num_labels=2)
    transformers.BertForSequenceClassification(other).save_pretrained(str(tmp_path / "small"))
    (folder / "model.safetensors").write_bytes((tmp_path / "small" / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match="not a model of this model"):
        load_model(folder)
