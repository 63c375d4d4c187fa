"""What the comparisons of record train with: rows of tables, and what a search draws."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

# Row of a table -> what sets it apart. The first is what all others are compared with.
ROWS: dict[str, dict[str, Any]] = {
    "softmax": {"loss": "softmax"},
    "t-softmax": {"loss": "t-softmax"},
    "sparse-softmax": {"loss": "sparse-softmax"},
    "sparsemax": {"loss": "sparsemax"},
    "entmax-1.5": {"loss": "entmax-1.5"},
    "label-smoothing": {"loss": "label-smoothing"},
    "am-softmax": {"loss": "am-softmax"},
    "bce": {"loss": "bce"},
    "focal-bce": {"loss": "focal-bce"},
    "asymmetric": {"loss": "asymmetric"},
    "early-stopping": {"loss": "softmax", "patience": 1},
    "infobatch": {"loss": "softmax", "skip": "infobatch"},
    "selective-backprop": {"loss": "softmax", "skip": "selective-backprop"},
    "seta": {"loss": "softmax", "skip": "seta"},
    "as-softmax": {"loss": "as-softmax"},
    "as-speed": {"loss": "as-softmax", "speed_steps": 2},
    "as-skip": {"loss": "as-softmax", "skip": "solved"},
    "as-skip-speed": {"loss": "as-softmax", "skip": "solved", "speed_steps": 2},
    "as-skip-speed-stopping": {"loss": "as-softmax", "skip": "solved", "speed_steps": 2, "patience": 1},
}
BASELINE = "softmax"

# What a search draws (`softsieve compare --search`). The first trial of a row is the recipe itself.


class Parameter(NamedTuple):
    """An option of a loss, drawn uniformly on a logarithmic scale."""

    name: str
    low: float
    high: float


RATES = 3.0  # the learning rate: from a third of the recipe's to three times it, uniformly on a logarithmic scale
EPOCHS = (0.5, 1.0, 1.5)  # the epochs: one of these times the recipe's
PARAMETERS = {  # loss -> its own parameter; others have none
    "as-softmax": Parameter("delta", 0.03, 0.9),
    "am-softmax": Parameter("margin", 0.05, 0.5),
    "label-smoothing": Parameter("smoothing", 0.02, 0.3),
    "t-softmax": Parameter("temperature", 0.5, 4.0),
    "sparse-softmax": Parameter("k", 2, 50),
    "entmax-1.5": Parameter("alpha", 1.1, 2),
    "focal-bce": Parameter("gamma", 0.5, 4),
    "asymmetric": Parameter("gamma_negative", 1, 6),
}
# Steps of a sequence that fills the cube evenly, however long it is (R3: powers of the root of x**4 = x + 1).
_STEPS = tuple(1.22074408460575947536**-power for power in (1, 2, 3))


def draw(row: str, trial: int, *, epochs: int, learning_rate: float) -> dict[str, Any]:
    """Settings of a row's trial, counted from 1, around a recipe's; of one number, all rows have the same two of them.

    Example:
        >>> draw("softmax", 1, epochs=8, learning_rate=1e-4)
        {}
        >>> draw("softmax", 2, epochs=8, learning_rate=1e-4)
        {'learning_rate': 6.72e-05, 'epochs': 4}
        >>> draw("am-softmax", 2, epochs=8, learning_rate=1e-4)
        {'learning_rate': 6.72e-05, 'epochs': 4, 'loss_options': {'margin': 0.0561}}
    """
    if trial == 1:
        return {}
    rate, length, own = ((0.5 + (trial - 1) * step) % 1 for step in _STEPS)
    changes: dict[str, Any] = {
        "learning_rate": _round(learning_rate * RATES ** (2 * rate - 1)),
        "epochs": max(1, round(epochs * EPOCHS[int(length * len(EPOCHS))])),
    }
    parameter = PARAMETERS.get(ROWS[row]["loss"])
    if parameter is not None:
        value = _round(math.exp(math.log(parameter.low) + own * math.log(parameter.high / parameter.low)))
        if parameter.name == "delta":
            return {**changes, "delta": value}
        changes["loss_options"] = {parameter.name: round(value) if parameter.name == "k" else value}
    return changes


def _round(value: float) -> float:
    """To three digits, as people write settings."""
    return float(f"{value:.3g}")
