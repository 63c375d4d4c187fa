"""The paper's algorithm: entries of the weight are read in a random order until intervals decide."""

from softsieve.heads.coordinates.engine import Coordinates

__all__ = ["Coordinates"]
