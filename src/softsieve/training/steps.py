"""One optimizer step over some rows: as it is, or replayed as a CUDA graph."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from softsieve._graphs import Graphed
from softsieve.errors import DivergedError
from softsieve.tasks.rows import Rows
from softsieve.training.replica import Replica, RowPass
from softsieve.training.row_adamw import clip_gradients
from softsieve.training.settings import Settings

MOST_GRAPHS = 12  # texts of up to 128 tokens have ten lengths, rounded


class RowResults:
    """What the latest training pass over each row showed, on the device so that nothing waits for it."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.solved = torch.zeros(rows, dtype=torch.bool, device=device)
        self.loss = torch.zeros(rows, dtype=torch.float32, device=device)
        self.margin = torch.zeros(rows, dtype=torch.float32, device=device)
        self.weight = torch.ones(rows, dtype=torch.float32, device=device)  # of the row in the loss
        self.tally = torch.zeros(2, dtype=torch.float32, device=device)  # mean loss of every step, and rows solved
        self.steps = self.samples = 0  # that the tally is over

    def note(self, index: Tensor, rows: RowPass, count: Tensor) -> None:
        """Keep what a pass showed of the rows ``index``, part of a step with ``count`` labels."""
        self.loss[index], self.solved[index], self.margin[index] = rows
        self.tally += torch.stack([rows.loss.sum() / count, rows.solved.sum()])

    def figures(self, step: int) -> tuple[float, float]:
        """Mean loss and share of solved rows since the last call; a loss that is not finite is refused."""
        loss, solved = (self.tally.cpu() / torch.tensor([max(1, self.steps), max(1, self.samples)])).tolist()
        self.tally.zero_()
        self.steps = self.samples = 0
        refuse_diverged("loss", loss, step)
        return loss, solved


def refuse_diverged(name: str, loss: float, step: int) -> None:
    """Refuse a loss that is not finite: whatever is trained on after it is lost."""
    if not math.isfinite(loss):
        raise DivergedError(f"the {name} is {loss} at step {step}: try a smaller learning rate or another precision")


@dataclass
class EagerSteps:
    """Steps on any device, over several processes, in as many passes as there are micro-batches or all in one."""

    replica: Replica
    rows: Rows
    results: RowResults
    settings: Settings

    def run(self, index: Tensor, micro_batches: int) -> None:
        """One step over the mean loss of the rows ``index`` (on the CPU), which are so many batches."""
        replica, clip = self.replica, self.settings.max_grad_norm
        parts = index.chunk(1 if self.settings.merge else micro_batches)
        count = self.rows.count(index.to(replica.device))
        for number, part in enumerate(parts, 1):
            waits = number < len(parts)
            with replica.accelerator.no_sync(replica.model) if waits else contextlib.nullcontext():
                replica.accelerator.backward(self.batch_loss(part, count))
        if clip and any(p.grad is not None and p.grad.is_sparse for p in replica.model.parameters()):
            clip_gradients(replica.model.parameters(), clip)
        elif clip:
            replica.accelerator.clip_grad_norm_(replica.model.parameters(), clip)
        replica.optimizer.step()
        replica.optimizer.zero_grad()

    def batch_loss(self, index: Tensor, count: Tensor) -> Tensor:
        """This process's part of the loss of the rows ``index``, over ``count``, times the processes (DDP averages)."""
        replica, results = self.replica, self.results
        mine, weight = replica.share(index)
        _, rows = replica.row_losses(self.rows.batch(mine))
        gathered = (replica.gather(value.detach(), len(index)) for value in rows)
        results.note(index.to(replica.device), RowPass(*gathered), count)
        weight = weight.to(replica.device) * results.weight[mine.to(replica.device)]
        total: Tensor = (rows.loss * weight).sum() * replica.ranks
        return total / count


class GraphSteps(EagerSteps):
    """Steps on one GPU with everything on the device and nothing that waits for the host; full ones are replayed."""

    def run(self, index: Tensor, micro_batches: int) -> None:
        full = len(index) == micro_batches * self.settings.batch_size
        positions = self.rows.positions(index, rounded=True)
        (self._graphed if full else self.step)(positions, index=index.to(self.replica.device, non_blocking=True))

    @cached_property
    def _graphed(self) -> Graphed:
        return Graphed(self.step, limit=MOST_GRAPHS)

    def step(self, positions: int, index: Tensor) -> tuple[Tensor, ...]:
        """What is recorded."""
        optimizer = self.replica.optimizer.optimizer
        optimizer.zero_grad()
        batch = self.rows.batch(index, positions=positions)
        _, rows = self.replica.row_losses(batch)
        weight = self.results.weight[index]
        count = self.rows.count(index, weight)
        mean = (rows.loss * weight).sum() / count
        mean.backward()  # type: ignore[no-untyped-call]
        if self.settings.max_grad_norm:
            nn.utils.clip_grad_norm_(self.replica.model.parameters(), self.settings.max_grad_norm)
        optimizer.step()
        self.results.note(index, rows._replace(loss=rows.loss.detach()), count)
        return (rows.solved,)
