"""Commands start on the CPU, in a new folder and with an Accelerate that knows nothing of the test before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    state = pytest.importorskip("accelerate.state")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    environment = dict(os.environ)
    yield
    for name in os.environ.keys() - environment.keys():  # the command sets those of Hugging Face
        del os.environ[name]
    torch.set_num_threads(threads)
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """A file of texts with a label each."""
    return write_reviews(tmp_path / "reviews.csv")


def write_reviews(path: Path, rows: int = 80) -> Path:
    words = ["good", "fine", "lovely", "great"], ["bad", "poor", "awful", "dull"]
    lines = [f"a {words[i % 2][i // 2 % 4]} film number {i},{'pos' if i % 2 == 0 else 'neg'}" for i in range(rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["text,label", *lines]) + "\n")
    return path


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A folder with a tiny BERT of random weights and its tokenizer."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "bert"
    folder.mkdir()
    words = ["a", "film", "number", "good", "fine", "lovely", "great", "bad", "poor", "awful", "dull"]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *"0123456789", *(f"##{d}" for d in range(10))]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(str(folder))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(pieces), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained(str(folder))
    return folder
