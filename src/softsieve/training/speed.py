"""AS-Speed: the more rows are solved, the more batches share one optimizer step."""

from __future__ import annotations

from typing import Any

from softsieve import _checks


class ASSpeed:
    """How many micro-batches the next optimizer step accumulates, from how many rows are solved (arXiv 2508.03175).

    A batch of ``total`` rows, ``solved`` of them with zero gradient, carries the signal of ``total - solved`` rows, so
    ``round(lam * total / (total - solved))`` of them make a full one; an exact half is rounded down, as it is in the
    published code. The number never falls, rises by at most one at a time and stops at ``max_steps``; with every row
    solved it heads for ``max_steps``.

    Under several processes, pass the sums of ``solved`` and ``total`` over all of them, so that every rank gets the
    same answer.

    Args:
        lam: how eagerly to accumulate; above 0.
        max_steps: the most micro-batches in one optimizer step.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was found.

    Example:
        At the start of every accumulation window:

        >>> speed = ASSpeed(lam=1.0, max_steps=4)
        >>> [speed.update(solved, 32) for solved in (0, 20, 20, 0, 32)]
        [1, 2, 3, 3, 4]
    """

    def __init__(self, lam: float = 1.0, max_steps: int = 2) -> None:
        self.lam = _checks.number("lam", lam, 1e-6, 1e6)
        _checks.whole_number("max_steps", max_steps, 1, 2**31)
        self.max_steps = max_steps
        self.steps = 1

    def update(self, solved: int, total: int) -> int:
        """The number of micro-batches in this window, given the rows of the latest batch and how many are solved."""
        _checks.whole_number("total", total, 1, 2**63 - 1)
        _checks.whole_number("solved", solved, 0, total)
        ratio = total / (total - solved + 1e-8)  # a half is then a little less
        wanted = self.max_steps if solved == total else round(self.lam * ratio)
        self.steps = min(max(wanted, self.steps), self.steps + 1, self.max_steps)
        return self.steps

    def state_dict(self) -> dict[str, Any]:
        """All that changes: the current number of micro-batches."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the `state_dict` was taken."""
        _checks.state(state, ("steps",))
        _checks.whole_number("steps", state["steps"], 1, self.max_steps)
        self.steps = state["steps"]
