"""What the loop needs of a sampler, and the rivals of `SolvedSampler` by their names in the settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from softsieve.training.infobatch import InfoBatchSampler
from softsieve.training.selective import SelectiveBackpropSampler
from softsieve.training.seta import SeTaSampler
from softsieve.training.settings import Settings


class RowSampler(Protocol):
    """Who says which rows an epoch visits. May have ``weights`` of the rows in the loss, set by `next_epoch`.

    What `update` is told of a row's training pass is ``wants``, a field of `RowResults`; margins without it.
    """

    plan: Tensor  # the rows of the epoch under way, in order

    def next_epoch(self) -> Tensor:
        """Begin an epoch and return its plan."""

    def update(self, indices: Tensor, values: Tensor, /) -> None:
        """Take in what training showed of some rows."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers that a checkpoint holds."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


@runtime_checkable
class Chooser(Protocol):
    """A sampler that picks among the rows of its plan after a forward pass."""

    def choose(self, loss: Tensor) -> Tensor:
        """Which of the rows with these losses to train on."""


RIVALS: dict[str, Callable[[int, Settings], RowSampler]] = {
    "infobatch": lambda rows, settings: InfoBatchSampler(rows, epochs=settings.epochs, seed=settings.seed),
    "selective-backprop": lambda rows, settings: SelectiveBackpropSampler(rows, seed=settings.seed),
    "seta": lambda rows, settings: SeTaSampler(rows, epochs=settings.epochs, seed=settings.seed),
}
