"""AS-Softmax in Lightning: callbacks for the margin's schedule, for AS-Speed and for skipping solved rows.

The loss itself is a criterion like any other. Callbacks that go by solved rows read them from what ``training_step``
returns: ``{"loss": loss, "solved": stats.solved, "index": index}``, one flag and one row index a row of the batch. With
``"margin": stats.margin`` skipping also knows how safely rows lead, which it must with a margin of its own.
Learning rates that move every step stay in step with the epochs, however few optimizer steps are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from softsieve.errors import InputError
from softsieve.integrations.causal_loss import ModelForward
from softsieve.losses.linear import LinearASCrossEntropyLoss
from softsieve.losses.modules import ASCrossEntropyLoss, ASMultiLabelLoss, LinearASMultiLabelLoss
from softsieve.losses.objectives import ASSoftmax, MultiLabelASSoftmax
from softsieve.losses.schedule import DeltaSchedule
from softsieve.training.sampler import SolvedSampler
from softsieve.training.speed import ASSpeed

LOSSES = (ASCrossEntropyLoss, ASMultiLabelLoss, LinearASCrossEntropyLoss, LinearASMultiLabelLoss)


def _read_output(outputs: Any, name: str) -> Tensor:
    """A tensor of what ``training_step`` returned."""
    if not isinstance(outputs, dict) or name not in outputs:
        names = ", ".join(outputs) if isinstance(outputs, dict) else type(outputs).__name__
        raise InputError(f"training_step: expected a dict with {name!r}, found {names}")
    value: Tensor = outputs[name]
    return value


def _catch_up(trainer: Trainer, batch_idx: int, steps: float) -> None:
    """Bring learning rates that move every step to where ``steps`` an epoch would have them by now."""
    if trainer.max_steps != -1 or steps == float("inf") or batch_idx % trainer.accumulate_grad_batches:
        return  # with max_steps the schedule is as long as the optimizer steps really made
    nominal = trainer.current_epoch * steps + batch_idx * steps // trainer.num_training_batches
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and not config.reduce_on_plateau:
            while config.scheduler.last_epoch < nominal // config.frequency:
                config.scheduler.step()  # type: ignore[call-arg]


class DeltaCallback(Callback):
    """Brings the margin of the AS losses in the module down from ``initial_delta`` to ``delta``.

    Also that of a language model which trains by `accelerate_loss`.

    Args:
        delta: margin at the end; None: 0.7 for a multi-label loss against the threshold, 0.1 for others.
        initial_delta: margin at the start; 1 is plain softmax.
        ratio: share of training spent on the way.

    Example::

        Trainer(max_epochs=10, callbacks=[DeltaCallback(delta=0.1, ratio=0.2)])
    """

    def __init__(self, delta: float | None = None, *, initial_delta: float = 1.0, ratio: float = 0.0) -> None:
        margins = {"labels": ASSoftmax.delta, "threshold": MultiLabelASSoftmax.delta}
        self.schedules = {  # counted in shares of training
            against: DeltaSchedule(margin if delta is None else delta, initial_delta, ratio, total_steps=1)
            for against, margin in margins.items()
        }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.losses: list[Any] = []
        for module in pl_module.modules():
            forward = vars(module).get("forward")
            if isinstance(module, LOSSES):
                self.losses.append(module)
            elif isinstance(forward, ModelForward):  # by `accelerate_loss`
                self.losses.append(forward.loss)
        if not self.losses:
            raise InputError("DeltaCallback: expected an AS loss among the modules of the model, found none")
        if trainer.max_steps == -1 and trainer.max_epochs == -1:
            raise InputError("DeltaCallback: expected max_epochs or max_steps, found neither")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        done = trainer.global_step / trainer.max_steps
        if trainer.max_steps == -1:
            done = (trainer.current_epoch + batch_idx / trainer.num_training_batches) / (trainer.max_epochs or 1)
        for loss in self.losses:
            loss.delta = self.schedules[getattr(loss, "against", "labels")](done)


class SpeedCallback(Callback):
    """AS-Speed: ``accumulate_grad_batches`` grows with the share of solved rows.

    Lightning's windows end at multiples of their length, so the number rises where the longer window begins on time.
    The optimizer makes fewer steps; all processes make the same.

    Args:
        speed: the rule, with its state; saved in checkpoints.

    Raises:
        InputError: when training starts, if accumulation is not Lightning's to change: under manual optimization, with
            ``accumulate_grad_batches`` or with a strategy that accumulates by itself.

    Example::

        Trainer(max_epochs=10, callbacks=[SpeedCallback(ASSpeed(max_steps=4))])
    """

    def __init__(self, speed: ASSpeed) -> None:
        if not isinstance(speed, ASSpeed):
            raise TypeError(f"speed: expected an ASSpeed, found {type(speed).__name__}")
        self.speed = speed
        self._window = 1  # accumulate_grad_batches
        self._seen = torch.zeros(2, dtype=torch.long)  # rows solved and not solved in this window

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        batches, strategy = trainer.accumulate_grad_batches, trainer.strategy
        if not pl_module.automatic_optimization:
            raise InputError(
                "automatic_optimization: expected True, or AS-Speed would change nothing, found False: "
                "call ASSpeed.update in training_step"
            )
        if batches != 1:
            raise InputError(f"accumulate_grad_batches: expected 1, AS-Speed sets it, found {batches}")
        if strategy.handles_gradient_accumulation:
            raise InputError(f"strategy: expected one whose accumulation may change, found {type(strategy).__name__}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.accumulate_grad_batches = self._window

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.accumulate_grad_batches = self._window = self.speed.steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        _catch_up(trainer, batch_idx, trainer.num_training_batches)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        solved = _read_output(outputs, "solved").bool()
        self._seen = self._seen.to(solved.device) + torch.stack([solved.sum(), (~solved).sum()])
        done = batch_idx + 1
        if done % self._window and not trainer.is_last_batch:
            return
        seen, unsolved = trainer.strategy.reduce(self._seen, reduce_op="sum").tolist()
        steps = self.speed.update(seen, seen + unsolved)
        self._seen = torch.zeros_like(self._seen)
        self._window = max((n for n in range(self._window, steps + 1) if done % n == 0), default=self._window)
        trainer.accumulate_grad_batches = self._window

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.accumulate_grad_batches = 1

    def state_dict(self) -> dict[str, Any]:
        return {"speed": self.speed.state_dict(), "now": self._window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.speed.load_state_dict(state["speed"])
        self._window = state["now"]


class SkipCallback(Callback):
    """Leaves solved rows out of the epochs: a `SolvedSampler` that Lightning's loop, validation and checkpoints follow.

    Until training starts, ``len(loader)`` is that of one process and of all rows; then it is that of the epoch.

    Args:
        num_samples: rows of the data set.
        **settings: keywords of `SolvedSampler`.

    Raises:
        InputError: when training starts, if the loader has another sampler or a data set of another length.

    Example::

        skip = SkipCallback(len(dataset))
        loader = DataLoader(dataset, batch_size=32, sampler=skip.sampler)
        Trainer(max_epochs=10, callbacks=[skip]).fit(module, loader)
    """

    def __init__(self, num_samples: int, **settings: Any) -> None:
        self.solved = SolvedSampler(num_samples, **settings)
        self._plan = self.solved.next_epoch()
        self.sampler = _Share(self._plan.tolist())
        self._over = False  # whether the plan has been visited
        self._batches = 0  # of it, visited by now
        self._epoch = 0  # in which they were
        self._full: float = 0  # batches of an epoch without skipping
        self._accumulate = 1
        self._loaded = False
        self._noted: list[tuple[Tensor, Tensor]] = []  # not yet told the sampler, which would wait for the device

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._accumulate = trainer.accumulate_grad_batches  # before AS-Speed moves it
            self._renew()
            self._share_out(trainer)

    def _renew(self) -> None:
        """Plan the next epoch if the last is over."""
        if self._over:
            self._tell()
            self._plan, self._over, self._batches = self.solved.next_epoch(), False, 0

    def _tell(self) -> None:
        for index, shown in self._noted:
            self.solved.update(index, shown)
        self._noted = []

    def _share_out(self, trainer: Trainer) -> None:
        """Give this process its share of the plan."""
        every, rows = trainer.world_size, len(self._plan)
        mine = torch.arange(trainer.global_rank, rows + -rows % every, every)  # as many for every process
        self.sampler.rows, self.sampler.start = self._plan[mine % rows].tolist(), 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader = trainer.train_dataloader
        if not isinstance(loader, DataLoader) or loader.sampler is not self.sampler:
            raise InputError("train_dataloader: expected a DataLoader with the callback's sampler, found another")
        data: Any = loader.dataset
        rows = self.solved.num_samples
        if hasattr(data, "__len__") and len(data) != rows:
            raise InputError(f"num_samples: expected {len(data)}, the rows of the data set, found {rows}")
        self._full = max(self._full, trainer.num_training_batches)
        if self._loaded:
            self._loaded = False
            if trainer.current_epoch > self._epoch:  # else Lightning ends that epoch first, if only formally
                self._renew()
            self._share_out(trainer)
            self.sampler.start = self._batches * (loader.batch_size or 1)
            self._measure(trainer)
            iter(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]  # its iterator is older than the plan

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._over:
            self._renew()
            self._share_out(trainer)
            self._measure(trainer)

    def _measure(self, trainer: Trainer) -> None:
        """Tell Lightning how many batches the epoch has, on which validation depends."""
        loader: Any = trainer.train_dataloader
        trainer.fit_loop.max_batches = batches = min(len(loader), self._full)
        if trainer.val_check_batch is not None and isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        _catch_up(trainer, batch_idx, -(-self._full // self._accumulate))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        index, shown = _read_output(outputs, "index"), _read_output(outputs, "solved")
        if self.solved.margin is not None:
            shown = _read_output(outputs, "margin")
        elif "margin" in outputs:  # solved is what the loss says, whose delta the sampler need not have
            shown = outputs["margin"].masked_fill(~shown.bool(), -1.0)
        self._noted.append((index, shown))
        self._epoch, self._batches, self._over = trainer.current_epoch, batch_idx + 1, trainer.is_last_batch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._over = True  # also when cut short

    def state_dict(self) -> dict[str, Any]:
        self._tell()
        state = {"plan": self._plan.clone(), "over": self._over, "batches": self._batches, "epoch": self._epoch}
        return {"solved": self.solved.state_dict(), **state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.solved.load_state_dict(state["solved"])
        self._plan, self._over = state["plan"].clone(), state["over"]
        self._batches, self._epoch, self._loaded = state["batches"], state["epoch"], True


class _Share(DistributedSampler[int]):
    """The rows of one process, from ``start`` on after a resume; a DistributedSampler, which Lightning leaves alone."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(range(1), num_replicas=1, rank=0)  # type: ignore[arg-type]
        self.rows = rows
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows[self.start :])

    def __len__(self) -> int:
        return len(self.rows)
