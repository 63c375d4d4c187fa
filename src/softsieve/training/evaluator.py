"""Forward passes without gradient: to judge a model, and to screen rows before they are trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from softsieve._graphs import Graphed
from softsieve.tasks.rows import Rows
from softsieve.training.replica import Replica, count_labels
from softsieve.training.steps import MOST_GRAPHS

ForwardPass = Callable[..., tuple[Tensor, ...]]


class Judge(Protocol):
    """Who knows what logits mean; a `softsieve.tasks.Task` does."""

    def decide(self, logits: Tensor) -> Tensor:
        """The answers: class ids, or flags for multi-label; on the device of the logits."""

    def by_word(self, decided: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Answers and targets of a whole split as they are judged, on the CPU."""

    def metrics(self, decided: Tensor, target: Tensor) -> dict[str, float]:
        """Figures of merit over a whole split."""


class Evaluator:
    """Runs a model in eval mode, in batches of ``batch_size`` rows on each process.

    The rows ``keep`` will be evaluated more than once: their CUDA graphs are kept.
    """

    def __init__(self, replica: Replica, judge: Judge, batch_size: int, *, keep: tuple[Rows, ...]) -> None:
        self.replica, self.judge, self.batch_size = replica, judge, batch_size
        self._kept = {id(rows): self._make_forward_pass(rows) for rows in keep}

    def _make_forward_pass(self, rows: Rows) -> ForwardPass:
        """Forward pass over some rows; every call has the same number of them."""
        replica = self.replica

        def forward(positions: int | None, index: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                logits, row = replica.row_losses(rows.batch(index, positions=positions))
                return self.judge.decide(logits), row.loss.float(), row.margin

        return Graphed(forward, limit=MOST_GRAPHS) if replica.graphs else forward

    def answers(self, rows: Rows, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Answers of the rows ``index``, in their order, their losses and margins; rows of like length go together."""
        replica, forward = self.replica, self._kept.get(id(rows)) or self._make_forward_pass(rows)
        size = self.batch_size * replica.ranks
        order = None if rows.lengths is None else rows.lengths[index].argsort(stable=True)
        index = index if order is None else index[order]
        parts = []
        with replica.in_eval_mode():
            for some in torch.split(index, size):
                share, _ = replica.share(some, size if replica.graphs else 0)
                positions = rows.positions(some, rounded=True) if replica.graphs else None
                outputs = forward(positions, index=share.to(replica.device) if replica.graphs else share)
                if replica.ranks > 1 and outputs[0].ndim > 1:  # processes may have cut their part differently
                    outputs = replica.accelerator.pad_across_processes(outputs[0], dim=1), *outputs[1:]
                parts.append([replica.gather(value, len(some)).clone() for value in outputs])
        answers, loss, margin = zip(*parts, strict=True)
        width = max(part.shape[-1] for part in answers)
        found = torch.cat([_widen(part, width) for part in answers]), torch.cat(loss), torch.cat(margin)
        if order is None:
            return found
        back = order.argsort().to(loss[0].device)
        return found[0][back], found[1][back], found[2][back]

    def evaluate(self, rows: Rows) -> tuple[dict[str, float], Tensor]:
        """Metrics over rows, and the answers they are made from."""
        decided, loss, _ = self.answers(rows, torch.arange(len(rows)))
        if decided.ndim > 1:
            decided = _widen(decided, rows.target.shape[1])
        mean = float(loss.sum() / count_labels(rows.target))
        return {"loss": mean, **self.judge.metrics(*self.judge.by_word(decided, rows))}, decided

    def logits(self, rows: Rows, index: Tensor) -> Tensor:
        """Those of a few rows, on the CPU; every process computes all of them."""
        with self.replica.in_eval_mode(), torch.no_grad():
            parts = torch.split(index, self.batch_size)
            return torch.cat([self.replica.model(**rows.batch(part).inputs).float().cpu() for part in parts])


def _widen(decided: Tensor, width: int) -> Tensor:
    """Answers of positions (rows, n) filled up to (rows, width)."""
    if decided.ndim == 1 or decided.shape[1] == width:
        return decided
    return nn.functional.pad(decided, (0, width - decided.shape[1]))
