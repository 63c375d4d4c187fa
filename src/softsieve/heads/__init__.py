"""Linear heads that answer without reading all of their weight."""

from softsieve.heads.adaptive import AdaptiveSoftmax
from softsieve.heads.calibration import Calibration
from softsieve.heads.cascade_answers import DriftWarning, WeightChanged
from softsieve.heads.cascade_calibration import CascadeCalibration
from softsieve.heads.results import Coverage, LogPartition, TopK

__all__ = [
    "AdaptiveSoftmax",
    "Calibration",
    "CascadeCalibration",
    "Coverage",
    "DriftWarning",
    "LogPartition",
    "TopK",
    "WeightChanged",
]
