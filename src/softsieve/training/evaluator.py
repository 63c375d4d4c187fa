"""Forward passes without gradient: to judge a model, and to screen rows before they are trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from softsieve._graphs import Graphed
from softsieve.tasks.rows import Rows
from softsieve.training.replica import Replica
from softsieve.training.steps import MOST_GRAPHS

ForwardPass = Callable[..., tuple[Tensor, ...]]

FEWEST = 32  # rows of a pass that is recorded: fewer take as long
# Of the inputs in a batch on a CPU. With more, feature maps of images leave the caches and their memory comes from the
# system each time: an evaluation took twice as long, and the training steps after it a fifth longer.
NUMBERS = 1 << 17


class Judge(Protocol):
    """Who knows what logits mean; a `softsieve.tasks.Task` does."""

    def decide(self, logits: Tensor) -> Tensor:
        """The answers of every row: class ids, or whatever is known as well; on the device of the logits."""

    def by_word(self, decided: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Answers and targets of a whole split as they are judged, on the CPU."""

    def metrics(self, decided: Tensor, target: Tensor) -> dict[str, float]:
        """Figures of merit over a whole split."""


class Evaluator:
    """Runs a model in eval mode, in batches of up to ``batch_size`` rows on each process.

    The rows ``keep`` will be evaluated more than once: their CUDA graphs are kept.
    """

    def __init__(self, replica: Replica, judge: Judge, batch_size: int, *, keep: tuple[Rows, ...]) -> None:
        self.replica, self.judge, self.batch_size = replica, judge, batch_size
        self._kept = {id(rows): self._make_forward_pass(rows) for rows in keep}

    def _make_forward_pass(self, rows: Rows) -> ForwardPass:
        """Forward pass over some rows."""
        replica = self.replica

        def forward(positions: int | None, judged: bool, index: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                logits, row = replica.row_losses(rows.batch(index, positions=positions))
                shown = row.loss.float(), row.margin
                return (*shown, replica.decide(self.judge.decide, logits)) if judged else shown

        return Graphed(forward, limit=3 * MOST_GRAPHS) if replica.graphs else forward

    def _filled(self, rows: int) -> int:
        """Rows that a recorded pass over so many is filled up to: powers of two, which soon all have graphs."""
        power: int = 1 << (rows - 1).bit_length()
        return min(self.batch_size, max(FEWEST, power))

    def _at_once(self, rows: Rows) -> int:
        """Rows of a batch on each process."""
        if rows.target.device.type != "cpu":
            return self.batch_size
        numbers = sum(value.numel() for value in rows.inputs.values()) // max(1, len(rows))
        return max(1, min(self.batch_size, NUMBERS // max(1, numbers)))

    def screen(self, rows: Rows, index: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and margins of the rows ``index``, in their order."""
        loss, margin = self._run(rows, index, judged=False)
        return loss, margin

    def _run(self, rows: Rows, index: Tensor, *, judged: bool) -> tuple[Tensor, ...]:
        """Losses, margins and maybe answers of the rows ``index``, in their order; rows of like length go together."""
        replica, forward = self.replica, self._kept.get(id(rows)) or self._make_forward_pass(rows)
        size = self._at_once(rows) * replica.ranks
        order = None if rows.lengths is None else rows.lengths[index].argsort(stable=True)
        index = index if order is None else index[order]
        parts = []
        with replica.in_eval_mode():
            for some in torch.split(index, size):
                share, _ = replica.share(some, self._filled(len(some)) if replica.graphs else 0)
                positions = rows.positions(some, rounded=True) if replica.graphs else None
                outputs = forward(positions, judged, index=share.to(replica.device) if replica.graphs else share)
                if replica.ranks > 1 and outputs[-1].ndim > 1:  # processes may have cut their part differently
                    outputs = *outputs[:-1], replica.accelerator.pad_across_processes(outputs[-1], dim=1)
                parts.append([replica.gather(value, len(some)).clone() for value in outputs])
        back = slice(None) if order is None else order.argsort().to(replica.device)
        return tuple(_join(some)[back] for some in zip(*parts, strict=True))

    def evaluate(self, rows: Rows) -> tuple[dict[str, float], Tensor]:
        """Metrics over rows, and the answers they are made from."""
        loss, _, decided = self._run(rows, torch.arange(len(rows)), judged=True)
        if "target" in rows.sequences:
            decided = _widen(decided, rows.target.shape[1])
        mean = float(loss.sum() / rows.count())
        return {"loss": mean, **self.judge.metrics(*self.judge.by_word(decided, rows))}, decided

    def logits(self, rows: Rows, index: Tensor, make: Callable[[Tensor], Tensor] = lambda logits: logits) -> Tensor:
        """Those of a few rows, or what ``make`` makes of them, on the CPU; every process computes all of them."""
        with self.replica.in_eval_mode(), torch.no_grad():
            parts = torch.split(index, self.batch_size)
            outputs = (self.replica.model(**rows.batch(part).inputs).float() for part in parts)
            return torch.cat([self.replica.decide(make, some).cpu() for some in outputs])


def _join(parts: tuple[Tensor, ...]) -> Tensor:
    """One after the other; those that were cut are as wide as the widest."""
    return torch.cat([_widen(part, max(part.shape[-1] for part in parts)) for part in parts])


def _widen(decided: Tensor, width: int) -> Tensor:
    """Answers of positions (rows, n) filled up to (rows, width)."""
    if decided.ndim == 1 or decided.shape[1] == width:
        return decided
    return nn.functional.pad(decided, (0, width - decided.shape[1]))
