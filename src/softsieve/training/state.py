"""Where a run is, as a checkpoint saves it whole."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from softsieve import _checks
from softsieve.errors import shown


def _no_rows() -> Tensor:
    return torch.empty(0, dtype=torch.long)


@dataclass
class RunState:
    """What changes while a run goes on. Model, optimizer, sampler and generators have states of their own."""

    epoch: int = 0
    in_epoch: bool = False
    step: int = 0  # optimizer steps
    position: int = 0  # in the sampler's plan of this epoch
    trained: int = 0  # rows that went forward and backward
    screened: int = 0  # rows that went forward only
    best_step: int = 0
    stale: int = 0  # evaluations since the best one
    lines: int = 0  # of the log, when the checkpoint was written
    seconds: float = 0.0  # of training and evaluation
    evaluation_seconds: float = 0.0
    best: dict[str, float] = field(default_factory=dict)  # the evaluation of the best weights
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    queue: Tensor = field(default_factory=_no_rows)  # rows of the plan before `position` that wait for a batch
    unreported: list[Tensor] = field(default_factory=list)  # rows trained since the sampler was told of any

    def unreported_rows(self) -> Tensor:
        return torch.cat([*self.unreported, _no_rows()])

    def numbers(self) -> dict[str, Any]:
        """The fields that are single numbers, which a checkpoint has as JSON."""
        return {name: getattr(self, name) for name in NUMBERS}

    @classmethod
    def from_checkpoint(
        cls, state: dict[str, Any], files: dict[str, dict[str, Tensor]], *, epochs: int, rows: int
    ) -> RunState:
        """What `softsieve.training.checkpoint.save_run` wrote, checked.

        Raises:
            KeyError, TypeError, ValueError: naming what is missing or cannot be of a run of so many epochs and rows.
        """
        for name, default in NUMBERS.items():
            if isinstance(default, bool):
                if not isinstance(state[name], bool):
                    raise TypeError(f"{name}: expected true or false, found {type(state[name]).__name__}")
            elif isinstance(default, float):
                _checks.number(name, state[name], 0, 1e30)
            else:
                _checks.whole_number(name, state[name], 0, epochs if name == "epoch" else 2**62)
        if not all(type(value) in (int, float) for value in state["best"].values()):
            raise TypeError(f"best: expected numbers, found {shown(state['best'])}")
        waiting = {name: files["queue"][name] for name in ("queue", "unreported")}
        for name, value in waiting.items():
            _checks.saved(name, value, _no_rows(), high=rows - 1, sized=False)
        return cls(
            **{name: state[name] for name in NUMBERS},
            best=state["best"],
            best_weights=files.get("best", {}),
            queue=waiting["queue"],
            unreported=[waiting["unreported"]],
        )


NUMBERS: dict[str, Any] = {entry.name: entry.default for entry in fields(RunState) if entry.default is not MISSING}
