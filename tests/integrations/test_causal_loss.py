"""Language models of many architectures train without logits, with the loss and the gradients that logits give."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve import as_cross_entropy
from softsieve.errors import InputError

pytest.importorskip("transformers")

import transformers

from softsieve.integrations.causal_loss import accelerate_loss, loss_of, restore_loss
from softsieve.integrations.lazy_logits import LazyLogits
from softsieve.kernels import linear_ready
from tests.helpers import spy
from tests.integrations.architectures import NAMES, VOCABULARY, make, make_with_pictures

Batch = dict[str, Tensor]


def batch_of(rows: int = 2, length: int = 7, seed: int = 0) -> Batch:
    """Tokens, which are their own labels but for some that are ignored."""
    tokens = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[0, :3] = -100
    return {"input_ids": tokens, "labels": labels}


def batch_for(model: Any) -> Batch:
    """Tokens with every other label what the model itself says, so that some lead and some do not."""
    batch = batch_of()
    tokens, labels = batch["input_ids"], batch["labels"]
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = tokens
    best = model(**batch).logits.argmax(-1)
    if model.config.is_encoder_decoder:
        labels[:, 4::2] = best[:, 4::2]
    else:
        labels[:, 4::2] = best[:, 3:-1:2]
    return batch


def step(model: Any, batch: Batch, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradient of every parameter that has one."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch, **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        bound = tolerance * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=bound, msg=f"gradient of {name}")


def with_as_softmax(monkeypatch: pytest.MonkeyPatch, delta: float) -> None:
    """Models that make logits take AS cross-entropy of them from now on."""

    def loss(logits: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor:
        assert options.pop("label_smoothing", 0.0) == 0
        found: Tensor = as_cross_entropy(logits, target, delta=delta, **options)
        return found

    monkeypatch.setattr(F, "cross_entropy", loss)


def count_logits(monkeypatch: pytest.MonkeyPatch, classes: int = VOCABULARY) -> list[tuple[int, ...]]:
    """The shapes of all products with as many columns as there are classes."""
    seen: list[tuple[int, ...]] = []
    plain = F.linear

    def linear(*args: Any, **options: Any) -> Tensor:
        made = plain(*args, **options)
        if made.shape[-1] == classes:
            seen.append(tuple(made.shape))
        return made

    monkeypatch.setattr(F, "linear", linear)
    return seen


def llama(**changed: Any) -> Any:
    return make("Llama", **changed)


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(name)
    batch = batch_for(model)
    dense = step(model, batch)
    with monkeypatch.context() as patch:
        with_as_softmax(patch, 0.1)
        sparse = step(model, batch)
    assert abs(float(dense[0] - sparse[0])) > 1e-4  # the margin changes something
    loss = accelerate_loss(model, delta=1.0)
    same(step(model, batch), dense)
    loss.delta = 0.1
    same(step(model, batch), sparse)
    restore_loss(model)
    same(step(model, batch), dense, 0.0)


@pytest.mark.parametrize("name", ["Llava", "PaliGemma"])
def test_models_that_read_pictures(name: str) -> None:
    model, batch = make_with_pictures(name)
    dense = step(model, batch)
    accelerate_loss(model, delta=1.0)
    same(step(model, batch), dense)


def test_no_logits_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = llama(), batch_of()
    accelerate_loss(model)
    seen = count_logits(monkeypatch)
    outputs = model(**batch)
    assert seen == []
    assert isinstance(outputs.logits, LazyLogits)
    assert outputs.logits.shape == (2, 7, VOCABULARY)
    model.eval()(**batch)
    assert seen == [(2, 7, VOCABULARY)]


def test_without_labels_in_evaluation_and_in_generate_nothing_changes() -> None:
    model, batch = llama(), batch_of()
    expected = [
        model(input_ids=batch["input_ids"]).logits,
        *(model.eval()(**batch)[name] for name in ("loss", "logits")),
        model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False),
    ]
    model.train()
    accelerate_loss(model)
    found = [
        model(input_ids=batch["input_ids"]).logits,
        *(model.eval()(**batch)[name] for name in ("loss", "logits")),
        model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False),
    ]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_lazy_logits_make_what_the_model_makes() -> None:
    for name in ("Gemma2", "Granite", "Bart"):
        model, batch = make(name), batch_of()
        dense = model(**batch).logits
        accelerate_loss(model)
        lazy = model(**batch).logits
        torch.testing.assert_close(lazy.materialise(), dense, rtol=1e-4, atol=1e-5)
        assert torch.equal(lazy.argmax(-1), dense.argmax(-1))
        entropy = torch.special.entr(dense.softmax(-1)).sum(-1)
        torch.testing.assert_close(lazy.entropy(), entropy.detach(), rtol=1e-4, atol=1e-5)


def test_detached_logits_have_no_gradient() -> None:
    model, batch = llama(), batch_of()
    accelerate_loss(model)
    logits = model(**batch).logits
    assert logits.materialise().requires_grad
    assert logits.entropy().requires_grad
    assert not logits.detach().materialise().requires_grad
    assert not logits.detach().entropy().requires_grad


def test_evaluation_without_logits_is_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = llama(), batch_of()
    expected = model.eval()(**batch).loss
    accelerate_loss(model, delta=0.1, evaluate=True)
    seen = count_logits(monkeypatch)
    outputs = model(**batch)
    assert seen == []
    torch.testing.assert_close(outputs.loss, expected)
    logits = outputs.logits.float()
    assert (tuple(logits.shape), logits.size(1), len(logits), logits.dtype) == ((2, 7, VOCABULARY), 7, 2, torch.float32)
    assert logits.to(torch.float16).dtype == torch.float16
    assert seen == []
    assert logits.argmax(-1).shape == torch.argmax(logits, dim=2).shape == (2, 7)
    assert {rows for rows, _ in seen} == {14}  # in products of rows


def test_logits_of_an_evaluation_are_there_when_they_are_used() -> None:
    model, batch = llama(), batch_of()
    dense = model.eval()(**batch).logits
    accelerate_loss(model, evaluate=True)

    def logits() -> Any:
        return model(**batch).logits

    assert isinstance(logits(), Tensor)
    for work in (
        torch.detach, torch.clone, torch.isfinite, lambda x: x[0, 1:], lambda x: x.softmax(-1), lambda x: x.to("cpu"),
        lambda x: torch.cat([x, x]), lambda x: x.argmax(0), lambda x: x.argmax(-1, keepdim=True), lambda x: 2 - x,
        lambda x: x.to(torch.float64) + 1, lambda x: torch.stack(list(x)), lambda x: x.half(),
        lambda x: F.cross_entropy(x.flatten(0, 1), batch["input_ids"].flatten()),
    ):  # fmt: skip
        found = work(logits())
        assert type(found) is Tensor
        torch.testing.assert_close(found, work(dense), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits().entropy(), -(dense.softmax(-1) * dense.log_softmax(-1)).sum(-1))
    changed = logits()
    changed[..., 3] = 7.0
    changed.mul_(2)
    assert float(changed.amax()) == 14.0
    model.zero_grad(set_to_none=True)
    logits().sum().backward()
    assert model.lm_head.weight.grad is not None
    with torch.no_grad():
        made_later = logits()
    assert not made_later.softmax(-1).requires_grad
    assert made_later.numpy().shape == dense.shape


def test_a_tuple_of_outputs_has_tensors_too() -> None:
    model, batch = llama(), batch_of()
    _, dense, *_ = model.eval()(**batch, return_dict=False)
    for evaluate, expected in ((True, dense), ("tokens", dense.argmax(-1))):
        accelerate_loss(model, evaluate=evaluate)
        _, found, *_ = model(**batch, return_dict=False)
        torch.testing.assert_close(found + 0, expected)
        restore_loss(model)


def test_evaluation_in_a_compiled_model() -> None:
    model, batch = llama(), batch_of()
    dense = model.eval()(**batch)
    for evaluate, expected in ((True, dense.logits), ("tokens", dense.logits.argmax(-1))):
        torch.compiler.reset()
        accelerate_loss(model, evaluate=evaluate)
        whole = evaluate == "tokens"
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=whole)
        found = compiled(**batch)
        torch.testing.assert_close(found.loss, dense.loss)
        torch.testing.assert_close(found.logits + 0, expected, rtol=1e-5, atol=1e-5)
        restore_loss(model)


@pytest.mark.parametrize("items", [5, torch.tensor(23)])
def test_items_in_the_batch_divide_the_sum(items: Any) -> None:
    model, batch = llama(), batch_of()
    dense = step(model, batch, num_items_in_batch=items)
    accelerate_loss(model, delta=1.0)
    same(step(model, batch, num_items_in_batch=items), dense)


def test_labels_that_are_shifted_already() -> None:
    model, batch = llama(), batch_of()
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    dense = step(model, batch, shift_labels=shifted)
    accelerate_loss(model, delta=1.0)
    same(step(model, batch, shift_labels=shifted), dense)


def test_packed_sequences() -> None:
    """Two texts in one row without padding: their positions begin anew, and the first label of each is ignored."""
    model, batch = llama(attn_implementation="eager"), batch_of(1, 9)
    batch["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    batch["labels"][:, 4] = -100
    dense = step(model, batch)
    accelerate_loss(model, delta=1.0)
    same(step(model, batch), dense)


def test_labels_that_are_all_ignored_have_no_gradient() -> None:
    model, batch = llama(), batch_of()
    accelerate_loss(model)
    loss, gradients = step(model, {**batch, "labels": torch.full_like(batch["labels"], -100)})
    assert loss == 0
    assert all(not bool(gradient.any()) for gradient in gradients.values())


def test_checkpointing_and_accumulation() -> None:
    model, parts = llama(num_hidden_layers=2), [batch_of(seed=seed) for seed in (0, 1)]

    def window() -> Any:
        model.zero_grad(set_to_none=True)
        losses = [model(**part, num_items_in_batch=20).loss for part in parts]
        for loss in losses:
            loss.backward()
        return sum(losses).detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    dense = window()
    accelerate_loss(model, delta=1.0)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    same(window(), dense)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "T5"])  # GPT2's weight is tied to its embedding
def test_tied_weights_get_both_gradients(name: str) -> None:
    model, batch = make(name, tie_word_embeddings=True), batch_of()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    dense = step(model, batch)
    accelerate_loss(model, delta=1.0)
    same(step(model, batch), dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, batch = llama(), batch_of()
    exact = step(model, batch)
    model.to(dtype)
    accelerate_loss(model, delta=1.0)
    loss, gradients = step(model, batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact[0], rtol=0.03, atol=0)
    for name, gradient in exact[1].items():
        assert gradients[name].dtype == dtype
        error = (gradients[name].float() - gradient).norm() / gradient.norm()
        assert error < 0.1, name


def test_autocast() -> None:
    model, batch = llama(), batch_of()
    exact = step(model, batch)
    accelerate_loss(model, delta=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, gradients = step(model, batch)
    torch.testing.assert_close(loss, exact[0], rtol=0.03, atol=0)
    weight = gradients["lm_head.weight"]
    assert (weight - exact[1]["lm_head.weight"]).norm() / weight.norm() < 0.1


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_compiled(name: str) -> None:
    model, batch = make(name), batch_of()
    dense = step(model, batch)
    loss = accelerate_loss(model, delta=1.0)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad(set_to_none=True)
    found = compiled(**batch).loss
    found.backward()
    same((found.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}), dense)
    assert loss.summary()["tokens"] == 10


def test_memory_is_that_of_the_loss() -> None:
    model, batch = llama(), batch_of()
    dense = step(model, batch)
    accelerate_loss(model, delta=1.0, memory=10**9)
    same(step(model, batch), dense)
    restore_loss(model)
    with pytest.raises(ValueError, match="memory: expected at least"):
        accelerate_loss(model, delta=1.0, memory=1)
    same(step(model, batch), dense, 0.0)


def test_logits_are_held_in_a_compiled_model_that_may(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = spy(monkeypatch, linear_ready, "forward")
    model, batch = llama(), batch_of()
    dense = step(model, batch)
    for memory in (None, 10**9):
        torch.compiler.reset()
        accelerate_loss(model, delta=1.0, memory=memory)
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        model.zero_grad(set_to_none=True)
        loss = compiled(**batch).loss
        loss.backward()
        same((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}), dense)
        assert len(runs) == (memory is not None)
        restore_loss(model)


def test_summary_tells_of_the_batches() -> None:
    model, batch = llama(), batch_of()
    logits = model(**batch).logits[:, :-1].detach()
    counted = batch["labels"][:, 1:] != -100
    loss = accelerate_loss(model, delta=0.1)
    for _ in range(2):
        model(**batch)
    found = loss.summary()
    assert found["tokens"] == 2 * int(counted.sum())
    right = logits.argmax(-1)[counted] == batch["labels"][:, 1:][counted]
    assert found["token_accuracy"] == pytest.approx(float(right.float().mean()))
    assert found["lse"] == pytest.approx(float(logits.logsumexp(-1)[counted].mean()), rel=1e-5)
    assert loss.summary() == {"tokens": 0}


def test_tokens_of_an_evaluation_that_lead_by_the_margin_of_training() -> None:
    model = llama(initializer_range=1.0)
    batch = batch_for(model.eval())
    p, labels = model(**batch).logits[:, :-1].softmax(-1), batch["labels"][:, 1:]
    own = p.gather(-1, labels[..., None].clamp_min(0))
    lead = (own - p.scatter(-1, labels[..., None].clamp_min(0), -1).amax(-1, keepdim=True)).squeeze(-1)[labels != -100]
    for delta in (0.5, 0.1):
        loss = accelerate_loss(model, delta=delta, evaluate=True)
        model(**batch)
        assert loss.summary(training=False)["solved"] == pytest.approx(float((lead > delta).float().mean()))
        restore_loss(model)
    assert 0 < (lead > 0.5).sum() < (lead > 0.1).sum() < len(lead)


@pytest.mark.parametrize("name", ["Llama", "Bart"])
def test_weights_of_tokens(name: str) -> None:
    model, batch = make(name), batch_of()
    weights = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(1))
    logits, labels, own = model(**batch).logits, batch["labels"], weights
    if name == "Llama":
        logits, labels, own = logits[:, :-1], labels[:, 1:], own[:, 1:]
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * own.flatten()
    model.zero_grad()
    each.sum().backward()  # type: ignore[no-untyped-call]
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    accelerate_loss(model, delta=1.0)
    if name == "Llama":
        same(step(model, batch, token_weights=weights, num_items_in_batch=1), (each.sum().detach(), expected))
    else:
        total = (own.flatten() * (labels.flatten() != -100)).sum()
        torch.testing.assert_close(step(model, batch, token_weights=weights)[0], (each.sum() / total).detach())


def test_weights_of_tokens_after_a_batch_that_tells_nothing() -> None:
    """Labels that are all ignored look the same shifted or not."""
    model, batch = llama(), batch_of()
    weights = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(1))
    loss = accelerate_loss(model, delta=1.0)
    expected = model(**batch, token_weights=weights).loss
    loss.shift = None
    ignored = torch.full_like(batch["labels"], -100)
    assert model(input_ids=batch["input_ids"], labels=ignored, token_weights=weights).loss == 0
    torch.testing.assert_close(model(**batch, token_weights=weights).loss, expected)


def test_weights_of_tokens_in_a_compiled_model() -> None:
    model, batch = llama(), batch_of()
    weights = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(1))
    accelerate_loss(model, delta=1.0)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = compiled(**batch, token_weights=weights).loss
    torch.testing.assert_close(found, model(**batch, token_weights=weights).loss)
    assert abs(float((found - model(**batch).loss).detach())) > 1e-3


def test_a_margin_that_changes_is_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = llama()
    loss, counter = accelerate_loss(model, delta=1.0), CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(model, backend=counter, fullgraph=True)
    for number in range(6):
        loss.delta = 1 - 0.1 * number
        compiled(**batch_of(seed=number)).loss.backward()
    assert counter.frame_count <= 2  # a number that has changed once is a symbol from then on


def test_steps_and_their_summaries_are_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = llama()
    loss, counter = accelerate_loss(model, delta=1.0), CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(model, backend=counter, fullgraph=True)
    for number in range(5):
        compiled(**batch_of(seed=number)).loss.backward()
        if number > 1:
            assert loss.summary()["tokens"] == (30 if number == 2 else 10)
    assert counter.frame_count == 1


def test_predicted_tokens_in_place_of_logits() -> None:
    model, batch = llama(), batch_of()
    dense = model.eval()(**batch)
    accelerate_loss(model, evaluate="tokens")
    found = model(**batch)
    torch.testing.assert_close(found.loss, dense.loss)
    assert torch.equal(found.logits, dense.logits.argmax(-1))
    assert isinstance(model.train()(**batch).logits, LazyLogits)


def test_a_copy_has_its_own_loss() -> None:
    model, batch = llama(), batch_of()
    accelerate_loss(model, delta=1.0)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert float(twin(**batch).loss.detach()) == pytest.approx(float(torch.tensor(VOCABULARY).log()), rel=1e-5)
    restore_loss(twin)
    assert loss_of(model) is not None
    assert loss_of(twin) is None


# -- what is refused ---------------------------------------------------------------------------------------------------


def no_layer() -> Any:
    config = make("Llama").config
    return transformers.LlamaModel(config)


class Gate(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def not_linear() -> Any:
    model = llama()
    model.lm_head = Gate(16, VOCABULARY)
    return model


def quantised() -> Any:
    model = llama()
    model.lm_head.weight = nn.Parameter(torch.zeros(VOCABULARY, 16, dtype=torch.int8), requires_grad=False)
    return model


def patched() -> Any:
    model = llama()

    def forward(self: Any, input_ids: Tensor, labels: Tensor | None = None) -> Any: ...

    forward.__module__ = "liger_kernel.transformers.model.llama"
    model.forward = types.MethodType(forward, model)
    return model


def patched_with_another_cross_entropy() -> Any:
    """As Liger's `apply_liger_kernel_to_llama(cross_entropy=True)` does, for all models of the process."""

    def cross_entropy(*_: Any, **__: Any) -> Any: ...

    cross_entropy.__module__ = "liger_kernel.transformers.functional"
    F.cross_entropy = cross_entropy
    return llama()


def accelerated() -> Any:
    model = llama()
    accelerate_loss(model)
    return model


def two_devices() -> Any:
    model = llama()
    model.hf_device_map = {"model": 0, "lm_head": 1}
    return model


def two_devices_without_a_map() -> Any:
    model = llama()
    model.model.embed_tokens.to("meta")
    return model


def classifier() -> Any:
    config = make("Llama").config
    return transformers.LlamaForSequenceClassification(config)  # type: ignore[no-untyped-call]


def with_a_bias_of_tokens() -> Any:
    """Its forward pass changes single logits, which are not there."""
    model = llama()
    plain = model.loss_function

    def loss(logits: Any, labels: Tensor, **options: Any) -> Any:
        logits[..., 3] = -10.0
        return plain(logits=logits, labels=labels, **options)

    model.loss_function = loss
    return model


def another_loss() -> Any:
    model = llama()
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    return model


def a_loss_that_knows() -> Any:
    """In bf16, whose rounding excuses little."""
    model = llama().to(torch.bfloat16)
    plain = model.loss_function
    model.loss_function = lambda logits, **options: plain(logits, **options) * (1 + isinstance(logits, Tensor))
    return model


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (no_layer, "expected one with output embeddings, found LlamaModel"),
        (classifier, "expected one with output embeddings, found LlamaForSequenceClassification"),
        (not_linear, "x @ weight.T \\+ bias, found .*Gate"),
        (quantised, "found a quantised weight"),
        (patched, "found one of liger_kernel"),
        (patched_with_another_cross_entropy, "found one of liger_kernel"),
        (accelerated, "call restore_loss first"),
        (two_devices, "expected one device, found its layers on 0, 1"),
        (two_devices_without_a_map, "expected one device, found its layers on cpu, meta"),
        (with_a_bias_of_tokens, "found an assignment to some of them"),
        (another_loss, "found square"),
        (a_loss_that_knows, "expected the model's own loss at delta 1"),
    ],
)
def test_what_cannot_work_is_refused_and_left_as_it_was(
    bad: Callable[[], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "cross_entropy", F.cross_entropy)  # as it was, whatever a bad one does
    model = bad()
    before = dict(vars(model)), model.training
    layer = model.get_output_embeddings()
    inside = dict(vars(layer)) if layer is not None else {}
    with pytest.raises(InputError, match=words) as error:
        accelerate_loss(model)
    assert "\n" not in str(error.value)
    assert (dict(vars(model)), model.training) == before
    assert layer is None or dict(vars(layer)) == inside


def test_a_map_of_one_device_may_call_it_by_number() -> None:
    """As Accelerate's `dispatch_model` leaves it, whose numbers are not the names that weights have."""
    model = llama()
    model.hf_device_map = {"": 0}
    accelerate_loss(model)
    assert loss_of(model) is not None


def test_labels_of_another_shape() -> None:
    model, batch = llama(), batch_of()
    accelerate_loss(model)
    with pytest.raises(InputError, match="labels: expected one for each of the 14 positions of the logits, found 12"):
        model(input_ids=batch["input_ids"], labels=batch["labels"][:, :-1])
    for turned in (batch["labels"].t(), batch["labels"][..., None]):  # as many, which flattening would mix up
        with pytest.raises(InputError, match=r"labels: expected \(2, 7\), one for each position, found \("):
            model(input_ids=batch["input_ids"], labels=turned)
    for wrong in (batch["labels"].float(), batch["labels"].tolist()):
        with pytest.raises(TypeError, match="labels: expected"):
            model(input_ids=batch["input_ids"], labels=wrong)
    assert torch.isfinite(model(**batch).loss)
    assert isinstance(model(input_ids=batch["input_ids"]).logits, Tensor)
    with pytest.raises(ValueError, match="token_weights: expected shape"):
        model(**batch, token_weights=torch.ones(3))


def test_what_needs_logits_says_so() -> None:
    model, batch = llama(), batch_of()
    accelerate_loss(model)
    logits = model(**batch).logits
    for wrong in (
        lambda: logits.softmax(-1),
        lambda: torch.sort(logits),
        lambda: logits[..., 0],
        lambda: F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1),
        lambda: logits + 1.5,
        lambda: logits.view(-1),
    ):
        with pytest.raises(InputError, match="materialise"):
            wrong()
    assert logits[:, 2:, :].shape == (2, 5, VOCABULARY)
    assert logits[0, ...].shape == (7, VOCABULARY)


def test_bad_options() -> None:
    wrong: list[Any] = [{"delta": 1.5}, {"delta": "x"}, {"backend": "none"}, {"evaluate": "logits"}]
    for options in [*wrong, {"memory": 0}, {"memory": 1e9}]:
        model = llama()
        with pytest.raises((TypeError, ValueError), match=r"delta|backend|evaluate|memory"):
            accelerate_loss(model, **options)
        assert "forward" not in vars(model)
    with pytest.raises(InputError, match="found the model's own"):
        restore_loss(llama())
