"""The training loop: rows that matter in, a better model out."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule

from softsieve._graphs import Graphed
from softsieve.errors import InputError
from softsieve.losses.objectives import Objective
from softsieve.training.infobatch import InfoBatchSampler
from softsieve.training.journal import Journal
from softsieve.training.rows import Batch, Rows
from softsieve.training.sampler import SolvedSampler
from softsieve.training.settings import Settings
from softsieve.training.standing import restore, save

IGNORED = -100  # label of positions that do not count
FRESH = 16  # an epoch is looked at in at least so many blocks: what a look showed does not stay true for long
BLOCK = 4  # batches of rows that a block has at most


class Judge(Protocol):
    """Who knows what logits mean; a `softsieve.tasks.Task` does."""

    def decide(self, logits: Tensor) -> Tensor:
        """The answers: class ids, or flags for multi-label; on the device of the logits."""

    def by_word(self, decided: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Answers and targets of a whole split as they are judged, on the CPU."""

    def metrics(self, decided: Tensor, target: Tensor) -> dict[str, float]:
        """Figures of merit over a whole split."""


class Look(NamedTuple):
    """What a forward pass without gradient shows of every row."""

    decided: Tensor
    loss: Tensor  # summed over what counts in the row
    solved: Tensor


class Result(NamedTuple):
    """What a run came to. The model holds the best weights when it returns."""

    best: dict[str, float]  # the evaluation of those weights, {} without validation rows
    best_step: int
    steps: int  # optimizer steps
    trained: int  # rows that went forward and backward
    screened: int  # rows that went forward only, to see whether they are solved
    solved: float | None  # share of the rows that were solved when last seen, where the loss knows
    seconds: float  # of training and evaluation
    evaluation_seconds: float
    log: list[dict[str, Any]]


class Trainer:
    """Trains a model on rows, leaving out what is solved.

    Runs wherever Accelerate does: on a CPU, a GPU, or several processes under ``accelerate launch`` or ``torchrun``.
    Every process holds all rows and takes the same decisions; a batch is split among them.

    Args:
        model: called with the inputs of a batch by name, returns logits.
        objective: the loss, with ``reduction="none"`` (`Settings.objective` makes it).
        train, validation: encoded examples.
        judge: says what logits mean and how good answers are.
        settings: all the rest.
        output: folder for log and checkpoints; None keeps everything in memory.
        show: whether to show a progress bar.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        train: Rows,
        judge: Judge,
        settings: Settings,
        *,
        validation: Rows | None = None,
        output: Path | None = None,
        show: bool = False,
        console: Console | None = None,
    ) -> None:
        self.settings, self.objective, self.judge = settings, objective, judge
        self.output, self.show, self.console = output, show, console
        # A graph must not refer to copies of the weights that autocast made for an earlier call.
        copies = AutocastKwargs(cache_enabled=not settings.graphs)
        # Said aloud, or processes on CPUs would not know of each other.
        cpu = not torch.accelerator.is_available()
        self.accelerator = Accelerator(mixed_precision=settings.precision, kwargs_handlers=[copies], cpu=cpu)
        self.ranks, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        self.device = self.accelerator.device
        self.graphs = settings.graphs and self.device.type == "cuda" and self.ranks == 1
        self.sharded = "FSDP" in str(self.accelerator.distributed_type)
        # State with whole tensors, which only the main process gets of a sharded model.
        self.whole = StateDictOptions(full_state_dict=True, cpu_offload=self.sharded)
        self._check(train, validation)
        self.train, self.validation = train.to(self.device), None if validation is None else validation.to(self.device)
        self.model, self.optimizer = self.accelerator.prepare(model, self._adamw(model))
        self.schedule = settings.schedule()
        self.speed = settings.speed()
        self.sampler = self._sampler(len(train))
        self._look_at_train = self._looker(self.train)
        self._look_at_validation = None if self.validation is None else self._looker(self.validation)
        self._graphed_step = Graphed(self._whole_step) if self.graphs else self._whole_step
        # Where training stands: all of this is in a checkpoint.
        self.epoch = self.step = self.position = self.trained = self.screened = self.best_step = self.stale = 0
        self.lines = 0  # of the log, when the checkpoint was written
        self.in_epoch = False
        self.queue = torch.empty(0, dtype=torch.long)  # rows of the plan before `position` that wait for a batch
        self.unreported: list[Tensor] = []  # rows trained since the sampler heard of them
        self.best: dict[str, float] = {}
        self.best_weights: dict[str, Tensor] = {}
        self.seconds = self.evaluation_seconds = 0.0
        # What the latest pass over each row showed, on the device so that nothing waits for it.
        self.row_solved = torch.zeros(len(train), dtype=torch.bool, device=self.device)
        self.row_loss = torch.zeros(len(train), dtype=torch.float32, device=self.device)
        self.row_weight = torch.ones(len(train), dtype=torch.float32, device=self.device)
        # Since the last log line: loss summed over steps and rows solved; from which step on, over how many rows.
        self.tally = torch.zeros(2, dtype=torch.float32, device=self.device)
        self.logged = self.samples = 0
        self.rate = 0.0  # the learning rate of the latest step

    @cached_property
    def fingerprint(self) -> int:
        """Of the training data, so that no other are taken for them."""
        return self.train.fingerprint()

    # -- setting up ----------------------------------------------------------------------------------------------------

    def _check(self, train: Rows, validation: Rows | None) -> None:
        s = self.settings
        if len(train) == 0 or (validation is not None and len(validation) == 0):
            raise InputError(f"{'training' if len(train) == 0 else 'validation'} data: expected rows, found none")
        if validation is None:
            if s.patience or s.eval_steps:
                raise InputError("early stopping and eval_steps need validation data, found none")
        elif s.metric != "loss":
            answers, target = self.judge.by_word(validation.target.clamp_min(0), validation)
            known = self.judge.metrics(answers, target)
            if s.metric not in known:
                raise InputError(f"metric: expected one of loss, {', '.join(known)}, found {s.metric!r}")
        if s.graphs and not self.graphs:
            raise InputError("graphs: expected one process on a CUDA device")

    def _adamw(self, model: nn.Module) -> torch.optim.AdamW:
        """Weight decay for matrices only; the learning rate as a tensor where a graph must see it change."""
        s = self.settings
        trainable = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.ndim > 1], "weight_decay": s.weight_decay},
            {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
        ]
        lr = torch.tensor(s.learning_rate, dtype=torch.float32, device=self.device) if self.graphs else s.learning_rate
        if self.graphs:
            model.to(self.device)  # the optimizer must find its parameters where they stay
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=lr, fused=not self.sharded, capturable=self.graphs)

    def _sampler(self, rows: int) -> SolvedSampler | InfoBatchSampler:
        s = self.settings
        if s.skip == "infobatch":
            return InfoBatchSampler(rows, epochs=s.epochs, seed=s.seed)
        skip = s.skip == "solved"
        return SolvedSampler(
            rows,
            tolerance=s.tolerance if skip else 0.0,
            recheck=s.recheck,
            screen_above=s.screen_above if skip else 1.0,
            seed=s.seed,
        )

    # -- one step ------------------------------------------------------------------------------------------------------

    def _rows_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and whether it is solved, of every row, and the logits."""
        logits = self.model(**batch.inputs).float()
        target = batch.target
        tokens = logits.ndim > 2 and target.shape == logits.shape[:-1]
        if tokens:  # flat: as many positions as classes are nothing to warn of
            loss, solved = self.objective(logits.flatten(0, -2), target.flatten())
        else:
            loss, solved = self.objective(logits, target)
        if solved is None:
            solved = torch.zeros_like(loss, dtype=torch.bool)
        if tokens:  # a row of tokens is solved when all that count are
            solved = (solved.view(target.shape) | (target == IGNORED)).all(-1)
            loss = loss.view(target.shape).sum(-1)
        return loss, solved, logits

    def _count(self, target: Tensor, weight: Tensor) -> Tensor:
        """Labels that count among rows, those of weight 0 left out."""
        if target.dtype == torch.bool:  # flags
            return (weight > 0).sum().clamp_min(1)
        counted = (target != IGNORED).reshape(len(target), -1).sum(-1)
        return torch.where(weight > 0, counted, 0).sum().clamp_min(1)

    def _share(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """This process's part of the rows ``index``, equally long on all; what is filled up has weight 0."""
        short = -len(index) % self.ranks
        weight = torch.ones(len(index) + short, dtype=torch.float32)
        weight[len(index) :] = 0
        index = torch.cat([index, index[:1].expand(short)])
        size = len(index) // self.ranks
        part = slice(self.rank * size, (self.rank + 1) * size)
        return index[part], weight[part]

    def gather(self, value: Tensor, rows: int) -> Tensor:
        gathered: Tensor = self.accelerator.gather(value) if self.ranks > 1 else value
        return gathered.narrow(0, 0, rows)

    def _batch_loss(self, index: Tensor, count: Tensor) -> Tensor:
        """This process's part of the loss of the rows ``index``, over ``count``, times the processes (DDP averages)."""
        mine, weight = self._share(index)
        batch = self.train.batch(mine)
        weight = weight.to(self.device)
        loss, solved, _ = self._rows_loss(batch)
        everyone = index.to(self.device)
        self.row_solved[everyone] = self.gather(solved, len(index))
        self.row_loss[everyone] = self.gather(loss.detach().float(), len(index))
        total: Tensor = (loss * weight * self.row_weight[mine.to(self.device)]).sum() * self.ranks
        self.tally += torch.stack([self.row_loss[everyone].sum() / count, self.row_solved[everyone].sum()])
        return total / count

    def _eager_step(self, index: Tensor, micro_batches: int) -> None:
        """One optimizer step over the mean loss of the rows ``index``, in so many passes."""
        parts = index.chunk(micro_batches)
        count = self._count(self.train.target[index.to(self.device)], torch.ones(len(index), device=self.device))
        for number, part in enumerate(parts, 1):
            waits = number < len(parts)
            with self.accelerator.no_sync(self.model) if waits else contextlib.nullcontext():
                self.accelerator.backward(self._batch_loss(part, count))
        if self.settings.max_grad_norm:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _whole_step(self, index: Tensor) -> tuple[Tensor, ...]:
        """The same on one GPU with everything on the device and nothing that waits for the host."""
        self.optimizer.optimizer.zero_grad()
        batch = Batch({k: v[index] for k, v in self.train.inputs.items()}, self.train.target[index])
        loss, solved, _ = self._rows_loss(batch)
        weight = self.row_weight[index]
        count = self._count(batch.target, weight)
        mean = (loss * weight).sum() / count
        mean.backward()  # type: ignore[no-untyped-call]
        if self.settings.max_grad_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        self.optimizer.optimizer.step()
        self.row_solved[index] = solved
        self.row_loss[index] = loss.detach()
        self.tally += torch.stack([loss.detach().sum() / count, solved.sum()])
        return (solved,)

    def _take_step(self, index: Tensor, micro_batches: int) -> None:
        progress = self._progress(len(index) / 2)  # the middle of these rows: no step has a learning rate of 0
        if self.settings.adaptive:
            self.objective.delta = self.schedule(progress)  # type: ignore[attr-defined]
        self.rate = self.settings.learning_rate_at(progress)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.rate)
            else:
                group["lr"] = self.rate
        full = len(index) == micro_batches * self.settings.batch_size
        if self.graphs and self.settings.merge:
            (self._graphed_step if full else self._whole_step)(index=index.to(self.device, non_blocking=True))
        else:
            self._eager_step(index, 1 if self.settings.merge else micro_batches)
        self.step += 1
        self.trained += len(index)
        self.unreported.append(index)

    # -- which rows ----------------------------------------------------------------------------------------------------

    def _progress(self, back: float = 0) -> float:
        """Share of training behind us, rows left out included, or so many rows earlier."""
        done = (self.position - len(self.queue) - back) / max(1, len(self.sampler.plan))
        return min(1.0, (self.epoch + (done if self.in_epoch else 0.0)) / self.settings.epochs)

    def report(self) -> None:
        """Tell the sampler what training showed."""
        if not self.unreported:
            return
        index = torch.cat(self.unreported)
        shown = self.row_loss if isinstance(self.sampler, InfoBatchSampler) else self.row_solved
        self.sampler.update(index, shown[index.to(self.device)].cpu())
        self.unreported = []

    def _screen(self, rows: Tensor) -> Tensor:
        """The given rows without those that a forward pass shows to be solved."""
        if not isinstance(self.sampler, SolvedSampler) or self.settings.skip != "solved":
            return rows
        self.report()
        worth = self.sampler.worth_screening(rows)
        if not worth.any():
            return rows
        candidates = rows[worth]
        solved = self._look_over(self._look_at_train, candidates).solved.cpu()
        self.sampler.update(candidates, solved)
        self.screened += len(candidates)
        keep = torch.ones(len(rows), dtype=torch.bool)
        keep[worth] = ~solved
        return rows[keep]

    def _fill_queue(self, size: int) -> None:
        plan = self.sampler.plan
        block = len(plan)
        if self.settings.skip == "solved":
            most = BLOCK * self.settings.eval_batch_size * self.ranks
            block = max(self.settings.batch_size * self.ranks, min(most, len(self.train) // FRESH))
        while len(self.queue) < size and self.position < len(plan):
            rows = plan[self.position : self.position + block]
            self.position += len(rows)
            self.queue = torch.cat([self.queue, self._screen(rows)])

    # -- looking without training --------------------------------------------------------------------------------------

    def _looker(self, rows: Rows) -> Callable[..., tuple[Tensor, ...]]:
        """Forward pass over given rows; every call has the same number of them."""

        def look(index: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                batch = rows.batch(index, cut=not self.graphs)
                loss, solved, logits = self._rows_loss(batch)
                return self.judge.decide(logits), loss.float(), solved

        return Graphed(look) if self.graphs else look

    def _look_over(self, look: Callable[..., tuple[Tensor, ...]], index: Tensor) -> Look:
        """Look at the rows ``index`` in eval mode, in equal batches, each split among the processes."""
        size = self.settings.eval_batch_size * self.ranks
        parts = []
        with self._in_eval_mode():
            for rows in torch.split(index, size):
                fill = size if self.graphs else len(rows) + -len(rows) % self.ranks
                filled = torch.cat([rows, rows[:1].expand(fill - len(rows))])
                share = filled.chunk(self.ranks)[self.rank]
                found = look(index=share.to(self.device) if self.graphs else share)
                parts.append([self.gather(value, len(rows)).clone() for value in self._pad(found)])
        width = max(part[0].shape[-1] for part in parts) if parts[0][0].ndim > 1 else 0
        return Look(
            torch.cat([_widen(part[0], width) for part in parts]),
            torch.cat([part[1] for part in parts]),
            torch.cat([part[2] for part in parts]),
        )

    @contextlib.contextmanager
    def _in_eval_mode(self) -> Iterator[None]:
        self.model.eval()
        yield
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # which a backward pass would have done, and all that handles weights relies on

    def logits(self, rows: Rows, index: Tensor) -> Tensor:
        """Those of a few rows, on the CPU; every process computes all of them."""
        with self._in_eval_mode(), torch.no_grad():
            parts = torch.split(index, self.settings.eval_batch_size)
            return torch.cat([self.model(**rows.batch(part).inputs).float().cpu() for part in parts])

    def _pad(self, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Answers equally wide on all processes, which may have cut their part differently."""
        if self.ranks == 1 or found[0].ndim == 1:
            return found
        return (self.accelerator.pad_across_processes(found[0], dim=1), *found[1:])

    def evaluate(self, rows: Rows | None = None) -> tuple[dict[str, float], Tensor]:
        """Metrics over rows, the validation rows unless others are given, and the answers they are made from."""
        self._synchronise()  # steps still under way are none of its time
        started = time.perf_counter()
        rows = self.validation if rows is None else rows.to(self.device)
        if rows is None:
            raise InputError("evaluation: expected rows, found neither rows nor validation rows")
        look = self._look_at_validation if rows is self.validation and self._look_at_validation else self._looker(rows)
        shown = self._look_over(look, torch.arange(len(rows)))
        decided = shown.decided
        if decided.ndim > 1:
            decided = _widen(decided, rows.target.shape[1])
        count = self._count(rows.target, torch.ones(len(rows), device=self.device))
        metrics = {"loss": float(shown.loss.sum() / count), **self.judge.metrics(*self.judge.by_word(decided, rows))}
        self.evaluation_seconds += time.perf_counter() - started
        return metrics, decided

    def _judge(self, journal: Journal) -> bool:
        """Evaluate, keep what is best, and say whether training should stop."""
        s = self.settings
        metrics, _ = self.evaluate()
        journal.write(self.step, "validation", progress=self._progress(), **metrics)
        journal.advance(self._progress(), 0, **{s.metric: f"{metrics[s.metric]:.4f}"})
        sign = 1 if s.greater_is_better else -1

        def merit(found: dict[str, float]) -> tuple[float, float]:
            return sign * found[s.metric], -found["loss"]  # of two that are equally right, the one that is surer

        if not self.best or merit(metrics) > merit(self.best):
            self.best, self.best_step, self.stale = metrics, self.step, 0
            self.best_weights = self.weights()
        else:
            self.stale += 1
        return 0 < s.patience <= self.stale

    # -- the run -------------------------------------------------------------------------------------------------------

    def fit(self, resume: Path | None = None) -> Result:
        """Train to the end, from the beginning or from a checkpoint, and leave the model with its best weights.

        Raises:
            InputError: when the loss is not finite, the checkpoint is of another run, or nothing can be written.
        """
        s = self.settings
        torch.manual_seed(s.seed + self.rank)
        if resume is not None:
            restore(self, resume)
        main = self.accelerator.is_main_process
        journal = Journal(
            self.output if main else None,
            show=self.show and main,
            console=self.console,
            after=None if resume is None else (self.step, self.lines),
        )
        self.model.train()
        started = time.perf_counter() - self.seconds
        stop = False
        try:
            while self.epoch < s.epochs and not stop:
                stop = self._epoch(journal, started)
            self.figures()
            if self.validation is None:
                self.best_weights = self.weights()
            elif s.eval_steps and not stop and (self.step % s.eval_steps or not self.best):
                self._judge(journal)  # the last steps, too, are looked at
            self._synchronise()
            self.seconds = time.perf_counter() - started
        finally:
            journal.close()
        self.load_weights(self.best_weights)
        return Result(
            self.best,
            self.best_step,
            self.step,
            self.trained,
            self.screened,
            self._solved_share(),
            self.seconds,
            self.evaluation_seconds,
            journal.lines,
        )

    def _solved_share(self) -> float | None:
        if not (self.settings.adaptive and isinstance(self.sampler, SolvedSampler)):
            return None
        self.report()
        return float(self.sampler.solved.double().mean())

    def _epoch(self, journal: Journal, started: float) -> bool:
        """One pass over the plan of an epoch, or the rest of it after a resume; says whether training should stop."""
        s = self.settings
        if not self.in_epoch:
            self.report()
            self.sampler.next_epoch()
            if isinstance(self.sampler, InfoBatchSampler):
                self.row_weight.copy_(self.sampler.weights)
            self.in_epoch, self.position = True, 0
        micro_batches = self.speed.steps
        while True:
            size = s.batch_size * self.ranks * micro_batches
            self._fill_queue(size)
            if len(self.queue) == 0:
                break
            index, self.queue = self.queue[:size], self.queue[size:]
            self._take_step(index, micro_batches)
            if self.speed.steps < s.speed_steps:
                latest = index[-s.batch_size * self.ranks :]
                micro_batches = self.speed.update(int(self.row_solved[latest.to(self.device)].sum()), len(latest))
            self._log(journal, len(index))
            if s.eval_steps and self.step % s.eval_steps == 0 and self._judge(journal):
                return True
            if s.save_steps and self.step % s.save_steps == 0:
                self._synchronise()
                self.seconds, self.lines = time.perf_counter() - started, len(journal.lines)
                save(self)
        self.epoch, self.in_epoch = self.epoch + 1, False
        return self.validation is not None and not s.eval_steps and self._judge(journal)

    def _log(self, journal: Journal, samples: int) -> None:
        self.samples += samples
        if self.step % self.settings.logging_steps == 0:
            loss, solved = self.figures()
            figures = {"loss": loss, "learning_rate": self.rate, "progress": self._progress(), "samples": self.trained}
            if self.settings.adaptive:
                figures |= {"solved": solved, "delta": self.objective.delta}  # type: ignore[attr-defined]
            journal.write(self.step, "train", **figures)
            journal.advance(self._progress(), samples, loss=f"{loss:.4f}", solved=f"{solved:.0%}")
        elif self.step % 10 == 0:
            journal.advance(self._progress(), samples)
        else:
            journal.samples += samples

    def figures(self) -> tuple[float, float]:
        """Mean loss and share of solved rows since the last call.

        Raises:
            InputError: when the loss is not finite; called before anything is saved.
        """
        loss, solved = (
            self.tally.cpu() / torch.tensor([max(1, self.step - self.logged), max(1, self.samples)])
        ).tolist()
        self.tally.zero_()
        self.logged, self.samples = self.step, 0
        if not math.isfinite(loss):
            raise InputError(
                f"the loss is {loss} at step {self.step}: try a smaller learning rate or another precision"
            )
        return loss, solved

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # -- weights -------------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """The model's weights by name; of a sharded model whole, on the main process alone."""
        if self.sharded:
            whole: Any = get_model_state_dict(self.model, options=self.whole)
            return dict(whole)
        state: dict[str, Tensor] = self.accelerator.unwrap_model(self.model).state_dict()
        return {name: value.detach().clone() for name, value in state.items()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        if self.sharded:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(self.model, dict[str, Any](weights), options=options)
        else:
            self.accelerator.unwrap_model(self.model).load_state_dict(weights)


def _widen(decided: Tensor, width: int) -> Tensor:
    """Answers of positions (rows, n) filled up to (rows, width)."""
    if decided.ndim == 1 or decided.shape[1] == width:
        return decided
    return nn.functional.pad(decided, (0, width - decided.shape[1]))
