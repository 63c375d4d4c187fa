"""`softsieve head build --model`: the index of a tiny language model made here, as an engine finds it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from softsieve.cli import app
from softsieve.integrations import hidden_states
from softsieve.integrations.distributed import ShardedAdaptiveSoftmax
from softsieve.integrations.vllm import index_folder

transformers = pytest.importorskip("transformers")

ROWS, COLUMNS = 1000, 32
WORDS = ["<unk>", "<s>", *(f"w{number}" for number in range(ROWS - 2))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    folder = tmp_path_factory.mktemp("tiny")
    raw = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>")
    made.save_pretrained(str(folder))
    size = {"vocab_size": ROWS, "hidden_size": COLUMNS, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**size, intermediate_size=24, max_position_embeddings=64)
    network = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        network.lm_head.weight.copy_(torch.randn(ROWS, COLUMNS) * torch.arange(1, COLUMNS + 1) ** -1.0)
    network.save_pretrained(str(folder))
    text = "\n".join(random.Random(0).choices(WORDS[2:], k=1200))
    (folder / "text.txt").write_text(text)
    return folder


def build(model: Path, *more: str) -> Any:
    small = ["--states", "800", "--window", "16", "--delta", "0.1", "--k", "4", "--k", "20"]
    command = ["head", "build", "--model", str(model), "--text", str(model / "text.txt"), *small, *more]
    return CliRunner().invoke(app, command)


def test_one_command_writes_an_index_that_an_engine_finds(model: Path) -> None:
    done = build(model)
    assert done.exit_code == 0, done.output
    assert "1000 x 32, bfloat16; texts begin with token: none" in done.stderr
    assert "k = 20: right" in done.stderr
    network = transformers.AutoModelForCausalLM.from_pretrained(model)
    weight = network.lm_head.weight.detach().to(torch.bfloat16)
    folder = index_folder.find_index(model / "softsieve", weight, [index_folder.fingerprint(weight, None)])
    about = index_folder.read_description(folder)
    assert (about.rows, about.columns, about.ks, about.eps, about.delta) == (ROWS, COLUMNS, [4, 20], 0.1, 0.1)
    states, _ = index_folder.read_states(folder)
    assert states.shape == (800, COLUMNS)
    head = ShardedAdaptiveSoftmax.load(folder, weight=weight)
    assert head.head.method == "cascade"
    assert {k: fit.eps for k, fit in head.head.calibrations.items()} == {4: 0.9, 20: 0.1}
    best = (states[-50:].float() @ weight.float().T).topk(20)
    right = head.topk(states[-50:], 20)
    assert ((right.logits - best.values).abs().amax(-1) < 1e-3).sum() >= 40


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_index_that_is_built_on_a_gpu_answers_there(model: Path, tmp_path: Path) -> None:
    done = build(model, "--out", str(tmp_path / "gpu"), "--device", "cuda")
    assert done.exit_code == 0, done.output
    network = transformers.AutoModelForCausalLM.from_pretrained(model)
    weight = network.lm_head.weight.detach().to("cuda", torch.bfloat16)
    folder = index_folder.find_index(tmp_path / "gpu", weight, [index_folder.fingerprint(weight, None)])
    head = ShardedAdaptiveSoftmax.load(folder, weight=weight)
    assert {k: fit.eps for k, fit in head.head.calibrations.items()} == {4: 0.9, 20: 0.1}
    states = index_folder.read_states(folder)[0][-50:].to("cuda", torch.bfloat16)
    best = (states.float() @ weight.float().T).topk(20)
    right = head.topk(states, 20)
    assert ((right.logits.float() - best.values).abs().amax(-1) < 1e-3).sum() >= 40


def test_a_second_call_keeps_what_is_there_and_goes_on(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    assert build(model, "--out", str(out)).exit_code == 0
    files = {name: (out / name).stat().st_mtime_ns for name in ("states.safetensors", "rank-0-of-1.safetensors")}
    (out / "index.json").unlink()  # as if it had been stopped before the end
    again = build(model, "--out", str(out))
    assert again.exit_code == 0, again.output
    assert "hidden states: 800 from before" in again.stderr
    assert "rank 0: from before" in again.stderr
    assert files == {name: (out / name).stat().st_mtime_ns for name in files}
    (out / "rank-0-of-1.safetensors").unlink()
    assert "rank 0: from before" not in build(model, "--out", str(out)).stderr
    other = build(model, "--out", str(out), "--window", "8")
    assert "from before" not in other.stderr.replace("rank 0: from before", "")
    assert (out / "states.safetensors").stat().st_mtime_ns != files["states.safetensors"]


def test_ranks_have_the_rows_that_an_engine_gives_them(model: Path, tmp_path: Path) -> None:
    done = build(model, "--out", str(tmp_path / "two"), "--ranks", "2", "--dtype", "fp32")
    assert done.exit_code == 0, done.output
    assert "k = 4 on rank 1: right" in done.stderr
    weight = transformers.AutoModelForCausalLM.from_pretrained(model).lm_head.weight.detach()
    shards = [weight[:512], weight[512:1000]]
    fingerprints = [index_folder.fingerprint(shard, None) for shard in shards]
    for rank, shard in enumerate(shards):
        folder = index_folder.find_index(tmp_path / "two", shard, fingerprints)
        assert (folder / f"rank-{rank}-of-2.safetensors").is_file()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--states", "5000"], "expected at least 5000 tokens"),
        (["--dtype", "int8"], "dtype: expected one of bf16, fp16, fp32, found 'int8'"),
        (["--model", "nowhere"], "out: expected a folder for the index of nowhere"),
        (["--queries", "x.npy"], "expected --model with --text, and without --queries"),
        (["weight.npy"], "expected a weight or --model, found both"),
        (["--ranks", "3"], "ranks: expected a number that 1024 rows can be spread over evenly, found 3"),
        (["--delta", "0.01"], "states: expected at least 1573 for delta 0.01 of 1 ranks, found 800"),
    ],
)
def test_errors_are_one_line(model: Path, more: list[str], message: str) -> None:
    done = build(model, *more)
    assert done.exit_code == 1
    assert message in done.output
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(("lost", "begin", "first"), [(0.0, [], None), (30.0, [], 1), (0.0, [1], 1)])
def test_a_first_token_is_found_where_the_tokenizer_does_not_say(
    lost: float, begin: list[int], first: int | None
) -> None:
    """A model that gives every token the same chance, but may be lost without a first one."""

    class Network:
        device = torch.device("cpu")

        def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            logits = torch.zeros(*input_ids.shape, 50)
            if int(input_ids[0, 0]) != 1:
                logits[..., 0] = lost
            return type("Output", (), {"logits": logits})

    class Tokenizer:
        bos_token_id = 1

        def __call__(self, text: str) -> Any:
            return type("Encoding", (), {"input_ids": begin})

    assert hidden_states.measured_first_token(Network(), Tokenizer(), torch.arange(5, 45)) == first
