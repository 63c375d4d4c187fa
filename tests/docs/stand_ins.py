"""Small files and folders with the names that the pages use, and what a reader has already."""

from __future__ import annotations

import gzip
import json
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

WORDS = ["<unk>", "<s>", "Once", "upon", "a", "time", *(f"w{number}" for number in range(6, 800))]
SIZE = 32


def write_all(folder: Path) -> None:
    """Everything that a page may name."""
    write_reviews(folder / "reviews.csv")
    for part in ("train", "test"):
        write_reviews(folder / "reviews" / f"{part}.csv")
    for part in ("train", "validation", "test"):
        write_documents(folder / "documents" / f"{part}.jsonl")
    for name in ("text.txt", "wikitext.txt"):
        (folder / name).write_text(" ".join(random.Random(0).choices(WORDS[2:], k=5000)))
    write_items(folder / "beauty.txt.gz")
    write_language_model(folder / "SmolLM2-135M")
    write_encoder(folder / "bert-base-uncased")


def write_reviews(path: Path, rows: int = 60) -> None:
    words = ("good", "fine", "great"), ("bad", "poor", "dull")
    lines = [f"a {words[i % 2][i // 2 % 3]} film number {i},{'pos' if i % 2 == 0 else 'neg'}" for i in range(rows)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(["text,label", *lines]) + "\n")


def write_items(path: Path, users: int = 300, items: int = 200) -> None:
    draw = random.Random(0)
    lines = [f"{user} {item}" for user in range(users) for item in draw.sample(range(items), 5)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


def write_documents(path: Path, rows: int = 60) -> None:
    labels = [[f"{i % 5}", f"{i % 3 + 5}"][: 1 + i % 2] for i in range(rows)]
    lines = [json.dumps({"text": f"about {' and '.join(some)}", "labels": some}) for some in labels]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def write_language_model(folder: Path) -> None:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    transformers: Any = import_module("transformers")
    raw = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>")
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=SIZE,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=None,
    )
    network = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        network.get_output_embeddings().weight.normal_().mul_(1.5 / torch.arange(1, SIZE + 1) ** 0.5)
    network.save_pretrained(str(folder))


def write_encoder(folder: Path) -> None:
    transformers: Any = import_module("transformers")
    folder.mkdir()
    words = ["a", "film", "number", "good", "fine", "great", "bad", "poor", "dull", *"0123456789"]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *(f"##{digit}" for digit in range(10))]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(str(folder))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(pieces), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained(str(folder))


def names_of(page: str) -> dict[str, Any]:
    """What the code of a page takes for granted: the reader's own tensors and models."""
    generator = torch.Generator().manual_seed(0)
    shape = torch.arange(1, SIZE + 1) ** -0.5
    if page == "cascade.md":
        from transformers import AutoModelForCausalLM, AutoTokenizer

        weight = torch.randn(len(WORDS), SIZE, generator=generator) * shape
        states = torch.randn(1500, SIZE, generator=generator) * shape * 3
        return {
            "weight": weight,
            "bias": torch.zeros(len(WORDS)),
            "hidden_states": states,
            "x": states[0],
            "model": AutoModelForCausalLM.from_pretrained("SmolLM2-135M"),
            "tokenizer": AutoTokenizer.from_pretrained("SmolLM2-135M"),
            "own_rows": weight,
            "own_bias": torch.zeros(len(WORDS)),
            "group": None,
        }
    if page == "guides/language-models.md":
        from transformers import AutoTokenizer, Trainer, TrainingArguments

        rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 4
        args = TrainingArguments("out", max_steps=1, save_strategy="no", report_to="none", disable_tqdm=True)
        tokenizer = AutoTokenizer.from_pretrained("SmolLM2-135M")
        return {"args": args, "data": rows, "held_out": rows, "tokenizer": tokenizer, "SFTTrainer": Trainer}
    if page == "linear.md":
        weight = torch.randn(1000, SIZE, generator=generator, requires_grad=True)
        model = torch.nn.Module()
        model.embedding = torch.nn.Embedding(1000, SIZE)
        return {
            "hidden": torch.randn(8, SIZE, generator=generator),
            "weight": weight,
            "target": torch.randint(1000, (8,), generator=generator),
            "model": model,
            "my_rows_of_the_weight": weight,
            "group": torch.distributed.group.WORLD,
        }
    return {}
