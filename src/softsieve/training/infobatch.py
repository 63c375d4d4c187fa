"""InfoBatch (arXiv 2303.04947), the rival of skipping: rows below the mean loss are left out at random, the others of
them weighted up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softsieve import _checks


class InfoBatchSampler:
    """Leaves out a share ``prune`` of the rows whose loss was below the mean, and weights the rest of those up.

    The expected gradient stays that of the whole data set. The last ``1 - anneal`` of the epochs visit everything.

    Args:
        num_samples: rows of the data set.
        epochs: length of training.
        prune: share of the rows below the mean loss that an epoch leaves out (r in the paper), in [0, 1).
        anneal: share of the epochs that prunes at all (delta in the paper), in [0, 1].
        seed: of the random order.

    Example:
        >>> sampler = InfoBatchSampler(4, epochs=8)
        >>> len(sampler.next_epoch())
        4
        >>> sampler.update(torch.arange(4), torch.tensor([0.0, 0.0, 1.0, 1.0]))
        >>> len(sampler.next_epoch()), sampler.weights.tolist()
        (3, [2.0, 2.0, 1.0, 1.0])
    """

    wants = "loss"  # what of a row's training pass `update` is told

    def __init__(
        self, num_samples: int, *, epochs: int, prune: float = 0.5, anneal: float = 0.875, seed: int = 0
    ) -> None:
        _checks.whole_number("num_samples", num_samples, 1, 2**40)
        _checks.whole_number("epochs", epochs, 1, 2**31)
        _checks.number("prune", prune, 0, 0.999)
        _checks.number("anneal", anneal, 0, 1)
        _checks.whole_number("seed", seed, 0, 2**40)
        self.num_samples, self.epochs, self.prune, self.anneal, self.seed = num_samples, epochs, prune, anneal, seed
        self.epoch = -1
        self.loss = torch.full((num_samples,), float("inf"), dtype=torch.float32)  # of every row when last seen
        self.weights = torch.ones(num_samples, dtype=torch.float32)  # of every row's loss in this epoch
        self.plan = torch.empty(0, dtype=torch.long)

    def update(self, indices: Tensor, loss: Tensor) -> None:
        """Note the ``loss`` of the rows ``indices``."""
        index = _checks.row_numbers("indices", indices, self.num_samples)
        self.loss[index] = _checks.row_values("loss", loss, indices).float()

    def next_epoch(self) -> Tensor:
        """Begin an epoch: the rows to visit, in order; ``weights`` then holds what each counts."""
        self.epoch += 1
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        self.weights = torch.ones(self.num_samples, dtype=torch.float32)
        order = self._visits(generator).nonzero().flatten()
        self.plan = order[torch.randperm(len(order), generator=generator)]
        return self.plan

    @property
    def anneals(self) -> bool:
        """Whether the epoch is one of the last, which do not prune."""
        return self.epoch >= self.anneal * self.epochs

    def _visits(self, generator: torch.Generator) -> Tensor:
        """Which rows the epoch visits: bool, (num_samples,). Sets their weights."""
        visit = torch.ones(self.num_samples, dtype=torch.bool)
        if self.epoch > 0 and not self.anneals:
            below = (self.loss < self.loss[self.loss.isfinite()].mean()).nonzero().flatten()
            leave = int(self.prune * len(below))
            visit[below[torch.randperm(len(below), generator=generator)[:leave]]] = False
            self.weights[below] = len(below) / max(1, len(below) - leave)  # exact, also for few rows
        return visit

    def state_dict(self) -> dict[str, Any]:
        """All that changes."""
        return {"epoch": self.epoch, **{name: getattr(self, name).clone() for name in ("loss", "weights", "plan")}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the `state_dict` was taken."""
        _checks.state(state, ("epoch", "loss", "weights", "plan"))
        if len(state["loss"]) != self.num_samples:
            raise ValueError(f"state: expected {self.num_samples} samples, found {len(state['loss'])}")
        _checks.whole_number("epoch", state["epoch"], -1, 2**31)
        _checks.saved("loss", state["loss"].abs(), self.loss, high=float("inf"))
        _checks.saved("weights", state["weights"], self.weights, high=1e30)
        _checks.saved("plan", state["plan"], self.plan, high=self.num_samples - 1, sized=False)
        self.epoch = state["epoch"]
        self.loss, self.weights, self.plan = (state[name].clone() for name in ("loss", "weights", "plan"))
