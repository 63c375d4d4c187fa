"""The loss without logits in Hugging Face's `Trainer`: what `ASTrainer` does with language models, and a callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import TrainerCallback

from softsieve.errors import InputError
from softsieve.integrations.causal_loss import (
    WEIGHTS,
    CausalLoss,
    SignedForward,
    accelerate_loss,
    check_evaluate,
    inner_model,
    loss_of,
    restore_loss,
)
from softsieve.losses.schedule import DeltaSchedule

NAMES = ("token_accuracy", "solved", "lse", "margin")  # of a summary that is logged


def is_language_model(model: Any) -> bool:
    """Whether a model writes text: its labels are the tokens, which its own loss shifts."""
    inner = inner_model(model) if isinstance(model, nn.Module) else model
    if not hasattr(inner, "can_generate") or not inner.can_generate():
        return False
    return inner.get_output_embeddings() is not None


def loss_in(model: Any, delta: float) -> CausalLoss:
    """The accelerated loss of a model, which may have one already."""
    forward = loss_of(model)
    return forward.loss if forward is not None and forward.active else accelerate_loss(model, delta)


def by_sequence(loss: CausalLoss, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Solved, margin and counted of the labels of the latest batch, (rows, labels) each.

    Raises:
        InputError: when the model's code has left labels out, so that it cannot be told whose they were.
    """
    if loss.stats is None or loss.counted is None:
        raise InputError("model: expected a loss of its output layer's logits, found one of something else")
    if rows == 0 or loss.counted.numel() % rows:
        raise InputError("labels: expected as many of every row in the model's loss, found some left out")
    parts = loss.stats.solved, loss.stats.margin, loss.counted
    solved, margin, counted = (part.reshape(rows, -1) for part in parts)
    return solved, margin, counted


class ASLossCallback(TrainerCallback):
    """The loss without logits in a plain `Trainer`, or one of TRL: from the start of training to its end.

    The log gets ``token_accuracy``, ``solved`` (the share of tokens without a gradient), ``lse`` (mean log Z) and
    ``margin`` of the batches since the last entry; of several processes, those of the first. Given when the trainer is
    made, it also lets ``token_weights`` through, a column of the data that the Trainer would drop.

    Args:
        delta: margin at the end, in [0, 1]; 1 is the model's own cross-entropy.
        initial_delta: margin at the start.
        ratio: share of training over which the margin comes down from ``initial_delta`` to ``delta``.
        backend, memory: those of `accelerate_loss`.
        evaluate: whether evaluations within training do without logits, too. With True they are made where the trainer
            asks for more than the loss: for ``compute_metrics`` (after ``preprocess_logits_for_metrics``) and
            ``predict``. With ``"tokens"`` these get predicted tokens instead, ``preprocess_logits_for_metrics``, too.

    Raises:
        InputError: when training starts, as `accelerate_loss` does; after the first step when the trainer has not asked
            the model for its loss, so that this would change nothing.

    Example::

        Trainer(model, args, train_dataset=data, callbacks=[ASLossCallback(delta=0.1)]).train()
    """

    def __init__(
        self, delta: float = 0.1, *, initial_delta: float = 1.0, ratio: float = 0.0, backend: str = "auto",
        memory: int | None = None, evaluate: bool | str = False,
    ) -> None:  # fmt: skip
        self.schedule = DeltaSchedule(delta, initial_delta, ratio, total_steps=1)  # counted in shares of training
        check_evaluate(evaluate)
        self.options: dict[str, Any] = {"backend": backend, "memory": memory}
        self.evaluate = evaluate
        self._loss: CausalLoss | None = None
        self._ours = True
        self._signed: SignedForward | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        before = loss_of(model)
        own = type(args).__module__.partition(".")[0] == "trl"  # whose trainers have columns of their own
        if not own and is_language_model(model) and (before is None or not before.active):
            self._signed = SignedForward(inner_model(model))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._signed is not None:  # the Trainer knows by now
            self._signed.leave()
            self._signed = None
        if getattr(args, "n_gpu", 1) > 1:
            raise InputError("n_gpu: expected one GPU a process, found DataParallel, whose copies cannot be followed")
        if getattr(args, "label_smoothing_factor", 0):
            raise InputError(
                "label_smoothing_factor: expected 0, found a loss of the trainer's own, which needs logits"
            )
        before = loss_of(model)
        if before is None or not before.active:
            self._ours = True
            self._loss = accelerate_loss(model, self.schedule(0), **self.options, evaluate=self.evaluate)
            return
        if before.loss is not self._loss:  # that of a training which was interrupted
            self._ours = False  # it stays when training ends
        self._loss = before.loss
        self._loss.delta, self._loss.evaluates = self.schedule(0), self.evaluate

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._loss is not None:
            self._loss.delta = self.schedule(min(1.0, state.global_step / max(1, state.max_steps)))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._loss is not None and not self._loss.called:
            self.on_train_end(args, state, control, model)
            raise InputError("ASLossCallback: expected a trainer that takes the model's loss, found one with its own")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self._loss is None or logs is None or (start := _start(logs)) is None or (start and not self.evaluate):
            return
        found = {start + name: value for name, value in self._loss.summary(training=not start).items() if name in NAMES}
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._loss is not None:
            self._loss = None
            if self._ours:
                restore_loss(model)


class TokenWeightsCollator:
    """Takes ``token_weights`` of rows along: each goes where another collator puts its label.

    For any Trainer's ``data_collator``. Trainers of TRL drop the column unless ``remove_unused_columns=False``.

    Args:
        collator: what makes batches of rows without weights. It may pad their ``labels``, on either side, join them and
            ignore some.

    Raises:
        InputError: for rows without labels or with another number of weights, and for labels that the collator changes.

    Example:
        >>> from transformers import DataCollatorWithFlattening
        >>> collate = TokenWeightsCollator(DataCollatorWithFlattening())
        >>> row = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "token_weights": [0.0, 1.0, 0.5]}
        >>> collate([row, row])["token_weights"].tolist()
        [[0.0, 1.0, 0.5, 0.0, 1.0, 0.5]]
    """

    def __init__(self, collator: Callable[[list[Any]], Any]) -> None:
        if not callable(collator):
            raise TypeError(f"collator: expected what makes a batch of rows, found {type(collator).__name__}")
        self.collator = collator

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        plain = [{name: value for name, value in row.items() if name != WEIGHTS} for row in rows]
        labels, weights = ([torch.as_tensor(row.get(name, ())) for row in rows] for name in ("labels", WEIGHTS))
        for own, some in zip(labels, weights, strict=True):
            if own.shape != some.shape or not len(own):
                raise InputError(f"{WEIGHTS}: expected one for each of the {len(own)} labels, found {len(some)}")
        batch = self.collator([dict(row) for row in plain])
        numbers = torch.split(torch.arange(1, 1 + sum(map(len, labels))), [len(own) for own in labels])
        numbered = [{**row, "labels": part.tolist()} for row, part in zip(plain, numbers, strict=True)]
        place = self.collator(numbered)["labels"].clamp_min(0)  # 0 where there is no label of a row
        every = F.pad(torch.cat(labels), (1, 0), value=-100)
        found = batch["labels"]
        if place.shape != found.shape or not bool(((found == -100) | (found == every[place % len(every)])).all()):
            raise InputError(
                "collator: expected one that pads or joins the labels of rows, found one that changes them"
            )
        batch[WEIGHTS] = F.pad(torch.cat(weights).float(), (1, 0))[place]
        return batch


def _start(logs: dict[str, float]) -> str | None:
    """With what the names of a log begin: those of training with nothing, of an evaluation as its loss does."""
    losses = [name for name in logs if name == "loss" or (name.endswith("_loss") and name != "train_loss")]
    return min(losses, key=len).removesuffix("loss") if losses else None  # a metric's own name is longer


def logged(loss: CausalLoss, accelerator: Any, logs: dict[str, float]) -> dict[str, float]:
    """What a log of a Trainer is given: a summary of all processes since the last one of its kind."""
    if (start := _start(logs)) is None:
        return {}
    totals = loss.totals(training=not start).to(accelerator.device, torch.float32)
    summary = loss.summary(accelerator.reduce(totals, "sum"))
    return {start + name: value for name, value in summary.items() if name in NAMES}
