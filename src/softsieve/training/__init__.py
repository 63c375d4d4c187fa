"""Training that spends less on what is solved: AS-Speed, skipping, and the loop that uses both."""

from softsieve.training.infobatch import InfoBatchSampler
from softsieve.training.sampler import SolvedSampler
from softsieve.training.selective import SelectiveBackpropSampler
from softsieve.training.seta import SeTaSampler
from softsieve.training.speed import ASSpeed

__all__ = ["ASSpeed", "InfoBatchSampler", "SeTaSampler", "SelectiveBackpropSampler", "SolvedSampler"]
