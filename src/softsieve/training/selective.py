"""Selective-Backprop (arXiv 1910.00762), a rival of skipping: rows of a high loss are more likely to be trained on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softsieve import _checks


class SelectiveBackpropSampler:
    """Visits every row in every epoch, and trains on those that `choose` picks after a forward pass.

    A row is chosen with the probability ``CDF(loss) ** beta``: by the share of the latest losses that are below its
    own. With a ``beta`` of 1 that is half of the rows on average.

    Args:
        num_samples: rows of the data set.
        beta: how selective it is, at least 0: 0 trains on everything.
        history: how many of the latest losses count (R in the paper), never more than an epoch has: losses fall, and
            against old ones too few rows would be chosen.
        seed: of the random order, and of who is chosen.

    Example:
        >>> sampler = SelectiveBackpropSampler(1000)
        >>> loss = torch.linspace(0, 1, 1000)
        >>> chosen = sampler.choose(loss)
        >>> bool(400 < chosen.sum() < 600), bool(chosen[500:].sum() > 2 * chosen[:500].sum())
        (True, True)
    """

    wants = "loss"  # what of a row's training pass `update` is told

    def __init__(self, num_samples: int, *, beta: float = 1.0, history: int = 1024, seed: int = 0) -> None:
        _checks.whole_number("num_samples", num_samples, 1, 2**40)
        _checks.number("beta", beta, 0, 1e6)
        _checks.whole_number("history", history, 1, 2**31)
        _checks.whole_number("seed", seed, 0, 2**40)
        self.num_samples, self.beta, self.history, self.seed = num_samples, beta, min(history, num_samples), seed
        self.epoch = -1
        self.screened = 0  # rows that `choose` was asked about
        self.latest = torch.empty(0, dtype=torch.float32)  # their losses, the last of them
        self.plan = torch.empty(0, dtype=torch.long)

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + number)

    def choose(self, loss: Tensor) -> Tensor:
        """Which of the rows with these losses to train on: bool, shape of ``loss``."""
        values = _checks.row_values("loss", loss, _checks.tensor("loss", loss)).float()
        generator = self._generator(2**40 + self.screened)  # far from the epochs' numbers
        self.screened += values.numel()
        self.latest = torch.cat([self.latest, values.flatten()])[-self.history :]
        ordered = self.latest.sort().values
        # Of equal losses, half count as below: so the mean of all shares is a half.
        below, at_most = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
        share = (below + at_most).double() / (2 * max(1, len(ordered)))
        return torch.rand(values.shape, generator=generator, dtype=torch.float64) < share**self.beta

    def update(self, indices: Tensor, loss: Tensor) -> None:
        """Note nothing: the forward pass of every row has told its loss before it was trained on."""
        _checks.row_values("loss", loss, _checks.row_numbers("indices", indices, self.num_samples))

    def next_epoch(self) -> Tensor:
        """Begin an epoch: all rows, in random order."""
        self.epoch += 1
        self.plan = torch.randperm(self.num_samples, generator=self._generator(self.epoch))
        return self.plan

    def state_dict(self) -> dict[str, Any]:
        """All that changes."""
        numbers = {"epoch": self.epoch, "screened": self.screened}
        return {**numbers, "latest": self.latest.clone(), "plan": self.plan.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the `state_dict` was taken."""
        _checks.state(state, ("epoch", "screened", "latest", "plan"))
        _checks.whole_number("epoch", state["epoch"], -1, 2**31)
        _checks.whole_number("screened", state["screened"], 0, 2**62)
        _checks.saved(
            "latest", _checks.tensor("latest", state["latest"]).abs(), self.latest, high=float("inf"), sized=False
        )
        _checks.saved("plan", state["plan"], self.plan, high=self.num_samples - 1, sized=False)
        for name, most in {"latest": self.history, "plan": self.num_samples}.items():
            if len(state[name]) > most:
                raise ValueError(f"state: expected at most {most} numbers in {name}, found {len(state[name])}")
        self.epoch, self.screened = state["epoch"], state["screened"]
        self.latest, self.plan = state["latest"].clone(), state["plan"].clone()
