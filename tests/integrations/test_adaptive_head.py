"""Tiny language models with an adaptive head: the same text, the same parameters, and nothing left behind."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softsieve.errors import InputError
from softsieve.integrations.adaptive_head import AdaptiveHead, accelerate_head, collect_queries, restore_head
from softsieve.integrations.hidden_states import inputs_of

transformers = pytest.importorskip("transformers")

WORDS = 3000
SIZE = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZE |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "head_dim": 16}
PROMPT = torch.tensor([[5, 17, 400, 2]])


def make(*, tied: bool = True, seed: int = 0, **options: Any) -> Any:
    """With an output layer that knows what it wants."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SIZE, tie_word_embeddings=tied, eos_token_id=None, pad_token_id=0, **options)
    model = transformers.LlamaForCausalLM(config).eval()
    scale = 1.5 / torch.arange(1, 33) ** 0.5
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_().mul_(scale)
    return model


def queries_of(model: Any, count: int = 900) -> Tensor:
    ids = torch.randint(WORDS, (count // 30, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return inputs_of(model.get_output_embeddings(), model, ids).flatten(0, 1)


def accelerated(model: Any, *, delta: float = 0.05, k: int = 3) -> AdaptiveHead:
    module = accelerate_head(model, queries_of(model), delta=delta, k=k, generator=torch.Generator().manual_seed(0))
    fit: Any = module.head.calibrations[k]
    module.head.calibrations[k] = fit._replace(batch=64)  # what was measured here is a matter of the machine
    return module


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A model, and the same with an adaptive head."""
    model = make()
    accelerated(model)
    return make(), model


def steps(model: Any, ids: Tensor) -> Tensor:
    """Logits of every next token, made one token at a time as `generate` does."""
    cache, found = None, []
    with torch.no_grad():
        for at in range(ids.shape[1]):
            out = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits[:, -1])
    return torch.stack(found, 1)


def test_new_tokens_have_the_right_largest_logits(pair: tuple[Any, Any]) -> None:
    exact, model = pair
    ids = torch.randint(WORDS, (4, 50), generator=torch.Generator().manual_seed(2))
    module = model.get_output_embeddings()
    before = module.answered
    right, found = steps(exact, ids), steps(model, ids)
    assert module.answered - before == ids.numel()
    best, order = found.topk(3)
    same = (order == right.topk(3).indices).all(-1)
    assert same.float().mean() > 0.95
    torch.testing.assert_close(best[same], right.topk(3).values[same], rtol=1e-4, atol=1e-4)
    off = (found.logsumexp(-1) - right.logsumexp(-1)).abs()
    assert off.median() < 0.1
    assert not torch.equal(found, right)  # some of them are estimates


def test_prompts_and_training_are_exact(pair: tuple[Any, Any]) -> None:
    exact, model = pair
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits, exact(PROMPT).logits)
    losses = []
    for each in (exact, model):
        each.train()
        loss = each(PROMPT[:, :1], labels=PROMPT[:, :1]).logits.logsumexp(-1).sum()
        losses.append(torch.autograd.grad(loss, each.get_input_embeddings().weight)[0])
        each.eval()
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "temperature": 0.8, "top_k": 3, "num_return_sequences": 2},
        {"do_sample": True, "top_p": 0.8},
    ],
    ids=str,
)
def test_generate_works_as_before(pair: tuple[Any, Any], options: dict[str, Any]) -> None:
    texts = []
    for model in pair:
        torch.manual_seed(3)
        texts.append(model.generate(PROMPT, max_new_tokens=20, attention_mask=torch.ones_like(PROMPT), **options))
    assert texts[0].shape == texts[1].shape
    if not options["do_sample"] and "num_beams" not in options:
        assert torch.equal(*texts)


def test_a_draft_leaves_the_text_of_its_target(pair: tuple[Any, Any]) -> None:
    _, draft = pair
    target = make(seed=1)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(PROMPT)}
    alone = target.generate(PROMPT, **options)
    assert torch.equal(target.generate(PROMPT, assistant_model=draft, **options), alone)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_stay_what_they_are(tied: bool, tmp_path: Path) -> None:
    model = make(tied=tied)
    names, own = list(model.state_dict()), model.get_output_embeddings()
    module = accelerated(model)
    assert list(model.state_dict()) == names
    assert module.weight is own.weight
    assert (model.get_input_embeddings().weight is module.weight) == tied
    model.save_pretrained(str(tmp_path))
    plain = transformers.LlamaForCausalLM.from_pretrained(str(tmp_path)).eval()
    with torch.no_grad():
        assert torch.equal(plain(PROMPT).logits, model(PROMPT).logits)
    restore_head(model)
    assert model.get_output_embeddings() is own


def test_a_bias_and_divided_logits() -> None:
    for kind, options in (("Phi", {}), ("Granite", {"logits_scaling": 4.0})):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SIZE, eos_token_id=None, pad_token_id=0, **options)
        exact = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        layer = exact.get_output_embeddings()
        with torch.no_grad():
            layer.weight.normal_().mul_(4 / torch.arange(1, 33) ** 0.5)
            if layer.bias is not None:
                layer.bias.normal_()
        ids = torch.randint(WORDS, (2, 20), generator=torch.Generator().manual_seed(2))
        right = steps(exact, ids)
        accelerated(exact, k=1)
        found = steps(exact, ids)
        agree = found.argmax(-1) == right.argmax(-1)
        assert agree.float().mean() > 0.9, kind
        best = right.amax(-1)[agree]
        torch.testing.assert_close(found.amax(-1)[agree], best, rtol=1e-4, atol=1e-4)


def test_a_changed_weight_is_noticed() -> None:
    model = make()
    accelerated(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.01)
    with pytest.raises(RuntimeError, match="changed"):
        steps(model, PROMPT)


def test_bad_models_stay_as_they_are() -> None:
    base = transformers.LlamaModel(transformers.LlamaConfig(**SIZE))
    with pytest.raises(InputError, match="expected one with output embeddings, found LlamaModel"):
        accelerate_head(base, torch.zeros(3, 32))
    model = make()
    own = model.get_output_embeddings()
    with pytest.raises(InputError, match="expected an adaptive head"):
        restore_head(model)
    with pytest.raises(ValueError, match="expected shape"):
        accelerate_head(model, torch.randn(100, 31))
    with pytest.raises(ValueError, match="eps"):
        accelerate_head(model, queries_of(model), eps=2.0)
    assert model.get_output_embeddings() is own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = accelerate_head(model, queries_of(model, 60))  # too few: everything stays exact
    assert torch.equal(steps(model, PROMPT), steps(make(), PROMPT))
    assert (module.answered, module.exactly) == (4, 4)
    with pytest.raises(InputError, match="call restore_head first"):
        accelerate_head(model, queries_of(model))
    coded = nn.Linear(32, WORDS, bias=False)
    coded.weight = nn.Parameter(torch.zeros(WORDS, 32, dtype=torch.int8), requires_grad=False)
    model.set_output_embeddings(coded)
    with pytest.raises(InputError, match="expected output embeddings with a matrix"):
        accelerate_head(model, torch.zeros(3, 32))


class Letters:
    """A tokenizer of letters."""

    bos_token_id = 1

    def __call__(self, text: str, **options: Any) -> Any:
        return transformers.BatchEncoding({"input_ids": [2 + ord(letter) % 100 for letter in text]})


def test_queries_of_a_text() -> None:
    model = make()
    text = "All happy families are alike; every unhappy family is unhappy in its own way. " * 4
    found = collect_queries(model, Letters(), text, count=100, window=40)
    assert found.shape == (100, 32)
    with pytest.raises(InputError, match="expected at least 1000 tokens"):
        collect_queries(model, Letters(), text, count=1000, window=40)
    with pytest.raises(InputError, match="window: expected 1 to 64 tokens, found 65"):
        collect_queries(model, Letters(), text, count=100, window=65)
