"""Perplexity through an adaptive head, against a model's own losses and on heads whose logits are spoiled."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner, Result

from experiments import perplexity
from experiments.commands import app
from experiments.perplexity import Reading
from softsieve.comparisons.output import read_table
from softsieve.errors import InputError
from softsieve.heads import AdaptiveSoftmax
from softsieve.integrations.hidden_states import Corpus, Head

transformers = pytest.importorskip("transformers")

WORDS = 40
N, D = 1500, 24


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32, "head_dim": 8}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **options, initializer_range=0.5)).eval()


class Letters:
    """A tokenizer of letters."""

    bos_token_id = 1

    def __call__(self, text: str, **options: Any) -> Any:
        return transformers.BatchEncoding({"input_ids": [3 + ord(letter) % 37 for letter in text]})


@pytest.fixture(scope="module")
def reading() -> Reading:
    """A made-up head with states that have structure, and the tokens that it says come next."""
    torch.manual_seed(0)
    scale = 2 / torch.arange(1, D + 1) ** 0.5
    weight, states = torch.randn(N, D) * scale, torch.randn(1100, D)
    test = states[1000:]
    following = torch.multinomial((test @ weight.T).softmax(-1), 1)[:, 0]
    return Reading(Head(weight, None, 1.0, None, {"text": Corpus(states[:1000], test)}), following)


def measured(reading: Reading, **options: Any) -> list[dict[str, Any]]:
    return perplexity.summary(perplexity.measure(reading, delta=0.05, **options))


@pytest.mark.parametrize("first", [None, 1])
def test_states_go_with_the_tokens_that_follow_them(first: int | None) -> None:
    model = llama()
    text = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=200))
    told: list[float] = []
    found = perplexity.read(
        model,
        Letters(),
        text,
        calibration=30,
        tokens=45,
        first=first,
        window=16,
        progress=lambda what, share: told.append(share),
    )
    assert sum(told) == pytest.approx(1)
    ids = torch.tensor([3 + ord(letter) % 37 for letter in text])
    lead = [] if first is None else [first]
    expected = []
    with torch.no_grad():
        for start in range(0, 75, 16 - len(lead)):
            piece = ids[start : min(start + 16 - len(lead), 75)]
            logits = model(torch.tensor([[*lead, *piece.tolist()]])).logits[0, len(lead) :]
            expected.append(F.cross_entropy(logits, ids[start + 1 : start + 1 + len(piece)], reduction="none"))
    own = torch.cat(expected)[30:].double()
    states = found.head.corpora["text"]
    assert (len(states.calibration), len(states.test), len(found.following)) == (30, 45, 45)
    loss = perplexity.losses(states.test @ found.head.weight.T, found.following, None)
    torch.testing.assert_close(loss, own, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="story: expected at least 201 tokens"):
        perplexity.read(model, Letters(), text, calibration=100, tokens=100, window=16, place="story")


def test_the_adaptive_perplexity_nears_the_exact_one(reading: Reading) -> None:
    rows = measured(reading, ks=(64, 2))
    assert [(row["head"], row["k"], row["tokens"]) for row in rows] == [
        ("exact", None, 100),
        ("adaptive", 2, 100),
        ("adaptive", 64, 100),
    ]
    weight, states = reading.head.weight, reading.head.corpora["text"].test
    own = F.cross_entropy(states.double() @ weight.double().T, reading.following)
    assert rows[0]["perplexity"] == pytest.approx(float(own.exp()))
    assert (rows[0]["ratio"], rows[0]["ratio_error"], rows[0]["exact_share"]) == (1, 0, 1)
    assert rows[0]["bytes_read"] == N * D * 4
    few, many = rows[1:]
    assert 0 < many["ratio_error"] < few["ratio_error"]
    assert abs(many["ratio"] - 1) < 0.05
    assert abs(few["ratio"] - 1) < 0.3
    assert 1 < many["bytes_ratio"] < few["bytes_ratio"]
    assert few["exact_share"] < 1
    for row in rows[1:]:
        assert row["loss"] - rows[0]["loss"] == pytest.approx(torch.tensor(row["ratio"]).log().item(), abs=1e-6)
        assert row["bytes_ratio"] == pytest.approx(N * D * 4 / row["bytes_read"])


def test_spoiled_logits_are_seen(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    right = AdaptiveSoftmax.logits
    monkeypatch.setattr(AdaptiveSoftmax, "logits", lambda self, x: 0.5 * right(self, x))
    assert measured(reading, ks=[64])[1]["ratio"] > 1.2


def test_the_head_is_asked_one_state_at_a_time(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    right = AdaptiveSoftmax.logits

    def listening(self: AdaptiveSoftmax, x: Tensor) -> Tensor:
        shapes.append((tuple(x.shape), self.method))
        return right(self, x)

    monkeypatch.setattr(AdaptiveSoftmax, "logits", listening)
    told: list[float] = []
    perplexity.measure(reading, ks=[1], delta=0.05, progress=lambda what, share: told.append(share))
    assert shapes == [((D,), "cascade")] * 100
    assert sum(told) == pytest.approx(1, abs=0.05)


def test_the_index_and_the_calibration_have_states_of_their_own(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Tensor] = {}
    for name in ("build", "calibrate"):
        right = getattr(AdaptiveSoftmax, name)

        def listening(
            self: Any, queries: Tensor, *more: Any, name: str = name, right: Any = right, **options: Any
        ) -> Any:
            given[name] = queries
            return right(self, queries, *more, **options)

        monkeypatch.setattr(AdaptiveSoftmax, name, listening)
    perplexity.measure(reading, ks=[1], delta=0.05)
    both = torch.cat([given["build"], given["calibrate"]])
    assert len(both) == len(set(map(tuple, both.tolist()))) == 1000
    assert len(given["build"]) == 500


def test_the_error_of_the_ratio() -> None:
    exact = perplexity.Losses(None, torch.zeros(4).double(), torch.full((4,), 8), torch.ones(4).bool())
    other = exact._replace(k=1, loss=torch.tensor([0.1, -0.1, 0.3, -0.3]).double())
    found = perplexity.summary([exact, other])[1]
    assert (found["ratio"], found["ratio_error"]) == (pytest.approx(1), pytest.approx(0.05**0.5 / 2))


def test_too_few_states_to_calibrate_are_all_exact(reading: Reading) -> None:
    corpus = reading.head.corpora["text"]
    few = reading._replace(
        head=reading.head._replace(corpora={"text": corpus._replace(calibration=corpus.calibration[:20])})
    )
    with pytest.warns(UserWarning, match="too few"):
        exact, row = measured(few, ks=[1])
    assert row["exact_share"] == 1
    assert row["ratio"] == pytest.approx(1, abs=1e-5)
    assert row["bytes_read"] == exact["bytes_read"]


def test_beta_bias_and_softcap_are_the_models(reading: Reading) -> None:
    bias = torch.linspace(-1, 1, N)
    head = reading.head._replace(bias=bias, beta=0.5, softcap=3.0)
    exact, adaptive = measured(Reading(head, reading.following), ks=[64])
    linear = 0.5 * (head.corpora["text"].test @ head.weight.T + bias).double()
    own = F.cross_entropy(3 * torch.tanh(linear / 3), reading.following)
    assert exact["loss"] == pytest.approx(float(own), abs=1e-6)
    assert adaptive["ratio"] == pytest.approx(1, abs=0.05)


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    place = tmp_path_factory.mktemp("tiny")
    raw = Tokenizer(WordLevel({chr(97 + i) * 2: i for i in range(WORDS)}, unk_token="aa"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="bb").save_pretrained(str(place))
    llama().save_pretrained(str(place))
    (place / "text.txt").write_text(" ".join(random.Random(0).choices([chr(97 + i) * 2 for i in range(20)], k=900)))
    return place


def run(folder: Path, *more: str) -> Result:
    few = ["--calibration", "700", "--tokens", "40", "--window", "32", "--delta", "0.05", "--k", "1", "--k", "4"]
    command = ["perplexity", "--model", str(folder), "--text", str(folder / "text.txt"), *few, *more]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200", "TERM": "dumb"})


def test_the_command_writes_table_pictures_and_record(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "p"
    done = run(folder, "--out", str(out), "--bos")
    assert done.exit_code == 0, done.output
    assert {path.name for path in out.parent.iterdir()} == {f"p.{kind}" for kind in ("csv", "json", "png", "svg")}
    about, rows = read_table(out.with_suffix(".csv"))
    assert (about["experiment"], about["model"], about["text"]) == ("perplexity", folder.name, "text.txt")
    assert (about["calibration"], about["tokens"], about["ks"], about["first"]) == ("700", "40", "[1, 4]", "1")
    assert [row["k"] for row in rows] == ["", "1", "4"]
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["suite"] == "perplexity"
    assert [float(row["ratio"]) for row in rows] == [pytest.approx(r["ratio"], rel=1e-4) for r in record["results"]]
    assert str(folder.parent) not in out.with_suffix(".csv").read_text() + out.with_suffix(".json").read_text()
    for row in record["results"]:
        assert f"{row['perplexity']:.4g}" in done.output
        assert f"{row['ratio']:.4f} ± " in done.output
        assert f"{row['bytes_ratio']:.1f}x" in done.output
    assert str(out.with_suffix(".json")) in done.output


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--model", "nowhere"], "model nowhere: "),
        (["--tokens", "300"], "text.txt: expected at least 1001 tokens"),
        (["--window", "33"], "window: expected 1 to 32 tokens, found 33"),
        (["--k", "41"], "k: expected an int in [1, 40], found 41"),
        (["--eps", "1"], "eps: expected"),
        (["--delta", "0"], "delta: expected"),
        (["--out", "text/p"], "text/p: cannot be written to"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    more: list[str], message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("no folder")
    done = run(folder, *more)
    assert done.exit_code == 1, done.output
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
