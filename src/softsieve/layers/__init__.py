"""A layer that is trained and served by one object, and the optimizers that step inside its backward pass."""

from softsieve.layers.linear import SieveLinear
from softsieve.layers.optimizers import HeadAdamW, HeadSGD

__all__ = ["HeadAdamW", "HeadSGD", "SieveLinear"]
