"""Hugging Face encoders, with a tiny one made here."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from softsieve.errors import InputError
from softsieve.losses.objectives import make_objective
from softsieve.tasks import hf
from softsieve.tasks.examples import Data, Examples
from softsieve.tasks.hf import FOLDER, PretrainedBody, PretrainedEncoder, _as_numbers, _recordable
from softsieve.tasks.task import Task, TokenRows
from softsieve.training.compiled import compile_layers

transformers = pytest.importorskip("transformers")

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "dog", "run", "##s", "##ning", "paris", "in"]
PAD, CLS, SEP = 0, 2, 3


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` leaves it, with weights in half precision."""
    from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
    from tokenizers.models import WordPiece

    folder = tmp_path_factory.mktemp("tiny")
    raw = Tokenizer(WordPiece({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    raw.normalizer = normalizers.Lowercase()
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(str(folder))
    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).half().save_pretrained(str(folder))
    return folder


def text_data() -> Data:
    train = Examples(["the cat runs", "the dog", "cat"], ["a", "b", "a"], ["1", "2", "3"])
    return Data("d", "text", train, None, None)


def token_data() -> Data:
    words = [["the", "cat", "runs", "in", "Paris"], ["dogs"], ["cat", " ", "dog"]]
    labels = [["O", "B-X", "O", "O", "B-L"], ["B-X"], ["B-X", "O", "B-X"]]
    return Data("d", "tokens", Examples(words, labels, ["1", "2", "3"]), None, None)


def test_texts_become_what_the_tokenizer_says(pretrained: Path) -> None:
    task = Task.build(text_data(), model=str(pretrained))
    rows = task.rows(text_data().train)
    assert rows.inputs["input_ids"].tolist() == [
        [CLS, 4, 5, 7, 8, SEP],
        [CLS, 4, 6, SEP, PAD, PAD],
        [CLS, 5, SEP, PAD, PAD, PAD],
    ]
    assert sorted(rows.inputs) == ["attention_mask", "input_ids", "token_type_ids"]
    assert rows.lengths is not None
    assert rows.lengths.tolist() == [6, 4, 3]
    assert rows.inputs["attention_mask"].sum(1).tolist() == [6, 4, 3]
    assert rows.batch(torch.tensor([1, 2])).inputs["token_type_ids"].shape == (2, 4)


@pytest.mark.parametrize("make", [text_data, token_data])
def test_texts_are_tokenized_some_at_a_time(
    pretrained: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Data]
) -> None:
    data = make()
    task = Task.build(data, model=str(pretrained))
    whole = task.encoder.encode(data.train)
    monkeypatch.setattr(hf, "BLOCK", 1)
    done: list[float] = []
    parts = task.encoder.encode(data.train, progress=lambda what, share: done.append(share))
    assert sum(done) == pytest.approx(1)
    assert list(whole.inputs) == list(parts.inputs)
    assert all(torch.equal(whole.inputs[name], parts.inputs[name]) for name in whole.inputs)
    assert (whole.words is None and parts.words is None) or torch.equal(whole.words, parts.words)  # type: ignore[arg-type]


def test_max_length_is_kept_to_what_the_model_can_take(pretrained: Path) -> None:
    long = Examples(["the cat " * 40], [], ["1"])
    for max_length, expected in ((10, 10), (999, 22)):
        encoder = PretrainedEncoder.load(str(pretrained), max_length=max_length, per_word=False)
        assert encoder.max_length == expected
        assert encoder.encode(long).inputs["input_ids"].shape == (1, expected)


def test_a_tokenizer_that_marks_spaces_sees_words_as_inside_a_text(tmp_path: Path) -> None:
    """The RoBERTa family: "cat" after a space is another token than "cat" alone; positions are numbered from 2."""
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"actĠ", "ca", "cat", "Ġcat"]
    merges = [("c", "a"), ("ca", "t"), ("Ġ", "cat")]
    transformers.RobertaTokenizerFast(
        vocab={word: i for i, word in enumerate(vocabulary)}, merges=merges
    ).save_pretrained(str(tmp_path))
    config = transformers.RobertaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=20,
    )
    transformers.RobertaModel(config).save_pretrained(str(tmp_path))
    words = Examples([["cat"] * 30, ["cat", "a"]], [["O"] * 30, ["O", "B-X"]], ["1", "2"])
    task = Task.build(Data("d", "tokens", words, None, None), model=str(tmp_path))
    rows = task.rows(words)
    assert rows.inputs["input_ids"][1, :5].tolist() == [0, vocabulary.index("Ġcat"), vocabulary.index("Ġ"), 5, 2]
    logits = task.model(make_objective("softmax"))(**rows.inputs)
    assert logits.shape == (2, 18, 2)


def test_the_model_means_over_the_text_and_not_over_padding(pretrained: Path) -> None:
    task = Task.build(text_data(), model=str(pretrained))
    model = task.model(make_objective("softmax")).eval()
    rows = task.rows(text_data().train)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    inputs = rows.batch(torch.tensor([2]), positions=rows.inputs["input_ids"].shape[1]).inputs
    logits = model(**inputs)
    torch.testing.assert_close(logits, model(**rows.batch(torch.tensor([2])).inputs))
    hidden = transformers.AutoModel.from_pretrained(pretrained, dtype=torch.float32).eval()(**inputs).last_hidden_state
    body = model.get_submodule("body")
    torch.testing.assert_close(body(**inputs), hidden[:, :3].mean(1))  # [CLS] cat [SEP]


def test_every_parameter_learns(pretrained: Path) -> None:
    """Distributed training stops at a parameter that no loss reaches, a pooler for instance."""
    for data in (text_data(), token_data()):
        task = Task.build(data, model=str(pretrained))
        objective = make_objective("softmax")
        model = task.model(objective)
        batch = task.rows(data.train).batch(torch.arange(3))
        objective(model(**batch.inputs), batch.target).loss.backward()  # type: ignore[no-untyped-call]
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key


def test_mpnet_computes_its_position_bias_once_and_to_the_bit() -> None:
    config = transformers.MPNetConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=210,
    )
    torch.manual_seed(0)
    plain = transformers.MPNetModel(config).eval()
    body = PretrainedBody(copy.deepcopy(plain), features=16, per_word=True).eval()
    inner: Any = body.encoder.get_submodule("encoder")
    kept = inner.relative_position_bucket.kept
    for length in (200, 1, 2, 5, 16, 17, 33, 127, 200):
        inputs = {"input_ids": torch.randint(3, 20, (2, length)), "attention_mask": torch.ones(2, length).long()}
        with torch.inference_mode(length == 200):
            assert torch.equal(body(**inputs), plain(**inputs).last_hidden_state)
    assert len(kept) == 8  # powers of two from 1 to 128, and 256
    assert {buckets.is_inference() for buckets in kept.values()} == {False}
    before = list(kept.values())
    body(**inputs)
    assert all(now is then for now, then in zip(kept.values(), before, strict=True))  # a graph has their addresses
    loss: torch.Tensor = body(**inputs).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert inner.relative_attention_bias.weight.grad is not None
    state = body.encoder.state_dict()
    assert state.keys() == {name for name in plain.state_dict() if "pooler" not in name}


def small_mpnet() -> tuple[PretrainedBody, dict[str, torch.Tensor]]:
    """With rows of different lengths."""
    config = transformers.MPNetConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    body = PretrainedBody(transformers.MPNetModel(config), features=16, per_word=False).eval()
    mask = (torch.arange(12) < torch.tensor([12, 7, 1, 10])[:, None]).long()
    return body, {"input_ids": torch.randint(3, 20, (4, 12)), "attention_mask": mask}


def test_masks_as_numbers_give_the_same_bits() -> None:
    body, inputs = small_mpnet()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    numbers = _as_numbers(mask)
    assert numbers.shape == (4, 1, 1, 12)
    assert torch.equal(numbers == 0, mask.bool()[:, None, None])
    with torch.no_grad():
        outputs = [body.encoder(input_ids=ids, attention_mask=m).last_hidden_state for m in (mask, numbers)]
        whole = body.encoder(input_ids=ids, attention_mask=torch.ones_like(mask)).last_hidden_state
    assert torch.equal(*outputs)
    assert not torch.allclose(outputs[0][1], whole[1])  # what is not attended would matter
    assert torch.equal(inputs["attention_mask"], mask)


def test_masks_become_numbers_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    body, inputs = small_mpnet()
    seen: list[torch.Size] = []
    encode = body.encoder.forward

    def watched(**given: torch.Tensor) -> Any:
        seen.append(given["attention_mask"].shape)
        return encode(**given)

    monkeypatch.setattr(body.encoder, "forward", watched)

    class OnGpu(torch.Tensor):
        is_cuda = True

    with torch.no_grad():
        expected = body(**inputs)
        pretending = {**inputs, "attention_mask": inputs["attention_mask"].as_subclass(OnGpu)}
        for capturing in (False, True):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
            assert (_recordable(pretending["attention_mask"], body.encoder).ndim == 4) == capturing
            assert _recordable(inputs["attention_mask"], body.encoder).ndim == 2  # on the CPU nothing is recorded
            assert torch.equal(body(**pretending).as_subclass(torch.Tensor), expected)
    assert seen == [(4, 12), (4, 12), (4, 1, 1, 12)]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    compile_layers(body)  # what is recorded must have been compiled before
    assert _recordable(pretending["attention_mask"], body.encoder).ndim == 4
    monkeypatch.setattr(body.encoder.config, "_attn_implementation", "sdpa")  # fused: makes none
    assert _recordable(pretending["attention_mask"], body.encoder).ndim == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_mpnet_can_be_recorded() -> None:
    from softsieve._graphs import Graphed

    config = transformers.MPNetConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    body = PretrainedBody(transformers.MPNetModel(config), features=16, per_word=True).cuda().eval()

    def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (body(input_ids=input_ids, attention_mask=attention_mask).detach(),)

    graphed = Graphed(forward, warmup=1)
    for _ in range(4):
        inputs = {"input_ids": torch.randint(3, 20, (4, 12)).cuda(), "attention_mask": torch.ones(4, 12).long().cuda()}
        torch.testing.assert_close(graphed(**inputs)[0], forward(**inputs)[0])
    assert len(graphed.graphs) == 1


def test_the_label_is_on_the_first_token_of_a_word(pretrained: Path) -> None:
    task = Task.build(token_data(), model=str(pretrained))
    rows = task.rows(token_data().train)
    assert isinstance(rows, TokenRows)
    # labels: B-L 0, B-X 1, O 2; "runs" and "dogs" are two tokens; the tokenizer makes nothing of the second "word"
    no = -100
    assert rows.target.tolist() == [
        [no, 2, 1, 2, no, 2, 0, no],
        [no, 1, no, no, no, no, no, no],
        [no, 1, 1, no, no, no, no, no],
    ]
    decided = rows.target.clamp_min(0)
    assert task.predictions(decided, rows) == token_data().train.labels
    assert task.metrics(*task.by_word(decided, rows)) == {"accuracy": 1.0, "entity_f1": 1.0}


def test_words_that_are_cut_off_count_as_nothing_found(pretrained: Path) -> None:
    task = Task.build(token_data(), model=str(pretrained), max_length=5)  # [CLS] the cat run [SEP]
    rows = task.rows(token_data().train)
    decided = rows.target.clamp_min(0)
    assert task.predictions(decided, rows)[0] == ["O", "B-X", "O", "O", "O"]
    found = task.metrics(*task.by_word(decided, rows))
    assert found == pytest.approx({"accuracy": 8 / 9, "entity_f1": 2 * 4 / (4 + 5)})


def test_a_saved_task_needs_nothing_but_its_folder(pretrained: Path, tmp_path: Path) -> None:
    for data, loss in ((text_data(), "am-softmax"), (token_data(), "softmax")):
        task = Task.build(data, model=str(pretrained), max_length=10)
        objective = make_objective(loss)
        model = task.model(objective).eval()
        folder = tmp_path / data.kind
        task.save(folder, objective)
        assert not list(folder.rglob("*.safetensors"))
        again = Task.load(folder)
        empty = again.empty_model().eval()
        assert not torch.equal(next(empty.parameters()), next(model.parameters()))
        empty.load_state_dict(model.state_dict())
        rows, rows_again = task.rows(data.train), again.rows(data.train)
        assert rows.fingerprint() == rows_again.fingerprint()
        batch = rows.batch(torch.arange(3))
        torch.testing.assert_close(empty(**batch.inputs), model(**batch.inputs))


def test_what_cannot_be_loaded_is_said_in_one_line(pretrained: Path, tmp_path: Path) -> None:
    for name in ("no-such/model", str(tmp_path)):
        with pytest.raises(InputError, match=f"^model {name}: cannot be loaded [^\n]*$"):
            Task.build(text_data(), model=name)


def test_a_model_that_is_no_encoder_is_refused(tmp_path: Path) -> None:
    transformers.T5Config(vocab_size=9, d_model=8, num_layers=1).save_pretrained(str(tmp_path))
    with pytest.raises(InputError, match="expected an encoder of text, found a model of type t5"):
        Task.build(text_data(), model=str(tmp_path))


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_images_and_sounds_have_built_in_models_only(kind: str) -> None:
    with pytest.raises(InputError, match=f"model bert-base-cased: for {kind} there is only the built-in model"):
        Task.build(text_data()._replace(kind=kind), model="bert-base-cased")


def test_damaged_files_of_a_saved_model_are_named(pretrained: Path, tmp_path: Path) -> None:
    task = Task.build(text_data(), model=str(pretrained))
    task.save(tmp_path, make_objective("softmax"))
    path = tmp_path / FOLDER / "config.json"
    content = json.loads(path.read_text())
    for field, value in (("hidden_size", 2**40), ("num_hidden_layers", -1), ("vocab_size", 1e9)):
        path.write_text(json.dumps({**content, field: value}))
        with pytest.raises(InputError, match=f"{FOLDER}: ({field}: expected|cannot be loaded)[^\n]*$"):
            Task.load(tmp_path)
    path.write_text("{")
    with pytest.raises(InputError, match=f"{FOLDER}: cannot be loaded [^\n]*$"):
        Task.load(tmp_path)
    path.write_text(json.dumps(content))
    (tmp_path / FOLDER / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=f"{FOLDER}: cannot be loaded [^\n]*$"):
        Task.load(tmp_path)


def test_code_that_comes_with_a_model_is_not_run(pretrained: Path, tmp_path: Path) -> None:
    for file in pretrained.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((pretrained / "config.json").read_text())
    config |= {"model_type": "unheard-of", "auto_map": {"AutoConfig": "evil.C", "AutoModel": "evil.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(InputError, match="cannot be loaded"):
        Task.build(text_data(), model=str(tmp_path))
