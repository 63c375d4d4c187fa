"""How the margin delta comes down from plain softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass

from softsieve import _checks

SHAPES = ("linear", "cosine")


@dataclass(frozen=True)
class DeltaSchedule:
    """The margin after a number of steps: from ``initial`` down to ``final`` over the first ``ratio`` of training.

    A pure function of the step, so there is no state to save: after a resume it goes on where training does. Any unit
    of progress (optimizer steps, samples) serves, as long as ``total_steps`` and the argument agree.

    Args:
        final: margin from ``ratio * total_steps`` on, in [0, 1].
        initial: margin at step 0, in [0, 1]; 1 is plain softmax.
        ratio: share of training spent on the way, in [0, 1]; 0 means ``final`` throughout.
        total_steps: length of training; needed unless ``ratio`` is 0.
        shape: ``"linear"`` or ``"cosine"``.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was found.

    Example:
        >>> delta = DeltaSchedule(final=0.1, initial=1.0, ratio=0.5, total_steps=1000)
        >>> [round(delta(step), 3) for step in (0, 250, 500, 1000)]
        [1.0, 0.55, 0.1, 0.1]

        In a training loop: ``criterion.delta = delta(step)``.
    """

    final: float = 0.1
    initial: float = 1.0
    ratio: float = 0.0
    total_steps: int | None = None
    shape: str = "linear"

    def __post_init__(self) -> None:
        for name in ("final", "initial", "ratio"):
            _checks.number(name, getattr(self, name), 0, 1)
        _checks.choice("shape", self.shape, SHAPES)
        if self.total_steps is not None:
            _checks.number("total_steps", self.total_steps, 1)
        elif self.ratio > 0:
            raise ValueError(f"total_steps: expected a number of steps for ratio={self.ratio}, found None")

    def __call__(self, step: float) -> float:
        """The margin at ``step``, counted from 0."""
        _checks.number("step", step, 0)
        if self.total_steps is None or step >= (way := self.ratio * self.total_steps):
            return self.final
        done = step / way
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.initial + (self.final - self.initial) * done
