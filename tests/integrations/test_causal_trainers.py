"""PEFT, the Trainer and TRL with language models that train without logits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from softsieve.errors import InputError
from softsieve.training import ASSpeed

pytest.importorskip("transformers")

import transformers

from softsieve.integrations.causal_layer import check_product, rounding
from softsieve.integrations.causal_loss import accelerate_loss, loss_of, restore_loss
from softsieve.integrations.causal_trl import token_log_probs
from softsieve.integrations.transformers import (
    ASLossCallback,
    ASOptions,
    ASTrainer,
    ASTrainerMixin,
    TokenWeightsCollator,
)
from tests.integrations.architectures import VOCABULARY, make
from tests.integrations.test_causal_loss import batch_of, count_logits, same, step

ROWS = 8


def texts(rows: int = ROWS) -> list[dict[str, Any]]:
    """Sequences of tokens that count up, so that they can be learnt, with their first label ignored."""
    tokens = [[3 + (7 * row + 3 * i) % (VOCABULARY - 3) for i in range(6)] for row in range(rows)]
    return [{"input_ids": row, "labels": [-100, *row[1:]]} for row in tokens]


def settings(folder: Path, **changed: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 0.01,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "logging_steps": 1,
        **changed,
    }


def arguments(folder: Path, **changed: Any) -> Any:
    return transformers.TrainingArguments(**settings(folder, **changed))


def history(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


# -- PEFT --------------------------------------------------------------------------------------------------------------


def adapted(model: Any = None, **changed: Any) -> Any:
    """A model with LoRA on attention and output layer, whose factors are not zero."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    options = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj", "lm_head"], **changed}
    model = peft.get_peft_model(make("Llama") if model is None else model, peft.LoraConfig(**options))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3)
    return model.train()


@pytest.mark.parametrize("changed", [{}, {"lora_bias": True}, {"use_rslora": True}])
def test_lora_on_the_output_layer_has_the_gradients_of_logits(changed: dict[str, Any]) -> None:
    model = adapted(**changed)
    batch = batch_of()
    dense = step(model, batch)
    assert any("lm_head" in name for name in dense[1])
    accelerate_loss(model, delta=1.0)
    same(step(model, batch), dense)
    with model.disable_adapter():
        loss = model(**batch).loss
    restore_loss(model)
    with model.disable_adapter():
        torch.testing.assert_close(loss, model(**batch).loss)
    same(step(model, batch), dense, 0.0)


def test_many_steps_of_lora_are_those_of_logits() -> None:
    """200 steps with r = 8 on attention and output layer: the same weights, to the rounding of float32."""
    models = [adapted(make("Llama", initializer_range=0.1), r=8, lora_alpha=16) for _ in range(2)]
    accelerate_loss(models[1], delta=1.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02) for model in models]
    start = {name: p.detach().clone() for name, p in models[0].named_parameters() if p.requires_grad}
    for number in range(200):
        batch = batch_of(seed=number % 5)
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    ends = [dict(model.named_parameters()) for model in models]
    for name, weight in start.items():
        moved = (ends[0][name] - weight).norm()
        assert moved > 1e-3, name
        assert (ends[1][name] - ends[0][name]).norm() < 1e-3 * moved, name


def test_products_in_tf32_are_no_other_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where torch may round what it multiplies; LoRA's scale comes before that rounding or after it."""
    model = adapted()  # whose scale is no power of 2
    plain = F.linear

    def coarse(x: Tensor) -> Tensor:
        return (
            x if x.dtype == torch.float64 else torch.round(torch.frexp(x)[0] * 2**11) * 2.0 ** (torch.frexp(x)[1] - 11)
        )

    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: plain(coarse(x), coarse(weight), bias))
    layer = model.get_output_embeddings()
    check_product(layer, layer.forward)
    assert 1e-5 < rounding(layer.weight) < 1e-3
    with pytest.raises(InputError, match="which does something else"):
        check_product(layer, lambda x: layer.forward(x) * 1.1)


def test_lora_dropout_and_half_precision_on_the_output_layer() -> None:
    model = adapted(lora_dropout=0.5).to(torch.bfloat16)
    accelerate_loss(model, delta=0.1)
    loss, gradients = step(model, batch_of())
    assert torch.isfinite(loss)
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())


def test_lora_that_comes_later_is_followed() -> None:
    plain = make("Llama")
    dense = step(adapted(copy.deepcopy(plain)), batch_of())
    accelerate_loss(plain, delta=1.0)
    same(step(adapted(plain), batch_of()), dense)


def test_a_whole_copy_of_the_output_layer() -> None:
    model = adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])
    dense = step(model, batch_of())
    assert any("modules_to_save" in name for name in dense[1])
    accelerate_loss(model, delta=1.0)
    same(step(model, batch_of()), dense)


def test_other_adapters_on_the_output_layer_are_refused() -> None:
    peft = pytest.importorskip("peft")
    dora = adapted(use_dora=True)
    ia3 = peft.get_peft_model(
        make("Llama"), peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[], task_type="CAUSAL_LM")
    )
    for model in (dora, ia3):
        with pytest.raises(InputError, match="expected plain LoRA on the output layer"):
            accelerate_loss(model)
        assert loss_of(model) is None
    later = make("Llama")
    accelerate_loss(later)
    with pytest.raises(InputError, match="expected plain LoRA"):
        adapted(later, use_dora=True)(**batch_of())
    elsewhere = adapted(use_dora=True, target_modules=["q_proj"])
    dense = step(elsewhere, batch_of())
    accelerate_loss(elsewhere, delta=1.0)
    same(step(elsewhere, batch_of()), dense)


def test_adapters_chosen_for_each_row_are_refused_without_logits() -> None:
    """By PEFT's ``adapter_names``, which reach the output layer beside its states."""
    peft = pytest.importorskip("peft")
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["lm_head"]))
    model.eval()
    accelerate_loss(model, evaluate=True)
    with pytest.raises(InputError, match="is given states alone, found adapter_names"):
        model(**batch_of(), adapter_names=["default", "other"])


def test_a_quantised_body_is_no_matter() -> None:
    """As bitsandbytes has it: layers of the body with a packed weight of bytes, the output layer plain."""

    class Packed(torch.nn.Module):
        def __init__(self, layer: torch.nn.Linear) -> None:
            super().__init__()
            self.scale = float(layer.weight.abs().max()) / 127
            packed = (layer.weight / self.scale).round().to(torch.int8)
            self.weight = torch.nn.Parameter(packed, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x.dtype) * self.scale)

    model = make("Llama")
    model.model.layers[0].mlp.up_proj = Packed(model.model.layers[0].mlp.up_proj)
    dense = step(model, batch_of())
    accelerate_loss(model, delta=1.0)
    same(step(model, batch_of()), dense)


# -- log-probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@pytest.mark.parametrize("accelerated", [False, True])
def test_log_probs_of_tokens_and_their_gradients(name: str, accelerated: bool) -> None:
    model, batch = make(name), batch_of()
    ids, labels = batch["input_ids"], batch["labels"]
    weights = torch.rand(2, 6, generator=torch.Generator().manual_seed(0))
    each = (model(ids).logits[:, :-1] / 0.7).log_softmax(-1).gather(-1, labels[:, 1:, None].clamp_min(0)).squeeze(-1)
    dense = each * (labels[:, 1:] != -100)
    (dense * weights).sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    if accelerated:
        accelerate_loss(model, delta=0.1)
    found = token_log_probs(model, ids, labels, temperature=0.7)
    (found * weights).sum().backward()  # type: ignore[no-untyped-call]
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    same((found.detach(), gradients), (dense.detach(), expected))
    assert (loss_of(model) is not None) == accelerated
    with pytest.raises(InputError, match="labels: expected"):
        token_log_probs(model, ids, labels[:, 1:])


def test_log_probs_of_a_compiled_model_and_of_one_with_a_prompt_of_its_own() -> None:
    peft = pytest.importorskip("peft")
    model, ids = make("Llama"), batch_of()["input_ids"]
    expected = token_log_probs(model, ids)
    compiled: Any = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(token_log_probs(compiled, ids), expected)
    accelerate_loss(model, delta=0.1)
    torch.testing.assert_close(token_log_probs(compiled, ids), expected)
    restore_loss(model)
    tuned = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    logits = tuned(input_ids=ids).logits[:, 3:-1]
    dense = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(token_log_probs(tuned, ids), dense)


# -- Trainer -----------------------------------------------------------------------------------------------------------


def trained(folder: Path, kind: Any, model: Any, **changed: Any) -> Any:
    names = ("as_options", "callbacks", "compute_metrics", "eval_dataset", "preprocess_logits_for_metrics")
    own = {"eval_dataset": texts(4), **{key: changed.pop(key) for key in names if key in changed}}
    trainer = kind(model=model, args=arguments(folder, **changed), train_dataset=texts(), **own)
    trainer.train()
    return trainer


def test_astrainer_at_delta_1_is_a_plain_trainer_without_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    plain = trained(tmp_path, transformers.Trainer, make("Llama"), **options)
    with monkeypatch.context() as patch:
        seen = count_logits(patch)
        ours = trained(tmp_path, ASTrainer, make("Llama"), as_options=ASOptions(delta=1.0), **options)
    assert {shape for shape in seen if len(shape) == 3} == {(1, 8, VOCABULARY)}  # a few tokens to compare the loss
    for key in ("loss", "eval_loss"):
        assert history(ours, key) == pytest.approx(history(plain, key), rel=1e-4)
    assert len(history(ours, "token_accuracy")) == len(history(ours, "solved")) == 4
    assert len(history(ours, "eval_token_accuracy")) == 2


def test_texts_in_one_row_without_padding(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"][: 3 + i % 3]} for i, row in enumerate(texts())]

    def run(kind: Any, **options: Any) -> Any:
        collator = transformers.DataCollatorWithFlattening()  # type: ignore[no-untyped-call]
        data = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collator}
        trainer = kind(model=make("Llama"), args=arguments(tmp_path), **data, **options)
        trainer.train()
        return history(trainer, "loss"), trainer.evaluate()["eval_loss"]

    losses, judged = run(transformers.Trainer)
    assert run(ASTrainer, as_options=ASOptions(delta=1.0)) == (
        pytest.approx(losses, rel=1e-5),
        pytest.approx(judged, rel=1e-5),
    )
    with pytest.raises(InputError, match="skip: expected a row for each text, found 2 packed into 1"):
        run(ASTrainer, as_options=ASOptions(skip={}))


def test_compute_metrics_gets_tokens(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def metrics(prediction: Any) -> dict[str, float]:
        seen["tokens"], labels = torch.tensor(prediction.predictions), torch.tensor(prediction.label_ids)
        right = (seen["tokens"][:, :-1] == labels[:, 1:])[labels[:, 1:] != -100]
        return {"accuracy": float(right.float().mean())}

    trainer = trained(tmp_path, ASTrainer, make("Llama"), compute_metrics=metrics, max_steps=8)
    found = trainer.evaluate()
    rows = torch.tensor([row["input_ids"] for row in texts(4)])
    model = trainer.model.eval()
    assert torch.equal(seen["tokens"], model(rows).logits.argmax(-1))
    assert found["eval_accuracy"] == pytest.approx(found["eval_token_accuracy"])
    labels = torch.tensor([row["labels"] for row in texts(4)])
    assert found["eval_loss"] == pytest.approx(float(model(rows, labels=labels).loss), rel=1e-5)


def test_astrainer_adapts_to_solved_tokens(tmp_path: Path) -> None:
    """Schedule of the margin, AS-Speed and skipping, in a model that learns its texts by heart."""
    options = ASOptions(delta=0.1, ratio=0.5, speed=ASSpeed(max_steps=3), skip={"margin": 0.2})
    changed = {"max_steps": -1, "num_train_epochs": 40, "learning_rate": 0.05}
    trainer = trained(tmp_path, ASTrainer, make("Llama"), as_options=options, **changed)
    solved = history(trainer, "solved")
    assert solved[0] < 0.3 < 0.8 < max(solved)
    assert trainer.state.global_step < 40 * ROWS // 2 * 0.8


def test_a_callback_for_the_plain_trainer(tmp_path: Path) -> None:
    plain = trained(tmp_path, transformers.Trainer, make("Llama"))
    model = make("Llama")
    margins = []

    class Spy(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
            forward = loss_of(model)
            assert forward is not None
            margins.append(forward.loss.delta)

    same_loss = trained(tmp_path, transformers.Trainer, model, callbacks=[ASLossCallback(delta=1.0), Spy()])
    assert history(same_loss, "loss") == pytest.approx(history(plain, "loss"), rel=1e-4)
    assert len(history(same_loss, "token_accuracy")) == 4
    assert loss_of(model) is None
    margins.clear()
    trained(tmp_path, transformers.Trainer, make("Llama"), callbacks=[ASLossCallback(delta=0.1, ratio=0.5), Spy()])
    assert margins == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_a_callback_gives_compute_metrics_predicted_tokens(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(torch.tensor(prediction.predictions))
        return {}

    model = make("Llama")
    changed = {"eval_strategy": "steps", "eval_steps": 4, "compute_metrics": metrics}
    callbacks = [ASLossCallback(delta=0.1, evaluate="tokens")]
    trainer = trained(tmp_path, transformers.Trainer, model, callbacks=callbacks, **changed)
    rows, labels = (torch.tensor([row[name] for row in texts(4)]) for name in ("input_ids", "labels"))
    outputs = model.eval()(rows, labels=labels)
    assert torch.equal(seen[0], outputs.logits.argmax(-1))
    assert history(trainer, "eval_loss") == pytest.approx([float(outputs.loss)], rel=1e-5)
    assert len(history(trainer, "eval_token_accuracy")) == 1


def test_evaluations_of_several_sets_log_what_each_is_like(tmp_path: Path) -> None:
    """Each by its own name, whatever ``compute_metrics`` calls its numbers, and none with tokens of another."""
    sets = {"one": texts(4), "two": texts(6)[4:]}
    options = {
        "eval_dataset": sets, "compute_metrics": lambda _: {"my_loss": 1.0}, "eval_strategy": "steps", "eval_steps": 4,
    }  # fmt: skip
    ours = trained(tmp_path, ASTrainer, make("Llama"), **options)
    called = trained(
        tmp_path, transformers.Trainer, make("Llama"), callbacks=[ASLossCallback(evaluate="tokens")], **options
    )
    model = ours.model.eval()
    restore_loss(model)
    for name, rows in sets.items():
        tokens, labels = (torch.tensor([row[key] for row in rows]) for key in ("input_ids", "labels"))
        counted = labels[:, 1:] != -100
        lse = float(model(tokens).logits[:, :-1].logsumexp(-1)[counted].mean())
        for trainer in (ours, called):
            assert history(trainer, f"eval_{name}_lse") == pytest.approx([lse], rel=1e-4)
            assert history(trainer, f"eval_{name}_my_loss") == [1.0]
            assert history(trainer, "eval_my_lse") == []


def test_what_is_predicted_is_not_counted_in_the_next_evaluation(tmp_path: Path) -> None:
    trainer = trained(tmp_path, ASTrainer, make("Llama"))
    expected = trainer.evaluate()
    trainer.predict(texts(7)[4:])
    assert trainer.evaluate()["eval_lse"] == pytest.approx(expected["eval_lse"])


def test_an_interrupted_training_goes_on_and_gives_the_loss_back(tmp_path: Path) -> None:
    class Stop(transformers.TrainerCallback):
        steps = 0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.steps += 1
            if self.steps == 2:
                raise KeyboardInterrupt

    for own in (False, True):  # whether the user had put it there
        model = make("Llama")
        if own:
            accelerate_loss(model)
        data = {"args": arguments(tmp_path), "train_dataset": texts()}
        trainer = transformers.Trainer(model=model, **data, callbacks=[ASLossCallback(), Stop()])
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()
        assert (loss_of(model) is not None) == own


def predictions_of(found: list[Any]) -> list[Tensor]:
    """Tensors of what ``compute_metrics`` got."""
    return [torch.as_tensor(value).float() for value in found]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"preprocess_logits_for_metrics": lambda logits, labels: logits.log_softmax(-1)[..., 3:5]},
        {"eval_accumulation_steps": 1, "per_device_eval_batch_size": 2},
        {"bf16": True},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ],
    ids=lambda changed: next(iter(changed), "plain"),
)
def test_logits_that_a_trainer_asks_for_are_made(tmp_path: Path, changed: dict[str, Any]) -> None:
    """With a ``compute_metrics`` an evaluation without logits gives it what one with logits does."""

    def run(evaluate: bool) -> tuple[list[Any], list[float]]:
        torch.compiler.reset()
        found: list[Any] = []

        def metrics(prediction: Any) -> dict[str, float]:
            found.append(prediction.predictions)
            return {}

        options = {"eval_strategy": "steps", "eval_steps": 2, "compute_metrics": metrics, **changed}
        callbacks = [ASLossCallback(delta=0.1, evaluate=evaluate)]
        trainer = trained(tmp_path, transformers.Trainer, make("Llama"), callbacks=callbacks, **options)
        assert bool(history(trainer, "eval_token_accuracy")) == evaluate
        return found, history(trainer, "eval_loss")

    (ours, losses), (dense, expected) = run(True), run(False)
    assert len(ours) == 2
    torch.testing.assert_close(predictions_of(ours), predictions_of(dense), rtol=1e-4, atol=1e-4)
    assert losses == pytest.approx(expected, rel=1e-2 if "bf16" in changed else 1e-5)


@pytest.mark.parametrize("before", [False, True])
def test_no_logits_are_made_where_only_the_loss_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """Also where Accelerate casts what the model returns, which it does if the loss was there before the trainer."""
    seen = count_logits(monkeypatch)
    model = make("Llama")
    if before:
        accelerate_loss(model, evaluate=True)
    options = {"eval_strategy": "steps", "eval_steps": 2, "bf16": True}
    callbacks = [ASLossCallback(delta=0.1, evaluate=True)]
    trainer = trained(tmp_path, transformers.Trainer, model, callbacks=callbacks, **options)
    assert len(history(trainer, "eval_loss")) == 2
    assert {shape for shape in seen if len(shape) == 3} == {(1, 8, VOCABULARY)}  # a few tokens to compare the loss


def test_predict_gets_logits_or_tokens(tmp_path: Path) -> None:
    model = make("Llama")
    trainer: Any = transformers.Trainer(model=model, args=arguments(tmp_path))
    dense = trainer.predict(texts(4))
    for evaluate in (True, "tokens"):
        accelerate_loss(model, evaluate=evaluate)
        found = trainer.predict(texts(4))
        restore_loss(model)
        expected = dense.predictions.argmax(-1) if evaluate == "tokens" else dense.predictions
        assert found.predictions == pytest.approx(expected, abs=1e-5)
        assert found.metrics["test_loss"] == pytest.approx(dense.metrics["test_loss"], rel=1e-5)


def test_weights_of_tokens_reach_a_callback(tmp_path: Path) -> None:
    """A column of the data that a Trainer would drop, for the model's own forward does not take it."""
    datasets = pytest.importorskip("datasets")
    weights = [[float((place + row) % 3) for place in range(6)] for row in range(ROWS)]
    weighted = [{**row, "token_weights": some} for row, some in zip(texts(), weights, strict=True)]

    def run(kind: Any, data: Any, **options: Any) -> list[float]:
        model = make("Llama")
        trainer = kind(model=model, args=arguments(tmp_path), train_dataset=data, **options)
        trainer.train()
        assert kind is ASTrainer or "forward" not in vars(model)
        return history(trainer, "loss")

    expected = run(ASTrainer, weighted, as_options=ASOptions(delta=1.0))
    for data in (weighted, datasets.Dataset.from_list(weighted)):
        assert run(transformers.Trainer, data, callbacks=[ASLossCallback(delta=1.0)]) == pytest.approx(expected)
    assert run(ASTrainer, texts(), as_options=ASOptions(delta=1.0)) != pytest.approx(expected, rel=1e-3)


def weighted_texts() -> list[dict[str, Any]]:
    """Of several lengths, with a weight for each label, which the label tells."""
    rows = [{name: values[: 3 + i % 3] for name, values in row.items()} for i, row in enumerate(texts())]
    return [{**row, "token_weights": [label % 7 / 4 for label in row["labels"]]} for row in rows]


@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_weights_go_where_their_labels_go(side: str) -> None:
    words = tokenizer()
    words.padding_side = side
    plain: Any = transformers.DataCollatorForSeq2Seq(words, pad_to_multiple_of=8)
    if side == "none":
        plain = transformers.DataCollatorWithFlattening()  # type: ignore[no-untyped-call]
    batch = TokenWeightsCollator(plain)(weighted_texts())
    labels, weights = batch["labels"], batch["token_weights"]
    assert labels.shape == weights.shape == ((1, 31) if side == "none" else (ROWS, 8))
    counted = labels != -100
    torch.testing.assert_close(weights[counted], (labels % 7 / 4)[counted], rtol=0, atol=0)
    assert "token_weights" in weighted_texts()[0]


def test_weights_that_cannot_be_told_are_refused() -> None:
    collate = TokenWeightsCollator(transformers.DataCollatorForSeq2Seq(tokenizer()))
    row = weighted_texts()[0]
    for wrong in ({**row, "token_weights": [1.0]}, {"input_ids": [3], "token_weights": [1.0]}, texts()[0]):
        with pytest.raises(InputError, match=r"token_weights: expected one for each of the \d labels, found \d"):
            collate([wrong])
    of_inputs = TokenWeightsCollator(transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False))
    with pytest.raises(InputError, match="found one that changes them"):
        of_inputs([row])


def test_an_evaluation_leaves_weights_out(tmp_path: Path) -> None:
    collator = TokenWeightsCollator(transformers.DataCollatorForSeq2Seq(tokenizer()))

    def run(kind: Any, **options: Any) -> Any:
        data = {"train_dataset": weighted_texts(), "eval_dataset": weighted_texts(), "data_collator": collator}
        trainer = kind(model=make("Llama"), args=arguments(tmp_path, eval_strategy="epoch"), **data, **options)
        trainer.train()
        return history(trainer, "eval_loss")

    plain = run(transformers.Trainer, callbacks=[ASLossCallback(delta=1.0)])
    assert run(transformers.Trainer, callbacks=[ASLossCallback(delta=1.0, evaluate=True)]) == pytest.approx(plain)
    assert run(ASTrainer, as_options=ASOptions(delta=1.0)) == pytest.approx(plain)


def test_a_callback_that_would_change_nothing_is_refused(tmp_path: Path) -> None:
    model = make("Llama")
    with pytest.raises(InputError, match="label_smoothing_factor: expected 0"):
        trained(tmp_path, transformers.Trainer, model, callbacks=[ASLossCallback()], label_smoothing_factor=0.1)
    trainer = transformers.Trainer(
        model=model, args=arguments(tmp_path), train_dataset=texts(), callbacks=[ASLossCallback()],
        compute_loss_func=lambda outputs, labels, num_items_in_batch=None: outputs.logits.float().mean(),
    )  # fmt: skip
    with pytest.raises(InputError, match="expected a trainer that takes the model's loss"):
        trainer.train()
    assert loss_of(model) is None
    assert "forward" not in vars(model)


def test_tokens_are_generated_where_that_is_asked_for(tmp_path: Path) -> None:
    class Ours(ASTrainerMixin, transformers.Seq2SeqTrainer): ...

    def run(kind: Any) -> Any:
        args = transformers.Seq2SeqTrainingArguments(
            **settings(tmp_path, predict_with_generate=True, generation_max_length=9)
        )
        made = kind(model=make("T5"), args=args, train_dataset=texts(), eval_dataset=texts(4))
        return made.predict(texts(4))

    ours, plain = run(Ours), run(transformers.Seq2SeqTrainer)
    assert ours.predictions.tolist() == plain.predictions.tolist()
    assert ours.metrics["test_loss"] == pytest.approx(plain.metrics["test_loss"], rel=1e-5)


@pytest.mark.parametrize("after", [False, True])
def test_a_model_that_accelerate_has_prepared(after: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make("Llama")
    dense = step(model, batch_of())
    if not after:
        accelerate_loss(model, delta=1.0)
    prepared = accelerator.prepare(model)
    if after:
        accelerate_loss(prepared, delta=1.0)
    model.zero_grad(set_to_none=True)
    with accelerator.accumulate(prepared):
        loss = prepared(**batch_of()).loss
        accelerator.backward(2 * loss)  # which it divides by the steps
    same((loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}), dense)
    restore_loss(prepared)
    assert isinstance(accelerator.unwrap_model(prepared)(**batch_of()).logits, Tensor)


def test_bf16_training(tmp_path: Path) -> None:
    ours = trained(tmp_path, ASTrainer, make("Llama"), as_options=ASOptions(delta=1.0), bf16=True)
    plain = trained(tmp_path, transformers.Trainer, make("Llama"), bf16=True)
    assert history(ours, "loss") == pytest.approx(history(plain, "loss"), rel=0.05)


# -- TRL ---------------------------------------------------------------------------------------------------------------


def test_sft_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    def run(model: Any, **options: Any) -> Any:
        data = datasets.Dataset.from_list(texts())
        args = trl.SFTConfig(
            **settings(tmp_path, bf16=False, max_length=16), dataset_kwargs={"skip_prepare_dataset": True}
        )
        made = trl.SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer(), **options)
        made.train()
        return made

    plain = run(make("Llama"))
    ours = run(make("Llama"), callbacks=[ASLossCallback(delta=1.0)])
    for key in ("loss", "mean_token_accuracy", "entropy"):
        if history(plain, key):
            assert history(ours, key) == pytest.approx(history(plain, key), rel=1e-3), key
    assert history(ours, "token_accuracy")
    sparse = run(make("Llama"), callbacks=[ASLossCallback(delta=0.1)])
    assert history(sparse, "loss")[-1] < history(plain, "loss")[-1]


@pytest.mark.parametrize("joined", [False, True])
def test_weights_of_tokens_reach_trl(tmp_path: Path, joined: bool) -> None:
    """Weighted as in a plain Trainer, also where texts are joined without padding."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = TokenWeightsCollator(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=joined))
    data = datasets.Dataset.from_list(weighted_texts())
    changed = {"remove_unused_columns": False, "max_length": 16, "dataset_kwargs": {"skip_prepare_dataset": True}}

    def run(kind: Any, args: Any, **options: Any) -> list[float]:
        callbacks = [ASLossCallback(delta=1.0)]
        made = kind(
            model=make("Llama"), args=args, train_dataset=data, data_collator=collator, callbacks=callbacks, **options
        )
        made.train()
        return history(made, "loss")

    args = trl.SFTConfig(**settings(tmp_path, bf16=False), **changed)
    found = run(trl.SFTTrainer, args, processing_class=tokenizer())
    assert found == pytest.approx(run(transformers.Trainer, arguments(tmp_path)), rel=1e-4)
    data = data.map(lambda row: {"token_weights": [1.0] * len(row["labels"])})
    assert found != pytest.approx(run(transformers.Trainer, arguments(tmp_path)), rel=1e-2)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=plain, pad_token="w0", eos_token="w2", bos_token="w1", unk_token="w0"
    )


def test_a_head_of_trl_with_a_temperature() -> None:
    """As GRPO has it: log-probabilities and entropies of logits by a temperature, both with gradients."""
    utils = pytest.importorskip("trl.trainer.utils")

    def run(accelerated: bool, **options: Any) -> Any:
        model = make("Llama")
        utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits"), **options)
        loss = accelerate_loss(model, delta=1.0) if accelerated else None
        found = model(**batch_of(), fused_lm_head=True)
        (found.log_probs.sum() - 0.3 * found.entropy.sum()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        parts = torch.stack([found.log_probs, found.entropy, found.mean_logits])
        return (parts.detach(), gradients), loss

    dense, _ = run(False, temperature=0.5)
    ours, loss = run(True, temperature=0.5)
    same(ours, dense)
    assert loss.called
    _, loss = run(True, cast_lm_head_to_fp32=True)  # stays TRL's
    assert not loss.called
    model = make("Llama")
    utils.add_fused_lm_head(model, cast_lm_head_to_fp32=True)
    accelerate_loss(model)
    with pytest.raises(InputError, match=r"token_weights: .* found a head that stays TRL's, in float32"):
        model(**batch_of(), fused_lm_head=True, token_weights=torch.ones(2, 7))


def test_dpo_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    pairs = [{"prompt": f"w{3 + i} w4", "chosen": " w5 w6", "rejected": f" w{9 + i} w8"} for i in range(4)]

    def run(**options: Any) -> Any:
        model = make("Llama")
        args = trl.DPOConfig(**settings(tmp_path, bf16=False, max_length=16, beta=0.5))
        made = trl.DPOTrainer(
            model=model, ref_model=make("Llama", seed=1), args=args, train_dataset=datasets.Dataset.from_list(pairs),
            processing_class=tokenizer(), **options,
        )  # fmt: skip
        made.train()
        return made

    plain, ours = run(), run(callbacks=[ASLossCallback(delta=1.0)])
    assert history(ours, "loss") == pytest.approx(history(plain, "loss"), rel=1e-3)
    assert history(ours, "logps/chosen") == pytest.approx(history(plain, "logps/chosen"), rel=1e-3)
    assert history(ours, "token_accuracy")
