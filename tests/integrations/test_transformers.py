"""The real Trainer on tiny random BERTs, against gradients and losses worked out by hand."""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from softsieve import as_cross_entropy, as_multilabel_loss
from softsieve.errors import InputError
from softsieve.losses.multilabel import RULES
from softsieve.training import ASSpeed
from tests.helpers import default_dtype

pytest.importorskip("transformers")

import transformers

from softsieve.integrations.transformers import ASOptions, ASTrainer, ASTrainerMixin

CLASSES = 4
ROWS = 32


class Data:
    """Rows, and how often they were asked for."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.asked = rows, Counter[int]()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked[index] += 1
        return self.rows[index]


def easy(rows: int = ROWS, *, ambiguous: int = 0) -> Data:
    """Rows whose tokens say their label, but for the last ``ambiguous`` ones, which all look alike."""
    label = [i % CLASSES for i in range(rows)]
    token = [1 + label[i] if i < rows - ambiguous else 9 for i in range(rows)]
    return Data([{"input_ids": [t] * 4, "labels": y} for t, y in zip(token, label, strict=True)])


def bert(kind: str = "SequenceClassification", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=10,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.5,
        **{"num_labels": CLASSES, **options},
    )
    model: nn.Module = getattr(transformers, f"BertFor{kind}")(config)
    return model


def trainer(
    folder: Path,
    data: Any,
    model: nn.Module | None = None,
    options: ASOptions | None = None,
    make: type[ASTrainer] = ASTrainer,
    **settings: Any,
) -> ASTrainer:
    callbacks = settings.pop("callbacks", None)
    evaluation = settings.pop("eval_dataset", None)
    chosen: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 6,
        "learning_rate": 0.02,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "logging_steps": 1,
        **settings,
    }
    args = transformers.TrainingArguments(**chosen)
    model = bert() if model is None else model
    return make(
        model=model, args=args, train_dataset=data, eval_dataset=evaluation, callbacks=callbacks, as_options=options
    )


def logged(done: ASTrainer, key: str) -> list[float]:
    return [entry[key] for entry in done.state.log_history if key in entry]


def weights(model: nn.Module | None) -> Tensor:
    assert model is not None
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient_of_one_step(folder: Path, data: Data, model: nn.Module, **settings: Any) -> Tensor:
    before = weights(model)
    settings = {"num_train_epochs": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, **settings}
    done = trainer(folder, data, model, **settings)
    done.train()
    assert done.state.global_step == 1
    return before - weights(model)


def gradient(loss: Tensor, model: nn.Module) -> Tensor:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )


def close(found: Tensor, expected: Tensor) -> None:
    assert expected.norm() > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def tokens() -> Data:
    """Six rows with 1, 2, ... counted labels, so that micro-batches weigh differently."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for counted in range(1, 7):
        labels = torch.randint(CLASSES, (6,), generator=generator)
        labels[counted:] = -100
        rows.append({"input_ids": torch.randint(10, (6,), generator=generator), "labels": labels})
    return Data(rows)


def token_gradient(model: nn.Module) -> Tensor:
    """Of the mean over all counted labels of all rows."""
    ids, labels = (torch.stack([row[name] for row in tokens().rows]) for name in ("input_ids", "labels"))
    return gradient(as_cross_entropy(model(input_ids=ids).logits, labels, delta=0.3), model)


@pytest.mark.parametrize(("batch", "accumulated", "speed"), [(6, 1, 1), (2, 3, 1), (1, 6, 1), (1, 1, 6), (1, 2, 3)])
def test_gradient_is_that_of_the_mean_over_the_whole_window(
    tmp_path: Path, batch: int, accumulated: int, speed: int
) -> None:
    data, model = tokens(), bert("TokenClassification")
    expected = token_gradient(model)
    options = ASOptions(delta=0.3)
    if speed > 1:
        wide = ASSpeed(max_steps=speed)
        wide.steps = speed
        options = ASOptions(delta=0.3, speed=wide)
    found = gradient_of_one_step(
        tmp_path,
        data,
        model,
        options=options,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulated,
    )
    close(found, expected)


@pytest.mark.parametrize(("batch", "accumulated"), [(4, 1), (1, 4)])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, {"delta": 0.7, "against": "threshold"}),
        ({"delta": 0.2}, {"delta": 0.2, "against": "threshold"}),
        ({"against": "labels"}, {"delta": 0.1, "against": "labels"}),
    ],
)
def test_multilabel(tmp_path: Path, batch: int, accumulated: int, given: dict[str, Any], meant: dict[str, Any]) -> None:
    model = bert(problem_type="multi_label_classification")
    ids = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    logits = model(input_ids=ids).logits
    flags = (logits > 0).long()
    flags[0, 0] ^= 1  # all but this one are right, by more and by less
    rules = {as_multilabel_loss(logits, flags, delta=d, against=a).item() for d in (0.1, 0.2, 0.7) for a in RULES}
    assert len(rules) == 6
    loss = as_multilabel_loss(logits, flags, **meant)
    expected = gradient(loss, model)
    data = Data([{"input_ids": i, "labels": f.float()} for i, f in zip(ids, flags, strict=True)])
    settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated}
    close(gradient_of_one_step(tmp_path, data, model, options=ASOptions(**given), **settings), expected)


def test_evaluation_reports_the_loss_at_the_final_margin_and_the_logits(tmp_path: Path) -> None:
    data, model = easy(), bert()
    model.eval()
    ids, labels = (torch.tensor([row[name] for row in data.rows]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    expected = as_cross_entropy(logits, labels, delta=0.2).item()
    still: dict[str, Any] = {"learning_rate": 0.0, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    run = trainer(tmp_path, data, model, ASOptions(delta=0.2, ratio=1.0), eval_dataset=data, **still)
    run.train()
    assert logged(run, "eval_loss") == pytest.approx([expected] * 2, rel=1e-5)
    found = run.predict(data)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.as_tensor(found.predictions), logits)
    model.config.return_dict = False  # type: ignore[union-attr]
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(torch.as_tensor(run.predict(data).predictions), logits)  # type: ignore[arg-type]


def test_margin_comes_down_over_the_nominal_steps(tmp_path: Path) -> None:
    margins: list[float] = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert run._delta is not None
            margins.append(run._delta)

    data = easy(16)
    run = trainer(tmp_path, data, None, ASOptions(delta=0.1, ratio=0.5), num_train_epochs=2, callbacks=[Watch()])
    run.train()
    assert margins == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1, 0.1])


@pytest.mark.parametrize(
    ("options", "above"),
    [({}, 0.0), ({"delta": 0.3}, 0.2), ({"delta": 0.3, "skip": {"delta": 0.3}}, 0.0), ({"skip": {"margin": 0.5}}, 0.0)],
)
def test_a_row_of_tokens_leads_as_its_worst_that_counts(tmp_path: Path, options: dict[str, Any], above: float) -> None:
    """By the delta of the loss, where the sampler has another and no margin of its own."""
    data, model = tokens(), bert("TokenClassification")
    run = trainer(tmp_path, data, model, ASOptions(**{"skip": {}, **options}), num_train_epochs=1, learning_rate=0.0)
    run.train()
    assert run._sampler is not None
    for index, row in enumerate(data.rows):
        with torch.no_grad():
            logits = model(input_ids=torch.as_tensor(row["input_ids"])[None]).logits[0]
        labels = torch.as_tensor(row["labels"])
        _, stats = as_cross_entropy(logits, labels, return_stats=True)
        worst = min(stats.margin[labels != -100].tolist(), default=1.0)
        assert float(run._sampler.margins[index]) == pytest.approx(max(worst - above, -1), abs=1e-5)


def test_rows_of_many_labels_lead_by_the_threshold(tmp_path: Path) -> None:
    model = bert(problem_type="multi_label_classification")
    ids = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    flags = (logits > 0).long()
    flags[0, 0] ^= 1
    data = Data([{"input_ids": i, "labels": f.float()} for i, f in zip(ids, flags, strict=True)])
    run = trainer(tmp_path, data, model, ASOptions(skip={"delta": 0.7}), num_train_epochs=1, learning_rate=0.0)
    run.train()
    assert run._sampler is not None
    _, stats = as_multilabel_loss(logits, flags, delta=0.7, against="threshold", return_stats=True)
    torch.testing.assert_close(run._sampler.margins, stats.margin, rtol=0, atol=1e-5)
    assert len(set(stats.margin.tolist())) == 4


class Witness(ASTrainer):
    """Keeps, for every epoch, which rows were visited and whether they were solved then."""

    epochs: list[dict[int, bool]]

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        with torch.no_grad():
            logits = model(input_ids=inputs["input_ids"]).logits
        _, stats = as_cross_entropy(logits, inputs["labels"], return_stats=True)
        self.epochs[self._epoch].update(zip(inputs["as_index"].tolist(), stats.solved.tolist(), strict=True))
        return super().compute_loss(model, inputs, *args, **options)


def test_solved_rows_are_skipped_and_the_others_are_not(tmp_path: Path) -> None:
    run = trainer(tmp_path, easy(ambiguous=8), None, ASOptions(skip={"tolerance": 1.0}), Witness)
    assert isinstance(run, Witness)
    run.epochs = [{} for _ in range(6)]
    run.train()
    assert len(run.epochs[0]) == ROWS
    assert sum(map(len, run.epochs)) < 0.9 * 6 * ROWS
    for seen, after in zip(run.epochs, run.epochs[1:], strict=False):
        assert {row for row, solved in seen.items() if not solved} <= set(after)


def test_skipping_trains_for_the_epochs_asked_for_and_the_learning_rate_follows_them(tmp_path: Path) -> None:
    done = trainer(tmp_path, easy(), None, ASOptions(skip={"tolerance": 1.0}), warmup_steps=4)
    done.train()
    assert done.state.global_step < 6 * ROWS / 4
    assert done.state.epoch == pytest.approx(6)
    rates, epochs = logged(done, "learning_rate"), logged(done, "epoch")
    for rate, epoch in zip(rates[1:], epochs[:-2], strict=False):  # a step starts where the one before ended
        nominal = int(epoch * ROWS / 4 + 1e-6)
        expected = nominal / 4 if nominal < 4 else (48 - nominal) / 44
        assert rate == pytest.approx(0.02 * expected, rel=1e-6)


@pytest.mark.parametrize("accumulated", [1, 3])
def test_speed_makes_fewer_optimizer_steps_of_the_same_rows(tmp_path: Path, accumulated: int) -> None:
    data = easy()
    options = ASOptions(speed=ASSpeed(max_steps=3))
    done = trainer(tmp_path, data, None, options, gradient_accumulation_steps=accumulated)
    done.train()
    assert set(data.asked.values()) == {6}
    assert done.state.global_step < 6 * -(-8 // accumulated)
    assert done.state.epoch == 6
    assert options.speed is not None
    assert options.speed.steps == 1  # the options are not used up
    assert done._speed is not None
    assert done._speed.steps > 1
    assert logged(done, "learning_rate")[-1] < 0.2 * 0.02


@pytest.mark.parametrize("limit", [{"num_train_epochs": 1.5}, {"max_steps": 12}])
def test_training_may_end_within_an_epoch(tmp_path: Path, limit: dict[str, Any]) -> None:
    data = easy()
    options = ASOptions(speed=ASSpeed(max_steps=2), skip={"tolerance": 0.0})
    done = trainer(tmp_path, data, None, options, save_strategy="steps", save_steps=500, **limit)
    done.train()
    assert done.state.epoch == pytest.approx(1.5, abs=0.13)
    assert (tmp_path / f"checkpoint-{done.state.global_step}").is_dir()  # saved at the end as by a plain Trainer


@pytest.mark.parametrize(("save", "accumulated"), [("steps", 1), ("steps", 2), ("epoch", 2)])
def test_resumed_training_ends_where_the_uninterrupted_one_does(tmp_path: Path, save: str, accumulated: int) -> None:
    options = ASOptions(speed=ASSpeed(max_steps=4), skip={"tolerance": 1.0}, ratio=0.1)
    settings: dict[str, Any] = {"save_strategy": save, "save_steps": 1, "gradient_accumulation_steps": accumulated}
    whole = trainer(tmp_path, easy(ambiguous=8), None, options, **settings)
    whole.train()
    states = {path.parent: json.loads(path.read_text()) for path in tmp_path.glob("*/softsieve.json")}
    sped = [folder for folder, state in states.items() if state["speed"]["steps"] > 1 and 0 < state["epoch"] < 4]
    chosen = sorted(sped)[:2] + [folder for folder, state in states.items() if state["batches"] == 0][:1]
    assert len(chosen) == 3
    for folder in chosen:  # in the middle of an epoch, at its last step, or after it
        resumed = trainer(tmp_path / "again", easy(ambiguous=8), None, options, **{**settings, "save_strategy": "no"})
        resumed.train(resume_from_checkpoint=str(folder))
        assert resumed.state.global_step == whole.state.global_step
        assert resumed.state.epoch == whole.state.epoch
        torch.testing.assert_close(weights(resumed.model), weights(whole.model), rtol=0, atol=0)


@pytest.mark.parametrize("skip", [{}, None])
def test_the_bar_comes_to_its_end_and_the_log_tells_what_is_solved(tmp_path: Path, skip: dict[str, Any] | None) -> None:
    class Watch(transformers.TrainerCallback):
        bar: Any = None

        def on_step_end(self, *_: Any, **__: Any) -> None:
            callbacks = made.callback_handler.callbacks
            Watch.bar = next(one for one in callbacks if isinstance(one, transformers.ProgressCallback)).training_bar

    options = ASOptions(skip=skip, speed=ASSpeed(max_steps=2))
    data = easy(ROWS, ambiguous=4)
    settings: dict[str, Any] = {"disable_tqdm": False, "logging_steps": 1, "callbacks": [Watch]}
    made = trainer(tmp_path, data, bert(), options, **settings)
    made.train()
    assert made.state.global_step < Watch.bar.total
    assert Watch.bar.n == Watch.bar.total == 6 * ROWS // 4
    lines = [line for line in made.state.log_history if "loss" in line]
    assert all(0 <= line["solved"] <= 1 for line in lines)
    assert lines[0]["solved"] < 0.3 < lines[-1]["solved"]
    if skip is not None:
        assert made._sampler is not None
        assert lines[-1]["solved"] == float(made._sampler.solved.double().mean())


def test_rows_are_solved_by_the_loss_whatever_margin_they_are_left_out_from(tmp_path: Path) -> None:
    made = trainer(tmp_path, easy(ROWS, ambiguous=4), bert(), ASOptions(skip={"margin": 1.0}), logging_steps=1)
    made.train()
    assert made._sampler is not None
    assert not made._sampler.solved.any()
    lines = [line["solved"] for line in made.state.log_history if "loss" in line]
    assert lines[-1] == float((made._sampler.margins >= 0.1).double().mean()) > 0.3


@pytest.mark.parametrize("kind", ["list", "datasets"])
def test_skipping_leaves_out_columns_the_model_does_not_know(tmp_path: Path, kind: str) -> None:
    rows: Any = [{**row, "text": "not for the model"} for row in easy().rows]
    seen = set[str]()

    def look(batch: dict[str, Any]) -> dict[str, Any]:
        seen.update(batch)
        return batch

    def collate(batch: list[dict[str, Any]]) -> Any:
        look(batch[0])
        return transformers.default_data_collator(batch)

    if kind == "datasets":
        rows = (
            pytest.importorskip("datasets").Dataset.from_list(rows).with_transform(look)
        )  # a row read is a row decoded
    run = trainer(tmp_path, rows, None, ASOptions(skip={}), num_train_epochs=1, eval_dataset=rows)
    run.data_collator = collate
    run.train()
    assert run.state.global_step == 8
    assert seen == {"input_ids", "labels"}
    assert run.train_dataset is rows
    assert run.evaluate()["eval_loss"] > 0


def test_items_of_several_gpus_in_one_process(tmp_path: Path) -> None:
    """What DataParallel would hand over: the logits of both GPUs, and the number of items once a GPU."""
    model, run = bert(), trainer(tmp_path, easy())
    inputs = {"input_ids": torch.tensor([[1, 2], [3, 4]]), "labels": torch.tensor([2, 3])}
    expected = run.compute_loss(model.eval(), inputs)
    run.args._n_gpu = 2
    torch.testing.assert_close(run.compute_loss(model, inputs, num_items_in_batch=torch.tensor([[2], [2]])), expected)
    run.args.average_tokens_across_devices = False
    torch.testing.assert_close(run.compute_loss(model, inputs, num_items_in_batch=torch.tensor([[1], [1]])), expected)


def test_as_many_positions_as_classes_are_nothing_to_tell(tmp_path: Path) -> None:
    model = bert("TokenClassification")
    run = trainer(tmp_path, easy(), model)
    inputs = {"input_ids": torch.ones(2, CLASSES, dtype=torch.long), "labels": torch.zeros(2, CLASSES).long()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run.compute_loss(model, inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_changes_nothing(tmp_path: Path, dtype: torch.dtype) -> None:
    model = bert()
    run = trainer(tmp_path, easy(), model)
    inputs = {"input_ids": torch.ones(2, 4, dtype=torch.long), "labels": torch.tensor([0, 1])}
    many = torch.tensor(100_001)  # more than fp16 holds, and rounded in bf16
    plain = run.compute_loss(model, inputs, num_items_in_batch=many)
    with default_dtype(dtype):
        found = run.compute_loss(model, inputs, num_items_in_batch=many)
        assert run.training_step(model, inputs, many).dtype == torch.float32
    assert torch.equal(found, plain)


def test_mixes_with_a_trainer_of_ones_own(tmp_path: Path) -> None:
    class Own(transformers.Trainer):
        said = False

        def create_optimizer(self, *args: Any, **options: Any) -> Any:
            self.said = True
            return super().create_optimizer(*args, **options)

    class Both(ASTrainerMixin, Own):
        pass

    args = transformers.TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True)
    run = Both(model=bert(), args=args, train_dataset=easy(), as_options=ASOptions(skip={}))
    run.train()
    assert run.said
    assert run._sampler is not None


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected no other loss"):
        trainer(tmp_path, easy(), label_smoothing_factor=0.1)
    with pytest.raises(InputError, match="train_sampling_strategy: expected 'random' with skipping, found 'seq"):
        trainer(tmp_path, easy(), options=ASOptions(skip={}), train_sampling_strategy="sequential")
    with pytest.raises(InputError, match="dispatch_batches: expected False with skipping"):
        trainer(tmp_path, easy(), options=ASOptions(skip={}), accelerator_config={"dispatch_batches": True})
    with pytest.raises(InputError, match="train_dataset: expected rows by index"):
        trainer(tmp_path, iter([]), options=ASOptions(skip={}), max_steps=1)
    with pytest.raises(InputError, match="labels: expected in every batch, found only input_ids"):
        trainer(tmp_path, Data([{"input_ids": [1, 2]}])).train()
    with pytest.raises(ValueError, match="tolerance"):
        ASOptions(skip={"tolerance": 2})
    with pytest.raises(ValueError, match="final"):
        ASOptions(delta=2)
    with pytest.raises(ValueError, match="against: expected one of 'labels', 'threshold', found 'all'"):
        ASOptions(against="all")


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in names.items()})
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's name need not lead anywhere
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    settings: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}
    model = bert("TokenClassification")
    found = gradient_of_one_step(Path(folder), tokens(), model, options=ASOptions(delta=0.3), **settings)
    options = ASOptions(skip={"tolerance": 1.0}, speed=ASSpeed(max_steps=2))
    done = trainer(Path(folder), easy(), None, options)
    done.train()
    state = {
        "gradient": found,
        "steps": done.state.global_step,
        "epoch": done.state.epoch,
        "weights": weights(done.model),
    }
    torch.save(state, f"{folder}/{rank}.pt")
    gc.collect()  # what still holds the group would keep its threads alive past the interpreter, which aborts them
    dist.destroy_process_group()


def test_two_processes(tmp_path: Path) -> None:
    spawn(worker, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    close(first["gradient"], token_gradient(bert("TokenClassification")))
    assert first["steps"] == second["steps"] < 6 * ROWS / 8
    assert first["epoch"] == second["epoch"] == 6
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)


# -- what is saved -----------------------------------------------------------------------------------------------------


def write_vocabulary(folder: Path) -> Any:
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcde"]) + "\n")
    return import_module("transformers").BertTokenizerFast(str(folder / "vocab.txt"))


@pytest.mark.parametrize("several", [False, True])
def test_a_saved_folder_loads_in_transformers_with_the_names_of_the_labels(tmp_path: Path, several: bool) -> None:
    datasets = pytest.importorskip("datasets")
    tokenizer = write_vocabulary(tmp_path / "tokenizer")
    names = ["no", "maybe", "yes", "never"]
    label = datasets.ClassLabel(names=names)
    if several:
        rows = {"text": ["a b", "c"], "labels": [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]]}
        data = datasets.Dataset.from_dict(rows)
    else:
        rows = {"text": ["a b", "c"], "label": ["yes", "no"]}
        data = datasets.Dataset.from_dict(rows).cast_column("label", label)
    data = data.map(lambda row: tokenizer(row["text"], padding="max_length", max_length=6))
    model = bert()
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), num_train_epochs=1, save_strategy="no", report_to="none", use_cpu=True
    )
    made = ASTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    made.train()
    made.save_model(str(tmp_path / "saved"))
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "saved"))
    pipe: Any = transformers.pipeline("text-classification", str(tmp_path / "saved"), top_k=None)
    scores = {one["label"]: one["score"] for one in pipe(["a b"])[0]}
    inputs = tokenizer(["a b"], return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(**inputs).logits[0]
        torch.testing.assert_close(loaded(**inputs).logits[0], logits)
    if several:
        assert list(scores.values()) == pytest.approx(sorted(logits.sigmoid().tolist(), reverse=True), abs=1e-6)
    else:
        assert scores == pytest.approx(dict(zip(names, logits.softmax(-1).tolist(), strict=True)), abs=1e-6)


def test_names_that_a_model_has_stay(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from softsieve.integrations.label_names import name_labels

    own: Any = bert(id2label={0: "a", 1: "b", 2: "c", 3: "d"}, num_labels=4)
    features = {"label": SimpleNamespace(names=["1", "2", "3", "4"])}
    name_labels(own, SimpleNamespace(features=features))
    assert own.config.id2label[0] == "a"
    other: Any = bert()
    name_labels(other, SimpleNamespace(features={"label": SimpleNamespace(names=["1", "2"])}))
    assert other.config.id2label[0] == "LABEL_0"
