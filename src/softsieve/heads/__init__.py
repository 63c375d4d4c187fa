"""Linear heads that answer without reading all of their weight."""

from softsieve.heads.adaptive import AdaptiveSoftmax
from softsieve.heads.cascade.fit import CascadeCalibration, DriftWarning, GpuCascadeCalibration
from softsieve.heads.coordinates.calibration import Calibration
from softsieve.heads.quantised import QuantisedWeight
from softsieve.heads.results import Above, Coverage, LogPartition, TopK
from softsieve.heads.watching import WeightChanged

__all__ = [
    "Above",
    "AdaptiveSoftmax",
    "Calibration",
    "CascadeCalibration",
    "Coverage",
    "DriftWarning",
    "GpuCascadeCalibration",
    "LogPartition",
    "QuantisedWeight",
    "TopK",
    "WeightChanged",
]
