"""The training loop: rows that matter in, a better model out."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from softsieve.errors import InputError
from softsieve.losses.objectives import Objective
from softsieve.tasks.rows import LabelRows, Rows
from softsieve.training.checkpoint import RunState, restore_run, save_run
from softsieve.training.evaluator import Evaluator, Judge
from softsieve.training.journal import Journal
from softsieve.training.replica import Replica
from softsieve.training.rivals import RIVALS, Chooser, RowSampler
from softsieve.training.sampler import SolvedSampler
from softsieve.training.settings import Settings
from softsieve.training.steps import EagerSteps, GraphSteps, RowResults, refuse_diverged

FRESH = 16  # an epoch is screened in at least so many blocks: what screening showed does not stay true for long
BLOCK = 4  # batches of rows that a block has at most


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

    The model is called with the inputs of a batch by name and returns logits. The objective has ``reduction="none"``
    (`Settings.objective` makes it); settings that are None are those that fine-tune an encoder (`Settings.filled`).
    Without an ``output`` folder, log and checkpoints stay in memory. ``stop`` is asked after every step of a single
    process whether to end here, with a checkpoint to go on from and a KeyboardInterrupt.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, train: Rows, judge: Judge, settings: Settings, *,
        validation: Rows | None = None, output: Path | None = None, show: bool = False, console: Console | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        settings = settings.filled()
        self.stop = stop
        self.settings, self.output, self.show, self.console = settings, output, show, console
        _check(train, validation, judge, settings)
        self.replica = replica = Replica(model, objective, settings)
        self.model = replica.model
        self.train = self._take(train, "training data")
        self.validation = None if validation is None else self._take(validation, "validation data")
        self.sampler = _make_sampler(len(train), settings)
        self.schedule, self.speed = settings.schedule(), settings.speed()
        self.results = RowResults(len(train), replica.device)
        everything = (self.train,) if self.validation is None else (self.train, self.validation)
        self.evaluator = Evaluator(replica, judge, settings.eval_batch_size, keep=everything)
        kind = GraphSteps if replica.graphs and settings.merge else EagerSteps
        self.steps = kind(replica, self.train, self.results, settings)
        self.state = RunState()
        self.rate = 0.0  # the learning rate of the latest step

    def _take(self, rows: Rows, name: str) -> Rows:
        """Rows that can be used, on the device."""
        self.check_rows(rows, name)
        return rows.to(self.replica.device)

    def check_rows(self, rows: Rows, name: str) -> None:
        """Refuse rows without any label where the loss goes without logits."""
        if self.replica.head is not None and isinstance(rows, LabelRows):
            empty = (rows.target < 0).all(1).nonzero()
            if len(empty):
                raise InputError(
                    f"{name}: with so many classes every row needs a label, found none in {len(empty)} of {len(rows)}, "
                    f"the first being row {int(empty[0])}"
                )

    @cached_property
    def fingerprint(self) -> int:
        """Of the training data, so that no other are taken for them."""
        return self.train.fingerprint()

    def weights(self) -> dict[str, Tensor]:
        """The model's weights by name; of a sharded model whole, on the main process alone."""
        return self.replica.weights()

    def _progress(self, back: float = 0) -> float:
        """Share of training behind us, rows left out included, or so many rows earlier."""
        state = self.state
        done = (state.position - len(state.queue) - back) / max(1, len(self.sampler.plan))
        return min(1.0, (state.epoch + (done if state.in_epoch else 0.0)) / self.settings.epochs)

    def update_sampler(self) -> None:
        """Tell the sampler what training showed."""
        if self.state.pending:
            index = self.state.pending_rows()
            values: Tensor = getattr(self.results, getattr(self.sampler, "wants", "margin"))
            self.sampler.update(index, values[index.to(self.replica.device)].cpu(), **self._delta)
            self.state.pending = []

    @property
    def _delta(self) -> dict[str, float]:
        """What a sampler that goes by margins is told of the loss."""
        known = self.settings.adaptive and isinstance(self.sampler, SolvedSampler)
        return {"delta": self.replica.objective.delta} if known else {}  # type: ignore[attr-defined]

    def _screen(self, rows: Tensor) -> Tensor:
        """The rows without those that lead in a screening pass, or that the sampler does not choose."""
        if isinstance(self.sampler, Chooser):
            self.state.screened += len(rows)
            return rows[self.sampler.choose(self.evaluator.screen(self.train, rows)[0].cpu())]
        if not isinstance(self.sampler, SolvedSampler) or self.settings.skip != "solved":
            return rows
        if self.state.step < self.settings.skip_after:
            return rows
        self.update_sampler()
        worth = self.sampler.worth_screening(rows)
        if not worth.any():
            return rows
        screened = rows[worth]
        margins = self.evaluator.screen(self.train, screened)[1].cpu()
        self.state.screened += len(screened)
        keep = torch.ones(len(rows), dtype=torch.bool)
        keep[worth] = ~self.sampler.screened(screened, margins, **self._delta)
        return rows[keep]

    def _fill_queue(self, size: int) -> None:
        s, state, plan, ranks = self.settings, self.state, self.sampler.plan, self.replica.ranks
        block = len(plan)
        if s.skip == "solved" or isinstance(self.sampler, Chooser):
            block = max(s.batch_size * ranks, min(BLOCK * s.eval_batch_size * ranks, len(self.train) // FRESH))
        while len(state.queue) < size and state.position < len(plan):
            rows = plan[state.position : state.position + block]
            state.position += len(rows)
            state.queue = torch.cat([state.queue, self._screen(rows)])

    def fit(self, resume: Path | None = None) -> Result:
        """Train to the end, from the beginning or from a checkpoint, and leave the model with its best weights.

        The last checkpoint is of the end. With more epochs than it was made with, training goes on from there as a run
        of so many does: learning rate and margin are those of its share of training.
        An `InputError` says that the loss is not finite, the checkpoint is of another run, or nothing can be written.
        """
        s, replica = self.settings, self.replica
        torch.manual_seed(s.seed + replica.rank)
        if resume is not None:
            restore_run(self, resume)
        state = self.state
        after = None if resume is None else (state.step, state.lines)
        output = self.output if replica.is_main else None
        journal = Journal(output, show=self.show and replica.is_main, console=self.console, after=after)
        self.model.train()
        started, began = time.perf_counter() - state.seconds, state.step
        stop = 0 < s.patience <= state.stale
        try:
            while state.epoch < s.epochs and not stop:
                stop = self._run_epoch(journal, started)
            self.results.figures(state.step)
            if self.validation is None:
                state.best_weights = self.weights()
            elif s.eval_steps and not stop and (not state.best or (state.step > began and state.step % s.eval_steps)):
                self._judge(journal)  # the last steps, too, are evaluated
            if self.output is not None and s.save_steps is not None and state.step > began:
                self._save(journal, started)
            replica.synchronise()
            state.seconds = time.perf_counter() - started
        finally:
            journal.close()
        replica.load_weights(state.best_weights)
        if isinstance(self.sampler, SolvedSampler):
            self.update_sampler()
        solved = self._solved_share()
        counts = state.best, state.best_step, state.step, state.trained, state.screened
        return Result(*counts, solved, state.seconds, state.evaluation_seconds, journal.lines)

    def _solved_share(self) -> float | None:
        """Share of the training rows that led by the margin of the loss when last seen, where that is known."""
        if not self.settings.adaptive or not isinstance(self.sampler, SolvedSampler):
            return None
        solved = self.sampler.margins >= self.settings.delta
        rows = self.state.pending_rows()  # the sampler is not told yet, for it decides by what it is told
        solved[rows] = self.results.solved[rows.to(self.replica.device)].cpu()
        return float(solved.double().mean())

    def _save(self, journal: Journal, started: float) -> None:
        self.replica.synchronise()
        self.state.seconds, self.state.lines = time.perf_counter() - started, len(journal.lines)
        save_run(self)

    def _run_epoch(self, journal: Journal, started: float) -> bool:
        """One pass over the plan of an epoch, or the rest of it after a resume; says whether training should stop."""
        s, state, ranks = self.settings, self.state, self.replica.ranks
        if not state.in_epoch:
            self.update_sampler()
            if isinstance(self.sampler, SolvedSampler):
                self.sampler.next_epoch(whole=state.step < s.skip_after)
            else:
                self.sampler.next_epoch()
            state.in_epoch, state.position = True, 0
        if (weights := getattr(self.sampler, "weights", None)) is not None:
            self.results.weight.copy_(weights)
        micro_batches = self.speed.steps
        while True:
            size = s.batch_size * ranks * micro_batches
            self._fill_queue(size)
            if len(state.queue) == 0:
                break
            index, state.queue = state.queue[:size], state.queue[size:]
            self._take_step(index, micro_batches)
            if self.speed.steps < s.speed_steps:
                latest = index[-s.batch_size * ranks :]
                solved = int(self.results.solved[latest.to(self.replica.device)].sum())
                micro_batches = self.speed.update(solved, len(latest))
            self._log(journal, len(index))
            if s.eval_steps and state.step % s.eval_steps == 0 and self._judge(journal):
                return True
            stops = self.stop is not None and ranks == 1 and self.stop()
            if stops or (s.save_steps and state.step % s.save_steps == 0):
                self._save(journal, started)
            if stops:
                raise KeyboardInterrupt
        state.epoch, state.in_epoch = state.epoch + 1, False
        return self.validation is not None and not s.eval_steps and self._judge(journal)

    def _take_step(self, index: Tensor, micro_batches: int) -> None:
        """One optimizer step over the rows ``index``, at the margin and learning rate of their time."""
        progress = self._progress(len(index) / 2)  # the middle of these rows: no step has a learning rate of 0
        if self.settings.adaptive:
            self.replica.objective.delta = self.schedule(progress)  # type: ignore[attr-defined]
        self.rate = self.settings.learning_rate_at(progress)
        self.replica.set_learning_rate(self.rate)
        self.steps.run(index, micro_batches)
        self.results.steps += 1
        self.results.samples += len(index)
        self.state.step += 1
        self.state.trained += len(index)
        self.state.pending.append(index)

    def _log(self, journal: Journal, samples: int) -> None:
        s, step, trained = self.settings, self.state.step, self.state.trained
        if step % s.logging_steps == 0:
            loss, solved = self.results.figures(step)
            figures = {"loss": loss, "learning_rate": self.rate, "progress": self._progress(), "samples": trained}
            if s.adaptive:
                figures |= {"solved": solved, "delta": self.replica.objective.delta}  # type: ignore[attr-defined]
            journal.write(step, "train", **figures)
            share = self._solved_share()
            told = {} if share is None else {"solved": f"{share:.0%}"}
            journal.advance(self._progress(), samples, loss=f"{loss:.4f}", **told)
        elif step % 10 == 0:
            journal.advance(self._progress(), samples)
        else:
            journal.samples += samples

    def evaluate(self, rows: Rows | None = None) -> tuple[dict[str, float], Tensor]:
        """Metrics over rows, the validation rows unless others are given, and the answers they are made from."""
        self.replica.synchronise()  # steps still under way are none of its time
        started = time.perf_counter()
        rows = self.validation if rows is None else self._take(rows, "evaluation")
        if rows is None:
            raise InputError("evaluation: expected rows, found neither rows nor validation rows")
        metrics, decided = self.evaluator.evaluate(rows)
        self.state.evaluation_seconds += time.perf_counter() - started
        return metrics, decided

    def _judge(self, journal: Journal) -> bool:
        """Evaluate, keep what is best, and say whether training should stop."""
        s, state = self.settings, self.state
        metrics, _ = self.evaluate()
        refuse_diverged("validation loss", metrics["loss"], state.step)  # those of training are from before each step
        journal.write(state.step, "validation", progress=self._progress(), **metrics)
        journal.advance(self._progress(), 0, **{s.metric: f"{metrics[s.metric]:.4f}"})
        sign = 1 if s.greater_is_better else -1

        def merit(figures: dict[str, float]) -> tuple[float, float]:
            return sign * figures[s.metric], -figures["loss"]  # of two that are equally right, the one that is surer

        if not state.best or merit(metrics) > merit(state.best):
            state.best, state.best_step, state.stale = metrics, state.step, 0
            state.best_weights = self.weights()
        else:
            state.stale += 1
        return 0 < s.patience <= state.stale


def _check(train: Rows, validation: Rows | None, judge: Judge, settings: Settings) -> None:
    """Refuse data that cannot be trained on, or evaluated as the settings ask."""
    if len(train) == 0 or (validation is not None and len(validation) == 0):
        raise InputError(f"{'training' if len(train) == 0 else 'validation'} data: expected rows, found none")
    if validation is None:
        if settings.patience or settings.eval_steps:
            raise InputError("early stopping and eval_steps need validation data, found none")
    elif settings.metric != "loss":
        answers, target = judge.by_word(validation.target.clamp_min(0), validation)
        known = judge.metrics(answers, target)
        if settings.metric not in known:
            raise InputError(f"metric: expected one of loss, {', '.join(known)}, found {settings.metric!r}")


def _make_sampler(rows: int, settings: Settings) -> RowSampler:
    if settings.skip in RIVALS:
        return RIVALS[settings.skip](rows, settings)
    s, skips = settings, settings.skip == "solved"
    return SolvedSampler(
        rows, margin=s.skip_margin, delta=s.delta, tolerance=s.tolerance if skips else 0.0, recheck=s.recheck,
        screen_above=s.screen_above, seed=s.seed,
    )  # fmt: skip
