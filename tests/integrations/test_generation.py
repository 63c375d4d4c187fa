"""Tiny language models that write: the text of `model.generate`, what it takes, and what a head is calibrated with."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softsieve.errors import InputError
from softsieve.integrations import generation
from softsieve.integrations.adaptive_head import AdaptiveHead, accelerate_head, collect_queries
from softsieve.integrations.generation import (
    Choice,
    Transcript,
    agreement,
    choose,
    end_tokens,
    exact_head,
    own_states,
    prompt_tokens,
    text_states,
    watched,
    write,
)
from softsieve.integrations.hidden_states import inputs_of

transformers = pytest.importorskip("transformers")

WORDS = 1000
SIZE: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZE |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "head_dim": 16}
SIZE |= {"eos_token_id": None, "pad_token_id": 0}
PROMPT = torch.tensor([5, 17, 400, 2])


def llama(**options: Any) -> Any:
    """With an output layer that knows what it wants."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SIZE, "initializer_range": 0.2, **options})
    ).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_().mul_(1.5 / torch.arange(1, 33) ** 0.5)
    return model


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=2, n_head=2, n_positions=64, eos_token_id=None, initializer_range=0.5
    )
    return transformers.GPT2LMHeadModel(config).eval()


def gemma3() -> Any:
    """With layers that forget."""
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        **SIZE, sliding_window=6, layer_types=layers, initializer_range=0.5, tie_word_embeddings=False
    )
    return transformers.Gemma3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    """With an adaptive head."""
    made = llama()
    ids = torch.randint(WORDS, (20, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        queries = inputs_of(made.get_output_embeddings(), made, ids).flatten(0, 1)
    module = accelerate_head(made, queries, delta=0.05, k=3, generator=torch.Generator().manual_seed(0))
    fit: Any = module.head.calibrations[3]
    module.head.calibrations[3] = fit._replace(batch=64)  # what was measured here is a matter of the machine
    return made


class Letters:
    """A tokenizer of letters, 2 to 101."""

    bos_token_id = 1
    eos_token_id = 7

    def __call__(self, text: str, **options: Any) -> Any:
        return transformers.BatchEncoding({"input_ids": [2 + ord(letter) % 100 for letter in text]})


# Writing


@pytest.mark.parametrize("make", [llama, gpt2, gemma3])
@pytest.mark.parametrize("length", [1, 4, 20])
def test_greedy_text_is_that_of_generate(make: Any, length: int) -> None:
    own = make()
    prompt = torch.randint(WORDS, (length,), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(prompt)[None]
    expected = own.generate(prompt[None], attention_mask=mask, max_new_tokens=15, do_sample=False)[0, length:]
    heard: list[int] = []
    found = write(own, prompt, tokens=15, stream=heard.append)
    assert found.tokens.tolist() == expected.tolist() == heard
    assert len(set(heard)) > 2, heard  # no text of one token, which any fault would leave as it is


def test_exactly_so_many_tokens_beyond_the_end_of_a_text() -> None:
    plain = write(llama(), PROMPT, tokens=9).tokens
    ended = llama()
    ended.config.eos_token_id = ended.generation_config.eos_token_id = int(plain[2])
    assert torch.equal(write(ended, PROMPT, tokens=9).tokens, plain)


def test_drawn_text_goes_by_the_generator() -> None:
    own = llama()
    choice = Choice(1.0, top_k=50)
    texts = [
        write(own, PROMPT, tokens=12, choice=choice, generator=torch.Generator().manual_seed(seed)).tokens.tolist()
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1] != texts[2]


class Slow(nn.Linear):
    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        time.sleep(0.02)
        return super().forward(input)


def test_only_new_tokens_are_timed_and_nothing_else_than_the_head() -> None:
    own = llama(tie_word_embeddings=False)
    slow = Slow(32, WORDS, bias=False)
    own.set_output_embeddings(slow)
    found = write(own, PROMPT, tokens=5, stream=lambda token: time.sleep(0.2))
    assert slow.calls == 5
    assert 5 * 0.02 <= found.head_seconds < found.seconds < 5 * 0.2
    assert not slow._forward_hooks
    assert not slow._forward_pre_hooks
    layers = own.base_model.layers
    layers[0].register_forward_pre_hook(lambda *_: time.sleep(0.02))
    again = write(own, PROMPT, tokens=5)
    assert again.seconds - again.head_seconds >= 5 * 0.02
    assert again.head_seconds < again.seconds - 5 * 0.02


def test_hooks_are_gone_after_an_error() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="stop"), watched(layer):
        raise RuntimeError("stop")
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_what_the_own_layer_reads() -> None:
    found = write(llama(), PROMPT, tokens=6)
    assert (found.bytes_read, found.exactly) == (6 * WORDS * 32 * 4, 6)


def test_what_the_adaptive_head_reads(model: Any) -> None:
    module = model.get_output_embeddings()
    write(model, PROMPT, tokens=2)
    before = module.answered, module.exactly, module.bytes_read
    found = write(model, PROMPT, tokens=30)
    assert module.answered - before[0] == 30
    assert found.exactly == module.exactly - before[1] < 30
    assert found.bytes_read == module.bytes_read - before[2]
    assert 0 < found.bytes_read < 30 * WORDS * 32 * 4


def test_a_model_without_a_cache() -> None:
    class Forgetful(nn.Module):
        device = torch.device("cpu")

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 9)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

        def forward(self, **inputs: Any) -> Any:
            return transformers.modeling_outputs.CausalLMOutput(logits=torch.zeros(1, 1, 9))

    with pytest.raises(InputError, match="expected one that keeps keys and values, found Forgetful"):
        write(Forgetful(), PROMPT[:1], tokens=1)


# Agreement


def test_a_right_head_agrees(model: Any) -> None:
    with exact_head(model):
        text = write(model, PROMPT, tokens=40).tokens
    heard: list[int] = []
    read: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: read.extend(ids[0].flatten().tolist()))
    found = agreement(model, PROMPT, text, stream=heard.append)
    hook.remove()
    assert found.steps == 40
    assert found.agreed >= 37  # 5 % may be wrong
    assert heard == text.tolist()
    assert read == [*PROMPT.tolist(), *text[:-1].tolist()]


def test_a_wrong_head_does_not(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with exact_head(model):
        text = write(model, PROMPT, tokens=10).tokens
    right = AdaptiveHead.forward
    monkeypatch.setattr(AdaptiveHead, "forward", lambda self, hidden: right(self, hidden).roll(1, -1))
    assert agreement(model, PROMPT, text) == (0, 10)


def test_of_equal_logits_any_will_do(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = model.get_output_embeddings()
    monkeypatch.setattr(AdaptiveHead, "forward", lambda self, hidden: torch.eye(WORDS)[None, 7:8])
    for other, agreed in ((7, 3), (8, 0)):
        own = nn.Linear(32, WORDS)
        nn.init.zeros_(own.weight)
        with torch.no_grad():
            own.bias.zero_()[[3, other]] = 1.0
        monkeypatch.setattr(layer, "_layer", (own,))
        assert agreement(model, PROMPT, torch.tensor([1, 2, 3])).agreed == agreed


def test_agreement_needs_an_adaptive_head() -> None:
    with pytest.raises(InputError, match="expected an adaptive head"):
        agreement(llama(), PROMPT, PROMPT)


def test_the_exact_head_is_there_for_a_while(model: Any) -> None:
    module = model.get_output_embeddings()
    before = module.answered
    with exact_head(model):
        assert model.get_output_embeddings() is module.replaced
        assert write(model, PROMPT, tokens=3).exactly == 3
    assert model.get_output_embeddings() is module
    with pytest.raises(RuntimeError, match="stop"), exact_head(model):
        raise RuntimeError("stop")
    assert model.get_output_embeddings() is module
    assert module.answered == before


# Choosing


def test_choices() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).expand(4000, -1)
    generator = torch.Generator().manual_seed(0)
    assert set(choose(logits, Choice()).tolist()) == {1}
    for choice, expected in (
        (Choice(1.0), logits[0].softmax(0)),
        (Choice(2.0), (logits[0] / 2).softmax(0)),
        (Choice(1.0, top_k=2), torch.tensor([-torch.inf, 3, 2, -torch.inf]).softmax(0)),
        (Choice(1.0, top_p=0.7), torch.tensor([-torch.inf, 3, 2, -torch.inf]).softmax(0)),
        (Choice(1.0, top_k=3, top_p=0.5), torch.tensor([0.0, 1.0, 0.0, 0.0])),
        (Choice(1.0, top_k=99), logits[0].softmax(0)),
    ):
        counts = torch.bincount(choose(logits, choice, generator), minlength=4) / 4000
        assert (counts[expected == 0] == 0).all()
        torch.testing.assert_close(counts, expected, rtol=0, atol=0.04)


# Text


@pytest.fixture(scope="module")
def bytewise() -> Any:
    """A tokenizer of bytes, with a token that ends a text."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")


def test_a_transcript_has_whole_characters_and_ends(bytewise: Any) -> None:
    def ids(text: str) -> Tensor:
        return torch.tensor(bytewise(text).input_ids)

    end = bytewise.eos_token_id
    transcript = Transcript(bytewise, ids("Grüße: "), [end])
    pieces = [transcript.add(token) for token in [*ids(" a ß€").tolist(), end, *ids("more").tolist()]]
    assert pieces == [" ", "a", " ", "", "ß", "", "", "€", "", "", "", "", ""]
    assert [Transcript(bytewise, ids("x")).add(token) for token in (end, int(ids("y")))] == ["", "y"]


def test_tokens_that_end_a_text() -> None:
    own = llama()
    assert end_tokens(own, Letters()) == [7]
    own.generation_config.eos_token_id = 3
    assert end_tokens(own, Letters()) == [3]
    own.generation_config.eos_token_id = [3, 9]
    assert end_tokens(own, Letters()) == [3, 9]


def test_prompts() -> None:
    own = llama()
    found = prompt_tokens(own, Letters(), "ab", tokens=62)
    assert found.tolist() == [2 + 97, 2 + 98]
    assert prompt_tokens(own, Letters(), "ab", tokens=61, first=1).tolist() == [1, 99, 100]
    for options, message in (
        ({"prompt": " \n"}, "prompt: expected text, found none"),
        ({"prompt": "abc", "tokens": 62}, "expected at most 2 tokens, because the model reads 64 and 62 are to come"),
        (
            {"prompt": "ab", "tokens": 62, "first": 1, "place": "file:3"},
            "file:3: expected at most 2 tokens, .* found 3",
        ),
        ({"prompt": "ab", "tokens": 64}, "tokens: expected fewer than the 64 that the model reads, found 64"),
    ):
        given: dict[str, Any] = {"tokens": 1, **options}
        with pytest.raises(InputError, match=message):
            prompt_tokens(own, Letters(), **given)
    with pytest.raises(InputError, match="tokenizer: expected tokens below 50, which the model knows, found 99"):
        prompt_tokens(llama(vocab_size=50), Letters(), "a", tokens=1)

    class Deaf(Letters):
        def __call__(self, text: str, **options: Any) -> Any:
            return transformers.BatchEncoding({"input_ids": []})

    with pytest.raises(InputError, match="prompt: expected text of which the tokenizer makes tokens, found 'ab'"):
        prompt_tokens(own, Deaf(), "ab", tokens=1)
    with pytest.raises(InputError, match="expected one that makes tokens of English words"):
        own_states(own, Deaf(), count=10)


# What to calibrate with


def test_states_of_a_text() -> None:
    own = llama(max_position_embeddings=40)
    text = "All happy families are alike; every unhappy family is unhappy in its own way. " * 4
    told: list[float] = []
    found = text_states(own, Letters(), text, count=100, progress=lambda what, share: told.append(share))
    assert torch.equal(found, collect_queries(own, Letters(), text, count=100, window=40))
    assert sum(told) == pytest.approx(1)
    led = text_states(own, Letters(), text, count=50, first=1)
    ids = Letters()(text).input_ids[:50]
    with torch.no_grad():
        parts = [torch.tensor([[1, *ids[start : start + 39]]]) for start in (0, 39)]
        expected = [inputs_of(own.get_output_embeddings(), own, part)[0, 1:] for part in parts]
    torch.testing.assert_close(led, torch.cat(expected), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="story: expected at least 1000 tokens"):
        text_states(own, Letters(), text, count=1000, place="story")


@pytest.mark.parametrize("first", [None, 1])
def test_states_of_texts_that_the_model_writes(first: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    own = llama()
    drawn: list[Tensor] = []

    def listening(logits: Tensor, choice: Choice, generator: Any) -> Tensor:
        assert choice == Choice(1.0)
        drawn.append(choose(logits, choice, generator))
        return drawn[-1]

    monkeypatch.setattr(generation, "choose", listening)
    monkeypatch.setattr(generation, "_TOGETHER", 2)
    told: list[float] = []
    length = 64 - (first is not None)
    count = 2 * length + 10
    found = own_states(
        own,
        Letters(),
        count=count,
        first=first,
        generator=torch.Generator().manual_seed(0),
        progress=lambda what, share: told.append(share),
    )
    assert found.shape == (count, 32)
    assert sum(told) == pytest.approx(1)
    starts = [2 + ord(word[0]) % 100 for word in generation.STARTS]
    together = torch.stack(drawn[:length], 1), torch.stack(drawn[length:], 1)  # two texts, then one
    texts = [*together[0], *together[1]]
    with torch.no_grad():
        states = []
        for start, text in zip(starts, texts, strict=False):
            lead = [] if first is None else [first]
            ids = torch.tensor([[*lead, start, *text[:-1].tolist()]])
            states.append(inputs_of(own.get_output_embeddings(), own, ids)[0, len(lead) :])
    torch.testing.assert_close(found, torch.cat(states)[:count], rtol=1e-4, atol=1e-4)
    assert len(set(torch.cat(texts).tolist())) > 50


# Loading


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    llama(tie_word_embeddings=True).save_pretrained(str(place))
    return place


def test_parameters_have_the_dtype_and_positions_their_digits(folder: Path) -> None:
    found = generation.load(str(folder), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in found.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in found.buffers()} == {torch.float32}
    assert found.get_output_embeddings().weight is found.get_input_embeddings().weight
    text = write(found, PROMPT, tokens=3).tokens
    plain = transformers.LlamaForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16).eval()
    assert torch.equal(text, write(plain, PROMPT, tokens=3).tokens)
