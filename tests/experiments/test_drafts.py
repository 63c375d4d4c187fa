"""Heads of models that draft: what they propose, against the model's own product and lists made by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from experiments import drafts
from experiments.commands import app
from experiments.drafts import ExactRows, Proposals
from softsieve.comparisons.output import read_table
from softsieve.errors import InputError

transformers = pytest.importorskip("transformers")
pytest.importorskip("scipy")

WORDS, ASKED = 40, 32
SIZES = ["--counted", "640", "--calibration", "256", "--tokens", str(ASKED), "--window", "16", "--list", "20"]


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32, "head_dim": 8}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(size | options), initializer_range=0.5)).eval()


def test_the_list_has_the_most_frequent_tokens_then_the_first() -> None:
    seen = torch.tensor([7, 7, 7, 2, 2, 9])
    assert drafts.frequent_tokens(seen, 2, 10).tolist() == [2, 7]
    assert drafts.frequent_tokens(seen, 5, 10).tolist() == [0, 1, 2, 7, 9]
    for count in (0, 11):
        with pytest.raises(InputError, match=f"list: expected 1 to 10 tokens, .* found {count}"):
            drafts.frequent_tokens(seen, count, 10)


@pytest.mark.parametrize("bias", [True, False])
def test_a_list_proposes_the_best_of_its_tokens(bias: bool) -> None:
    torch.manual_seed(0)
    layer, tokens = nn.Linear(6, 12, bias=bias), torch.tensor([1, 4, 5, 11])
    whole, part = ExactRows(layer), ExactRows(layer, tokens)
    for state in torch.randn(20, 6):
        logits = layer(state)
        assert whole(state) == int(logits.argmax())
        assert part(state) == int(tokens[logits[tokens].argmax()])
    columns = 6 + bias
    assert (whole.bytes_read, part.bytes_read) == (20 * 12 * columns * 4, 20 * 4 * columns * 4)


def test_parts_of_a_text_do_not_overlap() -> None:
    def tokenizer(text: str, **options: Any) -> Any:
        return transformers.BatchEncoding({"input_ids": list(range(len(text)))})

    options: dict[str, Any] = {"calibration": 30, "tokens": 9, "size": 5, "place": "story"}
    parts = drafts.cut(tokenizer, "x" * 130, counted=100, **options)
    assert parts.counted.tolist() == list(range(100))
    assert parts.calibration.shape == (6, 5)
    assert parts.held_out.tolist() == [list(range(100, 105)), list(range(120, 125))]
    with pytest.raises(InputError, match="story: expected at least 125 tokens"):
        drafts.cut(tokenizer, "x" * 120, counted=100, **options)
    with pytest.raises(InputError, match="tokens: expected 25 at most, with counted 100, found 26"):
        drafts.cut(tokenizer, "x" * 130, counted=100, **(options | {"tokens": 26}))
    with pytest.raises(InputError, match="window: expected 4 tokens of text at least, found 3"):
        drafts.cut(tokenizer, "x" * 130, counted=100, **(options | {"size": 3}))


def proposals(tokens: list[int], **options: Any) -> Proposals:
    fields: dict[str, Any] = {"head": "exact", "calibration": None, "ms": torch.full((8,), 2.0).double()}
    fields |= {"bytes_read": torch.full((8,), 80), "fallback": torch.zeros(8).bool()}
    return Proposals(tokens=torch.tensor(tokens), **(fields | options))


def test_the_figures_of_a_head() -> None:
    exact = proposals([1, 2, 3, 4, 5, 6, 7, 8])
    fallback = torch.tensor([True] + [False] * 7)
    own: dict[str, Any] = {"head": "adaptive", "calibration": "code", "fallback": fallback, "estimates": True}
    own |= {"ms": torch.tensor([4.0] + [0.5] * 7).double(), "bytes_read": torch.full((8,), 10)}
    other = proposals([1, 2, 0, 4, 5, 6, 7, 8], **own)
    first, second = drafts.summary("prose", [exact, other], window=8)
    assert (first["acceptance"], first["accepted_length"], first["fallback_share"]) == (1, 4, None)
    assert (second["acceptance"], second["accepted_length"], second["as_exact"]) == (7 / 8, 3, 7 / 8)
    assert second["low"] < 7 / 8 < second["high"] < 1
    assert (second["time_ratio"], second["bytes_ratio"], second["fallback_share"]) == (4, 8, 1 / 8)
    assert second["mean_ratio"] == pytest.approx(2 / (7.5 / 8))
    declined = other._replace(estimates=False)
    assert drafts.summary("prose", [exact, declined], window=8)[1]["fallback_share"] is None
    target = torch.tensor([0, 2, 0, 4, 5, 6, 7, 8])
    first, second = drafts.summary("prose", [exact, other], target, window=8)
    assert (first["acceptance"], second["acceptance"], second["as_exact"]) == (6 / 8, 7 / 8, 7 / 8)


def test_fewer_layers_are_those_of_a_smaller_model() -> None:
    model, ids = llama(), torch.randint(WORDS, (3, 12))
    whole = drafts.greedy_tokens(model, ids)
    assert torch.equal(whole, model(ids).logits.argmax(-1).flatten())
    smaller = llama(num_hidden_layers=1)
    smaller.load_state_dict(model.state_dict(), strict=False)
    drafts.keep_layers(model, 1)
    part = drafts.greedy_tokens(model, ids)
    assert torch.equal(part, smaller(ids).logits.argmax(-1).flatten())
    assert not torch.equal(part, whole)
    with pytest.raises(InputError, match=r"layers: expected 1 to 1, .* found 2"):
        drafts.keep_layers(model, 2)


def test_an_adaptive_head_proposes_what_the_model_would() -> None:
    model = llama(vocab_size=3000)
    weight = model.get_output_embeddings().weight
    weight.data = torch.randn(3000, 16) * 2 / torch.arange(1, 17) ** 0.5
    texts = {"text": drafts.Parts(torch.arange(100), torch.randint(3000, (80, 16)), torch.randint(3000, (10, 16)))}
    heads = drafts.make_heads(model, texts, size=1000, delta=0.05)
    assert [(name, fitted) for name, fitted, _ in heads] == [("exact", None), ("adaptive", "text"), ("list", "text")]
    assert model.get_output_embeddings().weight is weight
    states = drafts.read_states(model, texts["text"].held_out)
    exact, adaptive, listed = drafts.propose(heads, states)
    logits = states @ weight.T
    assert torch.equal(exact.tokens, logits.argmax(-1))
    assert (adaptive.tokens == exact.tokens).double().mean() > 0.85
    assert torch.equal(listed.tokens, logits[:, :1000].argmax(-1))
    assert adaptive.estimates == heads[1][2].estimates
    assert (adaptive.bytes_read > 0).all()
    assert (exact.bytes_read == 3000 * 16 * 4).all()


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    place = tmp_path_factory.mktemp("tiny")
    for name, shift in (("", 0), ("other", 1)):
        vocabulary = {chr(97 + (i + shift) % WORDS) * 2: i for i in range(WORDS)}
        raw = Tokenizer(WordLevel(vocabulary, unk_token="aa"))
        raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="bb").save_pretrained(str(place / name))
        llama().save_pretrained(str(place / name))
    for name, start in (("low", 0), ("high", 15)):
        words = [chr(97 + i) * 2 for i in range(start, start + 20)]
        (place / f"{name}.txt").write_text(" ".join(random.Random(start).choices(words, k=900)))
    return place


def run(folder: Path, *more: str) -> Result:
    texts = [part for name in ("low", "high") for part in ("--text", f"{name}={folder / name}.txt")]
    arguments = ["drafts", "--model", str(folder), *texts, *SIZES, *more]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})


def test_every_pair_of_texts_has_its_rows(folder: Path) -> None:
    done = run(folder, "--delta", "0.1", "--out", "results")
    assert done.exit_code == 0, done.output
    about, rows = read_table(Path("results.csv"))
    assert about["experiment"] == "drafts"
    assert (about["list"], about["n"]) == ("20", str(WORDS))
    pairs = [(row["head"], row["calibration"], row["use"]) for row in rows]
    fitted = [("adaptive", "low"), ("list", "low"), ("adaptive", "high"), ("list", "high")]
    assert pairs == [(*head, use) for use in ("low", "high") for head in [("exact", ""), *fitted]]
    record = json.loads(Path("results.json").read_text())
    assert record["suite"] == "drafts"
    for row in record["results"]:
        assert row["states"] >= ASKED
        assert row["acceptance"] == row["as_exact"]
        if row["head"] == "list":
            assert row["bytes_ratio"] == 2
    assert all(row["acceptance"] == 1 for row in record["results"] if row["head"] == "exact")


def test_a_shorter_draft_is_judged_by_the_whole_model(folder: Path) -> None:
    done = run(folder, "--layers", "1", "--delta", "0.1", "--out", "results")
    assert done.exit_code == 0, done.output
    rows = json.loads(Path("results.json").read_text())["results"]
    exact = [row for row in rows if row["head"] == "exact"]
    assert all(row["as_exact"] == 1 and row["acceptance"] < 1 for row in exact)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--list", "41"], "list: expected 1 to 40 tokens, as many as the vocabulary has, found 41"),
        (["--counted", "900"], "expected at least 1125 tokens"),
        (["--layers", "3"], "layers: expected 1 to 2"),
        (["--text", "low=x.txt"], "text: expected different names, found 'low' more than once"),
        (["--text", "x.txt"], "text: expected NAME=FILE, found 'x.txt'"),
        (["--dtype", "int8"], "dtype: expected"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(folder: Path, more: list[str], message: str) -> None:
    done = run(folder, *more, "--out", "results")
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())
    assert not list(Path().glob("results*"))


def test_a_target_of_another_vocabulary_is_refused(folder: Path) -> None:
    done = run(folder, "--target", str(folder / "other"), "--out", "results")
    assert done.exit_code == 1
    assert "target other: expected the vocabulary of" in " ".join(done.output.split())


def test_a_target_of_the_same_vocabulary_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []
    right = drafts.greedy_tokens

    def listening(*args: Any, **options: Any) -> Tensor:
        asked.append(right(*args, **options))
        return asked[-1]

    monkeypatch.setattr(drafts, "greedy_tokens", listening)
    done = run(folder, "--target", str(folder), "--delta", "0.1", "--out", "results")
    assert done.exit_code == 0, done.output
    assert len(asked) == 2
