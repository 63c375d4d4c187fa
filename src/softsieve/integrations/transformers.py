"""Hugging Face: AS-Softmax in the `Trainer`, and, from `adaptive_head`, faster output layers of language models.

In the Trainer there are the loss, its margin's schedule, AS-Speed and skipping of solved rows.

The Trainer's loop makes a fixed number of optimizer steps an epoch. Here it is given fewer: a window of micro-batches
as long as AS-Speed wants, taken from an epoch as long as the sampler plans. Learning rate, margin and the end of
training go by *nominal* steps, those of a plain Trainer that has seen the same share of the epoch.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from softsieve import _checks
from softsieve.errors import InputError, first_line
from softsieve.integrations.adaptive_head import AdaptiveHead, accelerate_head, collect_queries, restore_head
from softsieve.integrations.causal_loss import CausalLoss, accelerate_loss, restore_loss
from softsieve.integrations.causal_trainer import (
    ASLossCallback,
    TokenWeightsCollator,
    by_sequence,
    is_language_model,
    logged,
    loss_in,
)
from softsieve.integrations.causal_trl import token_log_probs
from softsieve.integrations.deferred_logits import DeferredLogits
from softsieve.integrations.label_names import mark_multilabel, name_labels
from softsieve.integrations.lazy_logits import LazyLogits
from softsieve.losses.multilabel import RULES
from softsieve.losses.objectives import ASSoftmax, MultiLabelASSoftmax, Objective
from softsieve.losses.schedule import DeltaSchedule
from softsieve.training.checkpoint import load_tensors, save_tensors
from softsieve.training.sampler import SolvedSampler
from softsieve.training.speed import ASSpeed

__all__ = [
    "ASLossCallback", "ASOptions", "ASTrainer", "ASTrainerMixin", "AdaptiveHead", "CausalLoss", "DeferredLogits",
    "LazyLogits", "TokenWeightsCollator", "accelerate_head", "accelerate_loss", "collect_queries", "restore_head",
    "restore_loss", "token_log_probs",
]  # fmt: skip

INDEX = "as_index"  # of a batch: which rows of the data set it holds
STATE, SAMPLER = "softsieve.json", "softsieve.safetensors"  # beside trainer_state.json


@dataclass(frozen=True)
class ASOptions:
    """What `ASTrainer` does besides the loss.

    Args:
        delta: margin of the loss, in [0, 1]; None: 0.7 for a multi-label loss against the threshold, 0.1 for others.
        initial_delta: margin at the start; 1 is plain softmax.
        ratio: share of training over which the margin comes down from ``initial_delta`` to ``delta``.
        speed: AS-Speed, whose number multiplies ``gradient_accumulation_steps``; None leaves it out.
        skip: keywords of `SolvedSampler`, ``{}`` for its defaults; None visits every row in every epoch.
        against: rule of the multi-label loss, ``"threshold"`` or ``"labels"``; see `as_multilabel_loss`.

    Example::

        ASOptions(delta=0.1, ratio=0.2, speed=ASSpeed(max_steps=4), skip={"recheck": 0.2})
    """

    delta: float | None = None
    initial_delta: float = 1.0
    ratio: float = 0.0
    speed: ASSpeed | None = None
    skip: Mapping[str, Any] | None = None
    against: str = "threshold"

    def __post_init__(self) -> None:
        self.schedule(1)
        _checks.choice("against", self.against, RULES)
        if self.speed is not None and not isinstance(self.speed, ASSpeed):
            raise TypeError(f"speed: expected an ASSpeed, found {type(self.speed).__name__}")
        if self.skip is not None:
            known = inspect.signature(SolvedSampler).parameters
            if not isinstance(self.skip, Mapping) or not set(self.skip) <= known.keys() - {"num_samples"}:
                raise ValueError(f"skip: expected keywords of SolvedSampler, found {self.skip!r}")
            SolvedSampler(1, **self.skip)

    def schedule(self, total_steps: int, *, multilabel: bool = False) -> DeltaSchedule:
        default = MultiLabelASSoftmax.delta if multilabel and self.against == "threshold" else ASSoftmax.delta
        final = default if self.delta is None else self.delta
        return DeltaSchedule(final, self.initial_delta, self.ratio, max(1, total_steps))


class ASTrainerMixin(Trainer):
    """Any `transformers.Trainer` with AS-Softmax in place of the model's own loss.

    For models that return logits: sequence, image and audio classification (labels ``(rows,)``), token classification
    (labels ``(rows, positions)``, -100 ignored) and multi-label (labels of the shape of the logits). The loss is the
    mean over the counted labels of a whole accumulation window, on all devices unless
    ``average_tokens_across_devices=False``. Evaluation reports it at the final margin. A model without names of labels
    is given those of a `datasets.Dataset`, so that `pipeline` says them of what is saved.

    A language model trains by `accelerate_loss`, without logits. Its evaluation reports the plain cross-entropy, also
    without logits, and ``compute_metrics`` gets predicted tokens (logits with ``preprocess_logits_for_metrics``). The
    log has ``token_accuracy``, ``solved``, ``lse`` and ``margin``, means over tokens.

    With AS-Speed or skipping, training still goes on for ``num_train_epochs`` (or ``max_steps`` nominal steps), while
    ``state.global_step`` and the steps of logging, saving and evaluation count the fewer optimizer steps really made.
    The bar goes by nominal steps, and the log has the share of ``solved`` rows: with skipping of all rows when last
    seen, else of those since the line before.
    Checkpoints hold all it takes to go on in the middle of an epoch; of several processes, only what the first of them
    saw of solved rows since the epoch began.

    Args:
        *args, **kwargs: those of the Trainer.
        as_options: see `ASOptions`.

    Raises:
        InputError: for settings of the Trainer that contradict ``as_options``.

    Example::

        class MyASTrainer(ASTrainerMixin, MyTrainer): ...
    """

    def __init__(self, *args: Any, as_options: ASOptions | None = None, **kwargs: Any) -> None:
        if as_options is not None and not isinstance(as_options, ASOptions):
            raise TypeError(f"as_options: expected ASOptions, found {type(as_options).__name__}")
        super().__init__(*args, **kwargs)
        name_labels(self.model, self.train_dataset)
        self.as_options = as_options or ASOptions()
        self._adapts = self.as_options.speed is not None or self.as_options.skip is not None
        self._check_settings()
        self._language = is_language_model(self.model)
        if self._language and self.args.n_gpu > 1:
            raise InputError("n_gpu: expected one GPU a process, found DataParallel, whose copies cannot be followed")
        if self._language:
            loss_in(self.model, self.as_options.schedule(1).final)
        else:
            self.model_accepts_loss_kwargs = True  # so that `compute_loss` is told num_items_in_batch
        self._delta: float | None = None  # of the latest loss in training
        self._step: int | None = None  # the nominal step under way
        self._speed: ASSpeed | None = None
        self._sampler: SolvedSampler | None = None
        self._total = self._steps = 1  # nominal steps of the whole training and of an epoch
        self._epoch = self._batches = 0  # whole epochs done, and micro-batches in the one under way
        self._early: list[Any] = []  # micro-batches of this window that the Trainer's loop does not see
        self._seen = torch.zeros(2, dtype=torch.long, device=self.args.device)  # labels solved and counted in it
        self._unlogged = torch.zeros_like(self._seen)  # and since the latest line of the log
        if self._adapts:
            callbacks = self.callback_handler.callbacks
            callbacks[:] = [_NominalBar(self) if type(one) is ProgressCallback else one for one in callbacks]
            callbacks.insert(0, _Notify(self))  # the others should see its state.epoch

    def _check_settings(self) -> None:
        options, data = self.as_options, self.train_dataset
        if self.compute_loss_func is not None or self.label_smoother is not None:
            raise InputError("ASTrainer: expected no other loss, found compute_loss_func or label_smoothing_factor")
        if self._adapts and data is not None and (isinstance(data, IterableDataset) or not hasattr(data, "__len__")):
            raise InputError(f"train_dataset: expected rows by index to adapt, found {type(data).__name__}")
        if options.speed is not None and self.is_deepspeed_enabled:
            raise InputError("speed: expected no DeepSpeed, which wants a fixed number of accumulation steps")
        if options.skip is not None and self.args.train_sampling_strategy != "random":
            strategy = self.args.train_sampling_strategy
            raise InputError(f"train_sampling_strategy: expected 'random' with skipping, found {strategy!r}")
        if options.skip is not None and self.accelerator.dispatch_batches:
            raise InputError("dispatch_batches: expected False with skipping, for all processes ask the sampler")

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:  # fmt: skip
        if "labels" not in inputs:
            raise InputError(f"labels: expected in every batch, found only {', '.join(inputs)}")
        if self._language:
            return self._language_loss(model, inputs, return_outputs, num_items_in_batch)
        labels: Tensor = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name not in ("labels", INDEX)})
        logits: Tensor = (outputs["logits"] if isinstance(outputs, dict) else outputs[0]).float()
        multilabel = labels.shape == logits.shape
        if multilabel:
            mark_multilabel(self.model)
        objective = self._objective(multilabel=multilabel, training=model.training)
        if labels.shape == logits.shape[:-1]:  # flat: as many positions as classes are nothing to warn of
            loss, solved, margin = objective(logits.flatten(0, -2), labels.flatten())
        else:
            loss, solved, margin = objective(logits, labels)
        counted = torch.ones_like(labels[..., 0], dtype=torch.bool) if multilabel else labels != -100
        if num_items_in_batch is None:
            loss = loss / counted.sum().clamp_min(1)
        else:  # DataParallel has it once a GPU; the Trainer counts the flags of multi-label, the loss its rows
            items = torch.as_tensor(num_items_in_batch).flatten()[0].float() / (labels.shape[-1] if multilabel else 1)
            loss = loss / items.clamp_min(1)
            if self.args.average_tokens_across_devices:  # items of all processes, whose gradients will be averaged
                loss = loss * (self.accelerator.num_processes // self.get_tp_size())
            else:  # items of one GPU, logits of all of them
                loss = loss / max(1, self.args.n_gpu)
        if model.training and solved is not None and margin is not None:
            self._take_note(inputs, solved.view(counted.shape), margin.view(counted.shape), counted)
        if return_outputs:
            return loss, outputs if isinstance(outputs, dict) else (loss, *outputs)
        return loss

    def _language_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool, items: Any) -> Any:
        """The model's own loss without logits, at the margin of the step under way; cross-entropy in evaluation."""
        loss, schedule = loss_in(model, 1.0), self.as_options.schedule(self._total)
        loss.delta = schedule.final
        if model.training and self._step is not None:
            loss.delta = self._delta = schedule(self._step)
        loss.evaluates = self.preprocess_logits_for_metrics is None
        try:
            given = {name: value for name, value in inputs.items() if name != INDEX}
            found = Trainer.compute_loss(self, model, given, return_outputs, items)
        finally:
            loss.evaluates = False
        if model.training and self._adapts:
            rows = len(inputs["labels"])
            if INDEX in inputs and len(inputs[INDEX]) != rows:
                raise InputError(f"skip: expected a row for each text, found {len(inputs[INDEX])} packed into {rows}")
            self._take_note(inputs, *by_sequence(loss, rows))
        return found

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Of a language model the loss, the tokens that it predicts and the labels; of others as a Trainer does.

        With ``predict_with_generate`` the tokens are those that it generates.
        """
        logits = self.preprocess_logits_for_metrics is not None
        generates = getattr(self.args, "predict_with_generate", False) and not prediction_loss_only
        if not self._language or "labels" not in inputs or logits or generates:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **options)
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            tokens = None if prediction_loss_only else outputs["logits"].argmax(-1)
        return loss.detach().mean(), tokens, None if prediction_loss_only else inputs["labels"]

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        if self._language:
            loss_in(self.model, 1.0).totals(training=False)  # forget what was predicted since the latest evaluation
        return super().evaluation_loop(*args, **options)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        if self._language:
            logs.update(logged(loss_in(self.model, 1.0), self.accelerator, logs))
        elif "loss" in logs:  # of training
            solved, counted = self.accelerator.reduce(self._unlogged, "sum").tolist()
            self._unlogged = torch.zeros_like(self._unlogged)
            if self._sampler is not None or counted > 0:
                known = None if self._sampler is None else _share_solved(self._sampler, self._delta)
                logs["solved"] = solved / counted if known is None else known
        super().log(logs, *args, **options)

    def _objective(self, *, multilabel: bool, training: bool) -> Objective:
        """The loss at the margin of the step under way; at the final one when there is none, as in evaluation."""
        schedule = self.as_options.schedule(self._total, multilabel=multilabel)
        delta = schedule.final
        if training and self._step is not None:
            delta = self._delta = schedule(self._step)
        if multilabel:
            return MultiLabelASSoftmax(delta=delta, against=self.as_options.against, reduction="sum")
        return ASSoftmax(delta=delta, reduction="sum")

    def _take_note(self, inputs: dict[str, Any], solved: Tensor, margin: Tensor, counted: Tensor) -> None:
        both = torch.stack([solved.sum(), counted.sum()])
        self._seen, self._unlogged = self._seen + both, self._unlogged + both
        if self._sampler is not None:  # a row of tokens leads as its worst counted token does
            worst = margin.masked_fill(~counted, 1.0).reshape(len(margin), -1).amin(1)
            self._sampler.update(inputs[INDEX], worst, delta=self._delta)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The micro-batches of one optimizer step, of which the Trainer's loop sees the last ``num_batches``."""
        step = self._step = self._nominal_step()
        self._seen = torch.zeros_like(self._seen)
        if not self._adapts:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if isinstance(self.lr_scheduler, LRScheduler) and not isinstance(self.lr_scheduler, ReduceLROnPlateau):
            while self.lr_scheduler.last_epoch < step:
                self.lr_scheduler.step()
        times = 1 if self._speed is None else self._speed.steps
        batches, items = super().get_batch_samples(epoch_iterator, times * num_batches, device)
        if not batches:  # the epoch ended before its nominal steps did
            return [], items
        self._batches += len(batches)
        if self._nominal_step() >= self._total:
            self.state.max_steps = self.state.global_step + 1  # the Trainer stops, saves and evaluates after this one
        self._early = batches[:-num_batches]
        seen: list[Any] = batches[-num_batches:]
        missing: list[Any] = [{}] * (num_batches - len(seen))  # the loop makes its step after num_batches turns
        return missing + seen, items

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=self.args.device)
        while self._early:
            batch = self._early.pop(0)
            with self.accelerator.no_sync(model=model):
                loss += super().training_step(model, batch, num_items_in_batch)
            self.current_flos += int(self.floating_point_ops(batch))
            self._track_num_input_tokens(batch)  # type: ignore[no-untyped-call]
        if inputs:
            loss += super().training_step(model, inputs, num_items_in_batch)
        return loss

    def _nominal_step(self) -> int:
        """Optimizer steps that a plain Trainer would have made by now."""
        if not self._adapts:
            return self.state.global_step
        return self._epoch * self._steps + self._batches * self._steps // self._planned_batches()

    def _planned_batches(self) -> int:
        """Micro-batches in the epoch under way."""
        loader: Any = self.callback_handler.train_dataloader
        return max(1, len(loader))

    def _end_window(self) -> None:
        self.state.epoch = self._epoch + self._batches / self._planned_batches()
        if self._speed is not None:
            solved, counted = self.accelerator.reduce(self._seen, "sum").tolist()
            if counted > 0:
                self._speed.update(solved, counted)
        if self._batches >= self._planned_batches():  # so that a checkpoint of this step goes on with the next epoch
            self._end_epoch()

    def _end_epoch(self) -> None:
        if self._batches > 0:
            self._epoch, self._batches = self._epoch + 1, 0

    def get_train_dataloader(self) -> DataLoader[Any]:
        if self.as_options.skip is None:
            return super().get_train_dataloader()
        data, collator = self.train_dataset, self.data_collator
        kept: Any = self._remove_unused_columns(data) if hasattr(data, "remove_columns") else data
        try:
            self.train_dataset = _Indexed(kept)
            self.data_collator = partial(_collate, self._get_collator_with_removed_columns(collator))
            return super().get_train_dataloader()
        finally:
            self.train_dataset, self.data_collator = data, collator

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        if self.as_options.skip is None:
            return super()._get_train_sampler(train_dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._sampler = SolvedSampler(len(train_dataset), **{"seed": seed, **self.as_options.skip})
        return self._sampler

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if not self._adapts or not self.args.should_save:
            return
        state: dict[str, Any] = {"epoch": self._epoch, "batches": self._batches}
        if self._speed is not None:
            state["speed"] = self._speed.state_dict()
        if self._sampler is not None:
            sampler = self._sampler.state_dict()
            save_tensors(Path(output_dir, SAMPLER), {k: v for k, v in sampler.items() if isinstance(v, Tensor)})
            state["sampler"] = {k: v for k, v in sampler.items() if not isinstance(v, Tensor)}
        Path(output_dir, STATE).write_text(json.dumps(state, indent=2) + "\n")

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """Whole epochs done and micro-batches done in the one under way."""
        done = super()._init_training_state(max_steps, num_update_steps_per_epoch, epochs, checkpoint, trial)
        self._total, self._steps = max_steps, num_update_steps_per_epoch
        self._epoch, self._batches = done
        self._speed = copy.copy(self.as_options.speed)
        if checkpoint is not None and self._adapts and Path(checkpoint, STATE).is_file():
            self._restore(Path(checkpoint))
        return self._epoch, self._batches

    def _restore(self, checkpoint: Path) -> None:
        try:
            state = json.loads((checkpoint / STATE).read_text())
            for name in ("epoch", "batches"):
                _checks.whole_number(name, state[name], 0, 2**62)
            self._epoch = state["epoch"]
            self._batches = 0 if self.args.ignore_data_skip else state["batches"]
            if self._speed is not None and "speed" in state:
                self._speed.load_state_dict(state["speed"])
            if self._sampler is not None and "sampler" in state:
                sampler = {**state["sampler"], **load_tensors(checkpoint / SAMPLER)}
                sampler.pop("position", None)  # the Trainer skips the batches that are behind itself
                if state["batches"] > 0:  # in the middle of an epoch: the next iteration repeats its plan
                    sampler["started"] = False
                self._sampler.load_state_dict(sampler)
        except InputError:
            raise
        except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
            raise InputError(f"{checkpoint / STATE}: cannot be read: {first_line(error)}") from error


class ASTrainer(ASTrainerMixin):
    """`transformers.Trainer` with AS-Softmax; see `ASTrainerMixin`.

    Example::

        options = ASOptions(delta=0.1, ratio=0.2, speed=ASSpeed(max_steps=4), skip={})
        trainer = ASTrainer(model=model, args=TrainingArguments("out"), train_dataset=data, as_options=options)
        trainer.train()
    """


def _share_solved(sampler: SolvedSampler, delta: float | None) -> float:
    """Of all rows, by the ``delta`` of the loss, also where rows are left out from another margin on."""
    solved = sampler.solved if sampler.margin is None or delta is None else sampler.margins >= delta
    return float(solved.double().mean())


class _Notify(TrainerCallback):
    """Tells the trainer that a step or an epoch is over, before anything is logged or saved."""

    def __init__(self, trainer: ASTrainerMixin) -> None:
        self.trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trainer._end_window()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.trainer._end_epoch()


class _NominalBar(ProgressCallback):
    """The Trainer's bar by nominal steps, which come to their total however few are made."""

    def __init__(self, trainer: ASTrainerMixin) -> None:
        super().__init__()
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        bar: Any = self.training_bar
        if state.is_world_process_zero and bar is not None:
            step = self.trainer._nominal_step()
            bar.update(step - self.current_step)
            self.current_step = step


class _Indexed(Dataset[Any]):
    """Rows with their indices."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[int, Any]]:
        several = getattr(self.rows, "__getitems__", None)
        rows = [self.rows[index] for index in indices] if several is None else several(indices)
        return list(zip(indices, rows, strict=True))


def _collate(collator: Callable[[list[Any]], Any], pairs: list[tuple[int, Any]]) -> dict[str, Any]:
    """A batch of `_Indexed` rows with their indices."""
    indices, rows = zip(*pairs, strict=True)
    return {**collator(list(rows)), INDEX: torch.tensor(indices)}
