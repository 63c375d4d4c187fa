"""`softsieve head extract` on a tiny language model made here."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from softsieve import __version__
from softsieve.cli import app
from softsieve.errors import InputError
from softsieve.integrations import head_file
from softsieve.integrations.head_file import read_head, write_head
from softsieve.integrations.hidden_states import Corpus, Head

transformers = pytest.importorskip("transformers")

WORDS = ["<unk>", "<s>", *"abcdefghijklmnop"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    folder = tmp_path_factory.mktemp("tiny")
    raw = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>")
    made.save_pretrained(str(folder))
    size = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**size, intermediate_size=24, max_position_embeddings=64)
    transformers.LlamaForCausalLM(config).save_pretrained(str(folder))
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_words(tmp_path / "story.txt", 100)


def write_words(path: Path, words: int) -> Path:
    content = "\n".join(random.Random(0).choices(WORDS[2:], k=words))
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


def extract(model: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["head", "extract", "--model", str(model), *more])


def small(text: Path, out: Path) -> list[str]:
    return ["--text", str(text), "--out", str(out), "--queries", "60", "--window", "16", "--dtype", "fp32"]


def test_extract_writes_one_file_that_agrees_with_the_model(model: Path, text: Path, tmp_path: Path) -> None:
    other = write_words(tmp_path / "other.txt.gz", 70)
    out = tmp_path / "deep" / "head.safetensors"
    done = extract(model, *small(text, out), "--text", f"second={other}", "--test-share", "0.25")
    assert done.exit_code == 0, done.output
    assert "18 x 16" in done.stderr
    assert "story: 45 states to calibrate, 15 to test" in done.stderr
    with safe_open(out, "pt") as file:
        names, notes = sorted(file.keys()), file.metadata()
    assert names == ["second.calibration", "second.test", "story.calibration", "story.test", "weight"]
    assert notes["model"] == model.name  # and not where that lies on one machine
    assert (notes["format_version"], notes["softsieve"], notes["window"]) == ("2", __version__, "16")
    assert [path.name for path in out.parent.iterdir()] == ["head.safetensors"]
    head, _ = read_head(out)
    network = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    for name, words in (("story", text.read_text()), ("second", gzip.decompress(other.read_bytes()).decode())):
        ids = torch.tensor([WORDS.index(word) for word in words.split()][:60])
        with torch.no_grad():
            own = torch.cat([network(window[None]).logits[0] for window in torch.split(ids, 16)])
        torch.testing.assert_close(torch.cat(head.corpora[name]) @ head.weight.T, own, rtol=1e-5, atol=1e-6)


def test_bf16_and_a_first_token(model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "head.safetensors"
    assert extract(model, *small(text, out), "--dtype", "bf16", "--bos").exit_code == 0
    head, notes = read_head(out)
    assert notes["first_token"] == "1"
    assert head.weight.dtype == head.corpora["story"].test.dtype == torch.bfloat16
    assert len(head.corpora["story"].test) == 30


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--text", "empty.txt"], "empty.txt: expected text, found none"),
        (["--text", "binary.txt"], "binary.txt:1: not UTF-8"),
        (["--text", "a=story.txt", "--text", "a=story.txt"], "found 'a' more than once"),
        (["--text", "=story.txt"], "expected FILE or NAME=FILE"),
        (["--queries", "101"], "story.txt: expected at least 101 tokens, one for each query, found 100"),
        (["--model", "nowhere"], "model nowhere: "),
        (["--model", "base"], "found no output embeddings"),
        (["--window", "65"], "window: expected 1 to 64 tokens, found 65"),
        (["--dtype", "int8"], "dtype: expected one of bf16, fp16, fp32, found 'int8'"),
        (["--test-share", "1"], "test_share: expected a number between 0 and 1"),
        (["--test-share", "0.001"], "expected queries to calibrate and to test, found 60 and 0"),
        (["--out", "head.bin"], "head.bin: expected a file .safetensors"),
        (["--out", "story.txt/head.safetensors"], "cannot be written to"),
        (["--out", "folder.safetensors"], "expected a file, found a folder"),
    ],
)
def test_errors_are_one_line_and_write_nothing(
    model: Path, text: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "folder.safetensors").mkdir()
    config = transformers.AutoConfig.from_pretrained(model)
    transformers.LlamaModel(config).save_pretrained(str(tmp_path / "base"))
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(str(tmp_path / "base"))
    before = sorted(tmp_path.rglob("*"))
    done = extract(model, *small(text, Path("head.safetensors")), *more)
    assert done.exit_code == 1, done.output
    assert done.stderr.startswith("softsieve: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


# The file


def made_up(**change: Any) -> Head:
    corpora = {"a.b": Corpus(torch.rand(3, 2), torch.rand(2, 2))}
    return Head(torch.rand(5, 2), torch.rand(5), 0.5, 30.0, corpora)._replace(**change)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path, head = tmp_path / "h.safetensors", made_up()
    write_head(path, head, notes={"model": "m"})
    found, notes = read_head(path)
    assert notes["model"] == "m"
    assert (found.beta, found.softcap) == (0.5, 30.0)
    assert found.bias is not None
    assert head.bias is not None
    assert torch.equal(found.weight, head.weight)
    assert torch.equal(found.bias, head.bias)
    assert all(map(torch.equal, found.corpora["a.b"], head.corpora["a.b"]))
    write_head(path, made_up(bias=None, softcap=None, beta=1.0), notes={})
    found, _ = read_head(path)
    assert (found.bias, found.softcap, found.beta) == (None, None, 1.0)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "h.safetensors"
    write_head(path, made_up(), notes={})
    before = path.read_bytes()

    def full_disk(part: Path, tensors: Any, metadata: Any) -> None:
        Path(part).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(head_file, "write_aligned", full_disk)
    with pytest.raises(InputError, match=r"h.safetensors: cannot be written .*No space left"):
        write_head(path, made_up(), notes={})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_weight_and_queries_in_two_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weight, queries = tmp_path / "w.safetensors", tmp_path / "q.safetensors"
    save_file({"weight": torch.rand(5, 2)}, weight)
    save_file({"x.calibration": torch.rand(4, 2), "x.test": torch.ones(3, 2)}, queries)
    head, notes = read_head(weight, queries)
    assert torch.equal(head.corpora["x"].test, torch.ones(3, 2))
    assert notes == {}
    assert read_head(weight)[0].corpora == {}


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"x": torch.rand(2, 2)}, None, "expected a matrix 'weight', found 'x'"),
        ({"weight": torch.ones(2, 2, dtype=torch.int64)}, None, "expected a matrix 'weight'"),
        ({"weight": torch.rand(3, 2), "bias": torch.rand(2)}, None, "bias: expected 3 numbers"),
        ({"weight": torch.rand(3, 2), "x.test": torch.rand(3, 2)}, None, "expected x.calibration with x.test"),
        (
            {"weight": torch.rand(3, 2), "x.test": torch.rand(3, 3), "x.calibration": torch.rand(3, 2)},
            None,
            "rows of 2",
        ),
        ({"weight": torch.rand(3, 2)}, {"format_version": "3"}, "expected format version 2, found '3'"),
        ({"weight": torch.rand(3, 2)}, {"beta": "much"}, "damaged metadata"),
    ],
)
def test_files_that_are_none(tmp_path: Path, tensors: Any, metadata: Any, message: str) -> None:
    from safetensors.torch import save_file

    save_file(tensors, tmp_path / "h.safetensors", metadata=metadata)
    with pytest.raises(InputError, match=message):
        read_head(tmp_path / "h.safetensors")


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "h.safetensors"
    with pytest.raises(InputError, match="no such file"):
        read_head(path)
    write_head(path, made_up(), notes={})
    whole = path.read_bytes()
    for damaged in (b"", b"hello", whole[:-1], whole[:20]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="cannot be read as safetensors"):
            read_head(path)
