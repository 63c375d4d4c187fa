"""Short, obviously right versions of everything in the library: what tests and benchmarks compare with.

They follow the formulas word for word, in whatever dtype they are given (float64 for truth), and check nothing.
"""

from softsieve.reference.losses import (
    as_cross_entropy,
    as_keep_mask,
    as_multilabel_loss,
    as_multilabel_stats,
    as_stats,
    delta_table,
    flags_of,
    linear_as_cross_entropy,
    linear_as_multilabel_loss,
    linear_as_multilabel_stats,
    linear_as_stats,
)

__all__ = [
    "as_cross_entropy",
    "as_keep_mask",
    "as_multilabel_loss",
    "as_multilabel_stats",
    "as_stats",
    "delta_table",
    "flags_of",
    "linear_as_cross_entropy",
    "linear_as_multilabel_loss",
    "linear_as_multilabel_stats",
    "linear_as_stats",
]
