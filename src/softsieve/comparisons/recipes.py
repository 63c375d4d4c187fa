"""What the comparisons of record train with: rows of the tables, and settings for each data set."""

from __future__ import annotations

from typing import Any

# Row of a table -> what sets it apart. The first is what all others are compared with.
ROWS: dict[str, dict[str, Any]] = {
    "softmax": {"loss": "softmax"},
    "t-softmax": {"loss": "t-softmax"},
    "sparse-softmax": {"loss": "sparse-softmax"},
    "sparsemax": {"loss": "sparsemax"},
    "entmax-1.5": {"loss": "entmax-1.5"},
    "label-smoothing": {"loss": "label-smoothing"},
    "am-softmax": {"loss": "am-softmax"},
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

# Data set -> settings with a pretrained encoder, and with the built-in model.
PRETRAINED: dict[str, dict[str, Any]] = {
    "clinc150": {"epochs": 8, "batch_size": 32, "learning_rate": 1e-4},
    "sst5": {"epochs": 7, "batch_size": 16, "learning_rate": 6e-5, "delta": 0.3},
    "conll2003": {"epochs": 4, "batch_size": 32, "learning_rate": 2e-4, "metric": "entity_f1"},
    "goemotions": {"epochs": 4, "batch_size": 64, "learning_rate": 1e-4, "metric": "micro_f1"},
    "reuters": {"epochs": 8, "batch_size": 32, "learning_rate": 1e-4, "metric": "micro_f1"},
}
BUILT_IN: dict[str, dict[str, Any]] = {
    "clinc150": {"epochs": 10, "batch_size": 64, "learning_rate": 3e-3},
    "sst5": {"epochs": 7, "batch_size": 64, "learning_rate": 3e-3, "delta": 0.3},
    "eurosat": {"epochs": 12, "batch_size": 64, "learning_rate": 3e-3},
    "cifar10": {"epochs": 10, "batch_size": 128, "learning_rate": 3e-3},
    "mnist": {"epochs": 3, "batch_size": 128, "learning_rate": 3e-3},
    "fsdd": {"epochs": 8, "batch_size": 64, "learning_rate": 3e-3},
    "sighan15": {"epochs": 8, "batch_size": 32, "learning_rate": 3e-3},
    "conll2003": {"epochs": 8, "batch_size": 32, "learning_rate": 3e-3, "metric": "entity_f1"},
    "goemotions": {"epochs": 6, "batch_size": 64, "learning_rate": 3e-3, "metric": "micro_f1"},
    "reuters": {"epochs": 10, "batch_size": 64, "learning_rate": 3e-3, "metric": "micro_f1"},
}


def recipe(task: str, *, pretrained: bool) -> dict[str, Any]:
    """Settings of a data set; {} for one that has none."""
    return dict((PRETRAINED if pretrained else BUILT_IN).get(task, {}))
