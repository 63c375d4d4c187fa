"""Hidden states of tiny language models made here, against the models' own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softsieve.errors import InputError
from softsieve.integrations import hidden_states
from softsieve.integrations.hidden_states import Head, collect, first_token, tokens_of

transformers = pytest.importorskip("transformers")

VOCABULARY = 40
SIZE = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZE |= {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32, "head_dim": 8}


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE, **options)).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config).eval()


def phi() -> Any:
    """Its output layer has a bias."""
    torch.manual_seed(0)
    model = transformers.PhiForCausalLM(transformers.PhiConfig(**SIZE)).eval()
    nn.init.normal_(model.lm_head.bias)
    return model


def gemma2() -> Any:
    torch.manual_seed(0)
    options = {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZE, **options)).eval()
    nn.init.normal_(model.lm_head.weight)
    return model


def granite() -> Any:
    """It divides its logits."""
    torch.manual_seed(0)
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZE, logits_scaling=8.0)).eval()


def some_tokens(count: int = 50) -> Tensor:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(1))


def logits_of(head: Head, name: str = "a") -> Tensor:
    rows = torch.cat(head.corpora[name])
    logits = rows @ head.weight.T if head.bias is None else rows @ head.weight.T + head.bias
    return head.beta * logits


@torch.no_grad()
def own_logits(model: Any, ids: Tensor, window: int, first: int | None = None) -> Tensor:
    """Window by window, with none of what is tested."""
    lead = [] if first is None else [first]
    pieces = torch.split(ids, window - len(lead))
    return torch.cat([model(torch.tensor([[*lead, *piece.tolist()]])).logits[0, len(lead) :] for piece in pieces])


@pytest.mark.parametrize(
    ("model", "bias"),
    [(llama(), False), (llama(tie_word_embeddings=True), False), (gpt2(), False), (phi(), True), (granite(), False)],
    ids=["llama", "tied", "gpt2", "bias", "scaled"],
)
@pytest.mark.parametrize("first", [None, 1])
def test_states_times_weight_are_the_models_logits_in_reading_order(model: Any, bias: bool, first: int | None) -> None:
    ids = some_tokens()  # 50 tokens in windows of 8 (7 with a first token): whole windows, a short batch, and a rest
    head = collect(model, {"a": ids}, first=first, window=8, batch_size=4)
    assert (head.bias is not None) == bias
    assert head.softcap is None
    assert head.beta == pytest.approx(0.125 if model.config.model_type == "granite" else 1.0)
    torch.testing.assert_close(logits_of(head), own_logits(model, ids, 8, first), rtol=1e-5, atol=1e-6)


def test_a_soft_cap_is_noted_and_left_out() -> None:
    model, ids = gemma2(), some_tokens()
    head = collect(model, {"a": ids}, window=8)
    assert (head.softcap, head.beta) == (2.0, 1.0)
    plain, own = logits_of(head), own_logits(model, ids, 8)
    assert float(plain.abs().max()) > 2 * float(own.abs().max())
    torch.testing.assert_close(2 * torch.tanh(plain / 2), own, rtol=1e-5, atol=1e-6)


def test_logits_that_are_made_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    forward = model.forward

    def squared(**inputs: Any) -> Any:
        found = forward(**inputs)
        found.logits = found.logits.square()
        return found

    monkeypatch.setattr(model, "forward", squared)
    with pytest.raises(InputError, match="logits that are a linear layer's"):
        collect(model, {"a": some_tokens()}, window=8)


def test_the_later_part_of_a_text_is_for_tests() -> None:
    model, texts = llama(), {"a": some_tokens(), "b": some_tokens(30).flip(0)}
    seen: list[int] = []
    head = collect(model, texts, window=8, test_share=0.2, progress=seen.append)
    assert sum(seen) == 80
    assert list(head.corpora) == ["a", "b"]
    assert [len(part) for name in texts for part in head.corpora[name]] == [40, 10, 24, 6]
    whole = collect(model, texts, window=8, test_share=0.5)
    for name in texts:
        assert torch.equal(torch.cat(head.corpora[name]), torch.cat(whole.corpora[name]))
    torch.testing.assert_close(logits_of(head, "b"), own_logits(model, texts["b"], 8), rtol=1e-5, atol=1e-6)


def test_the_output_layer_runs_for_a_few_tokens_only() -> None:
    model = llama()
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda layer, given, made: rows.append(made.shape[:-1].numel()))
    collect(model, {"a": some_tokens(200)}, window=8)
    assert max(rows) <= 16
    assert len(rows) <= 2
    assert not model.lm_head._forward_pre_hooks  # ours is gone
    assert model(some_tokens(5)[None]).logits.shape == (1, 5, VOCABULARY)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_dtypes(dtype: torch.dtype | None) -> None:
    model = phi()
    head = collect(model, {"a": some_tokens()}, window=8, dtype=dtype)
    assert head.bias is not None
    for tensor in (head.weight, head.bias, *head.corpora["a"]):
        assert tensor.dtype == (dtype or torch.float32)
        assert not tensor.is_inference()
        assert not tensor.requires_grad
    exact = own_logits(model, some_tokens(), 8)
    rough = torch.cat(head.corpora["a"]).float() @ head.weight.float().T + head.bias.float()
    assert float((rough - exact).abs().max()) < 0.05 * float(exact.abs().max())
    assert model.lm_head.weight.dtype == torch.float32


def test_a_model_in_half_precision_keeps_its_dtype() -> None:
    model = llama().bfloat16()
    head = collect(model, {"a": some_tokens()}, window=8)
    assert head.weight.dtype == head.corpora["a"].test.dtype == torch.bfloat16
    assert head.beta == 1.0


def test_states_that_do_not_fit_the_dtype_are_refused() -> None:
    model = llama()
    model.model.norm.weight.data.fill_(1e6)
    with pytest.raises(InputError, match=r"a: expected numbers that torch.float16 can hold"):
        collect(model, {"a": some_tokens()}, window=8, dtype=torch.float16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 33}, "window: expected 1 to 32 tokens, found 33"),
        ({"window": 1, "first": 1}, "window: expected 2 to 32 tokens, found 1"),
        ({"tokens": {"a": torch.tensor([1, VOCABULARY])}}, "expected tokens below 40, which the model knows, found 40"),
        ({"tokens": {"a": torch.tensor([1])}}, "a: expected queries to calibrate and to test, found"),
        ({"test_share": 0.001}, "a: expected queries to calibrate and to test, found 50 and 0"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        collect(llama(), **{"tokens": {"a": some_tokens()}, "window": 8, **change})


def test_models_without_output_embeddings(tmp_path: Path) -> None:
    base = transformers.LlamaModel(transformers.LlamaConfig(**SIZE))
    with pytest.raises(InputError, match="expected one with output embeddings, found LlamaModel"):
        collect(base, {"a": some_tokens()}, window=8)
    base.save_pretrained(str(tmp_path))
    with pytest.raises(InputError, match=r"expected a language model, found no output embeddings \(lm_head.weight\)"):
        hidden_states.load_model(str(tmp_path), dtype=torch.float32)
    llama(tie_word_embeddings=True).save_pretrained(str(tmp_path / "tied"))
    model = hidden_states.load_model(str(tmp_path / "tied"), dtype=torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training


# Tokens


def tokenizer(*, adds_bos: bool = False) -> Any:
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers.models import WordLevel

    raw = Tokenizer(
        WordLevel({word: i for i, word in enumerate(["<unk>", "<s>", *"abcdefgh", "word"])}, unk_token="<unk>")
    )
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>")


@pytest.mark.parametrize("text", ["a b c\nd e\n\nf g h a\nb\n", "a b c d e f g h a b"], ids=["lines", "one line"])
@pytest.mark.parametrize("piece", [6, 8, 1 << 16])
def test_pieces_are_joined_in_order(text: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "_PIECE", piece)
    assert tokens_of(tokenizer(adds_bos=True), text, count=10).tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 2, 3]
    assert tokens_of(tokenizer(), text, count=4).tolist() == [2, 3, 4, 5]


def test_pieces_end_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "_PIECE", 7)
    assert set(tokens_of(tokenizer(), "word\n" * 10, count=10).tolist()) == {10}


def test_only_what_is_needed_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenizer()
    read: list[Any] = []
    monkeypatch.setattr(hidden_states, "_PIECE", 4)
    monkeypatch.setattr(made, "_encode_plus", spy(made._encode_plus, read))
    tokens_of(made, "a b\n" * 1000, count=3)
    assert len(read) == 2


def spy(function: Any, calls: list[Any]) -> Any:
    def called(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return function(*arguments, **options)

    return called


def test_too_little_text() -> None:
    with pytest.raises(InputError, match=r"f.txt: expected at least 4 tokens, one for each query, found 3"):
        tokens_of(tokenizer(adds_bos=True), "a b c", count=4, place="f.txt")
    with pytest.raises(InputError, match=r"f.txt: expected text, found none"):
        tokens_of(tokenizer(), " \n", count=4, place="f.txt")


def test_the_first_token_is_the_tokenizers_unless_asked_for() -> None:
    assert first_token(tokenizer(adds_bos=True)) == 1
    assert first_token(tokenizer()) is None
    assert first_token(tokenizer(), bos=True) == 1
    assert first_token(tokenizer(adds_bos=True), bos=False) is None
    without = tokenizer()
    without.bos_token = None
    assert first_token(without) is None
    with pytest.raises(InputError, match="bos: expected a tokenizer with a token for the beginning"):
        first_token(without, bos=True)
