"""Linear heads that answer without reading all of their weight."""

from softsieve.heads.adaptive import AdaptiveSoftmax
from softsieve.heads.calibration import Calibration
from softsieve.heads.results import LogPartition, TopK

__all__ = ["AdaptiveSoftmax", "Calibration", "LogPartition", "TopK"]
