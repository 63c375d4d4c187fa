"""`softsieve generate` on a tiny language model made here."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from softsieve.cli import app
from softsieve.heads.cascade import crossover
from softsieve.integrations import generation
from softsieve.integrations.adaptive_head import INDEX, AdaptiveHead

transformers = pytest.importorskip("transformers")

N, D = 1000, 32
WORDS = ["<unk>", "<s>", *(f"w{number}" for number in range(2, N))]
PROMPT = "w5 w17 w400"
FEW = ["--tokens", "12", "--queries", "700", "--delta", "0.05"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    folder = tmp_path_factory.mktemp("tiny")
    raw = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>")
    made.save_pretrained(str(folder))
    size = {"vocab_size": N, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **size, intermediate_size=48, max_position_embeddings=64, initializer_range=0.2, eos_token_id=None
    )
    network = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        network.get_output_embeddings().weight.normal_().mul_(1.5 / torch.arange(1, D + 1) ** 0.5)
    network.save_pretrained(str(folder))
    return folder


@pytest.fixture(autouse=True)
def _always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is faster for so small a head is a matter of the machine."""
    monkeypatch.setattr(crossover, "measured_batch", lambda *arguments: 64)


def run(model: Path | str, *more: str) -> Result:
    command = ["generate", "--model", str(model), *FEW, *more]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200", "TERM": "dumb"})


def greedy(model: Path, prompt: str = PROMPT, count: int = 12) -> list[str]:
    network = transformers.AutoModelForCausalLM.from_pretrained(str(model)).eval()
    ids = torch.tensor([[WORDS.index(word) for word in prompt.split()]])
    out = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return [WORDS[token] for token in out[0, ids.shape[1] :]]


def shown(done: Result, prompt: str = PROMPT) -> list[str]:
    """The words after a prompt."""
    line = next(line for line in done.stdout.splitlines() if line.startswith(prompt))
    return line.removeprefix(prompt).split()


def row(done: Result, name: str) -> list[str]:
    """Cells of the table."""
    line = next(line for line in done.stdout.splitlines() if name in line)
    return [cell.strip() for cell in line.split("│")[2:-1]]


def test_text_table_and_record(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("w9 w8\n\nw77\n")
    out = tmp_path / "deep" / "record.json"
    done = run(model, "--prompt", PROMPT, "--prompts", str(tmp_path / "prompts.txt"), "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "with 700 tokens that the model wrote itself, at temperature 1" in done.stderr
    record = json.loads(out.read_text())
    assert (record["suite"], record["settings"]["model"], record["settings"]["n"]) == ("generate", model.name, N)
    assert record["provenance"]["versions"]["torch"]
    assert str(model.parent) not in out.read_text()
    assert [path.name for path in out.parent.iterdir()] == ["record.json"]
    results = record["results"]
    assert [(r["prompt"], r["head"]) for r in results] == [
        (prompt, head) for prompt in (PROMPT, "w9 w8", "w77", None) for head in ("exact", "adaptive")
    ]
    for result in results[:-2]:
        assert result["tokens"] == 12
        if result["head"] == "exact":
            assert result["text"].split() == greedy(model, result["prompt"])
            assert (result["exactly"], result["bytes_read"]) == (12, N * D * 4)
        else:
            assert shown(done, result["prompt"]) == result["text"].split()
            assert (result["steps"], result["bytes_read"] < N * D * 4) == (12, True)
            assert result["agreed"] >= 10
    exact, adaptive = results[-2:]
    for total, head in ((exact, "exact"), (adaptive, "adaptive")):
        parts = [r for r in results[:-2] if r["head"] == head]
        assert total["tokens"] == 36
        assert total["head_ms"] == pytest.approx(sum(part["head_ms"] for part in parts) / 3)
        assert total["tokens_per_second"] == pytest.approx(3 / sum(1 / part["tokens_per_second"] for part in parts))
        assert 0 < total["head_share"] < 1
    faster = adaptive["tokens_per_second"] / exact["tokens_per_second"]
    rates = [f"{total['tokens_per_second']:.1f}" for total in (exact, adaptive)]
    assert row(done, "tokens/s") == [*rates, f"{faster:.2f}x"]
    times = [f"{total['head_ms']:.2f}" for total in (exact, adaptive)]
    assert row(done, "ms a token") == [*times, f"{exact['head_ms'] / adaptive['head_ms']:.1f}x"]
    assert row(done, "share of time")[:2] == [f"{total['head_share']:.1%}" for total in (exact, adaptive)]
    sizes = [f"{total['bytes_read'] / 1e6:.2f}" for total in (exact, adaptive)]
    assert row(done, "MB read") == [*sizes, f"{exact['bytes_read'] / adaptive['bytes_read']:.1f}x"]
    assert row(done, "exactly")[:2] == ["36 of 36", f"{adaptive['exactly']} of 36"]
    assert row(done, "greedy")[1] == f"{adaptive['agreed']} of 36"


def test_a_head_that_is_wrong_is_seen(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = AdaptiveHead.forward
    monkeypatch.setattr(AdaptiveHead, "forward", lambda self, hidden: right(self, hidden).roll(1, -1))
    done = run(model, "--prompt", PROMPT)
    assert done.exit_code == 0, done.output
    assert row(done, "greedy")[1] == "0 of 12"
    assert shown(done) != greedy(model)


def test_a_text_to_calibrate_with(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    text_states, load = generation.text_states, generation.load

    def reading(network: Any, tokenizer: Any, text: str, **options: Any) -> Any:
        seen.append((text, options["count"], options["first"]))
        return text_states(network, tokenizer, text, **options)

    def loading(name: str, *, dtype: torch.dtype) -> Any:
        seen.append(dtype)
        return load(name, dtype=torch.float32)  # for which the kernels are compiled

    monkeypatch.setattr(generation, "text_states", reading)
    monkeypatch.setattr(generation, "load", loading)
    text = " ".join(random.Random(0).choices(WORDS[2:], k=900))
    (tmp_path / "text.txt").write_text(text)
    done = run(model, "--prompt", PROMPT, "--calibration", str(tmp_path / "text.txt"), "--bos", "--dtype", "bf16")
    assert done.exit_code == 0, done.output
    assert seen == [torch.bfloat16, (text, 700, 1)]
    assert "with 700 tokens of a text" in done.stderr
    assert int(row(done, "exactly")[1].split()[0]) < 12


def test_what_is_shown_stops_where_the_text_ends(model: Path, tmp_path: Path) -> None:
    text = greedy(model)
    place = tmp_path / "ending"
    shutil.copytree(model, place)
    config = json.loads((place / "generation_config.json").read_text())
    (place / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": WORDS.index(text[4])}))
    done = run(place, "--prompt", PROMPT)
    assert done.exit_code == 0, done.output
    assert shown(done) == text[: text.index(text[4])]
    assert row(done, "exactly")[0] == "12 of 12"


def test_a_saved_model_needs_no_calibration(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "deep" / "saved"
    done = run(model, "--prompt", PROMPT, "--k", "3", "--save", str(saved))
    assert done.exit_code == 0, done.output
    assert f"saved: {saved}" in done.stderr
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]
    assert greedy(saved) == greedy(model)  # anyone can load it
    text = shown(done)

    def none(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("calibrates")

    for name in ("own_states", "text_states"):
        monkeypatch.setattr(generation, name, none)
    draw = ["--temperature", "1", "--top-k"]
    for given in ([saved], [model, "--index", str(saved)], [model, "--index", str(saved / INDEX), "--k", "3"]):
        again = CliRunner().invoke(
            app, ["generate", "--prompt", PROMPT, "--tokens", "12", "--out", "r.json", "--model", *map(str, given)]
        )
        assert again.exit_code == 0, again.output
        assert "index: " in again.stderr
        assert shown(again) == text
        settings = json.loads(Path("r.json").read_text())["settings"]
        assert (settings["k"], settings["delta"], settings["calibration"]) == (3, 0.05, "a saved index")
    assert run(saved, "--prompt", PROMPT, *draw, "2").exit_code == 0
    for more, message in (
        (["--k", "2"], "k: expected 3, which"),
        (["--eps", "0.1"], "eps: expected 0.3, which"),
        ([*draw, "4"], "top_k: expected at most 3, which"),
        (["--dtype", "bf16"], "weight"),
    ):
        refused = run(saved, "--prompt", PROMPT, *more)
        assert refused.exit_code == 1, refused.output
        assert message in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_a_failed_save_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(self: Any, folder: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", full_disk)
    done = run(model, "--prompt", PROMPT, "--save", "saved", "--out", "r.json")
    assert done.exit_code == 1
    assert "No space left on device" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_drawn_tokens_go_by_the_seed(model: Path, tmp_path: Path) -> None:
    draw = ["--prompt", PROMPT, "--temperature", "1", "--top-k", "20", "--top-p", "0.9"]
    texts = []
    for seed in ("1", "1", "2"):
        done = run(model, *draw, "--seed", seed, "--out", str(tmp_path / "r.json"))
        assert done.exit_code == 0, done.output
        texts.append(shown(done))
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] != greedy(model)
    settings = json.loads((tmp_path / "r.json").read_text())["settings"]
    assert (settings["k"], settings["temperature"], settings["top_k"], settings["top_p"]) == (20, 1.0, 20, 0.9)


def test_too_few_states_are_said_and_everything_is_exact(model: Path) -> None:
    done = run(model, "--prompt", PROMPT, "--queries", "40", "--threads", "2")
    assert done.exit_code == 0, done.output
    assert torch.get_num_threads() == 2
    assert "40 are too few" in done.stderr
    assert row(done, "exactly")[1] == "12 of 12"
    assert row(done, "MB read")[2] == "1.0x"
    assert shown(done) == greedy(model)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "prompt: expected --prompt TEXT or --prompts FILE, found neither"),
        (["--prompt", " "], "prompt: expected text, found none"),
        (["--prompts", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--prompts", "empty.txt"], "empty.txt: expected prompts, one a line, found none"),
        (["--prompts", "long.txt"], "long.txt:2: expected at most 52 tokens"),
        (["--prompt", "w2", "--tokens", "64"], "tokens: expected fewer than the 64 that the model reads, found 64"),
        (["--prompt", "w2", "--model", "nowhere"], "model nowhere: "),
        (["--prompt", "w2", "--model", "bare"], "model bare: the tokenizer cannot be loaded"),
        (["--prompt", "w2", "--model", "base"], "found no output embeddings"),
        (["--prompt", "w2", "--temperature", "-1"], "temperature: expected a number of at least 0, found -1"),
        (["--prompt", "w2", "--temperature", "nan"], "temperature: expected"),
        (["--prompt", "w2", "--top-k", "3"], "top_k: expected a --temperature above 0 with it, found 0"),
        (["--prompt", "w2", "--top-p", "0.5"], "top_p: expected a --temperature above 0 with it, found 0"),
        (["--prompt", "w2", "--temperature", "1", "--top-p", "0"], "top_p: expected a number above 0, at most 1"),
        (["--prompt", "w2", "--eps", "2"], "eps: expected"),
        (["--prompt", "w2", "--delta", "0"], "delta: expected"),
        (["--prompt", "w2", "--dtype", "int8"], "dtype: expected one of bf16, fp16, fp32, found 'int8'"),
        (["--prompt", "w2", "--index", "nowhere"], "index: expected a file, or a folder with"),
        (["--prompt", "w2", "--index", "long.txt"], "long.txt: "),
        (
            ["--prompt", "w2", "--temperature", "1", "--top-k", "1001"],
            "top_k: expected an int in [1, 1000], found 1001",
        ),
        (["--prompt", "w2", "--k", "1001"], "k: expected an int in [1, 1000], found 1001"),
        (["--prompt", "w2", "--calibration", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--prompt", "w2", "--calibration", "long.txt"], "long.txt: expected at least 700 tokens"),
        (["--prompt", "w2", "--calibration", "long.txt", "--index", "i"], "expected a text or an index, found both"),
        (["--prompt", "w2", "--save", "long.txt"], "long.txt: expected a new folder, found a file"),
        (["--prompt", "w2", "--save", "bare"], "bare: expected a new folder, found one with files"),
        (["--prompt", "w2", "--save", "long.txt/new"], "long.txt/new: cannot be written to"),
        (["--prompt", "w2", "--out", "long.txt/r.json"], "long.txt/r.json: cannot be written to"),
    ],
)
def test_errors_are_one_line_and_write_nothing(model: Path, tmp_path: Path, more: list[str], message: str) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")  # the folder that tests run in
    (tmp_path / "long.txt").write_text("w3\n" + "w4 " * 53)
    shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copytree(model, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    transformers.LlamaModel(transformers.AutoConfig.from_pretrained(str(model))).save_pretrained(str(tmp_path / "base"))
    before = sorted(tmp_path.rglob("*"))
    done = run(model, "--save", "new", "--out", "new.json", *more)
    assert done.exit_code == 1, done.output
    assert done.stderr.startswith("softsieve: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("option", ["--tokens", "--queries", "--k", "--top-k", "--threads"])
def test_numbers_out_of_range_are_refused(option: str) -> None:
    done = run("nowhere", "--prompt", "w2", option, "0")
    assert done.exit_code == 2
    assert option in done.output
