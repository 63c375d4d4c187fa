"""Tiny language models with an adaptive head: the same text, the same parameters, and nothing left behind."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from softsieve import AdaptiveSoftmax
from softsieve.errors import InputError
from softsieve.heads import WeightChanged
from softsieve.integrations.adaptive_head import (
    INDEX,
    AdaptiveHead,
    accelerate_head,
    collect_queries,
    restore_head,
)
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
    """A model that writes many different words, and the same with an adaptive head."""
    model = make(tied=False)
    accelerated(model)
    return make(tied=False), model


@pytest.fixture(scope="module")
def saved() -> Any:
    """A model with tied weights and an adaptive head."""
    model = make()
    accelerated(model)
    return model


@pytest.fixture(scope="module")
def folder(saved: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is."""
    path = tmp_path_factory.mktemp("model")
    saved.save_pretrained(str(path))
    return path


def loaded(path: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(str(path), **options).eval()


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
        for options in ({}, {"input_ids": PROMPT, "logits_to_keep": 1}, {"input_ids": PROMPT, "use_cache": False}):
            given = () if options else (PROMPT,)
            found = model(*given, **options).logits[:, -1]
            assert torch.equal(found, exact(*given, **options).logits[:, -1])
    before = model.get_output_embeddings().answered
    for training in (True, False):
        gradients = []
        for each in (exact, model):
            each.train(training)
            loss = each(PROMPT[:, :1], labels=PROMPT[:, :1]).logits.logsumexp(-1).sum()
            gradients.append(torch.autograd.grad(loss, each.get_input_embeddings().weight)[0])
            each.eval()
        assert torch.equal(*gradients)
        assert gradients[0].abs().max() > 0
    assert model.get_output_embeddings().answered == before


SAME: list[dict[str, Any]] = [  # ways of choosing tokens for which the three largest logits are enough
    {"do_sample": False},
    {"do_sample": False, "use_cache": False},
    {"do_sample": False, "prompt_lookup_num_tokens": 3},
    {"do_sample": True, "temperature": 0.8, "top_k": 3},
    {"do_sample": True, "top_k": 3, "top_p": 0.9},
    {"do_sample": True, "top_k": 3, "num_return_sequences": 3},
]
OTHER: list[dict[str, Any]] = [  # and those that use all of them, so that texts may differ
    {"do_sample": False, "repetition_penalty": 1.3},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": False, "num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    {"do_sample": True, "temperature": 0.8},
    {"do_sample": True, "top_p": 0.8},
    {"do_sample": True, "min_p": 0.05, "num_return_sequences": 2},
]


def written(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """What a model writes after prompts that are filled up with zeros from the left."""
    torch.manual_seed(3)
    mask = (ids != 0).long()
    return model.generate(ids, max_new_tokens=20, attention_mask=mask, **options)  # type: ignore[no-any-return]


def likelihood(model: Any, texts: Tensor) -> float:
    """The logarithm of a word's probability, in the mean."""
    with torch.no_grad():
        words = model(texts).logits[:, 3:-1].log_softmax(-1).gather(-1, texts[:, 4:, None])
    return float(words.mean())


@pytest.mark.parametrize("options", SAME, ids=str)
def test_generate_writes_what_it_did(pair: tuple[Any, Any], options: dict[str, Any]) -> None:
    module = pair[1].get_output_embeddings()
    before = module.answered
    exact, found = (written(model, PROMPT, **options) for model in pair)
    assert torch.equal(exact, found)
    assert len(set(found[0, 4:].tolist())) > 10
    if "prompt_lookup_num_tokens" not in options:  # which looks at several tokens at a time
        # The first of 20 comes with the prompt; without a cache, every one does.
        assert module.answered - before == (19 * len(found) if options.get("use_cache", True) else 0)


@pytest.mark.parametrize("options", OTHER, ids=str)
def test_generate_works_as_before(pair: tuple[Any, Any], options: dict[str, Any]) -> None:
    module = pair[1].get_output_embeddings()
    before = module.answered
    exact, found = (written(model, PROMPT, **options) for model in pair)
    assert exact.shape == found.shape
    assert module.answered - before >= 19
    assert likelihood(pair[0], found) > likelihood(pair[0], exact) - 1


def test_several_prompts_of_other_lengths(pair: tuple[Any, Any]) -> None:
    prompts = torch.tensor([[5, 17, 400, 2], [0, 0, 9, 1000], [0, 3, 3, 3]])
    texts = [written(model, prompts, do_sample=False) for model in pair]
    assert torch.equal(*texts)


def test_a_text_goes_on_from_what_is_kept(pair: tuple[Any, Any]) -> None:
    texts = []
    for model in pair:
        options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True}
        first = model.generate(PROMPT, max_new_tokens=8, attention_mask=torch.ones_like(PROMPT), **options)
        so_far = first.sequences
        again = model.generate(
            so_far,
            past_key_values=first.past_key_values,
            max_new_tokens=8,
            attention_mask=torch.ones_like(so_far),
            output_logits=True,
            **options,
        )
        assert len(again.logits) == 8
        texts.append(again.sequences)
    assert torch.equal(*texts)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 5}], ids=str)
def test_a_draft_leaves_the_text_of_its_target(pair: tuple[Any, Any], options: dict[str, Any]) -> None:
    """Greedy text is the target's; drawn text is one that the target could have drawn."""
    _, draft = pair
    target, module = make(seed=1), draft.get_output_embeddings()
    before = module.answered
    found = written(target, PROMPT, assistant_model=draft, **options)
    assert module.answered > before
    if not options["do_sample"]:
        assert torch.equal(found, written(target, PROMPT, **options))
    else:
        with torch.no_grad():
            best = target(found).logits.topk(5).indices[:, 3:-1]
        assert (best == found[:, 4:, None]).any(-1).all()


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
            layer.weight.normal_().mul_(2 / torch.arange(1, 33) ** 0.5)
            if layer.bias is not None:
                layer.bias.normal_()
        ids = torch.randint(WORDS, (2, 20), generator=torch.Generator().manual_seed(2))
        right = steps(exact, ids)
        module = accelerated(exact, k=1)
        found = steps(exact, ids)
        assert module.exactly < 20 < module.answered
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
    with pytest.raises(InputError, match=r"read one by one, found a quantised weight \(torch.int8\)"):
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


def test_queries_of_a_file(tmp_path: Path) -> None:
    model, path = make(), tmp_path / "text.txt"
    text = "All happy families are alike; every unhappy family is unhappy in its own way. \u00e9 " * 4
    path.write_text(text, encoding="utf-8")
    options: dict[str, Any] = {"count": 100, "window": 40}
    assert torch.equal(*(collect_queries(model, Letters(), one, **options) for one in (text, path)))
    with pytest.raises(InputError, match=r"text\.txt: expected at least 1000 tokens"):
        collect_queries(model, Letters(), path, count=1000, window=40)
    with pytest.raises(InputError, match=r"none\.txt: no such file"):
        collect_queries(model, Letters(), tmp_path / "none.txt", **options)
    with pytest.raises(InputError, match="cannot be read"):
        collect_queries(model, Letters(), tmp_path, **options)
    path.write_bytes(b" \n\n")
    with pytest.raises(InputError, match=r"text\.txt: expected text, found none"):
        collect_queries(model, Letters(), path, **options)
    path.write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(InputError, match=r"text\.txt:1: not UTF-8"):
        collect_queries(model, Letters(), path, **options)


# Files


def test_what_is_saved(saved: Any, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same model for anyone, and beside it the index without the weight."""
    make().save_pretrained(str(tmp_path))
    assert {path.name for path in folder.iterdir()} - {path.name for path in tmp_path.iterdir()} == {INDEX}
    with safe_open(folder / "model.safetensors", "pt") as new, safe_open(tmp_path / "model.safetensors", "pt") as old:
        assert new.keys() == old.keys()
    with safe_open(folder / INDEX, "pt") as file:
        assert "index.records" in file.keys()  # noqa: SIM118
        assert "weight" not in file.keys()  # noqa: SIM118
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        plain, info = transformers.AutoModelForCausalLM.from_pretrained(str(folder), output_loading_info=True)
    assert not caplog.records
    assert not any(info.values())
    assert plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    assert type(plain.get_output_embeddings()) is nn.Linear
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(PROMPT).logits, saved(PROMPT).logits)


@pytest.mark.parametrize("where", ["folder", "index of a folder", "index", "text"])
def test_an_index_is_found_again(saved: Any, folder: Path, where: str, tmp_path: Path) -> None:
    ids = torch.randint(WORDS, (2, 20), generator=torch.Generator().manual_seed(4))
    if where == "folder":
        model = loaded(folder)
        module = accelerate_head(model)
    else:
        make().save_pretrained(str(tmp_path))
        model = loaded(tmp_path)
        index: Any = {"index": folder / INDEX, "text": str(folder / INDEX)}.get(where, folder)
        module = accelerate_head(model, index=index, eps=0.3, delta=0.05, k=[1, 3])
    found = steps(model, ids)
    torch.testing.assert_close(found, steps(saved, ids), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(found, steps(make(), ids), rtol=1e-2, atol=1e-2)  # for some of them are estimates
    assert module.answered == 40
    assert module.head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_an_index_of_a_head_with_a_bias(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.PhiForCausalLM(transformers.PhiConfig(**SIZE, eos_token_id=None, pad_token_id=0)).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_().mul_(2 / torch.arange(1, 33) ** 0.5)
        model.lm_head.bias.normal_()
    accelerated(model, k=1)
    model.save_pretrained(str(tmp_path))
    again = loaded(tmp_path)
    assert accelerate_head(again).head.estimates()
    torch.testing.assert_close(steps(again, PROMPT), steps(model, PROMPT), rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        other = loaded(tmp_path)
        other.lm_head.bias[5:9] += 1
    with pytest.raises(InputError, match=f"4 of {WORDS} rows differ"):
        accelerate_head(other)


def untouched(model: Any, own: nn.Module) -> None:
    assert model.get_output_embeddings() is own
    assert "save_pretrained" not in model.__dict__
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs


def test_no_index(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # a model that came from nowhere did not come from here
    model = make()
    own = model.get_output_embeddings()
    says = r"found neither \(no folder that the model came from\): give queries=collect_queries.*, or index="
    with pytest.raises(InputError, match=says):
        accelerate_head(model)
    model.save_pretrained(str(tmp_path))
    with pytest.raises(InputError, match=rf"found neither \(no {INDEX} in {tmp_path}\)"):
        accelerate_head(loaded(tmp_path))
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match=f"index: expected a file, or a folder with {INDEX}, found none at"):
            accelerate_head(model, index=place)
    with pytest.raises(InputError, match="expected a saved AdaptiveSoftmax"):
        accelerate_head(model, index=tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="index: expected none with queries, which make a new one, found both"):
        accelerate_head(model, queries_of(model), index=folder)
    untouched(model, own)


def test_an_index_of_another_model(folder: Path, tmp_path: Path) -> None:
    model = make(seed=1)
    own = model.get_output_embeddings()
    with pytest.raises(InputError, match=f"{WORDS} of {WORDS} rows differ"):
        accelerate_head(model, index=folder)
    untouched(model, own)
    small = make(tied=False)
    small.resize_token_embeddings(WORDS - 1)
    with pytest.raises(InputError, match=r"weight: expected float32 of shape \(3000, 32\).*found .*\(2999, 32\)"):
        accelerate_head(small, index=folder)
    half = loaded(folder, dtype=torch.bfloat16)
    with pytest.raises(InputError, match="found bfloat16"):
        accelerate_head(half)
    AdaptiveSoftmax(own.weight).save(tmp_path / "uncalibrated", weight=False)
    with pytest.raises(InputError, match="expected a calibrated index, found none"):
        accelerate_head(model, index=tmp_path / "uncalibrated")
    head = AdaptiveSoftmax(own.weight, delta=0.1, beta=2.0)
    head.calibrate(queries_of(model, 300))
    head.save(tmp_path / "beta", weight=False)
    with pytest.raises(InputError, match="expected logits that the model multiplies with 1, found 2"):
        accelerate_head(model, index=tmp_path / "beta")
    untouched(model, own)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"eps": 0.2}, "eps: expected 0.3, which .* was calibrated for, or none, found 0.2: give queries"),
        ({"delta": 0.01}, "delta: expected 0.05, .* found 0.01"),
        ({"k": 1}, "k: expected 3, .* found 1"),
        ({"k": [1, 4]}, "k: expected 3, .* found 4"),
    ],
)
def test_an_index_for_something_else(folder: Path, asked: dict[str, Any], says: str) -> None:
    model = loaded(folder)
    own = model.get_output_embeddings()
    with pytest.raises(InputError, match=says):
        accelerate_head(model, **asked)
    untouched(model, own)


def test_restored_models_save_no_index(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder)
    own = model.get_output_embeddings()
    accelerate_head(model)
    restore_head(model)
    untouched(model, own)
    model.save_pretrained(str(tmp_path))
    assert not (tmp_path / INDEX).exists()
    calls: list[str] = []
    model.save_pretrained = calls.append  # somebody else's
    accelerate_head(model, index=folder)
    model.save_pretrained(str(tmp_path))
    assert calls == [str(tmp_path)]
    assert (tmp_path / INDEX).is_file()
    restore_head(model)
    assert model.__dict__["save_pretrained"] == calls.append


def test_only_the_main_process_saves(saved: Any, tmp_path: Path) -> None:
    for number, (args, options) in enumerate([((False,), {}), ((), {"is_main_process": False})]):
        place = tmp_path / str(number)
        saved.save_pretrained(place, *args, **options)
        assert not list(place.iterdir())
    saved.save_pretrained(tmp_path / "main", True, max_shard_size="100KB")
    assert (tmp_path / "main" / INDEX).is_file()
    assert len(list((tmp_path / "main").glob("model-*.safetensors"))) > 1
    accelerate_head(loaded(tmp_path / "main"))


class Hub:
    """Takes what is uploaded."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        return type("Repository", (), {"repo_id": repo_id})

    def create_commit(self, repo_id: str, operations: list[Any], **options: Any) -> None:
        self.files |= {operation.path_in_repo for operation in operations}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    for module in (transformers.modeling_utils, transformers.utils.hub):
        monkeypatch.setattr(module, "hf_api", lambda: made)
    monkeypatch.setattr(
        transformers.utils.hub, "create_and_tag_model_card", lambda *_, **__: type("Card", (), {"save": print})
    )
    return made


def test_the_index_goes_to_the_hub_too(saved: Any, hub: Hub, tmp_path: Path) -> None:
    saved.save_pretrained(tmp_path, push_to_hub=True, repo_id="some/model")
    assert {INDEX, "model.safetensors", "config.json"} <= hub.files
    assert "_upload_modified_files" not in saved.__dict__
    hub.files.clear()
    saved.push_to_hub("some/model")
    assert {INDEX, "model.safetensors", "config.json"} <= hub.files


def test_a_changed_weight_is_saved_without_its_index(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder)
    accelerate_head(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.01)
    with pytest.warns(UserWarning, match="its index is not saved, for the weight has changed since"):
        model.save_pretrained(str(tmp_path))
    assert not (tmp_path / INDEX).exists()
    with torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path)(PROMPT).logits, model(PROMPT).logits)


def test_a_change_that_torch_does_not_see_is_not_saved_either(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder)
    accelerate_head(model)
    model.get_output_embeddings().weight.data[7] += 1
    with pytest.warns(UserWarning, match="its index is not saved, for the weight has changed since"):
        model.save_pretrained(str(tmp_path))
    assert not (tmp_path / INDEX).exists()


def test_a_fused_step_is_noticed(folder: Path) -> None:
    """Torch does not count what it changes."""
    model = loaded(folder)
    layer = accelerate_head(model)
    fit: Any = layer.head.calibrations[3]
    layer.head.calibrations[3] = fit._replace(batch=64)
    steps(model, PROMPT)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()
    with pytest.raises(WeightChanged, match="have changed since the index was built"):
        steps(model, PROMPT)
    with pytest.raises(WeightChanged):
        steps(copy.deepcopy(model), PROMPT)


def test_a_weight_that_is_elsewhere_is_noticed(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder)
    accelerate_head(model)
    model.bfloat16()
    with pytest.raises(WeightChanged, match=r"not where it was .* call restore_head, and accelerate_head again"):
        steps(model, PROMPT)
    with pytest.warns(UserWarning, match="its index is not saved"):
        model.save_pretrained(str(tmp_path))
    restore_head(model)
    steps(model, PROMPT)


def through_a_file(model: Any, tmp_path: Path) -> Any:
    torch.save(model, tmp_path / "model.pt")
    return torch.load(tmp_path / "model.pt", weights_only=False)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("way", ["copy", "file"])
def test_copies(tied: bool, way: str, tmp_path: Path) -> None:
    """They answer the same, save themselves, and are on their own."""
    model = make(tied=tied)
    module = accelerated(model)
    again = copy.deepcopy(model) if way == "copy" else through_a_file(model, tmp_path)
    layer = again.get_output_embeddings()
    torch.testing.assert_close(steps(again, PROMPT), steps(model, PROMPT), rtol=1e-3, atol=1e-3)
    assert (layer.weight is again.get_input_embeddings().weight) == tied
    assert layer.weight.data_ptr() == layer.head.weight.data_ptr() != module.weight.data_ptr()
    assert layer.replaced.weight is layer.weight
    assert again.save_pretrained.model is again
    again.save_pretrained(str(tmp_path / "again"))
    assert (tmp_path / "again" / INDEX).is_file()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(WeightChanged):
        steps(again, PROMPT)
    steps(model, PROMPT)
    with pytest.warns(UserWarning, match="not saved"):
        again.save_pretrained(str(tmp_path / "changed"))
    found = loaded(tmp_path / "changed").get_output_embeddings().weight
    assert torch.equal(found, 2 * model.get_output_embeddings().weight)
    restore_head(again)
    untouched(again, layer.replaced)


def test_a_copy_of_a_changed_model_is_refused_too() -> None:
    model = make()
    accelerated(model)
    with torch.no_grad():
        model.get_output_embeddings().weight[3] += 1
    again = copy.deepcopy(model)
    with pytest.raises(WeightChanged, match="rows 3 have changed"):
        steps(again, PROMPT)


# Numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_logits_have_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    exact, model = make().to(dtype), make().to(dtype)
    module = accelerated(model, k=1)
    ids = torch.randint(WORDS, (2, 20), generator=torch.Generator().manual_seed(2))
    right, found = steps(exact, ids), steps(model, ids)
    assert found.dtype == dtype
    assert module.answered == 40
    assert module.exactly < 20
    best = found.amax(-1)
    torch.testing.assert_close(best, right.amax(-1), rtol=8 * torch.finfo(dtype).eps, atol=0.05)
    assert written(model, PROMPT, do_sample=False).shape == (1, 24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden_dtype", [None, torch.float32], ids=str)
def test_autocast(dtype: torch.dtype, hidden_dtype: torch.dtype | None, pair: tuple[Any, Any]) -> None:
    """Logits have the dtype of the exact product, whether they are estimated, drifted, of a prompt, or too many."""
    module = pair[1].get_output_embeddings()
    with torch.no_grad():
        hidden = inputs_of(module, pair[1], PROMPT)[0, :, None].to(hidden_dtype or dtype)
        module.prompted = False
        exactly = module.exactly
        with torch.autocast("cpu", dtype):
            right = F.linear(hidden, module.weight)
            found = module(hidden)
            assert module.exactly == exactly
            with pytest.warns(UserWarning, match="unlike those of the calibration"):
                drifted = module(torch.cat([hidden, hidden / 1000]))
            prompt = module(hidden.transpose(0, 1))
        assert module.exactly == exactly + len(hidden)
    assert found.dtype == drifted.dtype == prompt.dtype == right.dtype == dtype
    assert torch.equal(drifted[: len(hidden)], found)
    torch.testing.assert_close(found.amax(-1), right.amax(-1), rtol=0.02, atol=0.05)
    torch.testing.assert_close(prompt.transpose(0, 1), right)


def test_generate_under_autocast(pair: tuple[Any, Any]) -> None:
    """Also when tokens drift: they are exact, and the text goes on."""
    exact, model = pair
    module = model.get_output_embeddings()
    fit: Any = module.head.calibrations[3]
    module.head.calibrations[3] = fit._replace(low=fit.high)
    try:
        with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="unlike those of the calibration"):
            assert torch.equal(written(model, PROMPT, do_sample=False), written(exact, PROMPT, do_sample=False))
    finally:
        module.head.calibrations[3] = fit
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert written(model, PROMPT, do_sample=True).shape == (1, 24)


@pytest.mark.parametrize("mode", ["autocast", "inference mode", "float64"])
def test_a_head_that_is_made_in_a_mode(mode: str, pair: tuple[Any, Any]) -> None:
    model, before = make(tied=False), torch.get_default_dtype()
    queries = queries_of(model)
    contexts: dict[str, Any] = {
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "inference mode": torch.inference_mode(),
    }
    torch.set_default_dtype(torch.float64 if mode == "float64" else before)
    try:
        with contexts.get(mode, nullcontext()):
            module = accelerate_head(model, queries, delta=0.05, k=3, generator=torch.Generator().manual_seed(0))
    finally:
        torch.set_default_dtype(before)
    fit: Any = module.head.calibrations[3]
    assert fit._replace(batch=64) == pair[1].get_output_embeddings().head.calibrations[3]
    module.head.update_rows([0])


def test_bytes_are_counted(pair: tuple[Any, Any]) -> None:
    model = pair[1]
    module, whole = model.get_output_embeddings(), WORDS * 32 * 4
    before, (answered, exactly) = module.bytes_read, (module.answered, module.exactly)
    with torch.no_grad():
        hidden = inputs_of(module, model, PROMPT)[:, :1]
        module.prompted = False  # the model never came to its output layer
        module(hidden)
        queries = hidden.reshape(1, -1)
        read = int(module.head.topk(queries, 3).bytes_read)
    assert 0 < read < whole
    assert (module.bytes_read - before, module.answered - answered, module.exactly - exactly) == (read, 1, 0)
    both = torch.cat([hidden, 1e-3 * hidden])  # of which the second is answered exactly
    with torch.no_grad(), pytest.warns(UserWarning, match="unlike those of the calibration"):
        found = module(both)
    torch.testing.assert_close(found[1], F.linear(both[1], module.weight))
    after = module.bytes_read - before - 2 * read
    assert whole < after < 1.1 * whole
    assert module.exactly - exactly == 1
    fit, before = module.head.calibrations[3], module.bytes_read
    module.head.calibrations[3] = fit._replace(batch=1)
    with torch.no_grad():
        assert torch.equal(module(both), F.linear(both, module.weight))
    assert (module.bytes_read - before, module.exactly - exactly) == (whole, 3)  # both share one pass
    module.head.calibrations[3] = fit
    assert isinstance(module.bytes_read, int)
    assert isinstance(module.exactly, int)


def test_states_that_are_no_numbers(pair: tuple[Any, Any]) -> None:
    """As the model's own layer has it."""
    module = pair[1].get_output_embeddings()
    hidden = torch.full((1, 1, 32), torch.nan)
    with torch.no_grad(), pytest.warns(UserWarning, match="unlike those of the calibration"):
        assert module(hidden).isnan().all()


# What cannot be read row by row


class Int8Params(nn.Parameter):
    """As bitsandbytes has it."""


class Params4bit(nn.Parameter):
    """As bitsandbytes has it."""


class AffineQuantizedTensor(Tensor):
    """As torchao has it."""


class DTensor(Tensor):
    """As torch has it."""


class QuantLinear(nn.Module):
    """As packages for GPTQ and AWQ have it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.register_buffer(name, torch.zeros(4, WORDS, dtype=torch.int32))


def fake(kind: Any, values: Tensor) -> Any:
    return Tensor._make_subclass(kind, values, False)


def quantised() -> Tensor:
    found = nn.Parameter(torch.zeros(WORDS, 32))
    found.quant_state = object()  # type: ignore[attr-defined]
    return found


UNREADABLE: dict[str, Any] = {
    "torch.uint8": lambda: fake(Params4bit, torch.zeros(WORDS, 16, dtype=torch.uint8)),
    "torch.float8_e4m3fn": lambda: nn.Parameter(torch.zeros(WORDS, 32).to(torch.float8_e4m3fn), requires_grad=False),
    "Int8Params": lambda: fake(Int8Params, torch.zeros(WORDS, 32)),
    "AffineQuantizedTensor": lambda: nn.Parameter(fake(AffineQuantizedTensor, torch.zeros(WORDS, 32))),
    r"sharded over devices \(DTensor\)": lambda: fake(DTensor, torch.zeros(WORDS, 32)),
    "quant_state": quantised,
    "device meta": lambda: nn.Parameter(torch.zeros(WORDS, 32, device="meta")),
    r"shape \(96000,\), as sharded": lambda: nn.Parameter(torch.zeros(WORDS * 32)),
    r"shape \(0,\), as sharded": lambda: nn.Parameter(torch.zeros(0)),
}


@pytest.mark.parametrize("says", UNREADABLE)
def test_weights_that_cannot_be_read(says: str, folder: Path) -> None:
    model, layer = make(tied=False), nn.Linear(32, WORDS, bias=False)
    layer._parameters["weight"] = UNREADABLE[says]()
    model.set_output_embeddings(layer)
    for options in ({"queries": torch.zeros(3, 32)}, {"index": folder}):
        with pytest.raises(
            InputError, match=f"expected an output layer whose rows can be read one by one, found.*{says}"
        ):
            accelerate_head(model, **options)
    untouched(model, layer)


@pytest.mark.parametrize("name", ["qweight", "weight_packed", "other"])
def test_layers_without_a_weight(name: str) -> None:
    model, layer = make(tied=False), QuantLinear(name)
    model.set_output_embeddings(layer)
    says = "QuantLinear without a weight" if name == "other" else f"a quantised weight \\({name}\\)"
    with pytest.raises(InputError, match=f"can be read one by one, found {says}"):
        accelerate_head(model, torch.zeros(3, 32))
    untouched(model, layer)


class Adapted(nn.Linear):
    """As packages for adapters have it."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + hidden.sum(-1, keepdim=True) * torch.linspace(0, 1, WORDS)


def test_a_layer_with_an_adapter(folder: Path) -> None:
    model = make()
    layer = Adapted(32, WORDS, bias=False)
    layer.weight = model.get_output_embeddings().weight
    model.set_output_embeddings(layer)
    with pytest.raises(InputError, match=r"that is x @ weight.T \+ bias, found Adapted, .* merge an adapter first"):
        accelerate_head(model, index=folder)
    untouched(model, layer)


# Where it is


def test_the_names_are_in_two_places() -> None:
    from softsieve.integrations import adaptive_head
    from softsieve.integrations import transformers as both

    for name in ("AdaptiveHead", "accelerate_head", "collect_queries", "restore_head"):
        assert getattr(both, name) is getattr(adaptive_head, name)
        assert name in both.__all__


def test_transformers_is_imported_when_it_is_needed() -> None:
    code = "import sys, softsieve.integrations.adaptive_head; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
